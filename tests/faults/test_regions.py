"""Rows R-02 … R-13: what may become a region, and what is refused before anybody maps it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import posix_ipc
import pytest

import clientlib
from tests.fakes.broker import HandClient, descriptor, pool
from tests.faults import child, raw
from tests.faults.lab import Lab


def _register(client: HandClient, key: str, byte_size: int = 4096, name: str = "s", **fields: Any) -> list[str]:
    result = raw.outcome(client.ask("RegisterSystem", name=name, key=key, byte_size=byte_size, **fields))
    if result[0] == "RegionInfo":
        client.drop()
        client.ask("Unregister", name=name)
    return result


# --- R-02 … R-06: sizes and names that are not there ---------------------------------------------------------------


def _ask_for_wrong_ranges() -> dict[str, list[str]]:
    client = raw.session()
    found = {"R-02": _register(client, "/no-such-object")}
    with raw.named_memory(8192) as key:
        found["whole"] = _register(client, key, 8192)
        found["key without slash"] = _register(client, key[1:], 8192)
        found["R-04 by 1"] = _register(client, key, 8192, offset=1)
        found["R-04 by 2^40"] = _register(client, key, 8192 + (1 << 20), offset=1 << 40)
        found["R-04 size by 1"] = _register(client, key, 8193)
        found["R-05 2^63-1"] = _register(client, key, 8192, offset=2**63 - 1)
        found["R-05 2^64-4096"] = _register(client, key, 8192, offset=2**64 - 4096)
        found["R-06 size 0"] = _register(client, key, 0)
        found["R-06 size 0 at the end"] = _register(client, key, 0, offset=8192)
        raw.outcome(client.ask("RegisterSystem", name="twice", key=key, byte_size=4096))
        found["R-03 system"] = _register(client, key, 4096, name="twice")
        with descriptor(pool(4096)) as fd:
            found["R-03 pool"] = raw.outcome(client.ask("RegisterPool", [fd], name="twice", byte_size=4096))
    empty = posix_ipc.SharedMemory("/empty", posix_ipc.O_CREX, size=0)
    os.close(empty.fd)
    found["R-06 empty file"] = _register(client, "/empty", 1)
    posix_ipc.unlink_shared_memory("/empty")
    return found


def test_r02_to_r06_ranges_that_are_not_there(lab: Lab) -> None:
    """[R-02] [R-03] [R-04] [R-05] [R-06] Triton's codes and texts; sums do not wrap."""
    found = lab.offend(_ask_for_wrong_ranges)
    assert found["R-02"][0] == "INTERNAL"
    assert found["R-02"][1].startswith("Unable to open shared memory region: '/no-such-object'")
    assert "ENOENT" in found["R-02"][1]
    assert found["whole"] == ["RegionInfo", ""]
    assert found["key without slash"] == ["RegionInfo", ""]
    for case in ("R-03 system", "R-03 pool"):
        assert found[case] == ["ALREADY_EXISTS", "shared memory region 'twice' already in manager"]
    for case in ("R-04 by 1", "R-04 size by 1", "R-05 2^63-1", "R-06 size 0", "R-06 empty file"):
        assert found[case][0] == "INVALID_ARG", case
        assert found[case][1].startswith("failed to register shared memory region 's': invalid args"), case
    for case in ("R-04 by 2^40", "R-05 2^64-4096", "R-06 size 0 at the end"):
        assert found[case][0] == "INVALID_ARG", case
    lab.settled()


# --- any offset ----------------------------------------------------------------------------------------------


def _use_unaligned_offset(offset: int) -> bool:
    x = np.linspace(-5, 5, 32, dtype=np.float32).reshape(4, 8)
    with raw.named_memory(16384) as key, clientlib.connect() as client:
        memory = posix_ipc.SharedMemory(key)
        with mmap.mmap(memory.fd, 16384) as mapping:
            os.close(memory.fd)
            mapping[:] = b"\xee" * 16384
            mapping[offset : offset + x.nbytes] = x.tobytes()
            region = client.register_system_shm("odd", key=key, byte_size=4096, offset=offset)
            plan = client.prepare(
                "add1",
                inputs={"x": region.tensor(x.shape, "FP32")},
                outputs={"y": region.tensor(x.shape, "FP32", offset=2048)},
            )
            plan.infer(timeout=40)
            y = np.frombuffer(mapping[offset + 2048 : offset + 2048 + x.nbytes], np.float32).reshape(x.shape)
            around = {*mapping[:offset], *mapping[offset + x.nbytes : offset + 2048], *mapping[offset + 2176 :]}
            return bool(np.array_equal(y, x + 1)) and around <= {0xEE}


@pytest.mark.parametrize("offset", [0, 1, 3, 100, 4095, 4096, 4097])
def test_r07_unaligned_offsets_are_accepted(lab: Lab, offset: int) -> None:
    """[R-07] a window may start anywhere; its data is right and nothing around it is written."""
    assert lab.offend(_use_unaligned_offset, offset=offset) is True
    lab.settled()


# --- names ---------------------------------------------------------------------------------------------

NAMES = [
    "/../etc/passwd",
    "../x",
    "../../etc/passwd",
    "a/b",
    "//secret",
    "///secret",
    "/",
    "//",
    ".",
    "/.",
    "..",
    "/..",
    "/x/../secret",
    "x" * 255,
    "x" * 256,
    "/secret\0zzz",
    "\0",
    "%2e%2e",
    "%2fsecret",
    "s\u0435cret",
    "\u2025",
    "secret\n",
    "secret ",
    "~",
    "$HOME",
    "`id`",
    "secret;x",
    "*",
    "triton_python_backend_shm_region_0",
    "/triton_python_backend_shm_region_0",
    "/proc/self/fd/0",
    "/dev/shm/secret",
]


def _ask_for_names(names: list[str]) -> list[list[str]]:
    client = raw.session()
    secret = posix_ipc.SharedMemory("/secret", posix_ipc.O_CREX, size=4096)
    os.close(secret.fd)
    try:
        return [[name, *_register(client, name)] for name in names]
    finally:
        posix_ipc.unlink_shared_memory("/secret")


def test_r08_names_that_are_no_names(lab: Lab) -> None:
    """[R-08] traversal, aliases, NUL, look-alikes: refused before anything is opened."""
    for name, code, text in lab.offend(_ask_for_names, names=NAMES):
        assert code == "INVALID_ARG", name
        reserved = name.lstrip("/").startswith("triton_python")
        assert ("reserved prefix" if reserved else "invalid shm key") in text, (name, text)
    lab.settled()


def test_r11_internal_memory_has_no_names(lab: Lab) -> None:
    """[R-11] nothing of the broker's lies in /dev/shm, and guessed names and paths of descriptors open nothing."""
    pid = lab.worker_pid()
    names = [f"tensorbroker-{part}" for part in ("pool", "channel", "ledger", "statistics", "reply")]
    names += [f"/proc/{pid}/fd/{fd}" for fd in range(3, 20)] + ["memfd:tensorbroker-ledger", "memfd_ledger"]
    for name, code, text in lab.offend(_ask_for_names, names=names):
        assert code in ("INVALID_ARG", "INTERNAL"), (name, text)
    left = os.listdir(lab.shm)
    assert [name for name in left if lab.private or "tensorbroker" in name] == []
    lab.settled()


# --- what is no shared memory object -------------------------------------------------------------------------


@contextlib.contextmanager
def _objects() -> Iterator[list[str]]:
    """Things in /dev/shm that are not regular files with one name."""
    directory = "/dev/shm"
    made = []

    def path(name: str) -> str:
        made.append(name)
        return os.path.join(directory, name)

    os.symlink("/etc/passwd", path("row-symlink"))
    os.symlink("row-regular", path("row-symlink-inside"))
    os.mkfifo(path("row-fifo"), 0o600)
    os.mkdir(path("row-directory"), 0o700)
    with open(path("row-regular"), "wb") as file:
        file.write(bytes(4096))
    os.link(os.path.join(directory, "row-regular"), path("row-hardlink"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path("row-socket"))
    with contextlib.suppress(PermissionError):
        os.mknod(path("row-device"), 0o600 | 0o020000, os.makedev(1, 3))
    try:
        yield made
    finally:
        listener.close()
        os.rmdir(os.path.join(directory, "row-directory"))
        for name in made:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, name))


def _register_objects() -> list[list[str]]:
    client, bystander = raw.session(), raw.session()
    found = []
    with _objects() as names:
        for name in names:
            client.send("RegisterSystem", name="s", key=f"/{name}", byte_size=4096)
            assert bystander.ask("ListRegions")["type"] == "Regions"
            found.append([name, *raw.outcome(client.receive())])
    return found


def test_r09_objects_that_are_no_shared_memory(lab: Lab) -> None:
    """[R-09] links, FIFOs (which must not make the broker wait), directories, sockets, devices."""
    found = lab.offend(_register_objects)
    assert len(found) >= 7
    for name, code, text in found:
        assert code == "INVALID_ARG", (name, text)
        assert text.startswith(f"Unable to open shared memory region: '/{name}'"), text
        assert "root:" not in text
    lab.settled()


# --- other people's memory -----------------------------------------------------------------------------------

STRANGER = 65533


def _own_memory(mode: int) -> None:
    memory = posix_ipc.SharedMemory("/theirs", posix_ipc.O_CREX, size=4096, mode=0o600)
    os.fchmod(memory.fd, mode)
    os.close(memory.fd)
    child.say("made")
    child.hear()
    posix_ipc.unlink_shared_memory("/theirs")


def _take_theirs() -> list[str]:
    return _register(raw.session(), "/theirs")


def _connect_as_other() -> str:
    try:
        raw.stranger()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "connected"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run an owner under another uid")
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_r10_memory_of_another_uid(lab: Lab, mode: int) -> None:
    """[R-10] a broker that may open everything does not do it for others: the uid must be the peer's own."""
    owner = lab.start(_own_memory, uid=STRANGER, valid=False, mode=mode)
    assert owner.heard() == "made"
    code, text = lab.offend(_take_theirs)
    assert code == "INVALID_ARG"
    assert "belongs to uid 65533, and this connection to uid 0" in text
    owner.tell("enough")
    owner.result()
    lab.settled()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a client under another uid")
def test_h01_another_uid_cannot_connect(lab: Lab) -> None:
    """[H-01] the run directory is its owner's."""
    assert lab.offend(_connect_as_other, uid=STRANGER, valid=False) == "EACCES"
    lab.settled()


# --- sizes that nobody has -----------------------------------------------------------------------------


def _register_sparse(byte_size: int, window: int, free: int) -> dict[str, Any]:
    memory = posix_ipc.SharedMemory("/sparse", posix_ipc.O_CREX)
    try:
        os.ftruncate(memory.fd, byte_size)
        client = raw.session()
        found: dict[str, Any] = {"all": _register(client, "/sparse", byte_size)}
        found["blocks"] = os.fstat(memory.fd).st_blocks
        found["too much"] = _register(client, "/sparse", free + (1 << 20))
        found["blocks then"] = os.fstat(memory.fd).st_blocks
        found["window"] = _register(client, "/sparse", window, offset=4096)
        found["window's blocks"] = os.fstat(memory.fd).st_blocks
        return found
    finally:
        os.close(memory.fd)
        posix_ipc.unlink_shared_memory("/sparse")


def test_r12_64_tib_of_nothing(lab: Lab) -> None:
    """[R-12] a sparse file is cheap to make: the quota, with its numbers, refuses what can never fit."""
    found = lab.offend(_register_sparse, byte_size=64 << 40, window=65536, free=32 << 40)
    code, text = found["all"]
    assert code == "INVALID_ARG"
    assert f"asked {64 << 40} bytes" in text
    assert "limit" in text
    assert found["blocks"] == 0
    assert found["window"] == ["RegionInfo", ""]
    assert found["window's blocks"] == 128
    lab.settled()


def test_r13_more_than_dev_shm_holds(lab: Lab) -> None:
    """[R-13] pages are allocated at registration: no space is an error there, not a SIGBUS in the worker."""
    if not lab.private:
        pytest.skip("mounting a small /dev/shm takes root")
    found = lab.offend(_register_sparse, byte_size=256 << 20, window=65536, free=64 << 20)
    for case in ("all", "too much"):
        code, text = found[case]
        assert code == "UNAVAILABLE"
        assert "space" in text or "room" in text, text
    assert found["blocks"] == found["blocks then"] == 0
    assert found["window"] == ["RegionInfo", ""]
    lab.settled()


def _infer_into_sparse() -> bool:
    """The file was never written; the rest of /dev/shm is full."""
    memory = posix_ipc.SharedMemory("/sparse", posix_ipc.O_CREX, size=1 << 20)
    filler = posix_ipc.SharedMemory("/filler", posix_ipc.O_CREX)
    try:
        with clientlib.connect() as client:
            region = client.register_system_shm("sparse", key="/sparse", byte_size=1 << 20)
            with contextlib.suppress(OSError):
                while True:
                    os.write(filler.fd, bytes(1 << 20))
            tensors = [region.tensor((4, 1024), "FP32", offset=offset) for offset in (0, 1 << 19)]
            client.prepare("add1", inputs={"x": tensors[0]}, outputs={"y": tensors[1]}).infer(timeout=40)
            with contextlib.suppress(clientlib.InferError):
                posix_ipc.SharedMemory("/more", posix_ipc.O_CREX, size=1 << 20)
                client.register_system_shm("more", key="/more", byte_size=1 << 20)
                return False
            return bool((region.array((4, 1024), "FP32", offset=1 << 19) == 1).all())
    finally:
        for fd, key in ((memory.fd, "/sparse"), (filler.fd, "/filler")):
            os.close(fd)
            posix_ipc.unlink_shared_memory(key)


def test_r13_output_in_a_sparse_region_when_dev_shm_is_full(lab: Lab) -> None:
    """[R-13, F-01] what was registered can be written, however full the file system is by then."""
    if not lab.private:
        pytest.skip("filling /dev/shm takes one of the lab's own, which takes root")
    assert lab.offend(_infer_into_sparse) is True
    lab.settled()
