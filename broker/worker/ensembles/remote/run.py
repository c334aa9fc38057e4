"""One request for an ensemble with members in other workers, and its steps that run there.

Made by `broker.worker.ensembles.remote.elsewhere`. What differs from other runs is where tensors lie, and how the end
of a step elsewhere becomes the end of the step's request here.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from broker.worker.ensembles.remote.channel import Lane
from broker.worker.ensembles.remote.plans import Bound
from broker.worker.ensembles.remote.prepared import SharedPrepared
from broker.worker.ensembles.run import Run
from broker.worker.ensembles.steps import Asked, plan_of
from broker.worker.plans import PlacedTensor, Plan
from broker.worker.running import check_sizes
from shm import datatypes
from shm.admission import EXPIRED, Request, Verdict
from shm.errors import Code, InferError, TooSmall, is_too_small
from shm.layout import CODE_MASK, SEQUENCE_AGAIN
from shm.recovery import to_blame

if TYPE_CHECKING:
    from broker.worker.ensembles.remote.elsewhere import SpreadEnsemble

LARGEST = 1 << 30  # bytes that later requests are to have for an output whose size nobody knows before
_LENGTH = struct.Struct("<I")


class SpreadRun(Run):
    """See `Run`. `bound` and `grown` concern one step, of which nobody else is at work."""

    __slots__ = ()
    _ensemble: SpreadEnsemble
    _prepared: SharedPrepared

    @property
    def owner(self) -> int:
        """Whose sequences its steps belong to."""
        return self._plan.owner

    def bound(self, step: Request) -> Bound:
        """The plan of a step elsewhere."""
        return self._prepared.bound[step.slot]

    def grown(self, step: Request, output: str, byte_size: int) -> Bound | None:
        """The plan with room for so many bytes of an output; None if the step must not run again. Raises InferError."""
        at = step.slot
        member, described = self._ensemble.remote[at], self._ensemble.graph.steps[at]
        name = described.output_map.get(output)
        if name is None:
            return None
        rooms = self._ensemble.rooms
        byte_size = max(1 << (byte_size - 1).bit_length(), rooms.get(name, 0))  # others may have found out meanwhile
        self._prepared.shared(name, "UINT8", (byte_size,), byte_size)  # what cannot be had is not asked for every time
        if byte_size <= LARGEST:
            rooms[name] = byte_size
        if not (step.sequence_id or member.retry):  # of a sequence's step what it gave is asked for, it does not run
            return None
        prepared, model = self._prepared, self._members[at]
        asked = Asked(self._request, self._plan, self._ensemble.model, prepared)
        plan = prepared.plans[at] = plan_of(asked, described, model, self._values)
        self._ensemble.adopt(plan, model)
        step.plan = plan
        return prepared.bind(at, plan, described, member, self._plan.owner)

    def forget_room(self, step: Request) -> None:
        """It was not sent, perhaps for want of memory: the next one asks for as little as the first one did."""
        for name in self._ensemble.graph.steps[step.slot].output_map.values():
            self._ensemble.rooms.pop(name, None)

    @property
    def light(self) -> bool:
        """Does it take little to go on when a step has ended?"""
        return self._prepared.light

    def postpone(self, then: Callable[[], None]) -> None:
        """See `StepSession.postpone`."""
        self._ensemble.session.postpone(then)

    def send(self, step: Request, bound: Bound) -> None:
        """Let a step go to another worker."""
        self._ensemble.send(self, step, bound)

    def is_over(self) -> bool:
        """Has it failed, or does nobody want it any more?"""
        return bool(self._request.code or self._request.ended)

    def blame(self) -> None:
        """A step ended another worker for the second time: tell whose request it was, and for which model."""
        request = self._request
        while isinstance(request.channel, Run):  # it is a step itself
            request = request.channel._request
        plan = request.plan
        assert isinstance(plan, Plan)
        if not plan.step:  # else it is told where its ensemble is
            self._ensemble.blame(plan.session, plan.model_name)

    def give_up(self) -> None:
        """A step elsewhere takes too long, while nothing else runs here."""
        self._fail(InferError(Code.UNAVAILABLE, "a step in another worker did not end in time"))
        self.withdraw()

    # --- as a run -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """The client's tensors, copied: its memory is nobody else's business."""
        request, model, prepared = self._request, self._ensemble.model, self._prepared
        check_sizes(self._plan)
        for tensor in self._plan.inputs:
            size = tensor.memory(request.input_position, request.rows).size
            shape = model.shape(tensor.name, tensor.shape_of(request.rows))
            value = prepared.shared(tensor.name, tensor.datatype, shape, size)
            target = value.region.bytes[value.offset : value.offset + size]
            reason = tensor.copy_out(request.input_position, request.rows, target)
            self._values[tensor.name] = value
            self._ensemble.count_copy(reason, size)
            request.copied += size
            if model.cached is not None:
                self._copies.append(target)

    def _request_of(self, at: int) -> Request:
        member = self._ensemble.remote.get(at)
        if member is None:
            return super()._request_of(at)
        step = self._ensemble.graph.steps[at]
        for name in step.input_map.values():
            value = self._values.get(name)
            if value is not None and value.region.info.kind == "private":  # its size was not known before
                shared = self._prepared.shared(name, value.datatype, value.shape, value.byte_size)
                end = shared.offset + value.byte_size
                shared.region.bytes[shared.offset : end] = value.region.bytes[value.offset :][: value.byte_size]
                self._values[name] = shared
                self._ensemble.count_copy("output", value.byte_size)
                self._request.copied += value.byte_size
        request = super()._request_of(at)
        plan = request.plan
        assert isinstance(plan, Plan)
        self._prepared.bind(at, plan, step, member, self._plan.owner)
        return request

    def _byte_size(self, step: Request, tensor: PlacedTensor, shape: tuple[int, ...]) -> int:
        if step.slot not in self._ensemble.remote:
            return super()._byte_size(step, tensor, shape)
        return _byte_size(tensor, shape)

    def _finish(self) -> None:
        super()._finish()
        if self._request.code:  # else it was kept for the next run
            self._prepared.dispose()


@final
class RemoteStep:
    """A step on its way through another worker's channel. Implements `broker.worker.ensembles.remote.channel.Sends`."""

    __slots__ = ("_bound", "_lane", "_run", "ident", "light", "step")

    def __init__(self, run: SpreadRun, step: Request, lane: Lane, bound: Bound) -> None:
        self._run = run
        self._lane = lane
        self._bound = bound
        self.step = step
        self.ident = 0
        self.light = run.light

    def word(self) -> int:
        """See `Sends`."""
        return self._bound.word(self._lane.worker)

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        """It has ended there."""
        step = self.step
        self._lane.ended(self)
        code = Code(entry[2] & CODE_MASK)
        step.queue_ns, step.input_ns, step.infer_ns, step.output_ns = entry[3:7]
        # The way there and back, too: by what a request took its client knows how long looking for the next one pays.
        step.queue_ns += max(0, time.monotonic_ns() - step.arrival - sum(entry[3:7]))
        if not code:
            step.note = note
            step.channel.complete((step,))
            return
        text = note.rstrip(b"\0").decode(errors="replace")
        if code == Code.UNAVAILABLE and to_blame(text):
            self._run.blame()
        small = is_too_small(text) if code == Code.INVALID_ARG else None
        if small is None:
            self._end((code, text))
        else:
            self._run.postpone(lambda: self._grow(small, (code, text)))

    def fail(self, verdict: Verdict) -> None:
        """See `Sends`."""
        if verdict[0] == Code.UNAVAILABLE and verdict is not EXPIRED:
            self._run.forget_room(self.step)
        self._end(verdict)

    def _end(self, verdict: Verdict) -> None:
        self.step.fail(*verdict)
        self.step.channel.complete((self.step,))

    def _grow(self, small: TooSmall, verdict: Verdict) -> None:
        """There was too little room for an output: it runs again with more, if it may and there is so much memory."""
        if self._run.is_over():
            self._end((Code.CANCELLED, "the request was cancelled"))
            return
        try:
            bound = self._run.grown(self.step, *small)
        except InferError:
            bound = None
        if bound is None:
            self._end(verdict)
            return
        if self.step.sequence_id:  # which must not take the step twice
            entry = self.step.entry
            self.step.entry = (*entry[:8], entry[8] | SEQUENCE_AGAIN, *entry[9:])
        self._run.send(self.step, bound)
        self._run.look()


def _byte_size(tensor: PlacedTensor, shape: tuple[int, ...]) -> int:
    """Of an output whose shape another worker has told. Raises InferError if it does not fit where it was to lie."""
    room = tensor.place.byte_size
    if tensor.datatype != datatypes.BYTES:
        size = datatypes.byte_size(tensor.datatype, shape)
    else:
        size, memory = 0, tensor.memory(0).data
        for _ in range(datatypes.element_count(shape)):
            if size + _LENGTH.size > room:
                size = room + 1
                break
            size += _LENGTH.size + _LENGTH.unpack_from(memory, size)[0]
    if size > room:
        raise InferError(
            Code.INTERNAL,
            f"output '{tensor.name}' is said to have the shape {datatypes.shape_text(shape)}, which does not fit into"
            f" its {room} bytes",
        )
    return size
