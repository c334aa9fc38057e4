"""What the broker does with gateway processes, shown on small ones that serve nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path

import msgpack
import pytest

from broker.gateway.options import GatewayOptions
from broker.gateways import TRIES, CannotServe, Gateways
from broker.records import Peer
from shm.gateway_messages import Serving
from shm.messages import encode
from tests.fakes.broker import alive
from tests.fakes.processes import descriptors, in_loop, subreaper, until

ENTRY = "tests.fakes.small_gateway"


class Sessions:
    """Takes what the small gateways say, without the rules of sessions."""

    def __init__(self):
        self.gateways = None
        self.open = []

    def adopt(self, connection, pid, pidfd, role):
        assert role == "gateway"
        session = Session(self, connection, pid, pidfd)
        self.open.append(session)
        return session


class Session:
    def __init__(self, sessions, connection, pid, pidfd):
        self.peer = Peer(1, pid, os.getuid())
        self.sessions, self.socket, self.pidfd = sessions, connection, pidfd
        asyncio.get_running_loop().add_reader(connection, self.read)

    def read(self):
        data = self.socket.recv(65536)
        if not data:
            self.end()
            return
        message = msgpack.unpackb(data)
        serving = Serving(lines=tuple(message["lines"]), error=message["error"])
        self.sessions.gateways.on_serving(self.peer, serving)

    def send(self, message):
        with contextlib.suppress(OSError):
            self.socket.send(encode(message))

    def hang_up(self, reason):
        self.end()

    def end(self):
        if self.socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.socket)
            self.socket.close()
            os.close(self.pidfd)


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@contextlib.asynccontextmanager
async def running(what, directory=".", count=1):
    """Gateways that have been started; at the end nothing of them is left."""
    with subreaper():
        sessions = Sessions()
        gateways = Gateways(
            GatewayOptions(server_name=what, gateways=count, directory=str(directory)), sessions, entry=ENTRY
        )
        sessions.gateways = gateways
        before = descriptors()
        gateways.start()
        gateways.welcome()
        try:
            yield gateways
        finally:
            gateways.exiting()
            await gateways.end()
            for session in sessions.open:
                session.end()
        assert not descriptors() - before  # others may be collected meanwhile


@in_loop
async def test_they_serve_and_end_when_they_are_told():
    async with running("serve", count=2) as gateways:
        assert await gateways.serving() == ("Started nothing at 0",)
        await until(lambda: all(row["state"] == "serving" for row in gateways.rows()))
        pids = [row["pid"] for row in gateways.rows()]
        assert len(set(pids)) == 2
        gateways.exiting()
        assert await gateways.ended(30.0)
        assert not any(alive(pid) for pid in pids)
        assert [row["restarts"] for row in gateways.rows()] == [0, 0]


@in_loop
async def test_one_that_had_served_is_replaced_at_once_every_time(caplog):
    caplog.set_level(logging.INFO)
    async with running("serve") as gateways:
        await gateways.serving()
        for restarts in range(3):
            pid = gateways.rows()[0]["pid"]
            os.kill(pid, signal.SIGKILL)
            await until(lambda r=restarts: gateways.rows()[0]["restarts"] == r + 1)
            await until(lambda: gateways.rows()[0]["state"] == "serving")
        assert caplog.text.count("the next one starts in 0.0 s") == 3
        assert "killed by SIGKILL" in caplog.text
        assert "gateway 0 serves again" in caplog.text


@in_loop
async def test_one_that_is_stopped_is_replaced(monkeypatch, caplog):
    monkeypatch.setattr("broker.gateways.LOOK_S", 0.05)
    monkeypatch.setattr("broker.gateways.SILENT_S", 1.0)
    async with running("serve") as gateways:
        await gateways.serving()
        stopped = gateways.rows()[0]["pid"]
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: gateways.rows()[0]["pid"] not in (None, stopped))
        await until(lambda: gateways.rows()[0]["state"] == "serving")
        assert not alive(stopped)
        assert gateways.rows()[0]["hangs"] >= 1  # more on a machine that lets it stand still for a second
        assert "(killed by SIGKILL: gave no sign of life for 1 s: stopped, or stuck)" in caplog.text


@in_loop
async def test_signs_of_life_every_now_and_then_are_enough():
    """The broker's looks, on simulated time: only what it has seen counts as silence."""
    async with running("serve") as gateways:
        await gateways.serving()
        (gateway,) = gateways._gateways
        os.kill(pid := gateways.rows()[0]["pid"], signal.SIGSTOP)  # its own would come at any time
        await until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        now_ns = time.monotonic_ns()
        for look in range(300):
            if look % 29 == 0:
                gateways.counters[0].beat()
            now_ns += 10_000_000_000 if look % 10 == 0 else 1_000_000_000  # the broker stood still, or all did
            gateway._look(now_ns)
        assert gateways.rows()[0]["hangs"] == 0
        for _ in range(32):
            now_ns += 1_000_000_000
            gateway._look(now_ns)
        assert gateways.rows()[0]["hangs"] == 1


@in_loop
async def test_what_the_first_one_cannot_do_is_told():
    async with running("fail") as gateways:
        with pytest.raises(CannotServe, match=r"^Socket '127\.0\.0\.1:1' already in use $"):
            await gateways.serving()


@in_loop
async def test_one_that_dies_at_every_start_is_given_up():
    async with running("die") as gateways:
        with pytest.raises(CannotServe, match=rf"^the gateway ended {TRIES} times .*, at last with exit code 3$"):
            await gateways.serving()


@in_loop
async def test_once_it_has_served_deaths_at_start_cost_patience_and_no_more(tmp_path, caplog):
    async with running("once", tmp_path) as gateways:
        await gateways.serving()
        os.kill(gateways.rows()[0]["pid"], signal.SIGKILL)
        await until(lambda: gateways.rows()[0]["restarts"] == TRIES + 1)
        assert await gateways.serving() == ("Started nothing at 0",)
        for delay in ("0.0", "0.1", "0.5"):
            assert f"(exit code 4); the next one starts in {delay} s" in caplog.text


@in_loop
async def test_one_that_stays_is_killed():
    async with running("linger") as gateways:
        await gateways.serving()
        pid = gateways.rows()[0]["pid"]
        gateways.exiting()
        assert not await gateways.ended(0.0)
        await gateways.end()
        await until(lambda: not alive(pid))


@in_loop
async def test_one_that_never_serves_is_killed(monkeypatch, caplog):
    monkeypatch.setattr("broker.gateways.START_S", 0.0)
    async with running("mute") as gateways:
        with pytest.raises(CannotServe, match="killed by SIGKILL"):
            await gateways.serving()
    assert "did not serve within 0 s" in caplog.text


@in_loop
async def test_what_a_gateway_that_was_killed_left_in_the_run_directory_goes(tmp_path):
    async with running("serve", tmp_path) as gateways:
        await gateways.serving()
        for name in ("http.sock", "grpc.sock", "zmq.sock", "zmq.sock.hidden", "zmq.sessions", "broker.sock"):
            (tmp_path / name).touch()
    assert os.listdir(tmp_path) == ["broker.sock"]


@in_loop
async def test_none_are_none():
    async with running("serve", count=0) as gateways:
        assert await gateways.serving() == ()
        assert await gateways.ended(0.0)
