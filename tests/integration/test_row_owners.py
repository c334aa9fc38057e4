"""Rows of many clients share batches in a real broker, and every row goes back to its owner (random sizes)."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

import clientlib
from tests.fakes import models
from tests.fakes.broker import Broker

CLIENTS, REQUESTS, MOST = 6, 60, 5
CONFIG = "max_batch_size: 16\ndynamic_batching { max_queue_delay_microseconds: 2000 }\n"


def test_every_row_goes_back_to_its_owner(tmp_path: Path) -> None:
    models.write_model(tmp_path / "repository", "m", models.two_input(), config=CONFIG)
    problems: list[BaseException] = []

    def ask(number: int) -> None:
        chance = random.Random(number)
        try:
            with clientlib.connect(f"ipc://{tmp_path}/run") as client:
                for turn in range(REQUESTS):
                    rows = chance.randint(1, MOST)
                    a = np.full((rows, 8), number * 1000 + turn, np.float32)
                    b = np.arange(rows, dtype=np.float32)[:, None] * np.ones((1, 8), np.float32)
                    got = client.infer("m", {"a": a, "b": b}, timeout=30)
                    assert np.array_equal(got["total"], a + b)
                    assert np.array_equal(got["difference"], a - b)
        except BaseException as error:
            problems.append(error)

    with Broker(tmp_path / "repository", tmp_path / "run") as broker:
        broker.ready()
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not problems, problems[0]
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            (found,) = client.statistics("m")
        if found["execution_count"] == found["inference_count"]:
            pytest.fail("nothing was batched: nothing was tested")
