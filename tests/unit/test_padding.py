"""`pad_to`: requests of different lengths in one rectangular batch, on a runtime that looks at its mask."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.repository.config import InstanceGroup, ModelConfig, TensorConfig
from broker.repository.scheduling import DynamicBatching, MadeInput, Padding, WarmUp, WarmUpInput
from broker.worker import backends
from broker.worker.backends.builtin import array_of
from broker.worker.padding import element
from shm.errors import Code
from tests.fakes.loaded import Loaded, shapes_of, spec, text_of

PADDING = Padding(
    to=(4, 8, 16),
    value=9,
    inputs={"X": 1, "Z": 2},
    outputs={"Y": (1,), "OUTER": (1, 2)},
    mask=MadeInput(name="MASK", datatype="INT64", shape=(1, -1)),
    lengths=MadeInput(name="LENGTHS", datatype="INT32", shape=()),
)
MOST = 8  # rows of a batch


class Runtime:
    """Y is X and the sum of what is not padding, OUTER all products of X, COUNT the sum over Z's first row."""

    def __init__(self) -> None:
        self.seen: list[dict[str, np.ndarray]] = []
        self.too_short = False

    def bind(self, inputs, outputs):
        return Run(self, inputs, outputs)

    def close(self) -> None: ...


class Run:
    def __init__(self, runtime, inputs, outputs) -> None:
        self.runtime, self.inputs, self.outputs = runtime, inputs, outputs

    def run(self) -> None:
        seen = {operand.name: array_of(operand).copy() for operand in self.inputs}
        self.runtime.seen.append(seen)
        x, mask = seen["X"], seen["MASK"][:, 0, :]
        assert (mask.sum(1) == seen["LENGTHS"]).all()
        made = {
            "Y": x + (x * mask).sum(1, keepdims=True).astype(np.float32),
            "OUTER": x[:, :, None] * x[:, None, :],
            "COUNT": (seen["Z"][:, 0, :] * mask).sum(1, keepdims=True).astype(np.int32),
        }
        for operand in self.outputs:
            assert operand.shape == made[operand.name].shape, "as large as the batch"
        self.values = [made[operand.name][..., : -1 if self.runtime.too_short else None] for operand in self.outputs]

    def results(self):
        return self.values


def config(**more) -> ModelConfig:
    fields = {
        "name": "m", "platform": "", "backend": "fake", "directory": "/nowhere", "versions": {1: "/nowhere"},
        "default_model_filename": "", "max_batch_size": MOST,
        "input": (
            TensorConfig(name="X", datatype="FP32", dims=(-1,)),
            TensorConfig(name="Z", datatype="INT16", dims=(2, -1)),
        ),
        "output": (
            TensorConfig(name="Y", datatype="FP32", dims=(-1,)),
            TensorConfig(name="OUTER", datatype="FP32", dims=(-1, -1)),
            TensorConfig(name="COUNT", datatype="INT32", dims=(1,)),
        ),
        "instance_group": (InstanceGroup(name="m"),), "dynamic_batching": DynamicBatching(), "padding": PADDING,
    }  # fmt: skip
    return ModelConfig(**(fields | more))


@pytest.fixture(scope="module")
def runtime():
    made = Runtime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "find", lambda config: SimpleNamespace(load=lambda context: made))
        yield made


@pytest.fixture(scope="module")
def loaded(runtime):
    with Loaded(config()) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def forget(runtime):
    runtime.seen.clear()
    runtime.too_short = False


X, Z, Y, OUTER, COUNT = 0, 1024, 4096, 8192, 32768  # offsets


class Client:
    """One plan and one request on it. `opened`: the shape of its outputs is the model's to say."""

    def __init__(self, loaded: Loaded, rows: int, length: int, seed: int, z: int = -1, opened: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.rows, self.length = rows, length
        self.memory = loaded.memory()
        self.x = rng.integers(-50, 50, (rows, length)).astype(np.float32)
        self.z = rng.integers(-50, 50, (rows, 2, length if z < 0 else z)).astype(np.int16)
        self.memory.put(X, self.x)
        self.memory.put(Z, self.z)
        size = -1 if opened else length
        room = {"byte_size": 4 * rows * length * length} if opened else {}
        self.plan = loaded.plan(
            self.memory,
            [spec("X", self.x.shape, offset=X), spec("Z", self.z.shape, "INT16", offset=Z)],
            [
                spec("Y", (rows, length), offset=Y),
                spec("OUTER", (rows, size, size), offset=OUTER, **room),
                spec("COUNT", (rows, 1), "INT32", offset=COUNT),
            ],
            rows=rows,
        )
        self.request = loaded.request(self.plan)

    def answer(self) -> list[np.ndarray]:
        rows, length = self.rows, self.length
        return [
            self.memory.get(Y, (rows, length)),
            self.memory.get(OUTER, (rows, length, length)),
            self.memory.get(COUNT, (rows, 1), "INT32"),
        ]

    def check(self) -> None:
        assert not self.request.code, text_of(self.request)
        y, outer, count = self.answer()
        assert (y == self.x + self.x.sum(1, keepdims=True)).all()
        assert (outer == self.x[:, :, None] * self.x[:, None, :]).all()
        assert (count[:, 0] == self.z[:, 0].sum(1)).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 16), st.booleans()), min_size=1, max_size=6))
def test_each_request_gets_what_it_would_get_alone(loaded, runtime, sizes):
    sizes = [size for at, size in enumerate(sizes) if sum(rows for rows, _, _ in sizes[: at + 1]) <= MOST]
    runtime.seen.clear()
    together = [Client(loaded, rows, n, seed, opened=opened) for seed, (rows, n, opened) in enumerate(sizes)]
    assert len({id(client.plan.signature) for client in together}) == 1, "they may share a batch"
    loaded.run(*(client.request for client in together))
    (seen,) = runtime.seen
    longest = max(length for _, length, _ in sizes)
    assert seen["X"].shape == (sum(rows for rows, _, _ in sizes), next(size for size in (4, 8, 16) if size >= longest))
    for seed, (client, (rows, length, opened)) in enumerate(zip(together, sizes, strict=True)):
        client.check()
        alone = Client(loaded, rows, length, seed, opened=opened)
        loaded.run(alone.request)
        assert all((a == b).all() for a, b in zip(client.answer(), alone.answer(), strict=True))
        if opened:
            assert shapes_of(client.request) == [(rows, length, length)]


def test_what_is_added_lies_at_the_end_and_has_the_value(loaded, runtime):
    short, long = Client(loaded, 1, 2, 1), Client(loaded, 2, 3, 2)
    loaded.run(short.request, long.request)
    (seen,) = runtime.seen
    assert seen["X"].tolist() == [
        [*short.x[0].tolist(), 9, 9],
        [*long.x[0].tolist(), 9],
        [*long.x[1].tolist(), 9],
    ]
    assert seen["Z"][0].tolist() == [[*row, 9, 9] for row in short.z[0].tolist()]
    assert seen["MASK"][:, 0].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert seen["LENGTHS"].tolist() == [2, 3, 3]
    assert short.request.copied == 2 * 4 + 4 * 2 + 2 * 4 + 4 * 4 + 4, "its own bytes, in and out"


def test_one_that_cannot_be_padded_fails_alone(loaded, runtime):
    good, long, torn = Client(loaded, 1, 3, 1), Client(loaded, 1, 17, 2), Client(loaded, 1, 3, 3, z=4)
    loaded.run(good.request, long.request, torn.request)
    good.check()
    assert (long.request.code, torn.request.code) == (Code.INVALID_ARG, Code.INVALID_ARG)
    assert text_of(long.request) == (
        "input 'X' of model 'm' has 17 elements in its variable dimension, the largest size in pad_to is 16"
    )
    assert text_of(torn.request) == (
        "inputs 'X' and 'Z' of model 'm' have 3 and 4 elements in their variable dimension: pad_to takes them for the"
        " same dimension"
    )
    assert len(runtime.seen) == 1


def test_an_output_that_is_not_as_long_as_the_inputs_is_an_error_of_the_model(loaded, runtime):
    runtime.too_short = True
    client = Client(loaded, 1, 3, 1)
    loaded.run(client.request)
    assert client.request.code == Code.INTERNAL
    assert "output 'Y' of model 'm' has the shape [1,3] for inputs that were padded to 4" in text_of(client.request)


def test_warm_up_has_a_mask_too(runtime):
    inputs = (
        WarmUpInput(name="X", datatype="FP32", dims=(5,), kind="random"),
        WarmUpInput(name="Z", datatype="INT16", dims=(2, 5), kind="zero"),
    )
    bare = replace(config(), output=(TensorConfig(name="COUNT", datatype="INT32", dims=(1,)),))
    with Loaded(replace(bare, warm_up=(WarmUp(name="w", batch_size=2, inputs=inputs),))):
        (seen,) = runtime.seen
    assert seen["MASK"].tolist() == [[[1] * 5]] * 2
    assert seen["LENGTHS"].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("value", "datatype", "bits"),
    [(-1, "INT8", 0xFF), (1, "BOOL", 1), (1.5, "FP32", 0x3FC00000), (1.5, "BF16", 0x3FC0), (1.0, "FP16", 0x3C00)],
)
def test_the_value_in_every_datatype(value, datatype, bits):
    assert element(value, datatype) == bits
