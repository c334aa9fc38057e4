"""Sessions over socket pairs that the broker made: whose they are, what ends them, and how their requests run."""

from __future__ import annotations

import asyncio
import os
import socket

import msgpack
import pytest

from broker.listener import Sessions
from broker.records import CLIENT, GATEWAY, Peer
from broker.sessions import AT_ONCE, Answer
from shm.gateway_messages import Config
from shm.messages import MAX_DATAGRAM, Done, Welcome
from tests.fakes.processes import descriptors, in_loop, until


class Service:
    """Holds requests until told."""

    def __init__(self):
        self.began, self.cancelled = [], 0
        self.ended = []
        self.peers = set()
        self.go = asyncio.Event()
        self.reply = Done()

    async def welcome(self, session):
        return Welcome(protocol=1, epoch="e", session=session.peer.session, version="0")

    async def answer(self, peer, request, fds):
        self.peers.add(peer)
        self.began.append(request.id)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Answer(self.reply)

    async def end(self, peer):
        self.ended.append((peer.session, self.cancelled))


def pair(sessions, role=GATEWAY, pid=0, pidfd=-1):
    """The child's end of an adopted session, and the session."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    pid = pid or os.getpid()
    return theirs, sessions.adopt(ours, pid, pidfd if pidfd >= 0 else os.pidfd_open(pid), role)


def send(end, kind, number, **fields):
    end.send(msgpack.packb({"type": kind, "id": number, **fields}))


async def receive(end):
    loop = asyncio.get_running_loop()
    return msgpack.unpackb(await asyncio.wait_for(loop.sock_recv(end, 65536), 10))


async def greet(end):
    send(end, "Hello", 1, protocol=1)
    assert (await receive(end))["type"] == "Welcome"


@in_loop
async def test_a_child_is_known_by_what_its_parent_knows():
    before = descriptors()
    service = Service()
    sessions = Sessions(service, limit=0)  # which is not for children
    like_pidfd, life = os.pipe()  # readable at the end of a life
    end, session = pair(sessions, pid=4242, pidfd=like_pidfd)
    assert session.peer == Peer(session.peer.session, 4242, os.getuid(), GATEWAY)
    await greet(end)
    service.go.set()
    send(end, "ListRegions", 2)
    assert (await receive(end))["type"] == "Done"
    assert service.peers == {session.peer}
    os.close(life)  # its end of the socket is still open
    await until(lambda: not len(sessions))
    await session.closed
    assert service.ended == [(session.peer.session, 0)]
    end.close()
    assert descriptors() <= before


@in_loop
async def test_hang_up_ends_it_too():
    service = Service()
    sessions = Sessions(service)
    end, session = pair(sessions)
    await greet(end)
    end.close()
    await until(lambda: not len(sessions))
    await session.closed
    assert service.ended == [(session.peer.session, 0)]


@in_loop
async def test_only_clients_must_say_hello_soon():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("broker.listener.HELLO_TIMEOUT_S", 0.01)
        sessions = Sessions(Service())
        (client, _), (gateway, session) = pair(sessions, CLIENT), pair(sessions)
        assert (await receive(client))["reason"] == "no Hello within 0.01 s"
        assert list(sessions) == [session]
        await greet(gateway)
        await sessions.end_all("the test is over")
        client.close()
        gateway.close()


@in_loop
async def test_a_gateways_requests_run_at_once_up_to_a_bound():
    service = Service()
    sessions = Sessions(service)
    end, _ = pair(sessions)
    await greet(end)
    numbers = list(range(2, 2 + AT_ONCE + 5))
    for number in numbers:
        send(end, "ListRegions", number)
        await asyncio.sleep(0)
    await until(lambda: len(service.began) == AT_ONCE)
    for _ in range(20):
        await asyncio.sleep(0)
    assert service.began == numbers[:AT_ONCE]
    service.go.set()
    answers = [await receive(end) for _ in numbers]
    assert sorted(answer["id"] for answer in answers) == numbers
    assert service.began == numbers
    await sessions.end_all("the test is over")
    end.close()


@in_loop
async def test_a_clients_requests_run_one_after_another():
    service = Service()
    sessions = Sessions(service)
    end, _ = pair(sessions, CLIENT)
    await greet(end)
    for number in (2, 3):
        send(end, "ListRegions", number)
    await until(lambda: service.began == [2])
    for _ in range(20):
        await asyncio.sleep(0)
    assert service.began == [2]
    await sessions.end_all("the test is over")
    end.close()


@in_loop
async def test_what_runs_is_cancelled_before_anything_is_given_back():
    service = Service()
    sessions = Sessions(service)
    end, session = pair(sessions)
    await greet(end)
    for number in range(2, 5):
        send(end, "ListRegions", number)
    await until(lambda: len(service.began) == 3)
    end.close()
    await session.closed
    assert service.ended == [(session.peer.session, 3)]


@in_loop
async def test_a_gateway_may_be_busy_while_all_its_calls_are_answered():
    service = Service()
    service.reply = Config(config="x" * (MAX_DATAGRAM - 100))
    service.go.set()
    sessions = Sessions(service)
    end, _ = pair(sessions)
    await greet(end)
    numbers = list(range(2, 2 + AT_ONCE))
    for number in numbers:
        send(end, "ListRegions", number)
    await until(lambda: len(service.began) == AT_ONCE)
    answers = [await receive(end) for _ in numbers]
    assert sorted(answer["id"] for answer in answers) == numbers
    await sessions.end_all("the test is over")
    end.close()
