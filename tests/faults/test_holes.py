"""Rows T-03, T-04 and T-05: memory whose pages go, or are written, while a model works on it. Nobody dies of it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import posix_ipc
import pytest

import clientlib
from tests.faults import child
from tests.faults.lab import Lab, scaled

MIB = 1 << 20
SHAPE = (4, MIB // 16)  # FP32: 1 MiB
PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Another process of this client's does it over and over."""
    pid = os.fork()
    if not pid:
        while True:
            act()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def while_it_lasts(turns: int) -> Iterator[int]:
    """Turns, but after ten of them no longer than five seconds: two that fault and punch the same pages may crawl."""
    until_s = time.monotonic() + 5
    return itertools.takewhile(lambda turn: turn < 10 or time.monotonic() < until_s, range(turns))


def prepare(client: clientlib.Client, region: clientlib.Region) -> clientlib.Plan:
    """x in the first MiB, y in the second."""
    return client.prepare("add1", {"x": region.tensor(SHAPE, "FP32")}, {"y": region.tensor(SHAPE, "FP32", MIB)})


def run_over_holes(turns: int) -> list[list[float]]:
    """Which values were ever seen in an output."""
    with clientlib.connect() as client:
        region = client.create_region("r", 2 * MIB)
        plan, x, y = prepare(client, region), region.array(SHAPE, "FP32"), region.array(SHAPE, "FP32", MIB)
        fd, seen = region.memory.fd, set()

        def punch() -> None:
            assert _libc.fallocate(fd, PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(2 * MIB)) == 0

        with meanwhile(punch):
            for _ in while_it_lasts(turns):
                x[:] = 6
                plan.infer(timeout=60)
                seen |= set(np.unique(y).tolist())
        x[:] = 6
        plan.infer(timeout=60)
        return [sorted(seen), np.unique(y).tolist()]


def test_t04_holes_are_punched_while_a_model_runs(lab: Lab) -> None:
    """[T-04] a sealed pool keeps its size; what is lost is the client's own, and reads as zeros."""
    seen, afterwards = lab.offend(run_over_holes, turns=scaled(100, 10_000))
    assert set(seen) <= {0.0, 1.0, 7.0}
    assert afterwards == [7.0]
    lab.settled()


def write_over_outputs(turns: int) -> list[float]:
    with clientlib.connect() as client:
        region = client.create_region("r", 2 * MIB)
        plan, x, y = prepare(client, region), region.array(SHAPE, "FP32"), region.array(SHAPE, "FP32", MIB)
        x[:] = 6

        def scribble() -> None:
            y[:] = 3

        with meanwhile(scribble):
            for _ in while_it_lasts(turns):
                plan.infer(timeout=60)
        plan.infer(timeout=60)
        found: list[float] = np.unique(y).tolist()
        return found


def test_t05_outputs_are_written_by_their_client(lab: Lab) -> None:
    assert lab.offend(write_over_outputs, turns=scaled(100, 10_000)) == [7.0]
    lab.settled()


def shrink_and_grow(half: bool) -> list[object]:
    """The input lies in what was cut off and is there again, without its pages."""
    memory = posix_ipc.SharedMemory("/cut", posix_ipc.O_CREX, size=2 * MIB)
    try:
        with clientlib.connect() as client:
            region = client.register_system_shm("r", "/cut", 2 * MIB)
            x, y = region.array(SHAPE, "FP32", MIB), region.array(SHAPE, "FP32")
            places = {"x": region.tensor(SHAPE, "FP32", MIB)}, {"y": region.tensor(SHAPE, "FP32")}
            plan = client.prepare("add1", *places)
            x[:] = 6
            plan.infer(timeout=60)
            os.ftruncate(memory.fd, MIB if half else 0)
            os.ftruncate(memory.fd, 2 * MIB)
            told = child.refusal(plan.infer, timeout=60)
            return [told, np.unique(y).tolist()]
    finally:
        os.close(memory.fd)
        posix_ipc.unlink_shared_memory("/cut")


@pytest.mark.parametrize("half", [True, False], ids=["half", "all"])
def test_t03_cut_off_and_there_again(lab: Lab, half: bool) -> None:
    """[T-03] zeros, whose pages nobody else ever had."""
    told, found = lab.offend(shrink_and_grow, half=half)
    assert told == ["OK", ""]
    assert found == [1.0]
    lab.settled()
