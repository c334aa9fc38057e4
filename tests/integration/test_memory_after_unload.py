"""An unloaded model's memory is back: loading and unloading it again and again does not make the worker larger."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
from onnx import helper

import clientlib
from broker.worker import messages
from tests.fakes import models
from tests.fakes.broker import Broker, eventually
from tests.fakes.loading import config_of
from tests.fakes.lone_worker import LoneWorker, Session

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
            kept.append(_settled(pid, looks=40))
        assert min(peaks) > MODEL_BYTES  # it was measured at all
        assert max(peaks) < min(peaks) + MODEL_BYTES // 2, peaks
        # What the runtime and the allocator keep once shows in the first two.
        assert max(kept[2:]) < kept[1] + min(peaks) // 50, kept
        assert _worker(broker) == pid


def test_memory_is_back_within_two_percent_after_fifty_cycles(tmp_path: Path) -> None:
    width = 1 << 18
    weights = 2 * 4 * width * 4  # bytes
    model = models.build(
        [helper.make_node("MatMul", ["x", "v"], ["t"]), helper.make_node("MatMul", ["t", "w"], ["y"])],
        [models.tensor("x", [1, 4])],
        [models.tensor("y", [1, 4])],
        {"v": np.full((4, width), 0.5, np.float32), "w": np.full((width, 4), 0.5 / width, np.float32)},
    )
    config = config_of(tmp_path, model, "max_batch_size: 0\n")
    # Else the allocator takes weights from its heap from some load on, and now and then keeps a piece of their size.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
    with LoneWorker(environ=environ) as worker, Session(worker).attach() as session:
        blocks, base = worker.blocks(config), 0
        for cycle in range(1, 51):
            worker.load(config, blocks, cycle)
            plan = session.bind(config)
            assert plan.infer(2.0) == 2.0
            plan.drop()
            loaded = resident(worker.pid)
            worker.ask(messages.UnloadModel(model=config.name, version=1))
            if cycle == 10:  # what the runtime and the allocator keep once is there
                eventually(lambda: resident(worker.pid) < loaded - weights, "the model's memory is back")  # noqa: B023
                base = _settled(worker.pid, looks=40)
        eventually(lambda: resident(worker.pid) <= base * 1.02, f"no more than the {base} bytes of cycle 10")


def _settled(pid: int, looks: int = 2) -> int:
    """`resident`, once so many looks in a row have seen the same."""
    seen = [resident(pid)]

    def is_same() -> bool:
        seen.append(resident(pid))
        return len(seen) >= looks and len(set(seen[-looks:])) == 1

    eventually(is_same)
    return seen[-1]


def _worker(broker: Broker) -> int:
    (worker,) = broker.status()["workers"]
    pid: int = worker["pid"]
    return pid
