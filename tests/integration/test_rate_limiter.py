"""The rate limiter in a real broker: who runs beside whom, who goes first, which loads are refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from clientlib import InferError
from tests.fakes import journal_backend
from tests.fakes.broker import Broker

CONFIG = """backend: "journal"
input {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }}
instance_group {{ count: {count} kind: KIND_CPU {limit} }}
parameters {{ key: "together" value {{ string_value: "{together}" }} }}
"""
RUNS = 60


def write(root: Path, name: str, *resources: str, priority: int = 1, count: int = 2, together: int = 1) -> None:
    """`together`: so many run together at some time, as the test expects it."""
    claims = "".join(f"resources {{ {resource} }} " for resource in resources)
    limit = f"rate_limiter {{ {claims} priority: {priority} }}" if resources else ""
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(CONFIG.format(count=count, limit=limit, together=together))
    shutil.copy(journal_backend.__file__, root / name / "backend.py")


def run_all(broker: Broker, *models: str, at_once: str = "") -> None:
    """RUNS requests to each of the models, in flight together. `at_once`: all of them wait before the first one runs;
    another model of the same worker, which opens the channel.
    """
    x = np.arange(4, dtype=np.float32)
    with clientlib.connect(f"ipc://{broker.directory}", slots=256) as client:
        if at_once:
            client.infer(at_once, {"x": x})
        source = client.create_region("in", 16)
        source.array((4,), np.float32)[:] = x
        plans = []
        for model in models:
            target = client.create_region(f"out {model}", 16 * RUNS)
            outputs = {"y": target.tensor((4,), "FP32", stride=16)}
            plans.append((client.prepare(model, {"x": source.tensor((4,), "FP32")}, outputs, slots=(1, RUNS)), target))
        with stopped(broker) if at_once else contextlib.nullcontext():
            pending = [plan.submit(output_slot=slot) for slot in range(RUNS) for plan, _ in plans]
        for one in pending:
            one.result()
        for _, target in plans:
            assert np.array_equal(target.array((RUNS, 4), np.float32), np.tile(x, (RUNS, 1)))


@contextlib.contextmanager
def stopped(broker: Broker) -> Iterator[None]:
    """Meanwhile its worker does nothing."""
    (worker,) = broker.status()["workers"]
    os.kill(worker["pid"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker["pid"], signal.SIGCONT)


def journal(root: Path) -> list[tuple[str, str]]:
    return [(line[0], line[2:]) for line in (root / "journal").read_text().splitlines()]


def most_together(entries: list[tuple[str, str]], *models: str) -> int:
    running = most = 0
    for what, model in entries:
        if model in models:
            running += 1 if what == "+" else -1
            most = max(most, running)
    assert running == 0
    return most


def test_what_shares_a_resource_takes_turns_by_priority(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    write(root, "often", 'name: "r" count: 2')
    write(root, "seldom", 'name: "r" count: 2', priority=2)
    write(root, "free", together=2)
    write(root, "warm")
    with Broker(root, tmp_path / "run", "--rate-limit=execution_count") as broker:
        run_all(broker.ready(), "often", "seldom", "free", at_once="warm")
    entries = journal(root)
    assert most_together(entries, "often", "seldom") == 1
    assert most_together(entries, "free") == 2, "who needs nothing is not limited"
    first = Counter([model for what, model in entries if what == "+" and model in ("often", "seldom")][:RUNS])
    assert first["often"] > 1.5 * first["seldom"]


@pytest.mark.parametrize(("flags", "together"), [(("--rate-limit-resource=r:6",), 3), ((), 1)])
def test_there_is_as_much_as_the_command_line_says(tmp_path: Path, flags: tuple[str, ...], together: int) -> None:
    root = tmp_path / "repository"
    write(root, "m", 'name: "r" count: 2', count=4, together=together)
    with Broker(root, tmp_path / "run", "--rate-limit=execution_count", *flags) as broker:
        run_all(broker.ready(), "m")
    assert most_together(journal(root), "m") == together


def test_without_the_flag_nothing_is_limited(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    write(root, "m", 'name: "r" count: 2', count=3, together=3)
    with Broker(root, tmp_path / "run") as broker:
        run_all(broker.ready(), "m")
    assert most_together(journal(root), "m") == 3


def test_a_model_that_could_never_run_is_not_loaded(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    write(root, "large", 'name: "r" count: 4')
    write(root, "small", 'name: "r" count: 3')
    flags = ("--rate-limit=execution_count", "--rate-limit-resource=r:3", "--model-control-mode=explicit")
    with (
        Broker(root, tmp_path / "run", *flags, "--load-model=small") as broker,
        clientlib.connect(f"ipc://{broker.ready().directory}") as client,
    ):
        with pytest.raises(InferError) as refused:
            client.load("large")
        assert (
            'Resource count for "r" is limited to 3 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 4"
        ) in refused.value.message
        client.unload("small")
        client.load("small")
        run_all(broker, "small")
