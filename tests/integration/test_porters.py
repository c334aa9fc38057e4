"""What clients hand over, received by a process of its own: what comes through, what is kept, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import struct
from collections.abc import AsyncIterator, Iterator

import pytest

from broker import porter_link
from broker.porter_link import NotTaken, Outcome, Porters, Taken
from shm import sockets
from shm.errors import ProtocolError
from tests.fakes.processes import children, in_loop, subreaper, until

FULL_B = b"x" * 65536


@pytest.fixture(autouse=True)
def guarded() -> Iterator[None]:
    with subreaper():
        yield


class Asker:
    """One client's socket, and what came of asking for its datagrams."""

    def __init__(self, porters: Porters, session: int = 1) -> None:
        self._porters, self._session = porters, session
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)

    async def take(self, data: bytes, fds: list[int]) -> Outcome:
        sockets.send(self.theirs, data, fds)
        return await self.take_what_is_there()

    async def take_what_is_there(self) -> Outcome:
        told: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        assert self._porters.take(self._session, self.ours, told.set_result) == ""
        return await told

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def new_children(before: set[int]) -> list[int]:
    """`before`: brokers that other tests share."""
    return [pid for pid in children() if pid not in before]


@contextlib.asynccontextmanager
async def asker(stuck: list[int] | None = None) -> AsyncIterator[tuple[Porters, Asker]]:
    before = set(children())
    porters = Porters((stuck if stuck is not None else []).append)
    with contextlib.closing(Asker(porters)) as asking:
        yield porters, asking
    await porters.end()
    await until(lambda: not new_children(before))


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """A socket whose last close waits, as long as its peer (the second to be closed here) does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(FULL_B)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
        yield ours
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, which ends the wait


async def hand_over(asking: Asker, lingers: socket.socket) -> Outcome:
    """So that the porter has the last reference."""
    sockets.send(asking.theirs, b"it lingers", [lingers.fileno()])
    lingers.close()
    return await asking.take_what_is_there()


@in_loop
async def test_only_what_is_the_kernels_own_comes_through() -> None:
    memory, (end, other_end) = os.memfd_create("it"), os.pipe()
    async with asker() as (porters, asking):
        outcome = await asking.take(b"data", [memory, end, memory])
        assert isinstance(outcome, Taken)
        assert outcome.data == b"data"
        assert [stat.S_IFMT(os.fstat(fd).st_mode) for fd in outcome.fds] == [stat.S_IFREG, stat.S_IFCHR, stat.S_IFREG]
        assert os.fstat(outcome.fds[0]).st_ino == os.fstat(memory).st_ino
        sockets.close_all([*outcome.fds, memory, end])
        # nobody has the pipe any more
        await until(lambda: _is_broken(other_end))
        os.close(other_end)
        await until(lambda: porters.held == 0)


def _is_broken(pipe: int) -> bool:
    try:
        os.write(pipe, b"x")
    except BrokenPipeError:
        return True
    return False


@in_loop
async def test_datagrams_as_the_session_would_have_received_them() -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    async with asker() as (_, asking):
        longest = await asking.take(FULL_B, [null])
        assert isinstance(longest, Taken)
        assert longest.data == FULL_B
        sockets.close_all(longest.fds)
        too_long = await asking.take(FULL_B + b"x", [null])
        assert isinstance(too_long, ProtocolError)
        assert "longer than 65536 bytes" in too_long.message
        many = await asking.take(b"many", [null] * 17)
        assert isinstance(many, ProtocolError)
        assert "at most 16" in many.message
        assert await asking.take_what_is_there() is None
        asking.theirs.close()
        assert await asking.take_what_is_there() == NotTaken("")
    os.close(null)


@in_loop
async def test_what_cannot_be_closed_is_kept_and_its_session_named() -> None:
    stuck: list[int] = []
    async with asker(stuck) as (porters, asking):
        with lingering() as lingers:
            outcome = await hand_over(asking, lingers)
            assert isinstance(outcome, Taken)
            sockets.close_all(outcome.fds)
            await until(lambda: stuck == [1])
            assert porters.held == 1
            again = await asking.take(b"again", [])  # others are served meanwhile
            assert again == Taken(b"again", [])
        await until(lambda: porters.held == 0)
        assert stuck == [1]


@in_loop
async def test_a_porter_that_keeps_too_much_is_replaced() -> None:
    before, stuck = set(children()), list[int]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(porter_link, "THREADS", 1)
        async with asker(stuck) as (porters, asking):
            with lingering() as lingers:
                outcome = await hand_over(asking, lingers)
                (first,) = new_children(before)
                assert isinstance(outcome, Taken)
                sockets.close_all(outcome.fds)
                await until(lambda: stuck == [1])
                assert await asking.take(b"again", []) == Taken(b"again", [])
                await until(lambda: first not in children())  # this close, unlike a FUSE file's, can be interrupted
            assert porters.held == 0


@in_loop
async def test_when_there_can_be_no_porter_nothing_is_taken() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(porter_link, "MAX_PORTERS", 0)
        async with asker() as (porters, asking):
            assert "no more can be passed" in porters.take(1, asking.ours, print)
            assert porters.refused == 1
            patched.undo()
            assert await asking.take(b"now", []) == Taken(b"now", [])


@in_loop
async def test_a_porter_that_does_not_answer_costs_one_session() -> None:
    before = set(children())
    with pytest.MonkeyPatch.context() as patched:
        async with asker() as (_, asking):
            assert await asking.take(b"one", []) == Taken(b"one", [])
            patched.setattr(porter_link, "ANSWER_S", 0.2)
            os.kill(new_children(before)[0], signal.SIGSTOP)
            outcome = await asking.take(b"two", [])
            assert isinstance(outcome, NotTaken)
            assert "ended" in outcome.reason
            patched.undo()
            assert await asking.take_what_is_there() == Taken(b"two", [])


@in_loop
async def test_what_nobody_has_read_is_taken_at_the_end() -> None:
    read, write = os.pipe()
    async with asker() as (porters, asking):
        sockets.send(asking.theirs, b"plain")
        for _ in range(3):
            sockets.send(asking.theirs, b"unread", [write])
        os.close(write)
        sockets.send(asking.ours, b"last words")
        porters.close(1, asking.ours)
        assert asking.theirs.recv(100) == b"last words"
        assert asking.theirs.recv(100) == b""
        os.set_blocking(read, False)
        await until(lambda: _has_ended(read))
    os.close(read)


def _has_ended(pipe: int) -> bool:
    try:
        return os.read(pipe, 1) == b""
    except BlockingIOError:
        return False
