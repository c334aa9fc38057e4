"""Ensembles in real brokers: what goes in comes out of the last step, and other requests do not mix with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import Broker, eventually, steady

STEP = """{{ model_name: "{model}" model_version: -1
  input_map {{ key: "x" value: "{source}" }} output_map {{ key: "y" value: "{target}" }} }}"""
MEMBER = """backend: "onnxruntime" max_batch_size: 4 dynamic_batching {{ }}
input {{ name: "x" data_type: TYPE_FP32 dims: [ {0} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {0} ] }}"""


def ensemble(root: Path, name: str, steps: list[tuple[str, str, str]], outputs: tuple[str, ...] = ("OUT",)) -> None:
    given = "\n".join(f'output {{ name: "{each}" data_type: TYPE_FP32 dims: [ 8 ] }}' for each in outputs)
    text = ", ".join(STEP.format(model=m, source=s, target=t) for m, s, t in steps)
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(
        f"""platform: "ensemble" max_batch_size: 4
input {{ name: "IN" data_type: TYPE_FP32 dims: [ 8 ] }}
{given}
ensemble_scheduling {{ step [ {text} ] }}
"""
    )


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    root = tmp_path_factory.mktemp("repository")
    models.write_model(root, "fixed", models.identity(dims=("batch", 8)), config=MEMBER.format(8))
    models.write_model(root, "open", models.identity(), config=MEMBER.format(-1))
    for name in ("fixed", "open"):
        ensemble(root, f"chain_{name}", [(name, "IN", "a"), (name, "a", "b"), (name, "b", "OUT")])
    for name in ("left", "right"):
        models.write_model(root, name, models.add1(), config=MEMBER.format(8))
    steps = [("fixed", "IN", "a"), ("left", "a", "L"), ("right", "a", "R")]
    ensemble(root, "fan", steps, outputs=("L", "R"))
    with Broker(root, tmp_path_factory.mktemp("run")) as broker:
        broker.ready()
        yield broker


@pytest.mark.parametrize("name", ["chain_fixed", "chain_open"])
def test_a_chain_of_three_identities_gives_each_client_its_own_rows(broker, name):
    wrong: list[str] = []

    def ask(number: int) -> None:
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            for turn in range(20):
                rows = 1 + (number + turn) % 3
                x = np.full((rows, 8), 100 * number + turn, np.float32)
                try:
                    y = client.infer(name, {"IN": x}, timeout=20)["OUT"]
                except InferError as error:
                    wrong.append(str(error))
                    return
                if not np.array_equal(x, y):
                    wrong.append(f"client {number}: {y} instead of {x}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_what_lies_between_steps_is_not_copied_and_only_what_is_needed_runs(broker):
    """Of a fan-out, on clients' own memory: members read and write in place, or in the worker's memory."""

    def counters() -> dict[str, tuple[int, int]]:
        rows = {row["name"]: row for row in client.statistics()}
        return {name: (rows[name]["execution_count"], sum(rows[name]["copied_bytes"].values())) for name in members}

    def since() -> list[tuple[int, int]]:
        return [(now[0] - then[0], now[1] - then[1]) for now, then in zip(counters().values(), before, strict=True)]

    members = ("fixed", "left", "right")
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        before = tuple(steady(counters).values())
        region = client.create_region("r", 12288)
        x, left, right = (region.array((1, 8), np.float32, offset) for offset in (0, 4096, 8192))
        x[:] = np.arange(8)
        given = {"IN": region.tensor((1, 8), "FP32")}
        placed = {name: region.tensor((1, 8), "FP32", offset) for name, offset in (("L", 4096), ("R", 8192))}
        assert client.prepare("fan", given, placed).infer().copied_bytes == 0
        assert np.array_equal(left, x + 1)
        assert np.array_equal(right, x + 1)
        eventually(lambda: since() == [(1, 0), (1, 0), (1, 0)])
        for wanted, ran in (("R", [2, 1, 2]), ("L", [3, 2, 2])):
            result = client.infer("fan", given, outputs=[wanted])
            assert set(result) == {wanted}
            assert np.array_equal(result[wanted], x + 1)
            eventually(lambda: since() == [(count, 0) for count in ran])  # noqa: B023
