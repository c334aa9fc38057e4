"""T: clients that rewrite or truncate memory while a model works on it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import posix_ipc
import pytest
from onnx import TensorProto, helper

import clientlib
from tests.fakes import models
from tests.faults import child, raw, repository
from tests.faults.lab import SAME, Lab, scaled

GRANTED = 'parameters { key: "zero_copy_inputs" value { string_value: "all" } }\n'
COUNT = 2048  # elements of every input that is rewritten
MANY = 1 << 17  # where a change must be met: on one core that takes a switch of processes in the middle of a run
MIB = 1 << 20
SIZE = 4 * MIB  # of the input, and of the output, of a region that is truncated


def write(root: Path) -> Path:
    """The lab's models, and: gather_in_place (granted what it must not have), conv, cast, topk_of_a_view."""
    repository.write(root)
    models.write_model(root, "gather_in_place", models.gather(), config=GRANTED)
    x, y = models.tensor("x", ["batch", COUNT]), models.tensor("y", ["batch", COUNT])
    halves = models.tensor("y", ["batch", COUNT], TensorProto.FLOAT16)
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)]
    models.write_model(root, "cast", models.build(nodes, [x], [halves]))
    signal_in, signal_out = (models.tensor(name, ["batch", 1, COUNT]) for name in "xy")
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1])]
    models.write_model(root, "conv", models.build(nodes, [signal_in], [signal_out], {"w": np.ones((1, 1, 3), "f")}))
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["v"]), helper.make_node("TopK", ["v", "k"], ["y", "i"])]
    constants = {"shape": np.array([0, -1], np.int64), "k": np.array([COUNT], np.int64)}
    indices = models.tensor("i", ["batch", COUNT], TensorProto.INT64)
    models.write_model(root, "topk_of_a_view", models.build(nodes, [x], [y, indices], constants))
    return root


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory):
    with Lab(tmp_path_factory.mktemp("lab"), models=write) as lab:
        yield lab


# --- T-01, T-07: rewritten in a loop ---------------------------------------------------------------------------------


@contextlib.contextmanager
def rewriting(array: npt.NDArray[Any], *contents: npt.NDArray[Any]) -> Iterator[None]:
    """Another process writes `contents` into `array`, one after the other, as fast as it can."""
    pid = os.fork()
    if not pid:
        try:
            while True:
                for content in contents:
                    array[:] = content
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _indices(count: int) -> tuple[npt.NDArray[Any], ...]:
    """All 5; the same with a few outside the 64 rows; and with one far away."""
    good = np.full(count, 5, np.int64)
    outside, far = good.copy(), good.copy()
    outside[count // 2 :] = 70
    far[-1] = 5 * 10**10
    return good, good, outside, good, far


def _right_rows(results: dict[str, Any], contents: Any) -> bool:
    return bool((results["y"] == 5).all())


def _right_largest(results: dict[str, Any], contents: Any) -> bool:
    at = results["indices"]
    return bool(((at >= 0) & (at < COUNT)).all()) and bool(np.isin(results["values"], np.concatenate(contents)).all())


def _right_values(results: dict[str, Any], contents: Any) -> bool:
    y = results["y"]
    return bool((np.diff(y) > 0).all()) and bool(np.isin(y, np.concatenate(contents)).all())


def _right_positions(results: dict[str, Any], contents: Any) -> bool:
    y = results["y"][0]
    return bool((np.diff(y) > 0).all()) and bool(((y >= 0) & (y < COUNT)).all())


def flip(model: str, seconds: float, until: str = "", count: int = COUNT) -> dict[str, Any]:
    """Ask as fast as possible while the input changes; count what came. `until` that has come once."""
    chance = np.random.default_rng(1)
    name, datatype, shape, outputs, right = {
        "gather": ("index", "INT64", (1, count), {"y": ((1, count, 4), "FP32", 0)}, _right_rows),
        "topk": (
            "x",
            "FP32",
            (1, COUNT),
            {"values": ((1, 2), "FP32", 0), "indices": ((1, 2), "INT64", 0)},
            _right_largest,
        ),
        "unique": ("x", "FP32", (COUNT,), {"y": ((-1,), "FP32", COUNT * 4)}, _right_values),
        "nonzero": ("x", "FP32", (COUNT,), {"y": ((1, -1), "INT64", COUNT * 8)}, _right_positions),
    }[model.removesuffix("_in_place")]
    if datatype == "INT64":
        contents = _indices(count)
        contents = contents[:3] if model.endswith("in_place") else contents
    else:
        contents = tuple(chance.integers(0, 3, COUNT).astype(np.float32) + half for half in (0, 0.5))
    told: Counter[str] = Counter()
    with clientlib.connect() as client:
        region = client.create_region("r", MIB + 24 * count)
        array = region.array((count,), datatype)
        array[:] = contents[0]
        places = {
            output: region.tensor(dims, kind, (65536 + 8 * count) * (at + 1), byte_size=room or None)
            for at, (output, (dims, kind, room)) in enumerate(outputs.items())
        }
        plan = client.prepare(model, {name: region.tensor(shape, datatype)}, places)
        copied = plan.infer(timeout=50).copied_bytes
        with rewriting(array, *contents):
            end = time.monotonic() + seconds
            while (time.monotonic() < end or (not told["OK"] and time.monotonic() < end + 40)) and not told[until]:
                try:
                    results = plan.infer(timeout=50)
                except clientlib.InferError as error:
                    told[error.code] += 1
                else:
                    told["OK" if right(results, contents) else "outside"] += 1
    return {"told": told, "copied": copied}


@pytest.mark.parametrize("model", ["gather", "topk", "unique", "nonzero"])
def test_t01_rewritten_while_the_model_validates(lab, model):
    result = lab.offend(flip, model=model, seconds=scaled(1200, 60_000) / 1000, timeout_s=90)
    assert result["copied"] >= COUNT * 4, "such inputs are copied first"
    assert result["told"].get("outside", 0) == 0
    assert result["told"]["OK"] > 0
    assert set(result["told"]) <= ({"OK", "INTERNAL"} if model == "gather" else {"OK"})
    lab.settled()


def test_t01_attack_works_where_the_operator_granted_it(lab):
    """What the rows above could not see would not be there either."""
    told = lab.offend(flip, model="gather_in_place", seconds=80.0, until="outside", count=MANY, timeout_s=100)["told"]
    assert told["outside"] == 1
    lab.settled(replaced=SAME)


def rewrite_floats(model: str, shape: list[int], seconds: float) -> dict[str, Any]:
    chance = np.random.default_rng(2)
    count = int(np.prod(shape))
    contents = [chance.integers(0, 2**32, count, np.uint32).view(np.float32) for _ in range(4)]  # any bits at all
    told: Counter[str] = Counter()
    with clientlib.connect() as client:
        region = client.create_region("r", MIB)
        array = region.array((count,), "FP32")
        kind = "FP16" if model == "cast" else "FP32"
        places = {"x": region.tensor(shape, "FP32")}, {"y": region.tensor(shape, kind, 65536)}
        plan = client.prepare(model, *places)
        copied = plan.infer(timeout=50).copied_bytes
        with rewriting(array, *contents):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                told[child.refusal(plan.infer, timeout=50)[0]] += 1
    return {"told": told, "copied": copied}


@pytest.mark.parametrize(
    ("model", "shape"), [("add1", (4, COUNT)), ("matmul", (4, 4)), ("conv", (4, 1, COUNT)), ("cast", (4, COUNT))]
)
def test_t07_floats_rewritten_while_they_are_read(lab, model, shape):
    result = lab.offend(rewrite_floats, model=model, shape=shape, seconds=scaled(300, 10_000) / 1000)
    assert result["copied"] == 0, "in place: that is what is attacked"
    assert set(result["told"]) == {"OK"}
    lab.settled()


def look_at_models() -> dict[str, Any]:
    with clientlib.connect() as client:
        inputs = {name: [(t.zero_copy, t.zero_copy_reason) for t in m.inputs] for name, m in client.models().items()}
        x = np.arange(COUNT, dtype=np.float32).reshape(1, COUNT)
        copied = client.infer("topk_of_a_view", {"x": x}, timeout=50).copied_bytes
        return {"inputs": inputs, "copied": copied, "in place": client.infer("cast", {"x": x}).copied_bytes}


def test_t08_an_operator_that_reads_twice_has_its_input_copied(lab):
    result = lab.offend(look_at_models)
    for model, operator in (("gather", "Gather"), ("topk", "TopK"), ("unique", "Unique"), ("topk_of_a_view", "TopK")):
        ((zero_copy, reason),) = result["inputs"][model]
        assert not zero_copy, model
        assert operator in reason or model == "gather", reason
    for model in ("add1", "matmul", "conv", "cast", "gather_in_place"):
        assert result["inputs"][model][0][0], model
    assert result["copied"] - result["in place"] == COUNT * 4, "once more than the arrays themselves"
    lab.settled()


# --- T-02: truncated -------------------------------------------------------------------------------------------


class Truncated:
    """A POSIX region of x, then y, for add1, and the means to cut it."""

    def __init__(self, client: clientlib.Client, key: str, name: str = "r") -> None:
        self.fd = posix_ipc.SharedMemory(key).fd
        self.region = client.register_system_shm(name, key, 2 * SIZE)
        shape = (4, SIZE // 16)
        places = {"x": self.region.tensor(shape, "FP32")}, {"y": self.region.tensor(shape, "FP32", SIZE)}
        self.plan = client.prepare("add1", *places)

    def infer(self) -> list[str]:
        return child.refusal(self.plan.infer, timeout=50)

    def close(self) -> None:
        os.close(self.fd)


def truncate_before_and_after(size: int) -> list[list[str]]:
    with clientlib.connect() as client, raw.named_memory(2 * SIZE) as key:
        region = Truncated(client, key)
        told = [region.infer()]
        os.ftruncate(region.fd, size)
        told += [region.infer(), region.infer()]
        region.close()
        client.unregister("r")
        return told


@pytest.mark.parametrize("size", [0, SIZE // 2, SIZE, 2 * SIZE - 1])
def test_t02_truncated_before(lab, size):
    before, *after = lab.offend(truncate_before_and_after, size=size)
    assert before == ["OK", ""]
    for code, message in after:
        assert (code, "shared memory region 'r' changed size" in message) == ("INTERNAL", True), message
    lab.settled()


def truncate_during(rounds: int, seed: int) -> dict[str, int]:
    """How often each answer came, to a request whose memory goes while it runs and to the one that follows."""
    chance = random.Random(seed)
    told: Counter[str] = Counter()
    for turn in range(rounds):
        # A session of its own: the third truncated region would cost it.
        with clientlib.connect() as client, raw.named_memory(2 * SIZE) as key:
            region = Truncated(client, key, f"r{turn}")
            assert region.infer() == ["OK", ""]
            started = time.monotonic()
            assert region.infer() == ["OK", ""]
            takes = time.monotonic() - started
            size, delay = chance.choice((0, SIZE // 2, SIZE)), chance.uniform(0, 1.5 * takes)

            def cut(region: Truncated = region, size: int = size, delay: float = delay) -> None:
                time.sleep(delay)
                os.ftruncate(region.fd, size)

            cutter = threading.Thread(target=cut)
            cutter.start()
            told[" ".join(region.infer()).replace(f"'r{turn}'", "'r'")] += 1
            cutter.join()
            told["then " + " ".join(region.infer()).replace(f"'r{turn}'", "'r'")] += 1
            region.close()
            client.unregister(f"r{turn}")
    return told


CHANGED = "INTERNAL shared memory region 'r' changed size"
DIED = "UNAVAILABLE the worker died while it ran this request"
GONE = "NOT_FOUND the request names a plan that is not bound here"


def test_t02_truncated_at_any_moment(lab):
    rounds = scaled(150, 10_000)
    told = lab.offend(truncate_during, rounds=rounds, seed=4, timeout_s=scaled(110, 3000))
    during = {text: count for text, count in told.items() if not text.startswith("then ")}
    after = {text: count for text, count in told.items() if text.startswith("then ")}
    assert sum(during.values()) == sum(after.values()) == rounds
    assert during["OK "] > 0
    assert all(text.startswith(("OK ", CHANGED, DIED)) for text in during), during
    assert all(text.startswith(("then " + CHANGED, "then " + GONE)) for text in after), after
    lab.settled(replaced=SAME)
