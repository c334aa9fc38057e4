"""One request for an ensemble on its way: steps that can begin are queued, what they wrote lets others begin.

Made by `broker.worker.ensembles.ensemble`. Steps end on any thread, which calls `Run.complete` and thereby queues what
can begin next. A run ends once, when nothing of it is queued or running.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from broker.worker.cache import Output, Response
from broker.worker.ensembles.graph import Progress
from broker.worker.ensembles.memory import Outputs, Prepared, Value, fitted, not_fitting, of_client, private
from broker.worker.ensembles.steps import Asked, plan_of, told
from broker.worker.model import LoadedModel
from broker.worker.plans import Bytes, PlacedTensor, Plan
from broker.worker.running import check_sizes
from broker.worker.undelivered import worth_keeping
from shm.admission import EXPIRED, Request
from shm.errors import Code, InferError, as_infer_error, is_too_small, too_small
from shm.layout import SEQUENCE_AGAIN

if TYPE_CHECKING:
    from broker.worker.ensembles.ensemble import Ensemble
    from broker.worker.stream import Taker
    from broker.worker.streams import Streams

Submit = Callable[[list[Request]], None]
_now = time.monotonic_ns


class Withdrawable:
    """What is under way for a request; while it lasts it is the request's `sequence`."""

    __slots__ = ()

    def withdraw(self) -> None:
        """Take back the steps that still wait: nobody wants what they would write. Those that run go on."""
        raise NotImplementedError


class Run(Withdrawable):
    """Implements `shm.admission.Publishes` for its steps."""

    __slots__ = (
        "_advancing",
        "_began",
        "_copies",
        "_ended",
        "_ensemble",
        "_lock",
        "_members",
        "_plan",
        "_prepared",
        "_progress",
        "_publish",
        "_request",
        "_steps",
        "_submit",
        "_values",
    )

    def __init__(
        self,
        ensemble: Ensemble,
        request: Request,
        submit: Submit,
        publish: Callable[[], None],
        behind: frozenset[str] = frozenset(),
    ) -> None:
        plan = request.plan
        assert isinstance(plan, Plan)
        self._ensemble, self._request, self._plan = ensemble, request, plan
        self._submit, self._publish = submit, publish
        self._lock = threading.Lock()  # of what steps' ends and a cancel touch: the next three
        self._ended: list[Request] = []
        self._steps: dict[Request, None] = {}  # queued or running
        self._advancing = True
        self._prepared: Prepared = ensemble.prepared(plan, request, behind)
        self._progress = Progress(self._prepared.needed)
        self._members: dict[int, LoadedModel] = {}
        self._values: dict[str, Value] = {}  # what exists
        self._copies: list[Bytes] = []  # of the inputs, where answers are kept
        self._began = _now()
        request.note = b""
        request.queue_ns = request.input_ns = request.infer_ns = request.output_ns = request.copied = 0
        request.sequence = self

    def begin(self) -> None:
        """Queue the steps that need nothing from others."""
        self._ensemble.started()
        ready: list[int] = []
        try:
            if not (self._request.sequence_id and self._has_run()):
                self._members = self._ensemble.pin(self._prepared.needed.steps)
                self._read()
                ready = self._progress.begin()
        except Exception as error:
            self._fail(error)
        self._queue(ready)
        self._advance()

    def refuse(self, error: Exception) -> None:
        """It cannot begin."""
        self._ensemble.started()
        self._fail(error)
        self._advance()

    def start(self, requests: Sequence[Request]) -> None:
        """A step is about to run: nothing to mark, the ledger knows the client's request."""

    def complete(self, requests: Sequence[Request]) -> None:
        """Steps have ended, on whatever thread."""
        self._ensemble.left(requests)
        with self._lock:
            self._ended.extend(requests)
            if self._advancing:
                return
            self._advancing = True
        self._advance()

    def withdraw(self) -> None:
        """See `Withdrawable`."""
        with self._lock:
            steps = list(self._steps)
        waiting = []
        for step in steps:
            inner = step.sequence
            step.ended = step.ended or Code.CANCELLED  # one that waits in a sequence ends that: it would lack the step
            if isinstance(inner, Withdrawable):
                inner.withdraw()
            else:
                waiting.append(step)
        self._ensemble.take_back(waiting)

    def look(self) -> None:
        """Steps have been queued: who ended the run meanwhile may not have seen them."""
        if self._request.ended or self._request.code:
            self.withdraw()

    def taker(self, step: Request, streams: Streams) -> Taker:
        """Where a decoupled member would send its responses: it was none when the ensemble was loaded."""
        name = self._ensemble.graph.steps[step.slot].model_name
        raise InferError(
            Code.UNAVAILABLE,
            f"model '{name}' is decoupled, which it was not when its ensemble was loaded: ask again",
        )

    # --- by one thread at a time --------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take note of what has ended and queue what can begin, until there is nothing to do."""
        while True:
            with self._lock:
                ended, self._ended = self._ended, []
                for step in ended:
                    del self._steps[step]
                if not ended and self._steps:
                    self._advancing = False
                    return
            if not ended:
                break
            ready: list[int] = []
            for step in ended:
                try:
                    ready += self._collect(step)
                except Exception as error:
                    self._fail(error, step.slot)
            self._queue(ready)
        self._finish()

    def _queue(self, numbers: list[int]) -> None:
        request = self._request
        if not request.code and numbers:
            if request.ended:
                request.fail(Code.CANCELLED, "the request was cancelled")
            elif request.deadline and _now() >= request.deadline:
                self._fail(InferError(*EXPIRED), numbers[0])
        ready: list[Request] = []
        for at in numbers:
            if request.code:
                self.withdraw()
                return
            try:
                ready.append(self._request_of(at))
            except Exception as error:
                self._fail(error, at)
        if request.code:
            self.withdraw()
        elif ready:
            with self._lock:
                self._steps.update(dict.fromkeys(ready))
            self._submit(ready)
            self.look()

    def _has_run(self) -> bool:
        """Is it a step of a sequence that has run, and whose answer had no room? Then all that it gave is here."""
        kept = self._ensemble.undelivered(self._request)
        if kept is None:
            return False
        for tensor in self._plan.outputs:
            if tensor.name not in kept.values:
                text = f"output '{tensor.name}' was not asked for when this step was run"
                raise InferError(Code.INVALID_ARG, text)
        self._values = dict(kept.values)
        return True

    def _read(self) -> None:
        """The client's tensors, as the ensemble has them."""
        request, model = self._request, self._ensemble.model
        check_sizes(self._plan)
        for tensor in self._plan.inputs:
            shape = model.shape(tensor.name, tensor.shape_of(request.rows))
            value = of_client(tensor, request.input_position, request.rows, shape)
            self._values[tensor.name] = value if model.cached is None else self._copied(tensor, value)

    def _copied(self, tensor: PlacedTensor, value: Value) -> Value:
        """A copy that its client cannot change: an answer is kept for just what the members have read."""
        own = self._prepared.places.get(tensor.name)
        if own is None or (own.byte_size, own.shape) != (value.byte_size, value.shape):
            own = private("UINT8", (value.byte_size,))._replace(datatype=value.datatype, shape=value.shape)
            self._prepared.places[tensor.name] = own
        data = own.region.bytes[: own.byte_size]
        reason = tensor.copy_out(self._request.input_position, self._request.rows, data)
        self._ensemble.count_copy(reason, data.size)
        self._request.copied += data.size
        self._copies.append(data)
        return own

    def _request_of(self, at: int) -> Request:
        """The internal request of a step whose tensors exist."""
        step, prepared, client = self._ensemble.graph.steps[at], self._prepared, self._request
        values, member = self._values, self._members[at]
        given = tuple([values[tensor] for tensor in step.input_map.values() if tensor in values])
        plan = prepared.plans.get(at)
        if plan is None or plan.model is not member or prepared.sources[at] != given:
            asked = Asked(client, self._plan, self._ensemble.model, prepared)
            plan = prepared.plans[at] = plan_of(asked, step, member, values)
            self._ensemble.adopt(plan, member)
            prepared.sources[at] = given
            prepared.chain = None
        plan.owner = self._plan.owner  # it may be from a run for another client
        head, (sequence_id, flags, priority, _, *rest) = client.entry[:4], client.entry[7:]  # its event happened
        entry = (*head, 0, 0, plan.rows, sequence_id, flags & ~SEQUENCE_AGAIN, priority, 0, *rest)
        request = Request(self, at, entry, plan, _now())
        request.deadline = client.deadline  # a `timeout` of Triton's is its member's queue to judge
        request.started = True
        return request

    def _collect(self, step: Request) -> list[int]:
        """A step has ended: what it wrote exists now."""
        request = self._request
        if step.code:
            if request.ended and step.code == Code.CANCELLED:
                request.fail(Code.CANCELLED, "the request was cancelled")
            else:
                self._fail(InferError(Code(step.code), step.note.decode(errors="replace")), step.slot)
            return []
        request.queue_ns += step.queue_ns
        request.input_ns += step.input_ns
        request.infer_ns += step.infer_ns
        request.output_ns += step.output_ns
        plan = step.plan
        assert isinstance(plan, Plan)
        names = self._ensemble.graph.steps[step.slot].output_map
        note = list(struct.unpack(f"<{len(step.note) // 8}Q", step.note)) if step.note else []
        written = []
        for tensor in plan.outputs:
            name = names[tensor.name]
            value = self._prepared.places[name]
            if tensor.open:
                rank = note.pop(0)
                shape, note = tuple(note[:rank]), note[rank:]
                value = value._replace(shape=shape, byte_size=self._byte_size(step, tensor, shape))
            self._values[name] = value
            written.append(name)
        return self._progress.wrote(written)

    def _byte_size(self, step: Request, tensor: PlacedTensor, shape: tuple[int, ...]) -> int:
        """Of an output whose shape its step has told: the step's plan has noted it."""
        return tensor.place.byte_size

    def _fail(self, error: Exception, at: int = -1) -> None:
        if self._request.code:
            return  # the first one tells
        error = as_infer_error(error)
        where = f" ({told(self._ensemble.graph.steps[at], at, self._values)})" if at >= 0 else ""
        self._request.fail(Code[error.code], f"in ensemble '{self._ensemble.model.name}', {error.message}{where}")

    def _finish(self) -> None:
        request = self._request
        if not request.code:
            try:
                self._deliver()
            except Exception as error:
                self._fail(error)
                asked = request.sequence_id and not request.ended
                if asked and isinstance(error, InferError) and is_too_small(error.message):
                    self._keep_undelivered()
        self._ensemble.unpin(self._members)
        if not request.code:  # what a run that failed has left would have to be looked through
            self._ensemble.keep(self._plan, request, self._prepared)
        self._ensemble.ended(request, _now() - self._began)
        request.sequence = None
        self._publish()

    def _keep_undelivered(self) -> None:
        """Its steps must not run twice, and this is no memory of the client's, nor a GPU's."""
        given = {tensor.name: self._values[tensor.name] for tensor in self._plan.outputs}
        on_host = all(value.region.gpu is None for value in given.values())
        if on_host and worth_keeping(value.byte_size for value in given.values()):
            self._ensemble.keep_undelivered(self._request, Outputs.copied(given), _now())

    # --- the answer ---------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Copy what was not written in place, if everything fits; shapes of open outputs go into the note."""
        request, plan = self._request, self._plan
        check_sizes(plan)
        note: list[int] = []
        answers: list[tuple[PlacedTensor, Value, tuple[int, ...]]] = []
        for tensor in plan.outputs:
            shape = self._shape_of(tensor)
            if tensor.open:
                note.extend((len(shape), *shape))
            answers.append((tensor, self._values[tensor.name], shape))
        for tensor, value, _ in answers:
            start = tensor.place.offset + request.output_position * tensor.place.stride
            if value.region is not tensor.region or value.offset != start:
                data = value.region.bytes[value.offset : value.offset + value.byte_size]
                reason = tensor.copy_in(request.output_position, data)
                request.copied += value.byte_size
                self._ensemble.count_copy(reason, value.byte_size)
        request.note = struct.pack(f"<{len(note)}Q", *note) if note else b""
        cached = self._ensemble.model.cached
        if cached is not None and len(self._copies) == len(plan.inputs):  # else the step had run before
            outputs = [
                Output(tensor.name, shape, _bytes(value.region.bytes, value.offset, value.byte_size))
                for tensor, value, shape in answers
            ]
            response = Response(tuple(outputs))
            cached.keep(plan, request.rows, self._copies, response, self._ensemble.model.instances[0].block)

    def _shape_of(self, tensor: PlacedTensor) -> tuple[int, ...]:
        """Of an output, as the client has it. Raises InferError if it does not fit where the client wants it."""
        request, model, value = self._request, self._ensemble.model, self._values[tensor.name]
        reshape = model.reshapes.get(tensor.name)
        shape = value.shape
        if reshape is not None:
            shape = reshape.to_client(tensor.name, fitted(shape, reshape.model) or shape)
        wanted = tensor.shape_of(request.rows)
        if shape != wanted:
            shape = fitted(shape, wanted) or shape
        if shape != wanted and not tensor.open:
            raise not_fitting(tensor.name, shape, model.name, wanted)
        size = value.byte_size
        if not (tensor.open and tensor.make_room(size)) and size > tensor.place.byte_size:
            raise InferError(Code.INVALID_ARG, too_small(f"output '{tensor.name}'", tensor.place.byte_size, size))
        return shape


def _bytes(memory: Bytes, start: int, size: int) -> bytes:
    return np.ascontiguousarray(memory[start : start + size]).tobytes()
