"""A request for an ensemble with decoupled members: every response of such a member is a branch of its own.

A branch has what its parent had and what one response brought, and runs the steps that wait for it; when it has all
the outputs that the client asked for, they are a response of the ensemble. A thread per request takes the branches one
after the other, each with those that spring from it: so responses come in the order in which the members sent theirs,
and a client that does not read holds up nobody but its own request. Made by `broker.worker.ensembles.ensemble`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
import numpy.typing as npt

from broker.worker.answers import PATIENCE_NS, check_outputs
from broker.worker.binding import no_strings
from broker.worker.ensembles.memory import Value, as_array, byte_size_of, fitted, kept, of_bytes
from broker.worker.ensembles.run import Run, Withdrawable
from broker.worker.plans import Plan
from broker.worker.running import check_sizes
from broker.worker.stream import NOTHING, Arrays, Given, Taker
from broker.worker.streams import Streams
from shm.admission import Request, Verdict
from shm.errors import Code, InferError, as_infer_error, fresh

if TYPE_CHECKING:
    from broker.worker.ensembles.ensemble import Ensemble

# Of a member's responses that wait for the steps behind it. It may be one of those, so it waits for large ones only.
MAX_AHEAD, AHEAD_BYTES = 1024, 64 << 20
LOOK_S = 0.01
_now = time.monotonic_ns


class Brings(Protocol):
    """What a step in another worker brings, part by part (`broker.worker.ensembles.remote.stream`)."""

    def take(self) -> dict[str, Value] | None:
        """Once per `Branch.came`: the response that is complete with this part, by ensemble tensor."""


@final
class Flow(Withdrawable):
    """One request. `taker` is where its responses go."""

    __slots__ = ("_branches", "_ensemble", "_request", "_taker", "over", "plan")

    def __init__(self, ensemble: Ensemble, request: Request, taker: Taker) -> None:
        assert isinstance(request.plan, Plan)
        self.plan = request.plan
        self._ensemble = ensemble
        self._request = request
        self._taker = taker
        self._branches: tuple[Branch, ...] = ()  # those that have begun and not ended, each sprung from the one before
        self.over = False  # what still comes is not wanted
        request.sequence = self

    def begin(self) -> None:
        """Returns at once."""
        if self._ensemble.crowded():
            name = self._ensemble.model.name
            self._end(InferError(Code.UNAVAILABLE, f"ensemble '{name}' has as many requests under way as it takes"))
            return
        try:
            threading.Thread(target=self._drive, name="ensemble-flow", daemon=True).start()
        except RuntimeError as error:  # there are too many
            self._end(InferError(Code.UNAVAILABLE, f"in ensemble '{self._ensemble.model.name}', {error}"))

    def withdraw(self) -> None:
        """See `Withdrawable`."""
        for branch in self._branches:
            branch.withdraw()

    def unwanted(self) -> bool:
        """Has the request ended?"""
        return self.over or self._taker.is_unwanted()

    def copied(self, byte_size: int) -> None:
        """Of the client's tensors, before the first response."""
        self._request.copied += byte_size

    def branch(self, parent: Branch | None, written: Mapping[str, Value]) -> Branch:
        """A branch that has not begun."""
        client = self._request
        request = Request(client.channel, client.slot, client.entry, client.plan, _now())
        request.deadline = client.deadline
        return self._ensemble.branch(self, request, parent, written)

    def _drive(self) -> None:
        error: InferError | None = None
        try:
            self._run(self.branch(None, {}))
        except Exception as failure:
            error = as_infer_error(failure)
        self._end(error)

    def _end(self, error: InferError | None) -> None:
        self.over = True
        self.withdraw()
        self._request.sequence = None
        if error is None:
            self._taker.send(None, "", True)
        else:
            self._taker.fail(error)
        self._ensemble.flow_ended()

    def _run(self, branch: Branch) -> None:
        """Run a branch and all that springs from it, then send what it has. Raises what ended one of them."""
        error: InferError | None = None
        outer, self._branches = self._branches, (*self._branches, branch)
        branch.begin()
        for written in branch.responses():
            if error is None and not self.unwanted():
                try:
                    self._run(self.branch(branch, written))
                except Exception as failure:  # the branch goes on to its end all the same: steps of it run
                    error = as_infer_error(failure)
                    self.over = True
            if self.unwanted():
                branch.withdraw()  # its member need send no more
        self._branches = outer
        try:
            error = error or branch.error
            if error is not None:
                raise fresh(error)
            outputs = branch.outputs()
            if outputs is not None and not self.unwanted():
                self._taker.send(outputs, "", False)
        finally:
            branch.leave()


class Branch(Run):
    """A run with a part of the steps. Its request is a stand-in for the client's."""

    __slots__ = ("_ahead", "_changed", "_done", "_flow", "_inbox", "_parent", "_written")

    def __init__(
        self, flow: Flow, ensemble: Ensemble, request: Request, parent: Branch | None, written: Mapping[str, Value]
    ) -> None:
        super().__init__(ensemble, request, ensemble.queue, lambda: None, frozenset(written))
        self._flow = flow
        self._parent = parent
        self._written = written
        self._inbox: queue.SimpleQueue[dict[str, Value] | Brings | None] = queue.SimpleQueue()
        self._ahead = 0  # bytes of what is in there
        self._changed = threading.Condition(self._lock)
        self._done = False

    # --- of the flow's thread ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Queue the steps that can begin."""
        ready: list[int] = []
        try:
            self._members = self._ensemble.pin(self._prepared.needed.steps)
            if self._parent is None:
                self._read()
                ready = self._progress.begin()
            else:
                self._values = {**self._parent._values, **self._written}
                self._progress = self._parent._progress.copy()
                ready = self._progress.wrote(self._written)
        except Exception as error:
            self._fail(error)
        self._queue(ready)
        self._advance()

    def responses(self) -> Iterator[dict[str, Value]]:
        """What its decoupled members send, each when no other step runs: what those write, all branches have."""
        while (came := self._inbox.get()) is not None:
            written = came if isinstance(came, dict) else came.take()
            if written is None:
                continue
            with self._changed:
                self._ahead -= byte_size_of(written)
                self._changed.notify_all()
                self._changed.wait_for(self._settled)
            yield written

    @property
    def error(self) -> InferError | None:
        """Why it failed."""
        request = self._request
        return InferError(Code(request.code), request.note.decode(errors="replace")) if request.code else None

    def outputs(self) -> dict[str, npt.NDArray[Any]] | None:
        """The ensemble's outputs, when all that the client asked for exist. It has ended."""
        names = [tensor.name for tensor in self._plan.outputs]
        if any(name not in self._values for name in names):
            return None
        batch = (-1,) if self._request.rows else ()
        dims = {tensor.name: tensor.dims for tensor in self._ensemble.model.config.output}
        arrays = {}
        for name in names:
            value = self._values[name]
            arrays[name] = as_array(value, fitted(value.shape, (*batch, *dims[name])) or value.shape)
        return arrays

    def leave(self) -> None:
        """Nothing of it is under way, and nobody reads what it has any more."""
        self._request.sequence = None  # which is this branch

    # --- of members -------------------------------------------------------------------------------------------------

    def taker(self, step: Request, streams: Streams) -> Taker:
        """Where a decoupled member sends the responses to a step. See `broker.worker.decoupled`."""
        return _StepTaker(self, step, streams)

    def unwanted(self) -> bool:
        """Has the ensemble's request ended, or failed?"""
        return bool(self._flow.unwanted() or self._request.code)

    def check(self, step: Request, outputs: Arrays) -> None:
        """Raises InferError for what the step's member cannot send."""
        check_outputs(self._members[step.slot], outputs)

    def respond(self, step: Request, outputs: Arrays) -> None:
        """A member has sent a response. Waits while many bytes of them wait. Raises InferError where too many do."""
        graph, needed = self._ensemble.graph.steps[step.slot], self._prepared.needed
        datatype = {tensor.name: tensor.datatype for tensor in self._members[step.slot].config.output}
        written = {}
        for name, array in outputs.items():
            tensor = graph.output_map.get(name)
            if tensor is not None and tensor in needed.wanted:
                try:
                    written[tensor] = kept(datatype[name], np.asarray(array))
                except InferError as error:
                    raise no_strings(graph.model_name, name, error) from None
        if self._inbox.qsize() >= MAX_AHEAD:
            raise InferError(
                Code.UNAVAILABLE, f"{MAX_AHEAD} responses of model '{graph.model_name}' wait for the steps behind it"
            )
        if self._make_room(byte_size_of(written), step):
            self._inbox.put(written)

    def came(self, stream: Brings) -> None:
        """A part of a response has come from another worker: the flow's thread takes it in its turn."""
        self._inbox.put(stream)

    def has_room(self) -> bool:
        """May more responses wait here? Else they wait where they are."""
        return self._ahead < AHEAD_BYTES and self._inbox.qsize() < MAX_AHEAD

    def waits(self, byte_size: int) -> None:
        """A response of so many bytes waits here."""
        with self._changed:
            self._ahead += byte_size

    def _make_room(self, byte_size: int, step: Request) -> bool:
        """Wait until so many bytes more may wait, or nobody wants them."""
        until = _now() + PATIENCE_NS
        with self._changed:
            while self._ahead and self._ahead + byte_size > AHEAD_BYTES:
                if self.unwanted():
                    return False
                if _now() > until:
                    model = self._ensemble.graph.steps[step.slot].model_name
                    raise InferError(
                        Code.UNAVAILABLE,
                        f"responses of model '{model}' of {self._ahead} bytes wait for the steps behind it, or for the "
                        f"client, which took none for {PATIENCE_NS // 10**9} s",
                    )
                self._changed.wait(LOOK_S)
                if (streams := self._members[step.slot].streams) is not None:
                    streams.goes_on(step)
            self._ahead += byte_size
        return True

    # --- as a run ---------------------------------------------------------------------------------------------------

    def _settled(self) -> bool:
        return self._done or (not self._advancing and all(is_decoupled(step) for step in self._steps))

    def withdraw(self) -> None:
        """See `Withdrawable`."""
        if self.unwanted():
            self._request.ended = self._request.ended or Code.CANCELLED  # so the end of a step is no failure
        super().withdraw()

    def _queue(self, numbers: list[int]) -> None:
        if self.unwanted():
            self._request.ended = Code.CANCELLED
        super()._queue(numbers)

    def look(self) -> None:
        """Steps have been queued: who cancelled the request meanwhile may not have seen them."""
        if self.unwanted():
            self.withdraw()

    def _advance(self) -> None:
        super()._advance()
        with self._changed:
            self._changed.notify_all()

    def _read(self) -> None:
        """The client's tensors, copied: the request may end before the last step has read them."""
        check_sizes(self._plan)
        for tensor in self._plan.inputs:
            memory = tensor.memory(self._request.input_position, self._request.rows)
            shape = self._ensemble.model.shape(tensor.name, tensor.shape_of(self._request.rows))
            self._values[tensor.name] = of_bytes(tensor.datatype, shape, memory)
            self._ensemble.count_copy("policy", memory.size)
            self._flow.copied(memory.size)

    def _collect(self, step: Request) -> list[int]:
        if is_decoupled(step) and not step.code:
            return []  # its responses are branches
        return super()._collect(step)

    def _finish(self) -> None:
        self._ensemble.unpin(self._members)
        with self._changed:
            self._done = True
        self._inbox.put(None)


@final
class _StepTaker:
    """Implements `broker.worker.stream.Taker` for a step of an ensemble."""

    __slots__ = ("_branch", "_ended", "_lock", "_step", "_streams")

    def __init__(self, branch: Branch, step: Request, streams: Streams) -> None:
        self._branch = branch
        self._step = step
        self._streams = streams  # the member's
        self._lock = threading.Lock()
        self._ended = False

    def send(self, outputs: Arrays | None, error: str | InferError, final: bool, parameters: Given = NOTHING) -> None:
        """A response is a branch, an error ends the ensemble's request; parameters go nowhere. All as in Triton."""
        self._streams.goes_on(self._step)
        with self._lock:
            if self._ended:
                if self._branch.unwanted():
                    return
                raise InferError(Code.INTERNAL, "Unable to send response. Response sender has been closed.")
            if error:
                failure = error if isinstance(error, InferError) else InferError(Code.INTERNAL, error)
                self._end(failure)
                return
            if outputs is not None and not self._branch.unwanted():
                self._branch.check(self._step, outputs)
                try:
                    self._branch.respond(self._step, outputs)
                except InferError as failure:
                    self._end(failure)
                    return
            if final:
                self._end(None)

    def fail(self, error: InferError) -> None:
        """The member raised."""
        with self._lock:
            if not self._ended:
                self._end(error)

    def is_unwanted(self) -> bool:
        """As `broker.worker.stream.Stream.cancelled`."""
        self._streams.goes_on(self._step)
        return self._ended or self._branch.unwanted()

    def computed(self) -> None:
        """Statistics by response are kept for clients' requests only."""

    def reschedule(self) -> None:
        """As `Stream.reschedule`."""
        raise InferError(Code.UNSUPPORTED, "a step of an ensemble cannot be rescheduled")

    def let_go(self) -> None:
        """The member forgot the step. Called while memory is collected, so somebody else ends it."""
        if not self._ended:
            self._streams.drop(self)

    def end_if_idle(self, verdict: Verdict) -> None:
        """See `broker.worker.streams.Endable`."""
        self.fail(InferError(*verdict))

    def _end(self, error: InferError | None) -> None:
        self._ended = True
        if error is not None:
            self._step.fail(Code[error.code], error.message)
        self._step.channel.complete((self._step,))


def is_decoupled(step: Request) -> bool:
    """Has its member any number of responses to it?"""
    plan = step.plan
    return isinstance(plan, Plan) and plan.model is not None and plan.model.config.decoupled
