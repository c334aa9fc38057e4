"""F-01, F-07 and D-08: /dev/shm or a cgroup's memory is full, or indices lead out of a model's tables."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

import clientlib
from tests.fakes.models import GATHER_ROWS
from tests.faults import child
from tests.faults.lab import SAME, Lab, eventually

MIB = 1 << 20
SHAPE = (4, MIB // 16)  # FP32: 1 MiB
PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def private_lab(lab: Lab) -> Lab:
    if not lab.private:
        pytest.skip("filling /dev/shm needs one of the test's own: run as root")
    return lab


# --- F-01 ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sparse(byte_size: int) -> Iterator[tuple[str, int]]:
    """Key and descriptor of a POSIX object without a single page."""
    key = f"/row-{secrets.token_hex(6)}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=byte_size)
    try:
        yield key, memory.fd
    finally:
        os.close(memory.fd)
        posix_ipc.unlink_shared_memory(key)


@contextlib.contextmanager
def full() -> Iterator[None]:
    """Not a page is left in /dev/shm."""
    with sparse(0) as (_, fd):
        used = 0
        for step in (MIB, 4096):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(fd, used, step)
                    used += step
        yield


def prepare_add1(client: clientlib.Client, region: clientlib.Region) -> clientlib.Plan:
    """x in the first MiB, y in the second."""
    places = {"x": region.tensor(SHAPE, "FP32")}, {"y": region.tensor(SHAPE, "FP32", MIB)}
    return client.prepare("add1", *places)


def register_when_full() -> dict[str, Any]:
    told = {}
    with clientlib.connect() as client, sparse(2 * MIB) as (early, _), sparse(2 * MIB) as (late, fd):
        plan = prepare_add1(client, client.register_system_shm("early", early, 2 * MIB))
        with full():
            told["late"] = child.refusal(client.register_system_shm, "late", late, 2 * MIB)
            told["its pages"] = os.fstat(fd).st_blocks
            told["early"] = child.refusal(plan.infer, timeout=50)
            told["right"] = bool((plan.infer(timeout=50)["y"] == 1).all())
            told["pool"] = child.refusal(prepare_add1(client, client.create_region("pool", 2 * MIB)).infer, timeout=50)
        told["afterwards"] = child.refusal(client.register_system_shm, "late", late, 2 * MIB)
    return told


def test_f01_full_shm_is_refused_at_registration(private_lab):
    told = private_lab.offend(register_when_full)
    code, message = told["late"]
    assert code == "UNAVAILABLE"
    assert str(2 * MIB) in message
    assert told["its pages"] == 0, "what was refused keeps nothing"
    assert told["early"] == told["pool"] == ["OK", ""]
    assert told["right"]
    assert told["afterwards"] == ["OK", ""]
    private_lab.settled()


def infer_over_a_death() -> list[list[str]]:
    with clientlib.connect() as client, sparse(2 * MIB) as (key, _):
        plan = prepare_add1(client, client.register_system_shm("r", key, 2 * MIB))
        with full():
            told = [child.refusal(plan.infer, timeout=50)]
            child.say("full")
            child.hear()
            told.append(child.refusal(plan.infer, timeout=50))
            told.append(child.refusal(client.infer, "add1", {"x": np.ones((2, 3), np.float32)}, timeout=50))
        return told


def test_f01_worker_is_replaced_when_shm_is_full(private_lab):
    offender = private_lab.start(infer_over_a_death)
    offender.heard()
    victim = private_lab.worker_pid()
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: private_lab.worker_pid() not in (0, victim), "a new worker")
    offender.tell("go on")
    assert offender.result() == [["OK", ""]] * 3
    private_lab.settled(replaced=SAME)


def give_pages_back() -> list[list[str]]:
    """Punched holes after registration: the next touch needs a page, and there is none."""
    with clientlib.connect() as client, sparse(2 * MIB) as (key, fd):
        plan = prepare_add1(client, client.register_system_shm("r", key, 2 * MIB))
        told = [child.refusal(plan.infer, timeout=50)]
        assert _libc.fallocate(fd, PUNCH_HOLE, ctypes.c_long(MIB), ctypes.c_long(MIB)) == 0
        with full():
            told.append(child.refusal(plan.infer, timeout=50))
        told.append(child.refusal(plan.infer, timeout=50))
        return told


def test_f01_pages_given_back_after_registration(private_lab):
    before, during, after = private_lab.offend(give_pages_back)
    assert before == after == ["OK", ""]
    assert during[0] == "UNAVAILABLE"
    assert "the worker died while it ran this request" in during[1]
    worker = next(worker for worker in private_lab.status()["workers"] if worker["key"] == SAME)
    assert worker["last_death"] == "killed by SIGBUS"
    private_lab.settled(replaced=SAME)


# --- F-07 ----------------------------------------------------------------------------------------------------------


class CrampedLab(Lab):
    """Its broker sees memory cgroups, of either version, with limits that a test may write."""

    limit, used = 256 * MIB, 240 * MIB

    def write_usage(self, used: int) -> None:
        for directory, most, now in (("", "memory.max", "memory.current"), V1):
            place = self.directory / "cgroup" / directory
            place.mkdir(parents=True, exist_ok=True)
            (place / most).write_text(f"{self.limit}\n")
            (place / now).write_text(f"{used}\n")
            (place / "memory.stat").write_text("inactive_file 0\n")

    def _in_broker(self) -> None:
        first = self._namespace < 0
        super()._in_broker()
        if first:
            source = os.fsencode(self.directory / "cgroup")
            if _libc.mount(source, b"/sys/fs/cgroup", None, MS_BIND, None):
                raise OSError(ctypes.get_errno(), "mount --bind")


V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
MS_BIND = 4096


def register_sparse(byte_size: int) -> list[Any]:
    """What was told, the bytes allocated then, and after a request whose output lies at the end."""
    with clientlib.connect() as client, sparse(byte_size) as (key, fd):
        try:
            region = client.register_system_shm("r", key, byte_size)
        except clientlib.InferError as error:
            return [[error.code, error.message], os.fstat(fd).st_blocks * 512]
        told: list[Any] = [["OK", ""], os.fstat(fd).st_blocks * 512]
        inputs, outputs = region.tensor(SHAPE, "FP32"), region.tensor(SHAPE, "FP32", byte_size - MIB)
        told.append(child.refusal(client.prepare("add1", {"x": inputs}, {"y": outputs}).infer, timeout=50))
        return [*told, os.fstat(fd).st_blocks * 512]


def test_f07_a_cgroup_that_is_full_refuses_regions_before_any_worker_touches_them(tmp_path: Path) -> None:
    """[F-07] pages are charged where they are allocated: by the broker, at registration, if there is room for them."""
    if os.geteuid():
        pytest.skip("showing a broker a cgroup of the test's own needs a mount: run as root")
    lab = CrampedLab(tmp_path)
    lab.write_usage(lab.used)
    with lab:
        (code, message), *allocated = lab.offend(register_sparse, byte_size=32 * MIB)
        assert code == "UNAVAILABLE", message
        assert f"no space left for shared memory: {32 * MIB} bytes asked" in message
        assert f"{lab.limit - lab.used} bytes available" in message
        assert allocated == [0]
        assert lab.offend(register_sparse, byte_size=8 * MIB) == [["OK", ""], 8 * MIB, ["OK", ""], 8 * MIB]
        lab.write_usage(0)
        assert lab.offend(register_sparse, byte_size=32 * MIB)[0] == ["OK", ""]
        lab.settled()


# --- D-08 ----------------------------------------------------------------------------------------------------------


def gather(index: list[int]) -> list[Any]:
    """[code, message] or the first column of the rows."""
    with clientlib.connect() as client:
        try:
            y = client.infer("gather", {"index": np.array([index], np.int64)}, timeout=50)["y"]
        except clientlib.InferError as error:
            return [error.code, error.message]
        return [float(row[0]) for row in y[0]]


@pytest.mark.parametrize("wrong", [GATHER_ROWS, 70, -GATHER_ROWS - 1, 5 * 10**10, -(2**63), 2**63 - 1])
def test_d08_index_out_of_range_is_an_error(lab, wrong):
    code, message = lab.offend(gather, index=[1, wrong, 2])
    assert code == "INTERNAL"
    assert message.startswith("onnx runtime error: ")
    assert str(wrong) in message
    lab.settled()


def test_d08_indices_from_the_end(lab):
    assert lab.offend(gather, index=[-1, -GATHER_ROWS, 5]) == [GATHER_ROWS - 1.0, 0.0, 5.0]
    lab.settled()


def gather_together(wrong: list[int]) -> list[list[Any]]:
    """Many at once, so that they share batches; those in `wrong` name a row that does not exist."""
    count = 32
    with clientlib.connect() as client:
        region = client.create_region("r", MIB)
        index, y = region.array((count, 4), "INT64"), region.array((count, 4, 4), "FP32", 65536)
        for place in range(count):
            index[place] = 5 * 10**10 if place in wrong else place
        inputs = {"index": region.tensor((1, 4), "INT64")}
        plan = client.prepare("gather", inputs, {"y": region.tensor((1, 4, 4), "FP32", 65536)}, slots=count)
        pending = [plan.submit(input_slot=place, output_slot=place, timeout=50) for place in range(count)]
        codes = [child.refusal(one.result)[0] for one in pending]
        return [[code, bool((y[place] == place).all())] for place, code in enumerate(codes)]


def test_d08_bad_row_of_a_batch_fails_alone(lab):
    wrong = [3, 4, 17, 31]
    told = lab.offend(gather_together, wrong=wrong)
    assert [place for place, (code, _) in enumerate(told) if code != "OK"] == wrong
    assert all(right for place, (_, right) in enumerate(told) if place not in wrong)
    lab.settled()
