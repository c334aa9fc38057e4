"""Threads that load models: used again, and never waited for."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from broker.worker.load_threads import LoadThreads


def test_a_thread_is_used_again_and_one_that_is_at_work_is_not_waited_for():
    threads, told, gate = LoadThreads(), SimpleQueue[int](), threading.Event()

    def load():
        told.put(threading.get_ident())

    def endless():
        load()
        gate.wait(30)

    def ran_in() -> int:
        threads.run(load)
        return told.get(timeout=30)

    def is_idle(count: int) -> bool:
        end = threading.Event()
        for _ in range(3000):
            if len(threads._idle) == count:
                return True
            end.wait(0.01)
        return False

    first = ran_in()
    assert is_idle(1)
    assert ran_in() == first
    assert is_idle(1)
    threads.run(endless)
    assert told.get(timeout=30) == first
    second = ran_in()
    assert second != first
    gate.set()
    assert is_idle(2)
    assert {ran_in() for _ in range(2)} <= {first, second}
