"""What a leader has counted is written however busy it is."""

from __future__ import annotations

import os

from broker.worker.loop import Loop
from shm import statistics


def test_they_are_written_where_the_next_request_always_comes_soon(monkeypatch):
    """A spin that finds something at once leaves no time for it, and a leader that finds something never sleeps."""
    block = memoryview(bytearray(4096)).cast("Q")
    watch = os.eventfd(0, os.EFD_NONBLOCK)
    loop = Loop(block, lambda channel: None, watch)
    turns = 0

    def finds_something_at_once():
        nonlocal turns
        turns += 1
        loop._taken += 1
        loop.stopping = turns == 3000

    monkeypatch.setattr(loop, "_pause", finds_something_at_once)
    loop._lead(loop.turn.take())
    assert 2000 <= block[statistics.TAKEN] < 3000
    os.close(loop.hot_set._wake)
    os.close(watch)
