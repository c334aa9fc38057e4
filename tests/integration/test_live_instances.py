"""Control mode explicit in a real broker: the number of a model's instances changes while it serves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from tests.fakes import models
from tests.fakes.broker import Broker, eventually, steady

CONFIG = "max_batch_size: 4\ndynamic_batching {{ }}\ninstance_group {{ count: {} kind: KIND_CPU }}\n"
COUNTS = (3, 1, 4, 2, 1)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    models.write_model(tmp_path / "repository", "m", models.add1(), config=CONFIG.format(1))
    flags = ("--model-control-mode=explicit", "--load-model=m")
    with Broker(tmp_path / "repository", tmp_path / "run", *flags) as broker:
        yield broker.ready()


def test_instances_come_and_go_under_load(broker: Broker, tmp_path: Path) -> None:
    """By batches of many clients and, once it is quiet, by single requests that the leader runs itself."""
    problems: list[BaseException] = []
    counts = [0] * 6
    stop = threading.Event()

    def ask(index: int) -> None:
        try:
            with clientlib.connect(f"ipc://{broker.directory}") as client:
                x = np.full((1, 64), index, np.float32)
                while not stop.is_set():
                    assert np.array_equal(client.infer("m", {"x": x}, timeout=20)["y"], x + 1)
                    counts[index] += 1
        except BaseException as error:
            problems.append(error)

    with clientlib.connect(f"ipc://{broker.directory}") as control:
        before = control.statistics("m")[0]["inference_count"]
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(counts))]
        for thread in threads:
            thread.start()
        for count in COUNTS:
            models.write_model(tmp_path / "repository", "m", config=CONFIG.format(count))
            control.load("m")
            seen = list(counts)
            eventually(lambda: problems or all(map(int.__gt__, counts, seen)), "they run on")  # noqa: B023
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not problems, problems[0]
        x = np.zeros((1, 4), np.float32)
        for count in COUNTS:
            models.write_model(tmp_path / "repository", "m", config=CONFIG.format(count))
            control.load("m")
            for _ in range(20):
                assert np.array_equal(control.infer("m", {"x": x}, timeout=20)["y"], x + 1)
        asked = sum(counts) + 20 * len(COUNTS)
        eventually(lambda: control.statistics("m")[0]["inference_count"] - before == asked, "all of them are counted")
    (worker,) = broker.status()["workers"]
    assert worker["restarts"] == 0
    assert worker["lost_wakeups"] == 0
    assert worker["memory_bytes"] > 1 << 20


def test_a_replaced_worker_has_the_latest_number(broker: Broker, tmp_path: Path) -> None:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        one = steady(lambda: threads(broker))
        models.write_model(tmp_path / "repository", "m", config=CONFIG.format(3))
        client.load("m")
        (worker,) = broker.status()["workers"]
        eventually(lambda: threads(broker) >= one + 2, "an instance has a thread")
        os.kill(worker["pid"], signal.SIGKILL)
        x = np.zeros((1, 4), np.float32)
        assert np.array_equal(client.infer("m", {"x": x}, timeout=20)["y"], x + 1)
        eventually(lambda: threads(broker) >= one + 2, "so have those of the replacement")
        assert broker.status()["workers"][0]["restarts"] == 1


def threads(broker: Broker) -> int:
    """Of the worker."""
    (worker,) = broker.status()["workers"]
    return len(list(Path(f"/proc/{worker['pid']}/task").iterdir()))
