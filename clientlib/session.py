"""The session protocol without I/O: request ids, replies waited for, descriptors that belong to a reply.

`SyncSession` and `AsyncSession` move the datagrams; what is said over them is decided by `clientlib.native`, in
procedures: generators that yield a `Call` and get its `Answer`, so that the same code serves both.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol, TypeVar, final

import msgspec

from shm import messages
from shm.errors import Code, ConnectionLost, InferError, ProtocolError, fresh
from shm.gateway_messages import Exiting, Settings, Tracing
from shm.messages import (
    ChannelInfo,
    CloseChannel,
    Failure,
    Goodbye,
    Large,
    Message,
    Prepared,
    RegionInfo,
    Release,
    Reply,
    Starting,
    Unregister,
    Welcome,
)
from shm.sockets import close_all

MAX_LARGE = 1 << 28  # bytes of a reply that travels in a memfd


Answer = tuple[Reply, list[int]]


class Call(NamedTuple):
    """A request, the descriptors that go with it (still the caller's), and how many must come with the reply.

    `late` takes over an answer that nobody waits for any more. False: what the broker made for it is not wanted.
    """

    message: Message
    fds: Sequence[int] = ()
    expects: int = 0
    late: Callable[[Answer], bool] | None = None


T = TypeVar("T")
Procedure = Generator[Call, Answer, T]


@final
class Unanswered(InferError):
    """No reply came in time: whether the broker did what it was asked for is not known."""


class Waiter(Protocol):
    """Who waits for one reply. Exactly one of the two is called, at most once."""

    def answered(self, answer: Answer) -> None:
        """The descriptors of `answer` are the waiter's from now on."""

    def failed(self, error: InferError) -> None:
        """The broker refused the request, or the session ended."""


@final
class Session:
    """State of one session. Not thread-safe: its owner serialises the calls."""

    __slots__ = (
        "_ids",
        "_on_notice",
        "_path",
        "_reason",
        "_returns",
        "_waiting",
        "_welcomed",
        "lost",
        "starting",
        "unanswered",
    )

    def __init__(self, path: str, on_notice: Callable[[Message], None] | None = None) -> None:
        self._path = path
        self._on_notice = on_notice
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[Waiter, Call]] = {}
        self.unanswered: dict[int, Call | None] = {}  # calls that nobody waits for any more
        self._returns: deque[Message] = deque()
        self._welcomed = False
        self._reason = ""
        self.starting: Starting | None = None
        self.lost: ConnectionLost | None = None

    @property
    def outstanding(self) -> int:
        """How many calls the broker has not answered, whether anybody waits for them or not."""
        return len(self._waiting) + len(self.unanswered)

    def request(self, call: Call, waiter: Waiter) -> tuple[int, bytes]:
        """The id and the datagram of `call`. Raises InferError for what the broker would hang up on."""
        if self.lost is not None:
            raise fresh(self.lost)
        number = next(self._ids)
        kind = type(call.message).__name__
        try:
            data = messages.encode(msgspec.structs.replace(call.message, id=number))
        except (TypeError, ValueError, OverflowError) as error:
            raise InferError(Code.INVALID_ARG, f"bad argument for {kind}: {error}") from None
        if len(data) > messages.MAX_DATAGRAM:
            raise InferError(
                Code.INVALID_ARG, f"{kind} has {len(data)} bytes, a message may have {messages.MAX_DATAGRAM}"
            )
        try:
            messages.decode_request(data)  # the broker ends the session of a peer that sends what this refuses
        except ProtocolError as error:
            raise InferError(Code.INVALID_ARG, f"bad argument for {kind}: {_plain(error.message)}") from None
        self._waiting[number] = (waiter, call)
        return number, data

    def forget(self, number: int, *, sent: bool = True) -> None:
        """Nobody waits for this reply any more: when it comes, what it gives is kept by `Call.late` or given back."""
        waiting = self._waiting.pop(number, None)
        if waiting is not None and sent:
            self.unanswered[number] = waiting[1]

    def give_back(self, send: Callable[[bytes], None]) -> None:
        """Return what came too late. `send` raises OSError when it cannot: the rest is for the next time."""
        while self._returns:
            send(messages.encode(msgspec.structs.replace(self._returns[0], id=next(self._ids))))
            self._returns.popleft()

    def receive(self, data: bytes, fds: list[int]) -> None:
        """Hand one datagram to whom it concerns. Raises ProtocolError when it is none of the protocol."""
        try:
            reply = messages.decode_reply(data)
            if isinstance(reply, Large):
                reply, fds = _read_large(reply, fds), []
        except BaseException:
            close_all(fds)
            raise
        if isinstance(reply, Starting):
            self.starting = reply
            return
        if isinstance(reply, Goodbye | Exiting | Tracing) or (isinstance(reply, Settings) and not reply.id):
            if isinstance(reply, Goodbye):
                self._reason = reply.reason
            if self._on_notice is not None:
                self._on_notice(reply)
            return
        if isinstance(reply, Welcome):
            self._welcomed = True
        waiter, call = self._waiting.pop(reply.id, (None, None))
        if waiter is None or call is None:
            self._come_late(reply, fds)
        elif isinstance(reply, Failure):
            close_all(fds)
            waiter.failed(InferError(reply.code, reply.message))
        elif len(fds) != call.expects:
            close_all(fds)
            waiter.failed(ProtocolError(f"{type(reply).__name__} came with {len(fds)} descriptors, not {call.expects}"))
        else:
            waiter.answered((reply, fds))

    def _come_late(self, reply: Reply, fds: list[int]) -> None:
        call = self.unanswered.pop(reply.id, None)
        if call is None or call.late is None or isinstance(reply, Failure) or len(fds) != call.expects:
            close_all(fds)
        elif call.late((reply, fds)):
            return
        if call is not None:
            self.decline(reply)

    def decline(self, reply: Reply) -> None:
        """An answer that came too late: `give_back` returns what the broker made for it."""
        match reply:
            case ChannelInfo(channel=channel):  # a session has few, and would have one less for good
                self._returns.append(CloseChannel(channel=channel))
            case Prepared(index=index, generation=generation):
                self._returns.append(Release(index=index, generation=generation))
            case RegionInfo(name=name):  # nobody knows of it here: its memory would stay until the session ends
                self._returns.append(Unregister(name=name))

    def end(self, why: str = "went away") -> None:
        """The connection is gone: everyone who waits is told so."""
        if self.lost is None:
            reason = f": {self._reason}" if self._reason else ""
            self.lost = ConnectionLost(f"the broker at {self._path} {why}{reason}")
        waiting, self._waiting = self._waiting, {}
        for waiter, _ in waiting.values():
            waiter.failed(self.lost)
        self.unanswered = dict.fromkeys(self.unanswered)

    def late(self, call: Call, timeout_s: float) -> InferError:
        """What to raise when the reply to `call` did not come in time."""
        if not self._welcomed and self.starting is not None:
            waits_for = f"; {self.starting.waits_for}" if self.starting.waits_for else ""
            starting = f"starting: {self.starting.done} of {self.starting.total} models{waits_for}"
            return InferError(Code.UNAVAILABLE, starting)
        kind = type(call.message).__name__
        return Unanswered(
            Code.UNAVAILABLE, f"no answer to {kind} from the broker at {self._path} within {max(0.0, timeout_s):.3g} s"
        )


def _plain(problem: str) -> str:
    """What the decoder of our own message says, in the words of a caller: "version: Expected `str`, got `int`"."""
    match = re.search(r"([^:]+) - at `\$\.?(.*)`$", problem)
    return f"{match[2]}: {match[1].strip()}" if match else problem


def _read_large(large: Large, fds: list[int]) -> Reply:
    if len(fds) != 1 or large.byte_size > MAX_LARGE:
        raise ProtocolError(f"a large reply of {large.byte_size} bytes with {len(fds)} descriptors")
    parts = []
    offset = 0
    while offset < large.byte_size:
        part = os.pread(fds[0], large.byte_size - offset, offset)
        if not part:
            raise ProtocolError(f"a large reply of {large.byte_size} bytes that ends after {offset}")
        parts.append(part)
        offset += len(part)
    close_all(fds)
    return messages.decode_reply(b"".join(parts))
