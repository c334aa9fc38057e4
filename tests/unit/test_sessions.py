"""One client's connection: order, bounds, descriptors, and the end of it. Real sockets, one process, one loop."""

import array
import asyncio
import os
import pickle
import socket

import msgpack
import pytest

from broker.listener import RateLimited, Sessions, session_limit
from broker.run_directory import RunDirectory
from broker.sessions import MAX_ERRORS, MAX_WAITING, Answer
from shm import sockets
from shm.errors import InferError
from shm.messages import Done, GetModel, Hello, ListRegions, RegisterPool, Starting, Status, Welcome, encode


class Echo:
    """A service that records what it is asked. `hold` keeps requests running, `reply` overrides the answer."""

    def __init__(self):
        self.asked = []
        self.ended = []
        self.reply = Done()
        self.hold = asyncio.Event()
        self.hold.set()

    async def welcome(self, session):
        session.send(Starting(done=3, total=7))
        return Welcome(protocol=1, epoch="e", session=session.peer.session, version="0")

    async def answer(self, peer, request, fds):
        self.asked.append((request, len(fds)))
        sockets.close_all(fds)
        await self.hold.wait()
        if isinstance(self.reply, Exception):
            raise self.reply
        return Answer(self.reply)

    async def end(self, peer):
        self.ended.append(peer.session)


class Client:
    """The other end, packed by hand."""

    def __init__(self, path):
        self.socket = sockets.seqpacket()
        self.socket.connect(path)

    def send(self, message, fds=()):
        self.send_raw(msgpack.packb(message), fds)

    def send_raw(self, data, fds=()):
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], ancillary)

    async def receive(self):
        """The next datagram as a dict, None at end of file."""
        readable = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self.socket, lambda: readable.done() or readable.set_result(None))
        try:
            await asyncio.wait_for(readable, 10)
        finally:
            asyncio.get_running_loop().remove_reader(self.socket)
        datagram = sockets.receive(self.socket)
        if datagram is None:
            return None
        sockets.close_all(datagram[1][1:])
        message = msgpack.unpackb(datagram[0])
        if datagram[1]:
            message["fd"] = datagram[1][0]
        return message

    async def greet(self):
        self.send({"type": "Hello", "id": 1, "protocol": 1, "library": "by hand"})
        assert (await self.receive())["type"] == "Starting"
        welcome = await self.receive()
        assert (welcome["type"], welcome["id"]) == ("Welcome", 1)
        return welcome["session"]


async def until(condition):
    """Let the loop run until `condition()` holds."""
    while not condition():  # noqa: ASYNC110  what is waited for is the loop's own work
        await asyncio.sleep(0)


def session_test(scenario):
    """Run `scenario(service, sessions, connect)` against a listening socket; then nothing may be left open."""

    def test(tmp_path):
        async def main():
            service = Echo()
            sessions = Sessions(service, limit=3)
            run = RunDirectory.claim(str(tmp_path))
            clients = []

            def connect():
                clients.append(Client(run.socket_path))
                return clients[-1]

            sessions.listen(run.listen())
            try:
                await asyncio.wait_for(scenario(service, sessions, connect), 20)
            finally:
                sessions.stop_listening()
                await sessions.end_all("the test is over")
                for client in clients:
                    client.socket.close()
                run.release()

        before = len(os.listdir("/proc/self/fd"))
        asyncio.run(main())
        assert len(os.listdir("/proc/self/fd")) <= before

    test.__name__ = scenario.__name__
    return test


@session_test
async def test_requests_sent_back_to_back_are_answered_in_order(service, sessions, connect):
    client = connect()
    for number in range(1, 40):
        kind = {"type": "ListRegions"} if number > 1 else {"type": "Hello", "protocol": 1}
        client.send({**kind, "id": number})
    assert (await client.receive())["type"] == "Starting"
    assert [(await client.receive())["id"] for _ in range(1, 40)] == list(range(1, 40))
    (session,) = sessions
    assert (session.peer.pid, session.peer.uid) == (os.getpid(), os.getuid())
    assert len(service.asked) == 38


@session_test
async def test_one_request_at_a_time(service, sessions, connect):
    client = connect()
    await client.greet()
    service.hold.clear()
    for number in (2, 3):
        client.send({"type": "ListRegions", "id": number})
    await until(lambda: service.asked)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(service.asked) == 1
    service.hold.set()
    assert [(await client.receive())["id"] for _ in range(2)] == [2, 3]


@session_test
async def test_errors_become_failures_and_the_session_goes_on(service, sessions, connect):
    client = connect()
    await client.greet()
    cases = {
        InferError("NOT_FOUND", "no such thing"): ("NOT_FOUND", "no such thing"),
        OSError(24, "Too many open files", "/secret/path"): ("UNAVAILABLE", "Too many open files"),
        KeyError("/secret/path"): ("INTERNAL", "internal error of the broker"),
    }
    for number, (error, (code, text)) in enumerate(cases.items(), 2):
        service.reply = error
        client.send({"type": "ListRegions", "id": number})
        failure = await client.receive()
        assert (failure["type"], failure["id"], failure["code"]) == ("Failure", number, code)
        assert text in failure["message"]
        assert "secret" not in failure["message"]
        assert error.__traceback__ is None, "who holds it holds nothing else"
    service.reply = Done()
    client.send({"type": "ListRegions", "id": 9})
    assert await client.receive() == {"type": "Done", "id": 9}


@session_test
async def test_garbage_is_answered_and_the_next_valid_request_succeeds(service, sessions, connect):
    client = connect()
    await client.greet()
    nested = b"\x91" * 60000
    bad = [
        (b"\xc1", 0),
        (os.urandom(4096), 0),
        (pickle.dumps({"type": "ListRegions"}), 0),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + b"\xff" * 8, 0),
        (nested, 0),
        (msgpack.packb({"type": "ListRegions", "id": 5})[:-1], 0),
        (msgpack.packb({"type": "ListRegions", "id": 6}) + b"\x00", 0),
        (msgpack.packb({"type": "Nothing", "id": 7}), 7),
        (msgpack.packb({"type": "ListRegions", "id": 8, "more": 1}), 8),
        (msgpack.packb({"type": "GetModel", "id": 9, "model": 3}), 9),
        (msgpack.packb({"type": "GetModel", "id": 10}), 10),
        (msgpack.packb({"type": "ListRegions", "id": -1}), 0),
        (msgpack.packb({"type": "ListRegions", "id": 2**64 - 1}), 0),
        (msgpack.packb({"type": "RegisterPool", "id": 11, "name": "", "byte_size": 1}), 11),
        (msgpack.packb({"type": "RegisterPool", "id": 12, "name": "x" * 257, "byte_size": 1}), 12),
        (msgpack.packb({"type": "RegisterPool", "id": 13, "name": "x", "byte_size": 1.5}), 13),
        (msgpack.packb({"type": "RegisterPool", "id": 14, "name": "x", "byte_size": True}), 14),
        (msgpack.packb([1, 2]), 0),
    ]
    for data, number in bad:
        client.send_raw(data)
        failure = await client.receive()
        assert (failure["type"], failure["code"], failure["id"]) == ("Failure", "INVALID_ARG", number), data[:40]
        assert "Traceback" not in failure["message"]
    assert service.asked == []
    client.send({"type": "ListRegions", "id": 99})
    assert await client.receive() == {"type": "Done", "id": 99}
    assert next(iter(sessions)).protocol_errors == len(bad)


@session_test
async def test_nothing_but_garbage_is_hung_up(service, sessions, connect):
    client = connect()
    await client.greet()
    for _ in range(MAX_ERRORS):
        client.send_raw(b"\xc1")
        assert (await client.receive())["type"] == "Failure"
    assert (await client.receive())["type"] == "Goodbye"
    assert await client.receive() is None
    assert sessions.protocol_errors == MAX_ERRORS


@session_test
async def test_the_first_message_must_be_hello(service, sessions, connect):
    for first in (b"\xc1", encode(ListRegions(id=4)), pickle.dumps(print)):
        client = connect()
        client.send_raw(first)
        assert (await client.receive())["type"] == "Failure"
        assert (await client.receive())["type"] == "Goodbye"
        assert await client.receive() is None
    assert service.asked == []


@session_test
async def test_another_protocol_version_is_refused_naming_both(service, sessions, connect):
    client = connect()
    client.send({"type": "Hello", "id": 1, "protocol": 2})
    failure = await client.receive()
    assert failure["code"] == "UNSUPPORTED"
    assert "speaks protocol 1, the client speaks protocol 2" in failure["message"]
    assert (await client.receive())["type"] == "Goodbye"
    assert await client.receive() is None


@session_test
async def test_hello_is_sent_once(service, sessions, connect):
    client = connect()
    await client.greet()
    client.send_raw(encode(Hello(id=2, protocol=1)))
    assert (await client.receive())["message"].startswith("Hello is sent once")


@session_test
async def test_no_hello_in_time(service, sessions, connect):
    client = connect()
    await until(lambda: len(sessions))
    (session,) = sessions
    assert 0 < session._hello.when() - asyncio.get_running_loop().time() <= 5
    session._hello._run()
    assert "no Hello" in (await client.receive())["reason"]
    assert await client.receive() is None


@session_test
async def test_descriptors_reach_only_requests_that_take_one(service, sessions, connect):
    client = connect()
    await client.greet()
    read, write = os.pipe()
    client.send_raw(encode(GetModel(id=2, model="m")), [write, write, write])
    client.send_raw(encode(RegisterPool(id=3, name="r", byte_size=1)), [write])
    assert [(await client.receive())["id"] for _ in range(2)] == [2, 3]
    os.close(write)
    assert os.read(read, 1) == b""  # every copy of the write end is closed
    os.close(read)
    assert [count for _, count in service.asked] == [0, 1]


@session_test
async def test_too_many_descriptors_or_bytes_end_the_session_and_leak_nothing(service, sessions, connect):
    read, write = os.pipe()
    cases = ((encode(ListRegions(id=2)), [write] * 253, "were cut short"), (b"x" * 65537, [write], "is longer than"))
    for data, fds, text in cases:
        client = connect()
        await client.greet()
        client.send_raw(data, fds)
        assert text in (await client.receive())["message"]
        assert (await client.receive())["type"] == "Goodbye"
        assert await client.receive() is None
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)


@session_test
async def test_more_waiting_requests_than_allowed(service, sessions, connect):
    client = connect()
    session = await client.greet()
    service.hold.clear()
    said = []
    sessions._complain = lambda text, *arguments: said.append(text % arguments)
    for number in range(2, MAX_WAITING + 20):
        try:
            client.send({"type": "ListRegions", "id": number})
        except OSError:
            break
        if number % 8 == 0:
            await asyncio.sleep(0)
    goodbye = await client.receive()
    assert goodbye["type"] == "Goodbye"
    assert "are waiting" in goodbye["reason"]
    assert await client.receive() is None
    assert said == [f"session {session} (pid {os.getpid()}) was hung up: {goodbye['reason']}"]


@session_test
async def test_large_replies_come_in_a_memfd(service, sessions, connect):
    client = connect()
    await client.greet()
    service.reply = Status(status={"filler": "y" * 200_000})
    client.send({"type": "GetStatus", "id": 2})
    large = await client.receive()
    assert (large["type"], large["id"]) == ("Large", 2)
    data = os.pread(large["fd"], large["byte_size"], 0)
    with pytest.raises(PermissionError):
        os.pwrite(large["fd"], b"changed", 0)
    os.close(large["fd"])
    assert msgpack.unpackb(data) == {"type": "Status", "id": 2, "status": {"filler": "y" * 200_000}}


@session_test
async def test_hang_up_gives_everything_back_while_a_request_runs(service, sessions, connect):
    client = connect()
    session = await client.greet()
    service.hold.clear()
    client.send({"type": "ListRegions", "id": 2})
    client.send({"type": "ListRegions", "id": 3})
    await until(lambda: service.asked)
    client.socket.close()
    await until(lambda: service.ended == [session])
    assert len(service.asked) == 1
    assert len(sessions) == 0


@session_test
async def test_an_empty_datagram_is_a_hang_up(service, sessions, connect):
    client = connect()
    await client.greet()
    client.send_raw(b"")
    assert await client.receive() is None


@session_test
async def test_the_cap_refuses_politely_and_recovers(service, sessions, connect):
    clients = [connect() for _ in range(3)]
    for client in clients:
        await client.greet()
    refused = connect()
    refused.send({"type": "Hello", "id": 1, "protocol": 1})
    goodbye = await refused.receive()
    assert "too many sessions: the limit is 3" in goodbye["reason"]
    assert await refused.receive() is None
    assert sessions.refused == 1
    clients[0].socket.close()
    await until(lambda: service.ended and len(sessions) == 2 and not sessions._ending)
    await connect().greet()


def test_rate_limited_log_counts_what_it_leaves_out(caplog):
    now = [100.0]
    complain = RateLimited(lambda: now[0])
    for _ in range(50):
        complain("refused: %s", "why")
    assert [record.getMessage() for record in caplog.records] == ["refused: why"]
    now[0] += 1.5
    complain("refused: %s", "why")
    assert caplog.records[-1].getMessage() == "refused: why (and 49 like it)"


def test_session_limit_leaves_room():
    assert 1 <= session_limit() <= 4096
