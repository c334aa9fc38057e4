"""F-04: no thread can be started. Whoever wanted one is told so, loses nothing, and gets one later."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from broker.gateway.trace_files import NumberedPart, TraceFiles
from broker.reservation import Reservations
from broker.worker.ensembles.remote.session import StepSession
from shm.errors import InferError


class Limit:
    """`reached`: threads cannot be started, as when `pids.max` or RLIMIT_NPROC is reached."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached = True
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.reached:
                raise RuntimeError("can't start new thread")
            start(thread)

        patch.setattr(threading.Thread, "start", limited)


@pytest.fixture
def limit(monkeypatch):
    return Limit(monkeypatch)


def test_memory_that_cannot_be_allocated_now_costs_nobody_a_descriptor(limit):
    """The executor keeps the work of the `submit` that failed, and does it when it has a thread."""
    reservations = Reservations()
    fd = os.memfd_create("test-reserve")
    os.ftruncate(fd, 1 << 16)

    async def reserve() -> None:
        await reservations.reserve(fd, 0, 1 << 16)

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(InferError, match="65536 bytes of this shared memory cannot be allocated: can't start") as told:
        asyncio.run(reserve())
    assert told.value.code == "UNAVAILABLE"
    assert set(os.listdir("/proc/self/fd")) <= before
    others = [os.dup(0) for _ in range(8)]  # under the numbers that were free again
    limit.reached = False
    try:
        asyncio.run(reserve())
        assert os.fstat(fd).st_blocks * 512 >= 1 << 16
        for other in others:
            os.fstat(other)
    finally:
        reservations.close(wait=True)
        for each in (*others, fd):
            os.close(each)


def test_steps_elsewhere_get_their_thread_later(limit):
    asked = threading.Event()
    session = StepSession(asked.set)
    with pytest.raises(RuntimeError):
        session.need()
    limit.reached = False
    session.need()
    assert session._thread is not None
    assert session._thread.is_alive()


class Line:
    def text(self) -> str:
        return "[]"


class Whole:
    per_file = 0
    part = NumberedPart()


def test_traces_are_dropped_and_requests_go_on(limit, tmp_path, caplog):
    files = TraceFiles(str(tmp_path / "trace.json"), 0)
    files.put(Line(), Whole())
    assert "failed writing traces: can't start new thread" in caplog.text
    files.close()
    limit.reached = False
    files.put(Line(), Whole())
    files.close()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
