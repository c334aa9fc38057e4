"""Who waits for a core is the kernel's count; where it cannot be known, nobody does."""

from __future__ import annotations

import pytest

from broker.worker import waiting_cores
from broker.worker.waiting_cores import WaitingCores


@pytest.mark.parametrize(("running", "wanted"), [(1, False), (2, False), (3, True), (17, True)])
def test_more_runnable_threads_than_cores_is_somebody_waiting(tmp_path, running, wanted):
    path = tmp_path / "loadavg"
    path.write_text(f"0.91 1.05 1.24 {running}/157 32498\n")
    cores = WaitingCores(str(path), 2)
    assert cores.wanted() is wanted
    path.write_text("0.91 1.05 1.24 1/157 32498\n")
    assert not cores.wanted(), "it is read anew each time"
    cores.close()


@pytest.mark.parametrize("text", ["", "0.91", "a b c d/e f", "0 0 0"])
def test_what_cannot_be_read_is_nobody(tmp_path, text):
    path = tmp_path / "loadavg"
    path.write_text(text)
    cores = WaitingCores(str(path), 1)
    assert not cores.wanted()
    cores.close()
    assert not WaitingCores(str(tmp_path / "none"), 1).wanted()


def test_a_file_that_is_slow_to_read_is_not_asked(tmp_path, monkeypatch):
    path = tmp_path / "loadavg"
    path.write_text("0.91 1.05 1.24 9/157 32498\n")
    clock = iter(range(0, 1 << 40, waiting_cores.SLOW_NS + 1))
    monkeypatch.setattr(waiting_cores.time, "monotonic_ns", lambda: next(clock))
    assert not WaitingCores(str(path), 1).wanted()
