"""The order between an application's work on a GPU and a model that reads there what that work writes.

    plan.infer()                               everything enqueued on the plan's GPUs is waited for first: always right
    plan.after(stream).infer()                 an event is recorded on the stream, for which the worker waits
    plan.after(stream, "synchronize").infer()  the stream is waited for first
    plan.after(None).infer()                   nothing is waited for: the caller knows that all is done

The same goes for work that still reads an output's place: it has to be done before a model writes there again. `After`
says it to the plan by a context variable for the time of a call, so plans without GPU memory never ask.

    Native.orders ── Ring, one per GPU: a region of kind "events", registered with the first request that needs it

Used by both kinds of client and their plans. An index is recorded anew only when the channel has seen the end of the
request that it went with.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from typing import Final, Literal, NamedTuple, final

from clientlib.arguments import shown
from clientlib.cuda_region import CudaRegion
from clientlib.recipe import Recipe
from clientlib.region import TensorRef
from clientlib.session import Call, Procedure
from shm import messages
from shm.cuda import sync
from shm.cuda.descriptor import CudaEvents
from shm.cuda.driver import Context, find_device
from shm.cuda.marks import Mark, mark_now, of_another
from shm.errors import Code, ConnectionLost, InferError

Order = Literal["event", "synchronize"]
EVENTS: Final = 64  # of a ring; when all are in requests that have not ended, the stream is waited for instead
LOOK_NS: Final = 50_000  # as long as a GPU that is idle may take to say so; going to sleep takes no less
# Between two looks at a GPU, after that, an eighth of the time that it has taken so far, within these bounds.
SHORTEST_PAUSE_NS: Final = 20_000
LONGEST_PAUSE_NS: Final = 5_000_000


def gpus_of(recipe: Recipe) -> tuple[str, ...]:
    """UUIDs of the GPUs that have tensors of it."""
    placed = recipe.outputs.values() if isinstance(recipe.outputs, Mapping) else ()
    regions = {ref.region for ref in (*recipe.inputs.values(), *placed) if isinstance(ref, TensorRef)}
    return tuple(sorted({region.device for region in regions if isinstance(region, CudaRegion)}))


def stream_address(stream: object) -> int:
    """Of a stream as libraries have them: `cuda_stream` (torch), `ptr` (cupy), `handle` (numba, cuda.core).

    Or the address itself; 0, 1 and 2 are the default streams. Raises InferError INVALID_ARG for anything else.
    """
    protocol = getattr(stream, "__cuda_stream__", None)  # NVIDIA's own: (version, address)
    try:
        if callable(protocol):
            return _address(operator.index(protocol()[1]))
        for name in ("cuda_stream", "ptr", "handle"):
            if (found := getattr(stream, name, None)) is not None:
                return _address(int(getattr(found, "value", found)))  # numba has a ctypes pointer
        return _address(operator.index(stream))  # type: ignore[arg-type]
    except (TypeError, ValueError, IndexError):
        pass
    raise InferError(
        Code.INVALID_ARG,
        f"after= takes a stream of torch, cupy, numba or cuda.core, its address, or None for nothing to wait for; got "
        f"{shown(stream)}",
    )


def _address(number: int) -> int:
    """Raises ValueError for what is no address."""
    if not 0 <= number < 1 << 64:
        raise ValueError(number)
    return number


# --- what one call says --------------------------------------------------------------------------------------------


@final
class After:
    """What a call's request comes after: `stream` by its address, None: nothing. Of one call of one plan.

    `index`: the event that was recorded for it and is in no request yet, and its ring.
    """

    __slots__ = ("_token", "index", "order", "plan", "ring", "stream")

    def __init__(self, plan: object, stream: int | None, order: Order) -> None:
        self.plan, self.stream, self.order = plan, stream, order
        self.ring: Ring | None = None
        self.index = -1
        self._token: Token[After | None] | None = None

    def __enter__(self) -> After:
        self._token = _after.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _after.reset(self._token)
        self.take_back()

    def sent(self, lasts: Callable[[], bool]) -> None:
        """The event went with a request, which `lasts`."""
        assert self.ring is not None
        self.ring.sent(self.index, lasts)
        self.ring, self.index = None, -1

    def take_back(self) -> None:
        """The event is in no request, and none will have it."""
        if self.ring is not None:
            self.ring.events.give(self.index)
            self.ring, self.index = None, -1


_after: ContextVar[After | None] = ContextVar("after", default=None)


def said_of(plan: object) -> After | None:
    """What the call that is under way says of `plan`; None: nothing."""
    said = _after.get()
    return said if said is not None and said.plan is plan else None


def sent(lasts: Callable[[], bool]) -> None:
    """The event of the call that is under way went with a request, which `lasts` until its end was seen."""
    said = _after.get()
    assert said is not None
    said.sent(lasts)


# --- waiting here ----------------------------------------------------------------------------------------------------


class Wait(NamedTuple):
    """What has to be waited for before a request is sent: a stream; None: everything on `gpus`."""

    gpus: tuple[str, ...]
    stream: int | None
    choice: bool = True  # may the caller wait for something else?

    def now(self, deadline_ns: int = 0) -> None:
        """Raises CudaError for what went wrong on the GPU meanwhile, InferError UNAVAILABLE at the deadline (0: none).

        Without a deadline the driver waits, which is woken at once. With one it is asked again and again: no call of
        it knows a deadline.
        """
        if not deadline_ns:
            for gpu in self.gpus:
                with Context(ordinal_of(gpu)):
                    sync.synchronize(self.stream)
        elif (moment := self.begin()) is not None:
            moment.wait(deadline_ns)

    def begin(self) -> Moment | None:
        """What is left of it after a look; None: nothing. On the caller's thread, which may be what tells its default
        stream from others.
        """
        if self.stream is not None:  # one call, where it has nothing to do
            with Context(ordinal_of(self.gpus[0])):
                if sync.is_done(self.stream):
                    return None
        moment, until = Moment(self), time.monotonic_ns() + LOOK_NS
        try:
            while not moment.is_past():
                if time.monotonic_ns() >= until:
                    return moment
        except BaseException:
            moment.drop()
            raise
        return None


@final
class Moment:
    """What GPUs had to do when this was made, and have not done yet. For one thread at a time; ends with `drop`."""

    __slots__ = ("_began", "_wait", "left")

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._began = time.monotonic_ns()
        self.left: deque[tuple[str, Mark]] = deque()  # by GPU
        try:
            for gpu in wait.gpus:
                ordinal = ordinal_of(gpu)
                with Context(ordinal):
                    self.left.append((gpu, mark_now(ordinal, wait.stream)))
        except BaseException:
            self.drop()
            raise

    def is_past(self) -> bool:
        """Without waiting. Raises CudaError."""
        while self.left:
            gpu, mark = self.left[0]
            with Context(ordinal_of(gpu)):
                if not mark.is_past():
                    return False
            self.left.popleft()
            mark.drop()
        return True

    def pause_s(self, deadline_ns: int) -> float:
        """How long to wait before the next look; 0: it is past. Raises CudaError, and InferError UNAVAILABLE at the
        deadline (0: none).
        """
        if self.is_past():
            return 0.0
        now = time.monotonic_ns()
        if deadline_ns and now >= deadline_ns:
            raise self._too_late()
        pause_ns = min(max((now - self._began) // 8, SHORTEST_PAUSE_NS), LONGEST_PAUSE_NS)
        return 1e-9 * (min(pause_ns, deadline_ns - now) if deadline_ns else pause_ns)

    def wait(self, deadline_ns: int) -> None:
        """Until it is past. Raises as `pause_s`."""
        try:
            while pause_s := self.pause_s(deadline_ns):
                time.sleep(pause_s)
        finally:
            self.drop()

    def drop(self) -> None:
        """Nobody asks any more."""
        while self.left:
            self.left.popleft()[1].drop()

    def _too_late(self) -> InferError:
        stream = self._wait.stream
        whose = "this process" if stream is None else f"stream {stream:#x}"
        remedy = "give the request a longer timeout, or the GPU less to do before it"
        if stream is None and self._wait.choice:
            remedy = "plan.after(stream) waits for the work of one stream alone, plan.after(None) for none"
        return InferError(
            Code.UNAVAILABLE,
            f"timeout expired while waiting for work of {whose} on {self.left[0][0]}, which comes before the "
            f"request; it was not sent. {remedy}",
        )


def ring_for(said: After | None, gpus: tuple[str, ...], orders: Orders) -> Ring | None:
    """Has an event for a request of a plan on `gpus`, if one is wanted and can be."""
    if said is None or said.stream is None or said.order != "event" or len(gpus) > 1:
        return None  # of several GPUs, nobody knows which one the stream is of
    return orders.ring(gpus[0])


def record(said: After | None, ring: Ring | None) -> int:
    """An event on the stream, as a submission names it; 0: none was wanted, or none is free."""
    if said is None or said.stream is None or ring is None:
        return 0
    said.take_back()  # of a first try
    index = ring.record(said.stream)
    if index is None:
        return 0
    said.ring, said.index = ring, index
    return index + 1


def waits_for(said: After | None, gpus: tuple[str, ...]) -> Wait | None:
    """What a request of a plan on `gpus` that has no event waits for here; None: nothing."""
    if said is None or (said.stream is not None and len(gpus) > 1):
        return Wait(gpus, None)
    return None if said.stream is None else Wait(gpus, said.stream)


_ordinals: dict[str, int] = {}  # a process's never change


def ordinal_of(gpu: str) -> int:
    """Which one it is in this process."""
    if gpu not in _ordinals:
        _ordinals[gpu] = find_device(gpu, "a plan on GPU memory").ordinal
    return _ordinals[gpu]


# --- events --------------------------------------------------------------------------------------------------------


@final
class Ring:
    """Events of this process on one GPU, and which requests have them. Registered like a region, under `name`."""

    __slots__ = ("_lock", "_made_in", "_sent", "device", "events", "name", "registered")

    def __init__(self, device: str) -> None:
        self.device = device
        self.name = f"clientlib.events.{os.urandom(4).hex()}"
        self.registered = False
        self._made_in = os.getpid()
        with Context(ordinal_of(device)):
            self.events = sync.EventRing.create(EVENTS)
        self._sent: deque[tuple[int, Callable[[], bool]]] = deque()
        self._lock = threading.Lock()

    def registration(self) -> Call:
        """How it is registered."""
        return Call(
            messages.RegisterEvents(name=self.name, events=CudaEvents(device=self.device, handles=self.events.handles))
        )

    def record(self, stream: int) -> int | None:
        """A free event, recorded on `stream`; None: there is none."""
        with self._lock:
            for _ in range(len(self._sent)):
                index, lasts = self._sent.popleft()
                if lasts():
                    self._sent.append((index, lasts))
                else:
                    self.events.give(index)
        ordinal = ordinal_of(self.device)
        with Context(ordinal):
            try:
                return self.events.record(stream)
            except InferError as error:
                raise of_another(error, stream, ordinal) from None

    def sent(self, index: int, lasts: Callable[[], bool]) -> None:
        """Event `index` is a request's for as long as that `lasts`."""
        with self._lock:
            self._sent.append((index, lasts))

    def __del__(self) -> None:
        if hasattr(self, "events") and self._made_in == os.getpid():  # a forked child has nothing of CUDA
            with contextlib.suppress(InferError), Context(ordinal_of(self.device)):  # the context may be lost
                self.events.close()


@final
class Orders:
    """The rings of one client, by GPU. None: that GPU's events cannot be shared."""

    __slots__ = ("_lock", "_rings")

    def __init__(self) -> None:
        self._rings: dict[str, Ring | None] = {}
        self._lock = threading.Lock()

    def ring(self, device: str) -> Ring | None:
        """Made with the first request that wants it."""
        with self._lock:
            if device not in self._rings:
                with Context(ordinal_of(device)):
                    shared = sync.events_between_processes(ordinal_of(device))
                self._rings[device] = Ring(device) if shared else None
            return self._rings[device]

    def register(self, ring: Ring) -> Procedure[None]:
        """Have the broker know it, so that plans may name it."""
        try:
            yield ring.registration()
        except InferError as error:
            if error.code != Code.ALREADY_EXISTS.name:  # by another thread, at the same time
                raise
        ring.registered = True

    def known(self, name: str) -> str:
        """`name` of a ring that plans may name; "" if there is none of it any more."""
        return name if any(ring is not None and ring.name == name for ring in self._rings.values()) else ""

    def attach(self) -> Procedure[None]:
        """Register on a new session what plans may name. One that is refused is given up: streams are waited for."""
        for device, ring in list(self._rings.items()):
            if ring is not None and ring.registered:
                try:
                    yield from self.register(ring)
                except ConnectionLost:
                    raise
                except InferError:
                    self._rings[device] = None
