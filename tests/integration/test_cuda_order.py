"""A run sees what was written before its request was sent: by an event that its stream waits for, and only then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm.cuda.sync import OpenedRing
from shm.errors import InferError
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child

EVENTS = 4


@pytest.fixture(scope="module")
def pair(cuda_env: CudaEnv) -> Iterator[tuple[Child, Child]]:
    """An application whose stream stops at a gate before it writes, and a worker."""
    with (
        Child(cuda_env, "tests.fakes.cuda_roles:Application") as application,
        Child(cuda_env, "tests.fakes.cuda_roles:Worker") as worker,
    ):
        application.call("allocate", 4096)
        worker.call("add", 1, 1, application.call("export", 0, 0, 4096))
        assert worker.call("open_ring", application.call("make_ring", EVENTS)) == EVENTS
        yield application, worker
        worker.call("end_ring")
        application.call("end_ring")


def test_an_event_is_waited_for_by_the_stream(pair: tuple[Child, Child]) -> None:
    application, worker = pair
    for value in range(2, 2 + 2 * EVENTS):
        index = application.call("write_late", 0, float(value))
        worker.ask("read_after", 1, index)
        assert not worker.answered()
        application.call("open_gate")
        assert worker.answer() == value
        application.call("give", index)


def test_without_it_stale_data_is_read(pair: tuple[Child, Child]) -> None:
    """So the test above would see it if the wait did nothing."""
    application, worker = pair
    index = application.call("write_late", 0, 1000.0)
    assert worker.call("read_after", 1, None) < 1000
    application.call("open_gate")
    assert worker.call("read_after", 1, index) == 1000
    application.call("give", index)


def test_an_event_is_not_recorded_again_before_its_request_has_ended(pair: tuple[Child, Child]) -> None:
    application, _ = pair
    taken = [application.call("record") for _ in range(EVENTS)]
    assert sorted(taken) == list(range(EVENTS))
    with pytest.raises(InferError, match=f"all {EVENTS} events are in requests that have not ended"):
        application.call("record")
    application.call("give", taken[2])
    assert application.call("record") == taken[2]
    for index in taken:
        application.call("give", index)


@pytest.mark.parametrize("index", [-1, EVENTS, 1 << 40])
def test_an_index_outside_the_ring_is_refused(pair: tuple[Child, Child], index: int) -> None:
    with pytest.raises(InferError, match=f"there is no event {index} in a ring of {EVENTS}"):
        pair[1].call("read_after", 1, index)


@pytest.mark.parametrize("handles", [b"", b"x", bytes(65), bytes(64 * 1025)], ids=len)
def test_a_ring_of_another_length_is_refused(handles: bytes) -> None:
    with pytest.raises(InferError, match=f"{len(handles)} bytes came"):
        OpenedRing(handles)  # no driver is asked


def test_handles_of_no_event_are_refused(cuda_env: CudaEnv) -> None:
    with (
        Child(cuda_env, "tests.fakes.cuda_roles:Worker") as worker,
        pytest.raises(InferError, match="cuIpcOpenEventHandle failed with CUDA_ERROR_INVALID_HANDLE"),
    ):
        worker.call("open_ring", bytes(128))
