"""Single requests on the real runtime: what is run in place, what is copied and counted, what is reported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from broker.worker import binding
from shm import datatypes, statistics
from shm.errors import Code
from tests.fakes import models
from tests.fakes.loaded import Loaded, shapes_of, spec, text_of
from tests.fakes.loading import config_of
from tests.fakes.models import tensor

Load = Callable[..., Loaded]
X = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Loads a model as a broker's loader configures it."""
    opened: list[Loaded] = []

    def load(model: onnx.ModelProto, config: str | None = None) -> Loaded:
        opened.append(Loaded(config_of(tmp_path / str(len(opened)), model, config)))
        return opened[-1]

    yield load
    for loaded in opened:
        loaded.__exit__(None, None, None)


def test_a_lone_request_is_run_in_place(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (1, 4), offset=64)], [spec("y", (1, 4), offset=256)], rows=1)
    memory.put(64, X)
    request = loaded.infer(plan)
    assert np.array_equal(memory.get(256, (1, 4)), X + 1)
    assert request.copied == 0
    assert loaded.copied() == {}
    (execution,) = plan.bindings.values()
    assert not execution.copies
    assert not execution.opens
    memory.put(64, 10 * X)  # the binding points to the client's memory: no second one is made
    loaded.infer(plan)
    assert np.array_equal(memory.get(256, (1, 4)), 10 * X + 1)
    assert list(plan.bindings.values()) == [execution]


def test_every_position_has_its_own_place(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    inputs = [spec("x", (1, 4), offset=0, stride=32)]
    plan = loaded.plan(memory, inputs, [spec("y", (1, 4), offset=1024, stride=64)], positions=(8, 3), rows=1)
    for position in range(8):
        memory.put(32 * position, X * position)
    for position in range(8):
        loaded.infer(plan, position, position % 3)
        assert np.array_equal(memory.get(1024 + 64 * (position % 3), (1, 4)), X * position + 1)
    assert loaded.copied() == {}


def test_an_input_of_stride_0_is_the_same_at_every_position(load):
    loaded = load(models.two_input())
    memory = loaded.memory()
    inputs = [spec("a", (1, 4), stride=16), spec("b", (1, 4), offset=512)]
    outputs = [spec("total", (1, 4), offset=1024), spec("difference", (1, 4), offset=2048)]
    plan = loaded.plan(memory, inputs, outputs, positions=4, rows=1)
    memory.put(512, 100 * X)
    for position in range(4):
        memory.put(16 * position, X * position)
        loaded.infer(plan, position)
        assert np.array_equal(memory.get(1024 + 16 * position, (1, 4)), 100 * X + X * position)
        assert np.array_equal(memory.get(2048 + 16 * position, (1, 4)), X * position - 100 * X)


def test_fewer_rows_than_prepared(load):
    loaded = load(models.add1(), "max_batch_size: 8\n")
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (4, 4))], [spec("y", (4, 4), offset=256)], rows=4)
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    memory.put(0, rows)
    memory.bytes[256:320] = 0xEE
    loaded.infer(plan, rows=3)
    assert np.array_equal(memory.get(256, (3, 4)), rows[:3] + 1)
    assert memory.bytes[256 + 48 : 320].tolist() == [0xEE] * 16
    loaded.infer(plan)
    assert np.array_equal(memory.get(256, (4, 4)), rows + 1)
    assert loaded.count(statistics.INFERENCES) == 7
    assert loaded.count(statistics.EXECUTIONS) == 2
    assert loaded.batches() == {3: 1, 4: 1}


def test_the_policy_decides_what_is_copied_first(load):
    loaded = load(models.gather())
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("index", (1, 3), "INT64")], [spec("y", (1, 3, 4), offset=512)], rows=1)
    memory.put(0, np.array([[5, 7, -1]], np.int64))
    request = loaded.infer(plan)
    assert np.array_equal(memory.get(512, (1, 3, 4))[0, :, 0], [5, 7, 63])
    assert request.copied == 24
    assert loaded.copied() == {"policy": 24}
    loaded.infer(plan)
    assert loaded.copied() == {"policy": 48}


def test_a_copied_input_is_not_read_again(load):
    """What the runtime reads must be what it validated: it gets memory that the client cannot reach."""
    loaded = load(models.gather())
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("index", (1, 3), "INT64")], [spec("y", (1, 3, 4), offset=512)], rows=1)
    loaded.infer(plan)
    ((staging, source, _),) = next(iter(plan.bindings.values())).copies
    assert np.shares_memory(source, plan.inputs[0].region.bytes)
    assert not np.shares_memory(staging, plan.inputs[0].region.bytes)


@pytest.mark.parametrize("offset", [1, 3])
def test_misaligned_tensors_are_copied(load, offset):
    loaded = load(models.add1())
    memory = loaded.memory()
    inputs = [spec("x", (1, 4), offset=64 + offset)]
    aligned = loaded.plan(memory, inputs, [spec("y", (1, 4), offset=256)], rows=1)
    memory.put(64 + offset, X)
    assert loaded.infer(aligned).copied == 16
    assert loaded.copied() == {"align": 16}
    assert np.array_equal(memory.get(256, (1, 4)), X + 1)
    both = loaded.plan(memory, inputs, [spec("y", (1, 4), offset=512 + offset)], rows=1)
    assert loaded.infer(both).copied == 32
    assert loaded.copied() == {"align": 32, "output": 16}
    assert np.array_equal(memory.get(512 + offset, (1, 4)), X + 1)


def test_a_misaligned_stride_is_copied(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (1, 4), stride=17)], [spec("y", (1, 4), offset=256)], positions=2, rows=1)
    memory.put(17, X)
    loaded.infer(plan, 1)
    assert loaded.copied() == {"align": 16}
    assert np.array_equal(memory.get(272, (1, 4)), X + 1)


def test_open_outputs_report_their_shape(load):
    loaded = load(models.nonzero(), models.NONZERO_CONFIG)
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (5,))], [spec("y", (1, -1), "INT64", offset=512, byte_size=64)])
    for values, found in (([0, 1, 0, 1, 1], [1, 3, 4]), ([9, 0, 0, 0, 0], [0]), ([0] * 5, [])):
        memory.put(0, np.array(values, np.float32))
        request = loaded.infer(plan)
        assert shapes_of(request) == [(1, len(found))]
        assert memory.get(512, (1, len(found)), "INT64").tolist() == [found]
        assert request.copied == 20 + 8 * len(found)
    assert loaded.copied() == {"policy": 60, "output": 32}


def test_a_result_that_does_not_fit_writes_nothing_and_says_what_it_needs(load):
    loaded = load(models.nonzero(), models.NONZERO_CONFIG)
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (5,))], [spec("y", (1, -1), "INT64", offset=512, byte_size=24)])
    memory.bytes[512:600] = 0xEE
    memory.put(0, np.ones(5, np.float32))
    request = loaded.run(loaded.request(plan))
    assert request.code is Code.INVALID_ARG
    assert text_of(request) == (
        "shared memory size specified with the request for output 'y' (24 bytes) should be at least 40 bytes to hold"
        " the results"
    )
    assert memory.bytes[512:600].tolist() == [0xEE] * 88
    assert (loaded.count(statistics.FAIL), loaded.count(statistics.SUCCESS)) == (1, 0)
    memory.put(0, np.array([1, 1, 1, 0, 0], np.float32))
    assert shapes_of(loaded.infer(plan)) == [(1, 3)]


def test_nothing_is_written_unless_every_open_output_fits(load):
    unique = helper.make_node("Unique", ["x"], ["y", "first"])
    model = models.build(
        [unique], [tensor("x", ["n"])], [tensor("y", [None]), tensor("first", [None], TensorProto.INT64)]
    )
    loaded = load(model, models.NONZERO_CONFIG)
    memory = loaded.memory()
    outputs = [
        spec("y", (-1,), offset=512, byte_size=64),
        spec("first", (-1,), "INT64", offset=1024, byte_size=8),
    ]
    plan = loaded.plan(memory, [spec("x", (4,))], outputs)
    memory.bytes[512:1100] = 0xEE
    memory.put(0, np.array([3, 1, 3, 1], np.float32))
    assert "'first' (8 bytes) should be at least 16" in text_of(loaded.run(loaded.request(plan)))
    assert set(memory.bytes[512:1100].tolist()) == {0xEE}
    memory.put(0, np.full(4, 3, np.float32))
    assert shapes_of(loaded.infer(plan)) == [(1,), (1,)]


def test_a_fixed_shape_of_an_uncertain_output(load):
    loaded = load(models.nonzero(), models.NONZERO_CONFIG)
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (4,))], [spec("y", (1, 2), "INT64", offset=512)])
    memory.put(0, np.array([0, 1, 1, 0], np.float32))
    assert loaded.infer(plan).copied == 16  # the input: the output is written in place
    assert memory.get(512, (1, 2), "INT64").tolist() == [[1, 2]]
    memory.bytes[512:600] = 0xEE
    for values, expected in (
        ([1, 0, 0, 0], "output 'y' of model 'm' has shape [1,1], the plan says [1,2]: leave the dimension open (-1)"),
        ([1, 1, 1, 0], "output 'y' of model 'm' has shape [1,3], the plan says [1,2]: leave the dimension open (-1)"),
    ):
        memory.put(0, np.array(values, np.float32))
        request = loaded.run(loaded.request(plan))
        assert request.code is Code.INVALID_ARG
        assert expected in text_of(request)
        assert memory.bytes[512:600].tolist() == [0xEE] * 88
    memory.put(0, np.array([1, 0, 0, 1], np.float32))
    loaded.infer(plan)
    assert memory.get(512, (1, 2), "INT64").tolist() == [[0, 3]]


@pytest.mark.parametrize(
    ("element", "datatype"),
    [
        (TensorProto.FLOAT16, "FP16"),
        (TensorProto.BFLOAT16, "BF16"),
        (TensorProto.BOOL, "BOOL"),
        (TensorProto.DOUBLE, "FP64"),
        (TensorProto.INT8, "INT8"),
        (TensorProto.UINT16, "UINT16"),
        (TensorProto.UINT64, "UINT64"),
    ],
)
@pytest.mark.parametrize("offset", [0, 1])
def test_datatypes(load, element, datatype, offset):
    loaded = load(models.identity(element))
    memory = loaded.memory()
    item = datatypes.element_size(datatype)
    places = {"x": 64 + offset, "y": 256 + offset}
    plan = loaded.plan(
        memory,
        [spec("x", (1, 6), datatype, offset=places["x"])],
        [spec("y", (1, 6), datatype, offset=places["y"])],
        rows=1,
    )
    data = np.arange(6 * item, dtype=np.uint8) % (2 if datatype == "BOOL" else 120)
    memory.put(places["x"], data)
    loaded.infer(plan)
    assert memory.get(places["y"], data.shape, "UINT8").tolist() == data.tolist()
    misaligned = offset % item != 0
    assert loaded.copied().get("output", 0) == (6 * item if misaligned else 0)


def test_strings_in_and_out(load):
    loaded = load(models.identity(TensorProto.STRING))
    memory = loaded.memory()
    data = datatypes.encode_bytes(np.array([b"one", "zwölf", b""], object))
    inputs = [spec("x", (1, 3), "BYTES", byte_size=len(data))]
    plan = loaded.plan(memory, inputs, [spec("y", (1, 3), "BYTES", offset=512, byte_size=len(data))], rows=1)
    memory.put(0, np.frombuffer(data, np.uint8))
    request = loaded.infer(plan)
    assert memory.bytes[512 : 512 + len(data)].tobytes() == data
    assert shapes_of(request) == [(1, 3)]
    assert loaded.copied() == {"policy": len(data), "output": len(data)}
    tight = loaded.plan(memory, inputs, [spec("y", (1, 3), "BYTES", offset=512, byte_size=len(data) - 1)], rows=1)
    assert f"should be at least {len(data)} bytes" in text_of(loaded.run(loaded.request(tight)))


def test_strings_that_are_not_what_they_say(load):
    loaded = load(models.identity(TensorProto.STRING))
    memory = loaded.memory()
    inputs = [spec("x", (1, 2), "BYTES", byte_size=16)]
    plan = loaded.plan(memory, inputs, [spec("y", (1, 2), "BYTES", offset=512, byte_size=64)], rows=1)
    for lengths, expected in (((8, 1 << 30), "incomplete string data"), ((0, 0), "unexpected number of string")):
        memory.bytes[:16] = 0
        memory.put(0, np.array(lengths[:1], np.uint32))
        memory.put(4 + lengths[0], np.array(lengths[1:], np.uint32))
        request = loaded.run(loaded.request(plan))
        assert request.code is Code.INVALID_ARG
        assert expected in text_of(request)


def test_strings_that_are_not_text(load):
    loaded = load(models.identity(TensorProto.STRING))
    memory = loaded.memory()
    inputs = [spec("x", (1, 1), "BYTES", byte_size=6)]
    plan = loaded.plan(memory, inputs, [spec("y", (1, 1), "BYTES", offset=512, byte_size=64)], rows=1)
    memory.put(0, np.frombuffer(b"\2\0\0\0\xff\xfe", np.uint8))
    request = loaded.run(loaded.request(plan))
    assert request.code is Code.INVALID_ARG
    assert "element 0 of inference input 'x' is not UTF-8" in text_of(request)


def test_what_is_beside_strings_is_copied_and_counted(load):
    nodes = [helper.make_node("Identity", ["s"], ["t"]), helper.make_node("Add", ["x", "x"], ["y"])]
    string = TensorProto.STRING
    model = models.build(
        nodes, [tensor("s", ["n"], string), tensor("x", ["m"])], [tensor("t", ["n"], string), tensor("y", ["m"])]
    )
    loaded = load(model, models.NONZERO_CONFIG)
    memory = loaded.memory()
    inputs = [spec("s", (1,), "BYTES", byte_size=7), spec("x", (4,), offset=64)]
    plan = loaded.plan(memory, inputs, [spec("y", (4,), offset=512)])
    memory.put(0, np.frombuffer(datatypes.encode_bytes(np.array([b"abc"], object)), np.uint8))
    memory.put(64, X)
    request = loaded.infer(plan)
    assert np.array_equal(memory.get(512, (1, 4)), 2 * X)
    assert request.copied == 7 + 16
    assert loaded.copied() == {"policy": 7, "output": 16}
    assert request.note == b""


def test_tensors_without_elements(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (1, 0), offset=64)], [spec("y", (1, 0), offset=256)], rows=1)
    memory.bytes[:] = 0xEE
    loaded.infer(plan)
    assert set(memory.bytes[:512].tolist()) == {0xEE}


def test_only_the_outputs_asked_for(load):
    loaded = load(models.two_input())
    memory = loaded.memory()
    inputs = [spec("b", (1, 4), offset=64), spec("a", (1, 4))]
    plan = loaded.plan(memory, inputs, [spec("difference", (1, 4), offset=256)], rows=1)
    memory.put(0, 5 * X)
    memory.put(64, X)
    loaded.infer(plan)
    assert np.array_equal(memory.get(256, (1, 4)), 4 * X)


def test_a_region_that_was_truncated_is_not_touched(load):
    loaded = load(models.add1())
    fd = os.memfd_create("test-system", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8192)
    memory = loaded.memory(8192, fd=fd, kind="system")
    plan = loaded.plan(memory, [spec("x", (1, 4))], [spec("y", (1, 4), offset=4096)], rows=1)
    loaded.infer(plan)
    os.ftruncate(fd, 4096)
    request = loaded.run(loaded.request(plan))
    assert request.code is Code.INTERNAL
    assert text_of(request) == f"shared memory region '{memory.info.name}' changed size: register it again"
    os.ftruncate(fd, 8192)
    loaded.infer(plan)
    os.close(fd)


def test_errors_are_the_runtimes_reason(load):
    loaded = load(models.gather())
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("index", (1, 1), "INT64")], [spec("y", (1, 1, 4), offset=512)], rows=1)
    memory.put(0, np.array([[64]], np.int64))
    request = loaded.run(loaded.request(plan))
    assert request.code is Code.INTERNAL
    assert text_of(request).startswith("onnx runtime error: Non-zero status code returned while running Gather node")
    assert "idx=64 must be within the inclusive range [-64,63]" in text_of(request)
    assert loaded.count(statistics.FAIL) == 1
    assert loaded.count(statistics.FAIL_NS) > 0
    assert loaded.count(statistics.BATCH) == 0
    memory.put(0, np.array([[63]], np.int64))
    loaded.infer(plan)


def test_statistics_of_one_success(load):
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (2, 4))], [spec("y", (2, 4), offset=256)], rows=2)
    request = loaded.infer(plan)
    assert loaded.count(statistics.SUCCESS) == 1
    assert loaded.count(statistics.INFERENCES) == 2
    assert loaded.count(statistics.EXECUTIONS) == 1
    assert loaded.batches() == {2: 1}
    assert loaded.count(statistics.QUEUE_NS) == request.queue_ns > 0
    assert loaded.count(statistics.INFER_NS) == request.infer_ns > 0
    assert loaded.count(statistics.LAST_MS) > 0
    assert not any(loaded.count(word) for word in (statistics.FAIL, statistics.CANCELLED, statistics.EXPIRED))


def test_the_cache_of_bindings_is_bounded(load, monkeypatch):
    monkeypatch.setattr(binding, "MAX_BINDINGS", 4)
    loaded = load(models.add1())
    memory = loaded.memory()
    plan = loaded.plan(memory, [spec("x", (1, 4), stride=16)], [spec("y", (1, 4), offset=1024)], positions=8, rows=1)
    for position in (*range(8), 0, 7):
        memory.put(16 * position, X * position)
        loaded.infer(plan, position)
        assert np.array_equal(memory.get(1024 + 16 * position, (1, 4)), X * position + 1)
        assert len(plan.bindings) <= 4
    assert len(plan.bindings) == 4
