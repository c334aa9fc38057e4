"""A small broker in this process for the tests of the client library, and what every module begins with."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import clientlib
from tests.fakes.processes import descriptors
from tests.fakes.small_broker import SmallBroker, connect

# A busy machine may take its time for an example, or for making one: that is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_another_module() -> None:
    """Cycles left by other tests may hold descriptors: collected later, they would be missed by tests that count."""
    gc.collect()


@pytest.fixture
def small_broker(tmp_path: Path) -> Iterator[SmallBroker]:
    """Afterwards: no descriptor left, which includes mappings, as each keeps one."""
    before = descriptors()
    broker = SmallBroker(tmp_path)
    yield broker
    broker.release()
    broker.stop()
    left, until_s = descriptors() - before, time.monotonic() + 10
    while left and time.monotonic() < until_s:
        gc.collect()  # an error that a test caught refers to the test, and that to the error
        time.sleep(0.01)  # another thread may just have one open, or be closing it
        left = descriptors() - before
    assert not left, f"descriptors were left open: {sorted(left)}"


@pytest.fixture
def client(small_broker: SmallBroker) -> Iterator[clientlib.Client]:
    with connect(small_broker) as client:
        yield client
