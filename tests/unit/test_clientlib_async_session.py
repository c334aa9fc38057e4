"""Sessions on an event loop: how many calls the broker has at a time, whoever still waits for them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from clientlib.async_session import CALLS, AsyncSession
from clientlib.session import Answer, Call
from shm import messages, sockets
from shm.errors import ConnectionLost

LIMIT_S = 10.0
ASK = Call(messages.GetModels())


class Peer:
    """The other end: a broker that answers when the test says so."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.asked: list[int] = []

    def take(self) -> int:
        """How many calls have come."""
        while True:
            try:
                received = sockets.receive(self.sock)
            except BlockingIOError:
                return len(self.asked)
            assert received is not None
            self.asked.append(messages.decode_request(received[0]).id)

    def answer(self, number: int) -> None:
        sockets.send(self.sock, messages.encode(structs.replace(messages.Models(models=()), id=number)))


def run(test: Callable[[AsyncSession, Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        session = AsyncSession(ours, "/run", asyncio.get_running_loop())
        with theirs:
            await asyncio.wait_for(test(session, Peer(theirs)), LIMIT_S)
            session.close()

    asyncio.run(main())


def ask(session: AsyncSession, count: int = 1) -> list[asyncio.Task[Answer]]:
    loop = asyncio.get_running_loop()
    return [loop.create_task(session.call(ASK, loop.time() + LIMIT_S)) for _ in range(count)]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def give_up(tasks: list[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_a_call_that_was_given_up_counts_until_it_is_answered() -> None:
    """Clients that ask and leave, again and again, must not make the broker hang up on everybody."""

    async def test(session: AsyncSession, peer: Peer) -> None:
        tasks = ask(session, CALLS)
        await turns()
        assert peer.take() == CALLS
        await give_up(tasks)
        (patient,) = ask(session)
        await turns()
        assert peer.take() == CALLS
        for number in peer.asked:
            peer.answer(number)
        await turns()
        assert peer.take() == CALLS + 1
        peer.answer(peer.asked[-1])
        assert isinstance((await patient)[0], messages.Models)
        tasks = ask(session, CALLS)
        await turns()
        assert peer.take() == 2 * CALLS + 1
        await give_up(tasks)

    run(test)


def test_a_call_that_was_given_up_before_it_was_sent_leaves_nothing() -> None:
    async def test(session: AsyncSession, peer: Peer) -> None:
        first = ask(session, CALLS)
        await turns()
        later = ask(session, 3)
        await turns()
        await give_up(later)
        assert peer.take() == CALLS
        for number in peer.asked:
            peer.answer(number)
        await asyncio.wait(first)
        await turns()
        assert peer.take() == CALLS
        assert not session._session.unanswered

    run(test)


def test_what_comes_in_the_turn_in_which_it_is_given_up_is_given_back() -> None:
    async def test(session: AsyncSession, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        call = Call(messages.RegisterPool(name="r", byte_size=64))
        task = loop.create_task(session.call(call, loop.time() + LIMIT_S))
        await turns()
        assert peer.take() == 1
        task.cancel()
        info = messages.RegionInfo(id=peer.asked[0], name="r", kind="pool", region=1, generation=1, byte_size=64)
        sockets.send(peer.sock, messages.encode(info))
        session._read()
        received = sockets.receive(peer.sock)
        assert received is not None
        asked = messages.decode_request(received[0])
        assert isinstance(asked, messages.Unregister)
        assert asked.name == "r"
        await asyncio.wait([task])

    run(test)


def test_the_end_is_told_to_those_who_wait_for_their_turn() -> None:
    async def test(session: AsyncSession, peer: Peer) -> None:
        tasks = ask(session, CALLS)
        await turns()
        await give_up(tasks)
        waiting = ask(session, 3)
        await turns()
        peer.sock.close()
        for task in waiting:
            with pytest.raises(ConnectionLost):
                await task

    run(test)
