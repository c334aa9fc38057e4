"""Where the responses of decoupled models go: any number to a request, also long after it was run.

`Answers` puts every response of a request straight into its client's memory (see `shm.responses`), and waits for a
client that does not read: never in the loop, only in the thread that sends. The request is live until its final
response, so the client's memory stays mapped and the model stays loaded. Made by `broker.worker.decoupled`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from broker.worker.binding import check_shape, given_bytes
from broker.worker.given import packed
from broker.worker.model import Instance, LoadedModel
from broker.worker.plans import Bytes, Plan
from broker.worker.response_statistics import CANCEL, EMPTY, FAIL, SUCCESS, ResponseClock
from broker.worker.running import check_sizes
from broker.worker.sequence import Sequence as SequenceRecord
from broker.worker.stream import NOTHING, Arrays, Given
from broker.worker.streams import CANCELLED, Streams
from shm import datatypes, responses, statistics
from shm.admission import Request, Verdict
from shm.errors import Code, InferError
from shm.parameters import beside
from shm.responses import Extent
from shm.worker_channel import WorkerChannel

PATIENCE_NS = 30_000_000_000  # how long responses wait for a client that does not read those before them
PACE_NS = 10_000_000_000  # of that, what each that was read gives back: else a model's thread is held at one per 29 s
SHORTEST_S, LONGEST_S = 50e-6, 1e-3  # between two looks at whether it has: clients do not ring for that
UNREAD: Verdict = (
    Code.UNAVAILABLE,
    f"the client did not read its responses for {PATIENCE_NS // 10**9} s, or fewer of them than one every "
    f"{PACE_NS // 10**9} s, so the request was cancelled",
)
_now = time.monotonic_ns


@final
class Answers:
    """Where the responses of one request go."""

    __slots__ = (
        "_began",
        "_channel",
        "_clock",
        "_ended",
        "_instance",
        "_lock",
        "_numbers",
        "_over",
        "_parts",
        "_patience",
        "_plan",
        "_rooms",
        "_runs",
        "_streams",
        "kept",
        "request",
        "tensors",
    )

    def __init__(self, instance: Instance, streams: Streams, request: Request, now: int) -> None:
        plan, channel = request.plan, request.channel
        assert isinstance(plan, Plan)
        assert isinstance(channel, WorkerChannel)
        self.request = request
        self.tensors = plan.outputs
        self._instance = instance
        self._streams = streams
        self._plan = plan
        self._channel = channel
        self._rooms = [tensor.place.byte_size // plan.responses for tensor in plan.outputs]
        self._numbers: deque[int] = deque(maxlen=plan.responses)  # of the latest parts, to know when they were read
        self._parts = 0
        self._patience = PATIENCE_NS  # how long it may still wait
        self.kept: dict[str, Any] = {}  # by the model, from one run of the request to the next
        self._began = now
        self._clock = ResponseClock(instance.block, streams.lock, now)
        self._lock = threading.Lock()  # one response at a time; what ended is written no more
        self._ended = False  # its final completion is published
        self._over = False  # by the model, or nobody wants more: sending is no mistake, and does nothing
        self._runs = False  # the model is inside `execute`

    @property
    def over(self) -> bool:
        """Has it ended?"""
        return self._ended

    def is_unwanted(self) -> bool:
        """As `Stream.cancelled`."""
        self._streams.goes_on(self.request)
        unwanted = self._over or bool(self.request.ended)
        if unwanted:
            self._clock.cancelled(_now())
        return unwanted

    def computed(self) -> None:
        """As `Stream.computed`."""
        self._clock.computed(_now())

    def send(self, outputs: Arrays | None, error: str | InferError, final: bool, parameters: Given = NOTHING) -> None:
        """As `Stream.send`."""
        self._streams.goes_on(self.request)
        if outputs is None and not error and not final:
            raise InferError(
                Code.INVALID_ARG, "Inference Response object must be provided when the response flags is set to zero."
            )
        with self._lock:
            if self._over:
                self._count_unwanted(outputs, error)
                return
            if self._ended:
                raise InferError(Code.INTERNAL, "Unable to send response. Response sender has been closed.")
            if self.request.ended:
                self._give_up(CANCELLED)
                self._count_unwanted(outputs, error)
            elif error:
                failure = error if isinstance(error, InferError) else InferError(Code.INTERNAL, error)
                self._fail(failure, final)
            elif outputs is not None:
                self._respond(outputs, final, parameters)
            else:
                self._clock.sent(EMPTY, _now())
                self._end()

    def fail(self, error: InferError) -> None:
        """As `Stream.fail`."""
        with self._lock:
            if not self._ended:
                self._fail(error, True)

    def runs(self, inside: bool) -> None:
        """The model is called with the request, or has returned from that."""
        with self._streams.lock:  # the other one may be held by a sender that waits for the client
            self._runs = inside

    def reschedule(self) -> None:
        """As `Stream.reschedule`. The queue does it when the run is over (`broker.worker.sequences`)."""
        record = self.request.sequence
        batching = self._instance.model.config.sequence_batching
        if batching is None or not batching.iterative_sequence or not isinstance(record, SequenceRecord):
            raise not_rescheduled()
        with self._lock, self._streams.lock:
            if self._ended or self._over:
                return
            if not self._runs:  # its queue has let it go: the next step of its sequence would run again instead
                raise InferError(Code.INTERNAL, "a request can be rescheduled before 'execute' returns, not later")
            record.again = True
            self._streams.again[self.request] = self

    def let_go(self) -> None:
        """Nobody holds the stream any more."""
        if not self._ended:
            self._streams.drop(self)

    def end_if_idle(self, verdict: Verdict) -> None:
        """End it now, unless it has ended or a response is on its way."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._ended:
                    self._give_up(verdict)
            finally:
                self._lock.release()

    # --- with the lock -----------------------------------------------------------------------------------------------

    def _count_unwanted(self, outputs: Arrays | None, error: str | InferError) -> None:
        """As in Triton, what a model sends after its client has left counts; its end is the cancellation."""
        if self._instance.model.closed is None:  # else its block may be another model's
            self._clock.sent(FAIL if error else CANCEL if outputs is None else SUCCESS, _now())

    def _respond(self, outputs: Arrays, final: bool, parameters: Given) -> None:
        began = _now()
        data = self._serialized(outputs)
        extents = [None if each is None else Extent(shape, each.size) for each, shape in data]
        note = responses.pack(extents)
        given = packed(self._instance.model.name, parameters)
        if given:
            beside(note, given)  # raises where there is no room
        count = responses.part_count(extents, self._rooms)
        copied = 0
        for part in range(count):
            if not self._wait(self._has_place):
                return
            size = self._write([each for each, _ in data], part)
            copied += size
            self.request.copied += size
            self.request.note = note
            self.request.give(given)
            if final and part == count - 1:
                self._count_sent(copied, began)
                self._end()
            elif not self._wait(self._published):
                return
        if not final:
            self._count_sent(copied, began)

    def _serialized(self, outputs: Arrays) -> list[tuple[Bytes | None, tuple[int, ...]]]:
        model = self._instance.model
        check_outputs(model, outputs)
        found: list[tuple[Bytes | None, tuple[int, ...]]] = []
        for tensor in self.tensors:
            if tensor.name not in outputs:
                found.append((None, ()))
                continue
            array = np.asarray(outputs[tensor.name])
            reshape = model.reshapes.get(tensor.name)
            shape = tuple(array.shape) if reshape is None else reshape.to_client(tensor.name, array.shape)
            found.append((given_bytes(model, tensor, array), shape))
        return found

    def _write(self, data: Sequence[Bytes | None], part: int) -> int:
        """Put part `part` of a response into the request's next place; returns how many bytes."""
        check_sizes(self._plan)
        place = self._parts % self._plan.responses
        written = 0
        for tensor, room, whole in zip(self.tensors, self._rooms, data, strict=True):
            piece = whole[part * room : (part + 1) * room] if whole is not None else ()
            if len(piece):
                target = tensor.memory(self.request.output_position)
                target[place * room : place * room + len(piece)] = piece
                written += len(piece)
        self._parts += 1
        return written

    def _has_place(self) -> bool:
        """Has the client read what lies in the next place?"""
        credit = self._plan.credit
        if credit is not None:
            return self._parts - int(credit.memory(0).view(np.uint64)[0]) < self._plan.responses
        numbers = self._numbers
        return len(numbers) < (numbers.maxlen or 0) or self._channel.was_read(numbers[0])

    def _published(self) -> bool:
        number = self._channel.respond(self.request)
        if number:
            self._numbers.append(number)
            self._patience = min(PATIENCE_NS, self._patience + PACE_NS)
            self.request.copied = 0  # each completion has its own
            self.request.note = b""  # an ending without one has no response
            self.request.parameters = b""
        return number != 0

    def _wait(self, ready: Callable[[], bool]) -> bool:
        """Until `ready`. False: nobody wants a response any more, and the request has ended."""
        if ready():
            return True
        pause_s, until = SHORTEST_S, _now() + self._patience
        while not ready():
            if self.request.ended or self._channel.broken or _now() > until:
                self._give_up(CANCELLED if self.request.ended or self._channel.broken else UNREAD)
                return False
            time.sleep(pause_s)
            self._streams.goes_on(self.request)
            pause_s = min(2 * pause_s, LONGEST_S)
        self._patience = max(0, until - _now())
        return True

    def _fail(self, error: InferError, final: bool) -> None:
        self.request.fail(Code[error.code], error.message)
        self._clock.sent(FAIL, _now())
        if final:
            self._end()
        elif self._wait(self._published_error):
            self.request.code, self.request.note = Code.OK, b""

    def _published_error(self) -> bool:
        return self._channel.respond(self.request) != 0

    def _give_up(self, verdict: Verdict) -> None:
        self._over = True
        self.request.fail(*verdict)
        self._end()

    def _end(self) -> None:
        """Publish the ending that the request has: an error, the last part of a response, or nothing."""
        request = self.request
        self._ended = True
        request.infer_ns = _now() - self._began - request.output_ns
        with self._streams.lock:
            _count_ending(self._instance.block, request)
        self._channel.complete((request,))
        self._streams.end(request, self._instance.block)

    def _count_sent(self, copied: int, began: int) -> None:
        now = _now()
        self.request.output_ns += now - began
        self._clock.sent(SUCCESS, now)
        with self._streams.lock:
            self._instance.count_copy("output", copied)


def check_outputs(model: LoadedModel, outputs: Arrays) -> None:
    """Raises InferError INTERNAL for what the model cannot send."""
    config = model.config
    known = {tensor.name: tensor.datatype for tensor in config.output}
    for name, array in outputs.items():
        datatype = known.get(name)
        if datatype is None:
            raise InferError(Code.INTERNAL, f"model '{config.name}' has no output '{name}'")
        if datatype != datatypes.BYTES and np.asarray(array).dtype != datatypes.numpy_dtype(datatype):
            raise InferError(
                Code.INTERNAL,
                f"output '{name}' of model '{config.name}' is {datatype}, got an array of {np.asarray(array).dtype}",
            )
        reshape, shape = model.reshapes.get(name), np.asarray(array).shape
        check_shape(model, name, shape if reshape is None else reshape.to_client(name, shape))


def not_rescheduled() -> InferError:
    """For a model that cannot have a request run again."""
    return InferError(
        Code.INVALID_ARG,
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model does not have "
        "sequence_batching { iterative_sequence: true }",
    )


def _count_ending(block: memoryview, request: Request) -> None:
    block[statistics.LAST_MS] = int(time.time() * 1000)
    if request.code:
        block[statistics.CANCELLED if request.code == Code.CANCELLED else statistics.FAIL] += 1
        if request.code != Code.CANCELLED:
            block[statistics.FAIL_NS] += request.infer_ns
        return
    block[statistics.SUCCESS] += 1
    block[statistics.INFERENCES] += request.rows or 1
    block[statistics.QUEUE_NS] += request.queue_ns
    block[statistics.INFER_NS] += request.infer_ns
    block[statistics.OUTPUT_NS] += request.output_ns
    statistics.count_latency(block, request.queue_ns + request.infer_ns + request.output_ns)
