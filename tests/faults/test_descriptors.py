"""Rows R-18 and R-19: descriptors that come as pools and are none; a FUSE mount that is stopped over shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import posix_ipc
import pytest

from tests.fakes.broker import descriptor
from tests.faults import raw
from tests.faults.fuse import CannotMount, covered_by_stopped
from tests.faults.lab import Lab

MFD_HUGETLB = 4
SEALS = {"SHRINK": fcntl.F_SEAL_SHRINK, "GROW": fcntl.F_SEAL_GROW, "SEAL": fcntl.F_SEAL_SEAL}


def _memfd(byte_size: int, *seals: int, allocate: bool = True, flags: int = 0) -> int:
    fd = os.memfd_create("row", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, byte_size)
    if allocate and byte_size:
        os.posix_fallocate(fd, 0, byte_size)
    for seal in seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    return fd


def _descriptors() -> Iterator[tuple[str, int]]:
    every = tuple(SEALS.values())
    yield "no seals", _memfd(4096)
    for name in SEALS:
        yield f"without {name}", _memfd(4096, *(seal for other, seal in SEALS.items() if other != name))
    yield "sealing not allowed", os.memfd_create("row", os.MFD_CLOEXEC)
    yield "a byte short", _memfd(4095, *every)
    yield "empty", _memfd(0, *every)
    yield "not allocated", _memfd(4096, *every, allocate=False)
    good = _memfd(4096, *every)
    yield "read-only", os.open(f"/proc/self/fd/{good}", os.O_RDONLY)
    yield "path only", os.open(f"/proc/self/fd/{good}", os.O_PATH)
    os.close(good)
    yield from (("pipe", end) for end in os.pipe())
    yield "file", os.open(__file__, os.O_RDONLY)
    yield "directory", os.open("/tmp", os.O_RDONLY)
    yield "root", os.open("/", os.O_RDONLY)
    yield "null", os.open("/dev/null", os.O_RDWR)
    yield "zero", os.open("/dev/zero", os.O_RDWR)
    yield "event", os.eventfd(0)
    with select.epoll() as poll:
        yield "poll", os.dup(poll.fileno())
    yield "pidfd", os.pidfd_open(os.getpid())
    yield from (("socket", end.detach()) for end in socket.socketpair())
    key = f"/row-{secrets.token_hex(6)}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096)
    posix_ipc.unlink_shared_memory(key)
    yield "POSIX memory", memory.fd
    with contextlib.suppress(OSError):
        yield "huge pages", _memfd(2 << 20, *every, allocate=False, flags=MFD_HUGETLB)


def _register_descriptors() -> list[list[str]]:
    client = raw.session()
    found = []
    for name, fd in _descriptors():
        with descriptor(fd):
            found.append([name, *raw.outcome(client.ask("RegisterPool", [fd], name=name, byte_size=4096))])
    with descriptor(_memfd(4096, *SEALS.values())) as fd:
        for byte_size in (0, 4097, 1 << 20, 64 << 40, 2**63 - 1):
            reply = client.ask("RegisterPool", [fd], name="size", byte_size=byte_size)
            found.append([f"size {byte_size}", *raw.outcome(reply)])
        reply = client.ask("RegisterPool", [fd], name="good", byte_size=4000)
        assert reply["type"] == "RegionInfo"
    return found


def test_r18_r19_descriptors_that_are_no_pools(lab: Lab) -> None:
    """[R-18] [R-19] whatever can be sent by SCM_RIGHTS and is not a sealed, allocated memfd of that size."""
    found = lab.offend(_register_descriptors)
    assert len(found) >= 24
    for name, code, text in found:
        assert code == "INVALID_ARG", (name, text)
        assert text, name
        if name.startswith("without "):
            assert f"F_SEAL_{name[8:]} is missing" in text
    lab.settled()


def _register_what_is_covered() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with raw.named_memory(4096) as key, contextlib.closing(raw.session()) as client:
        try:
            with covered_by_stopped(Path("/dev/shm" + key)):
                found["covered"] = raw.outcome(client.ask("RegisterSystem", name="s", key=key, byte_size=4096))
        except CannotMount as error:
            return {"cannot": str(error)}
        found["bare"] = raw.outcome(client.ask("RegisterSystem", name="s", key=key, byte_size=4096))
    return found


def test_a_mount_over_shared_memory(lab: Lab) -> None:
    """To open it would wait for its owner: who may mount (fusermount lets everybody) could stop the broker so."""
    found = lab.offend(_register_what_is_covered) if lab.private else {"cannot": "not root in the broker's namespace"}
    lab.settled()
    if reason := found.get("cannot"):
        pytest.skip(f"no FUSE mount can be made here: {reason}")
    assert found["covered"][0] == "INVALID_ARG"
    assert "another file system is mounted there" in found["covered"][1]
    assert found["bare"] == ["RegionInfo", ""]
