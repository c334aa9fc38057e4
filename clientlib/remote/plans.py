"""Prepared and submitted requests of a remote client, for threads. The same verbs as `clientlib.plans`.

Made by `RemoteClient.prepare`. There is nothing to bind: a request is checked, claims its ranges, becomes a message and
is handed to the transport; its end writes the placed outputs, lets go of the ranges and wakes who waits.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import numpy.typing as npt

from clientlib.arguments import seconds
from clientlib.overlap import in_use
from clientlib.pending import Pending, expired
from clientlib.plans import Plan, was_released
from clientlib.process import StaysHere
from clientlib.remote.core import Remote, closed, deadline_of, with_options
from clientlib.remote.layout import Layout, Position
from clientlib.remote.transport import InferAnswer, InferRequest, cancelled
from clientlib.results import InferResult
from clientlib.streams import Stream
from clientlib.submission import NOT_CARRIED, check_all, check_options, deadline_ns_of
from shm.errors import Code, InferError, described, fresh

if TYPE_CHECKING:
    from clientlib.remote.client import RemoteClient

_serial = itertools.count()


def position_of(layout: Layout, input_slot: int, output_slot: int | None) -> Position:
    """The positions of a request. Raises InferError for those that the plan does not have."""
    if output_slot is not None and not layout.places_outputs:
        raise InferError(
            Code.INVALID_ARG, "output_slot is for outputs that the caller placed; this plan's have their own"
        )
    slot = output_slot or 0
    inputs, outputs = layout.positions
    if not (0 <= input_slot < inputs and 0 <= slot < outputs):
        raise InferError(
            Code.INVALID_ARG,
            f"input_slot {input_slot} / output_slot {slot}: the plan has {inputs} input and {outputs} output positions",
        )
    # Requests that place nothing do not exclude each other: each has a key of its own among the live ones.
    return Position(input_slot, slot if layout.places_outputs else next(_serial))


def claim(layout: Layout, at: Position) -> None:
    """Mark the ranges of a request as used. Raises InferError when memory is in use."""
    ranges = layout.ranges
    if ranges.rivals is not None:
        overlap, _ = ranges.claim(at)
    else:
        overlap = "" if ranges.live.setdefault(at.output_slot, at) is at else in_use(ranges, at)
    if overlap:
        raise InferError(Code.INVALID_ARG, overlap)


def ended_result(layout: Layout, at: Position, copied: int, end: InferAnswer | InferError) -> InferResult | InferError:
    """What a request's end is to the application; lets go of its ranges."""
    try:
        if isinstance(end, InferAnswer):
            return layout.result(end, at, copied)
        return layout.failure(end)
    except InferError as error:
        return fresh(error)
    except Exception as error:  # by who waits for the result: the thread that brings the answer serves others too
        return InferError(Code.INTERNAL, f"the server's answer cannot be read: {described(error)}")
    finally:
        layout.ranges.live.pop(at.output_slot, None)


@final
class RemotePlan(StaysHere):
    """A model, and where its inputs and outputs lie, checked once. Verbs and arguments are those of `Plan`."""

    __slots__ = ("__weakref__", "_client", "_layout", "_released")
    elsewhere = Plan.elsewhere

    def __init__(self, client: RemoteClient, layout: Layout) -> None:
        self._client = client
        self._layout = layout
        self._released = False

    def infer(
        self,
        timeout: float | None = None,
        input_slot: int = 0,
        output_slot: int | None = None,
        rows: int = 0,
        priority: int = 0,
        sequence_id: int = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> InferResult:
        """Run the model and wait. Raises InferError; UNAVAILABLE at the deadline, even if the model runs on."""
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        options = (rows, priority, sequence_id, sequence_start, sequence_end)
        request, at, copied = self._request(deadline_ns, input_slot, output_slot, options)
        return self._client.run(self._layout, request, at, copied, deadline_ns)

    def submit(
        self,
        timeout: float | None = None,
        input_slot: int = 0,
        output_slot: int | None = None,
        rows: int = 0,
        priority: int = 0,
        sequence_id: int = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> RemotePending:
        """Send the request and return at once. Waits only while every slot of the client is taken."""
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        options = (rows, priority, sequence_id, sequence_start, sequence_end)
        request, at, copied = self._request(deadline_ns, input_slot, output_slot, options)
        return self._client.start(self, self._layout, request, at, copied, deadline_ns)

    def stream(
        self,
        timeout: float | None = None,
        input_slot: int = 0,
        rows: int = 0,
        priority: int = 0,
        sequence_id: int = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> Stream:
        """Send the request; iterate over what comes. As `Plan.stream`, and `RemoteClient.stream`."""
        self._check()
        deadline_ns = 0 if timeout is None else deadline_ns_of(timeout)
        options = (rows, priority, sequence_id, sequence_start, sequence_end)
        return Stream(self._client.source(self, self._layout, deadline_ns, input_slot, options))

    def release(self) -> None:
        """A later request raises InferError. Those in flight end as usual, results stay valid."""
        self._released = True

    def __enter__(self) -> RemotePlan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _request(
        self, deadline_ns: int, input_slot: int, output_slot: int | None, options: tuple[int, int, int, bool, bool]
    ) -> tuple[InferRequest, Position, int]:
        self._check()
        return request_of(self._client.remote, self._layout, deadline_ns, input_slot, output_slot, options)

    def _check(self) -> None:
        self._client.remote.check()
        if self._released:
            raise was_released()


def request_of(
    remote: Remote,
    layout: Layout,
    deadline_ns: int,
    input_slot: int,
    output_slot: int | None,
    options: tuple[int, int, int, bool, bool],
    values: Sequence[npt.NDArray[Any]] = (),
) -> tuple[InferRequest, Position, int]:
    """The message of a plan's request, whose ranges are claimed from here on, and how many bytes travel in it.

    `options`: rows, priority, sequence_id, sequence_start, sequence_end.
    """
    try:
        check_options(*options)
        for region in layout.regions:
            remote.check_region(region)
        at = position_of(layout, input_slot, output_slot)
    except NOT_CARRIED:
        check_all(input_slot, output_slot, *options)
        raise
    claim(layout, at)
    try:
        request, copied = layout.request(at, options[0], values)
        return with_options(request, deadline_ns, *options[1:]), at, copied
    except BaseException:
        layout.ranges.live.pop(at.output_slot, None)
        raise


@final
class RemotePending(StaysHere):
    """A submitted request of a `RemotePlan`. Verbs are those of `Pending`."""

    __slots__ = (
        "_at",
        "_cancel",
        "_copied",
        "_deadline_ns",
        "_end",
        "_event",
        "_expired",
        "_freed",
        "_layout",
        "_owner",
        "_remote",
        "_settling",
        "_turn",
        "_wait",
    )
    elsewhere = Pending.elsewhere

    def __init__(
        self,
        owner: tuple[RemoteClient, object],
        layout: Layout,
        at: Position,
        copied: int,
        deadline_ns: int,
        freed: Callable[[], None],
    ) -> None:
        self._owner = owner  # keeps the client, the plan and with it its regions
        self._remote, self._turn = owner[0].remote, owner[0].turn
        self._layout, self._at, self._copied = layout, at, copied
        self._deadline_ns = deadline_ns
        self._freed = freed
        self._event = threading.Event()
        self._settling = threading.RLock()  # a signal handler may cancel what the thread below settles
        self._end: InferResult | InferError | None = None
        self._expired = False
        self._cancel: Callable[[], None] | None = None
        self._wait: Callable[[threading.Event, float | None], bool] = threading.Event.wait

    def submitted(self, cancel: Callable[[], None], wait: Callable[[threading.Event, float | None], bool]) -> None:
        """How to ask for an early end, and how to wait for the end."""
        self._cancel, self._wait = cancel, wait

    def ended(self, end: InferAnswer | InferError) -> None:
        """The transport's word, from any thread, once."""
        if self._remote.closed and not isinstance(end, InferAnswer):
            end = closed()
        self._settle(end)
        self._freed()

    def done(self) -> bool:
        """Has it ended? Never waits."""
        self._remote.check_process()
        return self._end is not None

    def cancel(self) -> bool:
        """Ask for an early end; False when it has ended already. A request that runs on shared memory runs on."""
        if self.done():
            return False
        self._give_up(cancelled())
        return True

    def result(self, timeout: float | None = None) -> InferResult:
        """Wait for the end. Raises TimeoutError after `timeout` seconds (the request goes on), InferError if it failed.

        At the request's own deadline it raises InferError UNAVAILABLE, whatever the server does.
        """
        self._remote.check_process()
        if self._end is None and not self._expired:
            ends = deadline_of(self._deadline_ns)
            patience = math.inf if timeout is None else time.monotonic() + seconds(timeout, now=True)
            until = min(ends, patience)
            remaining = None if until == math.inf else max(until - time.monotonic(), 0)
            if not self._turn.run(lambda: self._wait(self._event, remaining)):
                if ends > patience:
                    raise TimeoutError(f"no result within {timeout:g} s; the request goes on")
                self._expired = True
                self._give_up(expired())
        if self._expired and not isinstance(self._end, InferResult):
            raise expired()
        assert self._end is not None
        if isinstance(self._end, InferError):
            raise fresh(self._end)
        return self._end

    def _give_up(self, why: InferError) -> None:
        """Nobody waits for the answer any more. Where the server shares no memory the ranges are free at once."""
        if not self._layout.shared:
            self._settle(why)
        if self._cancel is not None:
            self._cancel()

    def _settle(self, end: InferAnswer | InferError) -> None:
        with self._settling:  # what comes second must not write to ranges that are free again
            if self._end is None:
                self._end = ended_result(self._layout, self._at, self._copied, end)
                self._event.set()
