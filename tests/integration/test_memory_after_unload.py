"""An unloaded model's memory is back: loading and unloading it again and again does not make the worker larger."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from onnx import helper

import clientlib
from tests.fakes import models
from tests.fakes.broker import Broker, eventually

SIDE = 5000
MODEL_BYTES = SIDE * SIDE * 4  # 100 MB
CYCLES = 5


def large() -> models.onnx.ModelProto:
    """y = x @ w."""
    return models.build(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [models.tensor("x", [1, SIDE])],
        [models.tensor("y", [1, SIDE])],
        {"w": np.eye(SIDE, dtype=np.float32)},
    )


def resident(pid: int) -> int:
    """Bytes of private memory in use: files that are mapped do not count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_the_worker_does_not_grow_with_each_load(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    models.write_model(repository, "large", large(), config="max_batch_size: 0\n")
    models.write_model(repository, "small", models.add1())
    flags = ("--model-control-mode=explicit", "--load-model=small")
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker(repository, tmp_path / "run", *flags))
        broker.ready()
        client = stack.enter_context(clientlib.connect(f"ipc://{broker.directory}"))
        x = np.ones((1, SIDE), np.float32)
        pid = _worker(broker)
        peaks: list[int] = []
        kept: list[int] = []
        for cycle in range(CYCLES):
            client.load("large")
            assert np.array_equal(client.infer("large", {"x": x})["y"], x)
            peaks.append(resident(pid))
            client.unload("large")
            eventually(lambda: resident(pid) < peaks[0] - MODEL_BYTES // 2, f"the memory of load {cycle} is back")
            kept.append(_settled(pid))
        assert min(peaks) > MODEL_BYTES  # it was measured at all
        assert max(peaks) < min(peaks) + MODEL_BYTES // 2, peaks
        # What the runtime and the allocator keep once shows in the first two.
        assert max(kept[2:]) < kept[1] + min(peaks) // 50, kept
        assert _worker(broker) == pid


def _settled(pid: int) -> int:
    """`resident`, once two looks in a row have seen the same."""
    seen = [resident(pid)]

    def is_same() -> bool:
        seen.append(resident(pid))
        return seen[-1] == seen[-2]

    eventually(is_same)
    return seen[-1]


def _worker(broker: Broker) -> int:
    (worker,) = broker.status()["workers"]
    pid: int = worker["pid"]
    return pid
