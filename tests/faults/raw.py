"""What offenders use to say what the client library would never say: sessions, plans and submissions by hand.

Everything runs in children of a lab, whose run directory TENSORBROKER_DIR names. `HandClient` packs its own messages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import posix_ipc

from shm.client_channel import ClientChannel
from tests.fakes.broker import HandClient, pool, tensor

LIMIT_S = 40.0
CODE_MASK = 0xFFFF_FFFF
Reply = dict[str, Any]


def socket_path() -> str:
    return os.path.join(os.environ["TENSORBROKER_DIR"], "broker.sock")


def stranger() -> HandClient:
    """Connected, and has said nothing."""
    return HandClient(socket_path())


def session() -> HandClient:
    """Welcome."""
    client = stranger()
    assert client.ask("Hello", protocol=1)["type"] == "Welcome"
    return client


def outcome(reply: Reply | None) -> list[str]:
    """[code, message] of a Failure, [type, ""] of anything else, ["hung up", reason] at the end."""
    if reply is None:
        return ["hung up", ""]
    if reply["type"] == "Goodbye":
        return ["hung up", reply["reason"]]
    return [reply["code"], reply["message"]] if reply["type"] == "Failure" else [reply["type"], ""]


@contextlib.contextmanager
def named_memory(byte_size: int, content: bytes = b"") -> Iterator[str]:
    """The key of a new POSIX object with allocated pages, unlinked at the end."""
    key = f"/row-{secrets.token_hex(6)}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=byte_size)
    os.posix_fallocate(memory.fd, 0, byte_size)
    os.pwrite(memory.fd, content, 0)
    os.close(memory.fd)
    try:
        yield key
    finally:
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(key)


class Region:
    """A pool registered by hand, mapped here."""

    def __init__(self, client: HandClient, name: str = "r", byte_size: int = 4096) -> None:
        fd = pool(byte_size)
        reply = client.ask("RegisterPool", [fd], name=name, byte_size=byte_size)
        assert reply["type"] == "RegionInfo", reply
        self.name = name
        self.memory = mmap.mmap(fd, byte_size)
        os.close(fd)

    def floats(self, offset: int, count: int) -> np.ndarray:
        return np.frombuffer(self.memory, np.float32, count, offset)


class Channel:
    """A channel whose submissions name whatever plan one likes."""

    def __init__(self, client: HandClient, worker: str = "cpu/default", slots: int = 64) -> None:
        self.info = client.ask("OpenChannel", worker=worker, slots=slots)
        assert self.info["type"] == "ChannelInfo", self.info
        memory, bell, pipe = client.fds
        client.fds = []
        self._link = ClientChannel(memory, bell, pipe, self.info["slots"], 0.0)
        self.endings: list[Ending] = []

    def submit(self, index: int, generation: int, *, input_position: int = 0, output_position: int = 0) -> Ending:
        ending = Ending()
        word = index | generation << 32
        assert self._link.submit(ending, word, input_position, output_position, 0, 0)
        self.endings.append(ending)
        return ending

    def wait(self, ending: Ending) -> list[str]:
        """[code, note] of the completion; code "0" is success, "none" that it never came."""
        deadline = time.monotonic() + LIMIT_S
        while ending.entry is None and time.monotonic() < deadline and not self._link.gone:
            self._link.wait(0.5)
            self._link.reap()
        if ending.entry is None:
            return ["none", ""]
        return [str(ending.entry[2] & CODE_MASK), ending.note.rstrip(b"\0").decode(errors="replace")]

    def close(self) -> None:
        self._link.close()


class Ending:
    """What a submission leaves in the channel."""

    def __init__(self) -> None:
        self.entry: tuple[int, ...] | None = None
        self.note = b""

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        self.note = note
        self.entry = entry


def plan(
    client: HandClient,
    model: str = "add1",
    x: Mapping[str, Any] | None = None,
    y: Mapping[str, Any] | None = None,
    *,
    shape: Sequence[int] = (2, 8),
    region: str = "r",
    **fields: Any,
) -> Reply:
    """Ask for a plan with x at offset 0 and y at offset 1024 of `region`; `x` and `y` change their fields."""
    inputs = [{**tensor("x", region, shape), **(x or {})}]
    outputs = [{**tensor("y", region, shape, offset=1024), **(y or {})}]
    return client.ask("Prepare", **{"model": model, "inputs": inputs, "outputs": outputs, **fields})
