"""ONNX Runtime's GPU path: the same code with the word "cpu" and a lane that is the host's; options; the provider."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from broker.worker.backends import OnGpu, Operand
from broker.worker.backends.onnxruntime import OnnxModel
from broker.worker.backends.onnxruntime_cuda import check_provider, provider_options
from shm.cuda.driver import Device
from shm.errors import InferError
from tests.doubles.host_lane import HostBuffer, HostLane, HostScratch
from tests.fakes import models

DEVICE = Device(1, "GPU-none", "the host", (0, 0), 0)


def model(graph: onnx.ModelProto) -> tuple[OnnxModel, HostLane]:
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    lane = HostLane()
    return OnnxModel(session, "cpu", lane, HostScratch()), lane  # type: ignore[arg-type]


def rows(count: int, value: float = 1.0) -> np.ndarray:
    return np.full((count, 4), value, np.float32)


def host(name: str, array: np.ndarray) -> Operand:
    return Operand(name, "FP32", array.shape, array.view(np.uint8).reshape(-1))


class There:
    """An array in what stands for the GPU."""

    def __init__(self, array: np.ndarray, offset: int = 0) -> None:
        self.buffer = HostBuffer(array.nbytes + offset)
        self.array = self.buffer.array[offset:].view(np.float32).reshape(array.shape)
        self.array[:] = array
        self.place = OnGpu(self.buffer.pointer + offset, array.nbytes)

    def operand(self, name: str) -> Operand:
        return Operand(name, "FP32", self.array.shape, None, self.place)


def test_pointers_are_used_in_place() -> None:
    made, lane = model(models.add1())
    x, y = There(rows(3)), There(rows(3, 0))
    binding = made.bind([x.operand("x")], [y.operand("y")])
    for _ in range(2):
        binding.run()
    assert (y.array == 2).all()
    assert lane.calls == ["finish", "finish"]
    assert dict(lane.moved) == {}  # type: ignore[attr-defined]


def test_what_lies_elsewhere_is_copied_around_the_run() -> None:
    made, lane = model(models.add1())
    x, y = rows(3), There(rows(3, 0), 16)
    binding = made.bind([host("x", x)], [y.operand("y")])
    binding.run()
    assert (y.array == 2).all()
    assert lane.calls == ["in", "within", "finish"]
    assert dict(lane.moved) == {"transfer": 48, "align": 48}  # type: ignore[attr-defined]
    z = rows(3, 0)
    made.bind([host("x", x)], [host("y", z)]).run()
    assert (z == 2).all()


def test_outputs_of_unknown_shape_stay_where_the_runtime_made_them() -> None:
    graph = models.build(
        [helper.make_node("Compress", ["x", "mask"], ["y"], axis=0)],
        [models.tensor("x", ["n", 4])],
        [models.tensor("y", ["k", 4])],
        {"mask": np.array([True, False, True])},
    )
    made, _ = model(graph)
    x = There(rows(3, 5))
    binding = made.bind([x.operand("x")], [Operand("y", "FP32", (-1, 4), None)])
    for _ in range(2):
        binding.run()
        ((place, shape),) = binding.places()  # type: ignore[attr-defined]
        assert (place.size, shape) == (32, (2, 4))
        assert (binding.results()[0] == 5).all()


def test_only_the_last_run_of_an_instance_keeps_what_the_runtime_allocated() -> None:
    """A client may have thousands of bindings, and one GPU is everybody's."""
    graph = models.build(
        [helper.make_node("Compress", ["x", "mask"], ["y"], axis=0)],
        [models.tensor("x", ["n", 4])],
        [models.tensor("y", ["k", 4])],
        {"mask": np.array([True, False, True])},
    )
    made, _ = model(graph)
    x = There(rows(3, 5))
    bindings = [made.bind([x.operand("x")], [Operand("y", "FP32", (-1, 4), None)]) for _ in range(3)]

    def held() -> list[bool]:
        return [value.has_value() for each in bindings for value in each._io.get_outputs()]  # type: ignore[attr-defined]

    for at, binding in enumerate(bindings):
        binding.run()
        assert held() == [each == at for each in range(3)]
        assert (binding.results()[0] == 5).all()


def test_closing_gives_the_stream_back() -> None:
    made, lane = model(models.add1())
    made.close()
    assert lane.calls == ["close"]


# --- options --------------------------------------------------------------------------------------------------------


def test_options_of_the_provider() -> None:
    assert provider_options({}, DEVICE, 77) == {
        "device_id": "1",
        "user_compute_stream": "77",
        "do_copy_in_default_stream": "1",
        "arena_extend_strategy": "kSameAsRequested",
    }
    given = {
        "cudnn_conv_algo_search": "1",
        "gpu_mem_limit": "4294967296",
        "arena_extend_strategy": "0",
        "do_copy_in_default_stream": "0",
    }
    made = provider_options(given, DEVICE, 77)
    assert made["cudnn_conv_algo_search"] == "HEURISTIC"
    assert made["gpu_mem_limit"] == "4294967296"
    assert made["arena_extend_strategy"] == "kNextPowerOfTwo"
    assert made["do_copy_in_default_stream"] == "0"
    assert provider_options({"cudnn_conv_algo_search": "DEFAULT"}, DEVICE, 0)["cudnn_conv_algo_search"] == "DEFAULT"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("cudnn_conv_algo_search", "3", "must be one of 0 (EXHAUSTIVE), 1 (HEURISTIC), 2 (DEFAULT), got '3'"),
        ("arena_extend_strategy", "", "must be one of 0 (kNextPowerOfTwo), 1 (kSameAsRequested), got ''"),
        ("gpu_mem_limit", "2GB", "model parameter 'gpu_mem_limit' must be a number of bytes, got '2GB'"),
        ("do_copy_in_default_stream", "yes", "must be one of 0, 1, got 'yes'"),
    ],
)
def test_values_that_a_parameter_cannot_have(name: str, value: str, text: str) -> None:
    with pytest.raises(InferError) as raised:
        provider_options({name: value}, DEVICE, 0)
    assert raised.value.code == "INVALID_ARG"
    assert text in raised.value.message


# --- the provider ---------------------------------------------------------------------------------------------------


def runtime(available: list[str]) -> Any:
    return SimpleNamespace(get_available_providers=lambda: available, __version__="1.31.1")


def session(providers: list[str]) -> Any:
    return SimpleNamespace(get_providers=lambda: providers)


def test_a_model_that_is_silently_on_the_cpu_is_refused() -> None:
    check_provider(runtime([]), session(["CUDAExecutionProvider", "CPUExecutionProvider"]), "m_0")
    for available, why in (
        (["CUDAExecutionProvider"], "the libraries of CUDA 13 or cuDNN 9 cannot be loaded"),
        (["CPUExecutionProvider"], "the installed package is the runtime for the CPU"),
    ):
        with pytest.raises(InferError) as raised:
            check_provider(runtime(available), session(["CPUExecutionProvider"]), "m_0")
        assert raised.value.code == "UNAVAILABLE"
        assert raised.value.message.startswith(
            "instance 'm_0' is to run on a GPU, but ONNX Runtime 1.31.1 runs it by CPUExecutionProvider: " + why
        )
