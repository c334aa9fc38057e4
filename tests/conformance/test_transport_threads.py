"""One client of any transport, several threads: answers reach those who wait alone, together, or only look."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import clientlib
from tests.fakes.broker import eventually
from tests.fakes.gateways import url_of

pytestmark = pytest.mark.timeout(180)
THREADS = 4


@pytest.fixture
def client(broker, transport):
    with contextlib.closing(clientlib.connect(url_of(broker, transport))) as client:
        yield client


def one(client, value: float) -> float:
    return float(client.infer("add1", {"x": np.full((1, 4), value, np.float32)}, timeout=60)["y"][0, 0])


def test_one_waits_then_many_then_one(client):
    assert [one(client, k) for k in range(5)] == [1, 2, 3, 4, 5]
    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(lambda k: one(client, k), range(100))) == [k + 1 for k in range(100)]
    assert [one(client, k) for k in range(5)] == [1, 2, 3, 4, 5]


def test_what_nobody_waits_for_ends_too(client):
    """Right after a wait, and while another thread waits for something that takes long."""
    region = client.create_region("looked at", 4096)
    region.array((1, 4), np.float32)[:] = 7
    y = region.tensor((1, 4), "FP32", offset=1024)
    plan = client.prepare("add1", {"x": region.tensor((1, 4), "FP32")}, {"y": y})
    for _ in range(3):
        assert plan.infer(timeout=60)["y"].tolist() == [[8] * 4]
        pending = plan.submit(60)
        eventually(pending.done, "it ends although nobody waits")
    place = client.create_region("long", 64)
    slow = client.prepare("slow", {"x": place.tensor((1,), "FP32")}, {"y": place.tensor((1,), "FP32", offset=4)})
    long = slow.submit(60)
    waiting = threading.Thread(target=long.result)
    waiting.start()
    pending = plan.submit(60)
    eventually(pending.done, "it ends although another thread waits for another one")
    waiting.join(60)
    assert not waiting.is_alive()
