"""Decoupled models in a worker: how slowly a client may read before its request is given up."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from broker.worker import answers
from tests.unit import test_worker_streams


class Clock:
    """Time that goes on when somebody sleeps, a second each; `read`: at every `gap`-th second."""

    def __init__(self, lab: test_worker_streams.Lab, gap: int) -> None:
        self.now, self._lab, self._gap = 0, lab, gap
        self._began = time.monotonic_ns() + 10**12  # after all that is true time

    def __call__(self) -> int:
        return self._began + self.now * 10**9

    def sleep(self, seconds: float) -> None:
        self.now += 1
        if self.now % self._gap == 0:
            self._lab.read()


@pytest.mark.parametrize(("gap", "responses"), [(29, 2), (15, 5), (10, 60), (3, 60)])
def test_a_client_that_reads_one_now_and_then_is_given_up(tmp_path, monkeypatch, gap, responses):
    """One every 10 s will do; at one every 15 s the 30 s that it has beyond that are used up."""
    monkeypatch.setattr(test_worker_streams, "RESPONSES", 1)
    lab = test_worker_streams.Lab(tmp_path)
    clock = Clock(lab, gap)
    monkeypatch.setattr(answers, "_now", clock)
    monkeypatch.setattr(answers, "time", SimpleNamespace(sleep=clock.sleep, time=time.time))
    stream, reader, _ = lab.start()
    sent = 0
    while sent < 60 and not stream.cancelled:
        stream.send(test_worker_streams.y(sent))
        sent += 1
    lab.read()
    assert len(reader.responses) == responses
    assert (reader.ending is None) == (responses == 60)
