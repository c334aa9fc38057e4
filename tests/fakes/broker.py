"""A real broker in a process of its own, and a client that packs its messages by hand.

The client shares no encoder with the code under test: `msgpack` and the standard library only.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from shm.client_channel import ClientChannel
from shm.prctl import PR_SET_PDEATHSIG, prctl
from tests.fakes.processes import children

LIMIT_S = 60.0  # of anything that takes milliseconds, or starts processes: a machine may be slow
T = TypeVar("T")


def eventually(condition: Callable[[], Any], what: str = "") -> Any:
    """The first true value of `condition`; fails after `LIMIT_S`."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came true: {what or condition}"
        select.select([], [], [], 0.005)
    return value


def steady(read: Callable[[], T], for_s: float = 0.2) -> T:
    """What `read` gives once it has given the same for so long.

    For counters: a worker adds up what ran inline when it pauses, so what earlier requests did may still come.
    """
    value, since = read(), time.monotonic()
    deadline = since + LIMIT_S
    while (now := time.monotonic()) < since + for_s:
        assert now < deadline, f"never steady: {value}"
        select.select([], [], [], 0.02)
        if (latest := read()) != value:
            value, since = latest, time.monotonic()
    return value


def command(*arguments: str, timeout: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run `tensorbroker …` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "broker", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


class Broker:
    """`tensorbroker serve` on `repository`. A context manager: at its end nothing of it is left.

    Without a gateway, whose ports would be in the way of other brokers, unless `flags` ask for one.
    """

    module = "broker"

    def __init__(self, repository: Path, directory: Path, *flags: str, before: Callable[[], None] | None = None):
        self.directory = directory
        self.path = str(directory / "broker.sock")
        gateways = () if any(flag.startswith("--gateways") for flag in flags) else ("--gateways=0",)
        arguments = ["serve", "--model-repository", str(repository), "--directory", str(directory), *gateways, *flags]

        def in_child() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if before:
                before()

        self._log_path = directory.with_name(f"{directory.name}.log")
        self._log = self._log_path.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            preexec_fn=in_child,
        )
        self.pid = self.process.pid
        self._clients: list[HandClient] = []

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_clients()
        family = self.descendants()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        eventually(lambda: not any(alive(pid) for pid in family), "all its processes have ended")

    def ready(self) -> Broker:
        """Wait for the line that says so."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        line = self.process.stdout.readline().decode() if readable else ""
        assert line == f"tensorbroker is ready: {self.path}\n", f"{line!r}\n{self.log()}"
        return self

    def log(self) -> str:
        return self._log_path.read_text()

    def connect(self) -> HandClient:
        """A client that has not said Hello."""
        client = HandClient(self.path)
        self._clients.append(client)
        return client

    def close_clients(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def client(self) -> HandClient:
        """A client that is welcome."""
        client = self.connect()
        assert client.ask("Hello", protocol=1)["type"] == "Welcome"
        return client

    def status(self) -> dict[str, Any]:
        """What `tensorbroker status --json` prints, by the same code: starting a Python for it takes half a second."""
        from broker.commands import NoAnswer, ask_status

        try:
            document: dict[str, Any] = json.loads(json.dumps(ask_status(str(self.directory))))
        except NoAnswer as error:
            raise AssertionError(str(error)) from error
        return document

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def descendants(self) -> list[int]:
        found, todo = [], [self.pid]
        while todo:
            with contextlib.suppress(OSError):
                below = children(todo.pop())
                found += below
                todo += below
        return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class HandClient:
    """One session, by hand. `fds` are the descriptors of the last reply; the next one closes them."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(LIMIT_S)
        try:
            self.socket.connect(path)
        except OSError:
            self.socket.close()
            raise
        self.fds: list[int] = []
        self._last = 0

    def send(self, kind: str, /, fds: Sequence[int] = (), **fields: Any) -> int:
        """Send a request; returns its id."""
        self._last += 1
        self.send_raw(msgpack.packb({"type": kind, "id": self._last, **fields}), fds)
        return self._last

    def send_raw(self, data: bytes, fds: Sequence[int] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], ancillary)

    def receive(self) -> dict[str, Any] | None:
        """The next message that is not Starting; None at the end."""
        was_reset = False
        while True:
            self.drop()
            try:
                data, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(64))
            except ConnectionResetError:
                if was_reset:
                    return None
                was_reset = True  # it closed without having read all; what it had said before is still to be read
                continue
            for _, _, payload in ancillary:
                self.fds += array.array("i", payload)
            if not data:
                return None
            message: dict[str, Any] = msgpack.unpackb(data)
            if message["type"] != "Starting":
                return message

    def ask(self, kind: str, /, fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """One request and its reply."""
        number = self.send(kind, fds, **fields)
        reply = self.receive()
        assert reply is not None, "hung up"
        assert reply["id"] == number
        return reply

    def register(self, name: str, byte_size: int = 4096) -> int:
        """A new pool; returns its descriptor, the caller's."""
        fd = pool(byte_size)
        reply = self.ask("RegisterPool", [fd], name=name, byte_size=byte_size)
        assert reply["type"] == "RegionInfo", reply
        return fd

    def drop(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def close(self) -> None:
        self.drop()
        self.socket.close()


def pool(byte_size: int) -> int:
    """A sealed memfd, made by hand."""
    fd = os.memfd_create("test-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, byte_size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def tensor(name: str, region: str, shape: Sequence[int], datatype: str = "FP32", **place: int) -> dict[str, Any]:
    return {"name": name, "region": region, "shape": list(shape), "datatype": datatype, **place}


@contextlib.contextmanager
def descriptor(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def prepare_add1(client: HandClient, region: str = "r", rows: int = 2) -> dict[str, Any]:
    """Ask for a plan of `add1`: x at offset 0, y at offset 64 of `region`."""
    inputs = [tensor("x", region, (rows, 4))]
    outputs = [tensor("y", region, (rows, 4), offset=64)]
    return client.ask("Prepare", model="add1", inputs=inputs, outputs=outputs)


class Ending:
    """What a submission leaves in its channel: the completion's words and its note."""

    def __init__(self) -> None:
        self.entry: tuple[int, ...] | None = None
        self.note = b""

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        assert self.entry is None, "a second ending"
        self.entry, self.note = entry, note


def open_channel(client: HandClient, slots: int = 64) -> ClientChannel:
    """A channel to the CPU worker, which owns its descriptors."""
    channel = client.ask("OpenChannel", worker="cpu/default", slots=slots)
    assert channel["type"] == "ChannelInfo", channel
    memory, bell, pipe = client.fds
    client.fds = []
    return ClientChannel(memory, bell, pipe, channel["slots"], 0.0)


def reap(channel: ClientChannel, endings: Sequence[Ending]) -> None:
    """Wait until all have ended, or until nobody is left who could end them."""
    deadline = time.monotonic() + LIMIT_S
    while any(ending.entry is None for ending in endings) and not channel.gone:
        assert time.monotonic() < deadline, "not every request has ended"
        channel.wait(1.0)
        channel.reap()
