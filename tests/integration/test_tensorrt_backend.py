"""The TensorRT backend on a double of TensorRT and the simulated driver: simulated; not run on hardware.

The functions `check_…` run in a process that finds the driver; pytest's own never loads one.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from broker.repository.config import InstanceGroup, ModelConfig, TensorConfig
from broker.worker.backends import Context, OnGpu, Operand
from broker.worker.backends import tensorrt as backend
from broker.worker.cuda.staging import KEPT, DeviceBuffer
from shm.cuda import driver
from shm.errors import InferError
from tests.doubles import tensorrt as double
from tests.fakes.cuda import CudaEnv

CHECKS: list[str] = []
BATCH = [[1, 4], [2, 4], [8, 4]]
Tensors = tuple[TensorConfig, ...]


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function.__name__)
    return function


def config(plan: bytes, inputs: Tensors, outputs: Tensors, most: int = 8, **parameters: str) -> ModelConfig:
    directory = Path(tempfile.mkdtemp()) / "1"
    directory.mkdir()
    (directory / "model.plan").write_bytes(plan)
    return ModelConfig(
        name="m",
        platform="tensorrt_plan",
        backend="tensorrt",
        directory=str(directory.parent),
        versions={1: str(directory)},
        default_model_filename="model.plan",
        max_batch_size=most,
        input=inputs,
        output=outputs,
        instance_group=(InstanceGroup(name="m", kind="KIND_GPU", gpus=(0,)),),
        parameters=parameters,
    )


def load(made: ModelConfig) -> backend.TensorRTModel:
    uuid = driver.devices("this test")[0].uuid
    return backend.load_with(double, Context(made, 1, made.versions[1], made.instance_group[0], "m_0", uuid))


def fp32(name: str, *dims: int) -> TensorConfig:
    return TensorConfig(name=name, datatype="FP32", dims=dims)


def adder(most: int = 8, **more: Any) -> ModelConfig:
    """OUTPUT0 = INPUT0 + INPUT1, batches of 1 to 8 rows of 4."""
    two = [double.tensor(f"INPUT{index}", [-1, 4], profiles=[BATCH]) for index in range(2)]
    plan = double.plan("add", two, [double.tensor("OUTPUT0", [-1, 4])], **more)
    return config(plan, (fp32("INPUT0", 4), fp32("INPUT1", 4)), (fp32("OUTPUT0", 4),), most)


class OnDevice:
    """An array on the GPU, at an offset in memory of its own."""

    def __init__(self, value: Any, offset: int = 0) -> None:
        self.value = np.asarray(value)
        self.buffer = DeviceBuffer(0, self.value.nbytes + offset)
        self.place = OnGpu(self.buffer.pointer + offset, self.value.nbytes)
        if self.value.nbytes:
            driver.call("cuMemcpyHtoD", self.place.pointer, self.value.ctypes.data, self.value.nbytes)

    def operand(self, name: str, datatype: str = "FP32") -> Operand:
        return Operand(name, datatype, self.value.shape, None, self.place)

    def now(self) -> np.ndarray:
        found = np.empty_like(self.value)
        driver.call("cuMemcpyDtoH", found.ctypes.data, self.place.pointer, found.nbytes)
        return found


def host(name: str, array: np.ndarray, datatype: str = "FP32") -> Operand:
    return Operand(name, datatype, array.shape, array.view(np.uint8).reshape(-1))


def refused(text: str, call: Callable[[], object]) -> None:
    with pytest.raises(InferError) as raised:
        call()
    assert text in raised.value.message


def rows(count: int, value: float = 1.0) -> np.ndarray:
    return np.full((count, 4), value, np.float32)


@check
def check_in_place() -> None:
    model = load(adder())
    x, y, z = OnDevice(rows(2)), OnDevice(rows(2, 2)), OnDevice(rows(2, 0))
    binding = model.bind([x.operand("INPUT0"), y.operand("INPUT1")], [z.operand("OUTPUT0")])
    for _ in range(2):
        binding.run()
    assert (z.now() == 3).all()
    assert dict(model.lane.moved) == {}
    assert binding.places() == []


@check
def check_host_operands_are_copied_and_counted() -> None:
    model = load(adder())
    x, y, z = rows(3), OnDevice(rows(3, 2)), rows(3, 0)
    binding = model.bind([host("INPUT0", x), y.operand("INPUT1")], [host("OUTPUT0", z)])
    binding.run()
    assert (z == 3).all()
    assert dict(model.lane.moved) == {"transfer": 2 * x.nbytes}


@check
def check_addresses_that_are_not_aligned_are_copied_on_the_gpu() -> None:
    model = load(adder())
    x, y, z = OnDevice(rows(1), 16), OnDevice(rows(1, 2)), OnDevice(rows(1, 0), 64)
    binding = model.bind([x.operand("INPUT0"), y.operand("INPUT1")], [z.operand("OUTPUT0")])
    binding.run()
    assert (z.now() == 3).all()
    assert dict(model.lane.moved) == {"align": 32}


@check
def check_bindings_take_turns_on_one_context() -> None:
    model = load(adder())
    made = []
    for count in (1, 5):
        x, y, z = OnDevice(rows(count, count)), OnDevice(rows(count)), OnDevice(rows(count, 0))
        made.append((model.bind([x.operand("INPUT0"), y.operand("INPUT1")], [z.operand("OUTPUT0")]), z, count, x, y))
    for _ in range(2):
        for binding, z, count, *_ in made:
            binding.run()
            assert (z.now() == count + 1).all()


@check
def check_outputs_without_memory_are_the_runtimes() -> None:
    model = load(adder())
    x = rows(2)
    binding = model.bind([host("INPUT0", x), host("INPUT1", x)], [Operand("OUTPUT0", "FP32", (2, 4), None)])
    binding.run()
    (result,) = binding.results()
    assert (result == 2).all()
    assert result.shape == (2, 4)
    ((place, shape),) = binding.places()
    assert shape == (2, 4)
    assert place.size == 32


@check
def check_an_instance_group_names_the_profiles_that_it_uses() -> None:
    """Of those that fit, the one that was built for what comes closest; others are not there for its instances."""
    ranges = [[[1, 4], [1, 4], [8, 4]], [[1, 4], [7, 4], [8, 4]], [[1, 4], [4, 4], [4, 4]]]
    plan = double.plan(
        "identity", [double.tensor("INPUT0", [-1, 4], profiles=ranges)], [double.tensor("OUTPUT0", [-1, 4])], profiles=3
    )
    made = config(plan, (fp32("INPUT0", 4),), (fp32("OUTPUT0", 4),))

    def grouped(*profiles: int) -> ModelConfig:
        return replace(made, instance_group=(replace(made.instance_group[0], profiles=profiles),))

    def chosen(model: backend.TensorRTModel, count: int) -> int:
        x, y = rows(count, count), rows(count, 0)
        binding = model.bind([host("INPUT0", x)], [host("OUTPUT0", y)])
        binding.run()
        assert (y == count).all()
        return binding._profile  # type: ignore[attr-defined, no-any-return]

    assert [chosen(load(grouped()), count) for count in (1, 4, 6, 8)] == [0, 2, 1, 1]
    assert [chosen(load(grouped(1, 0)), count) for count in (1, 4, 8)] == [0, 1, 1]
    limited = load(replace(grouped(2), max_batch_size=4))
    x = rows(5)
    text = "input 'INPUT0' of shape [5,4] is outside of the engine's optimization profiles, which have [1,4] to [4,4]"
    refused(text, lambda: limited.bind([host("INPUT0", x)], [host("OUTPUT0", x)]))
    refused(
        "takes batches of at most 4: max_batch_size: 4, or an optimization profile with more", lambda: load(grouped(2))
    )
    refused("instance group m names optimization profile 3, ", lambda: load(grouped(0, 3)))


@check
def check_profiles_are_chosen_by_shape() -> None:
    small, large = [[1, 4], [1, 4], [2, 4]], [[4, 4], [4, 4], [8, 4]]
    plan = double.plan(
        "identity", [double.tensor("INPUT0", [-1, 4], profiles=[small, large])], [double.tensor("OUTPUT0", [-1, 4])],
        profiles=2,
    )  # fmt: skip
    model = load(config(plan, (fp32("INPUT0", 4),), (fp32("OUTPUT0", 4),)))
    for count in (2, 8, 1):
        x, y = rows(count, count), rows(count, 0)
        model.bind([host("INPUT0", x)], [host("OUTPUT0", y)]).run()
        assert (y == count).all()
    x = rows(3)
    text = "input 'INPUT0' of shape [3,4] is outside of the engine's optimization profiles, which have [1,4] to [2,4]"
    refused(text, lambda: model.bind([host("INPUT0", x)], [host("OUTPUT0", x)]))


@check
def check_shape_tensors_are_read_once() -> None:
    inputs = [
        double.tensor("INPUT0", [12]),
        double.tensor("INPUT1", [2], "INT64", host=True, values=[[[1, 1], [2, 2], [12, 12]]]),
    ]
    plan = double.plan("reshape", inputs, [double.tensor("OUTPUT0", [-1, -1])])
    shape = TensorConfig(name="INPUT1", datatype="INT64", dims=(2,), is_shape_tensor=True)
    model = load(config(plan, (fp32("INPUT0", 12), shape), (fp32("OUTPUT0", -1, -1),), 0))
    values, wanted = np.arange(12, dtype=np.float32), np.array([3, 4], np.int64)
    out = Operand("OUTPUT0", "FP32", (-1, -1), None)
    on_gpu = OnDevice(wanted)
    for given in (host("INPUT1", wanted, "INT64"), on_gpu.operand("INPUT1", "INT64")):
        binding = model.bind([host("INPUT0", values), given], [out])
        binding.run()
        assert binding.results()[0].shape == (3, 4)
    binding = model.bind([host("INPUT0", values), host("INPUT1", wanted, "INT64")], [out])
    wanted[:] = 6, 2
    binding.run()
    assert binding.results()[0].shape == (6, 2)
    wanted[:] = 1, 13
    refused("shape tensor 'INPUT1' is [1, 13], the engine's optimization profile has [1, 1] to [12, 12]", binding.run)
    refused("the plan says [4,3]", model.bind(
        [host("INPUT0", values), on_gpu.operand("INPUT1", "INT64")],
        [host("OUTPUT0", np.empty((4, 3), np.float32))],
    ).run)  # fmt: skip


@check
def check_outputs_may_be_shape_tensors() -> None:
    plan = double.plan(
        "shape", [double.tensor("INPUT0", [-1, 4], profiles=[BATCH])],
        [double.tensor("OUTPUT0", [2], "INT32", host=True)],
    )  # fmt: skip
    output = TensorConfig(name="OUTPUT0", datatype="INT32", dims=(2,))
    model = load(config(plan, (fp32("INPUT0", -1, 4),), (output,), 0))
    x, y, z = rows(7), np.zeros(2, np.int32), OnDevice(np.zeros(2, np.int32))
    for out in (host("OUTPUT0", y, "INT32"), z.operand("OUTPUT0", "INT32"), Operand("OUTPUT0", "INT32", (2,), None)):
        binding = model.bind([host("INPUT0", x)], [out])
        binding.run()
    assert y.tolist() == z.now().tolist() == binding.results()[0].tolist() == [7, 4]


def places() -> backend.TensorRTModel:
    """OUTPUT0: where INPUT0, of 8, is not 0."""
    plan = double.plan("nonzero", [double.tensor("INPUT0", [8], "INT32")], [double.tensor("OUTPUT0", [-1], "INT32")])
    given = TensorConfig(name="INPUT0", datatype="INT32", dims=(8,))
    return load(config(plan, (given,), (TensorConfig(name="OUTPUT0", datatype="INT32", dims=(-1,)),), 0))


@check
def check_sizes_that_only_the_run_tells() -> None:
    """Bindings share the memory for them: one client has thousands of bindings, and one GPU is everybody's."""
    model = places()
    assert model.scratch.most == KEPT
    bindings, free = [], []
    for x in ([1] * 8, [0, 1, 0, 1, 1, 0, 0, 0], [0] * 8, [1] * 8):
        array = np.array(x, np.int32)
        bindings.append(model.bind([host("INPUT0", array, "INT32")], [Operand("OUTPUT0", "INT32", (-1,), None)]))
        bindings[-1].run()
        assert bindings[-1].results()[0].tolist() == np.flatnonzero(array).tolist()
        free.append(driver.call("cuMemGetInfo")[0])
    assert free == free[:1] * 4
    bindings[0].run()
    assert bindings[0].results()[0].tolist() == list(range(8)), "and the first still knows where"
    y, z = np.zeros(8, np.int32), OnDevice(np.zeros(8, np.int32))
    model.bind([host("INPUT0", array, "INT32")], [host("OUTPUT0", y, "INT32")]).run()
    model.bind([host("INPUT0", array, "INT32")], [z.operand("OUTPUT0", "INT32")]).run()
    assert y.tolist() == z.now().tolist() == list(range(8))
    array[0] = 0
    refused("output 'OUTPUT0' has shape [7], the plan says [8]: leave the dimension open (-1)", model.bind(
        [host("INPUT0", array, "INT32")], [host("OUTPUT0", y, "INT32")]
    ).run)  # fmt: skip


@check
def check_what_is_too_large_to_keep_ends_with_its_binding() -> None:
    model = load(adder())
    assert model.scratch.most > KEPT, "its configuration says how large tensors are"
    model.scratch.most = 16
    x, y, z = rows(2), rows(2), rows(2)
    before = driver.call("cuMemGetInfo")[0]
    binding = model.bind([host("INPUT0", x), host("INPUT1", y)], [host("OUTPUT0", z)])
    binding.run()
    assert (z == 2).all()
    assert model.scratch.lent
    assert driver.call("cuMemGetInfo")[0] < before
    del binding
    assert driver.call("cuMemGetInfo")[0] == before


@check
def check_plans_that_do_not_fit_the_configuration() -> None:
    def tensors(**more: Any) -> bytes:
        return double.plan(
            "identity", [double.tensor("INPUT0", [-1, 4], **{"profiles": [BATCH], **more})],
            [double.tensor("OUTPUT0", [-1, 4])],
        )  # fmt: skip

    def served(plan: bytes, name: str = "INPUT0", datatype: str = "FP32", dims: Any = (4,), most: int = 8) -> None:
        given = (TensorConfig(name=name, datatype=datatype, dims=dims),)
        load(config(plan, given, (fp32("OUTPUT0", 4),), most))

    served(tensors())
    refused("input 'X' is not in /", lambda: served(tensors(), name="X"))
    refused("is FP16 in the configuration, FP32 in the engine", lambda: served(tensors(), datatype="FP16"))
    refused("has shape [-1,5] in the configuration (with the batch", lambda: served(tensors(), dims=(5,)))
    refused("takes batches of at most 8: max_batch_size: 8", lambda: served(tensors(), most=9))
    refused("is FP8, for which there is no datatype", lambda: served(tensors(dtype="FP8")))
    text = "Two wide channel vectorized row major FP16 format"
    refused(f"has the format '{text}'", lambda: served(tensors(format=text)))
    refused("Channel major", lambda: served(tensors(format="Channel major FP16 format where C % 8 == 0")))
    refused("'INPUT0' of /", lambda: served(tensors(host=True)))
    refused("is a shape tensor, which is one for all of a batch", lambda: served(tensors(host=True)))
    served(tensors(dtype="BF16"), datatype="BF16")
    refused(
        "unable to create TensorRT engine: IRuntime::deserializeCudaEngine: Error Code 1: magic tag mismatch. /",
        lambda: served(b"garbage"),
    )
    refused("compute capability 9.0", lambda: served(b"garbage"))


@check
def check_a_run_that_fails_has_tensorrts_words() -> None:
    model = load(adder(fault="refuse"))
    x = rows(1)
    binding = model.bind([host("INPUT0", x), host("INPUT1", x)], [host("OUTPUT0", x)])
    refused("TensorRT failed to run the model: IExecutionContext::enqueueV3: Error Code 1: an error", binding.run)


@check
def check_instances_share_an_engine() -> None:
    made = adder()
    first, second = load(made), load(made)
    assert first.engine is second.engine
    assert first.lane.stream != second.lane.stream
    first.close()
    x, y = rows(1), rows(1, 0)
    second.bind([host("INPUT0", x), host("INPUT1", x)], [host("OUTPUT0", y)]).run()
    assert (y == 2).all()
    refused("TensorRT has no strings", lambda: second.bind([Operand("INPUT0", "BYTES", (1,), None)], []))
    second.close()


def run_all() -> None:
    """In the process with the driver: what each check raised, as JSON."""
    found = {}
    for name in CHECKS:
        try:
            globals()[name]()
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def failures(cuda_library: Path | None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    env = CudaEnv(cuda_library is not None, cuda_library, tmp_path_factory.mktemp("cusim-calls"))
    temporary = str(tmp_path_factory.mktemp("plans"))
    script = "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from {} import run_all; run_all()"
    result = env.run("-c", script.format(__name__), temporary)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CHECKS)
def test_tensorrt(failures: dict[str, str], name: str) -> None:
    assert failures[name] == ""


def test_no_gpu_no_tensorrt() -> None:
    made = adder()
    with pytest.raises(InferError, match="TensorRT runs on GPUs only"):
        backend.load_with(double, Context(made, 1, made.versions[1], made.instance_group[0], "m_0"))


def test_without_either_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MODULES", ("nowhere_to_be_found", "nor_this"))
    with pytest.raises(InferError) as raised:
        backend.runtime_module()
    assert raised.value.code == "UNAVAILABLE"
    text = (
        "TensorRT cannot be imported (nowhere_to_be_found: ModuleNotFoundError: No module named 'nowhere_to_be_found'; "
    )
    assert raised.value.message.startswith(text)
    assert "pip install 'tensorbroker[tensorrt]'" in raised.value.message
