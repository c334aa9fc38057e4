"""A double of TensorRT's Python module: as much of it as `broker.worker.backends.tensorrt` calls, on any CUDA driver.

A plan is JSON (`plan`): tensors, profiles, and one of the operations below. `execute_async_v3` copies the inputs to the
host, computes there in a host function, and copies the outputs back, all on the stream it is given and by calls of the
driver: so it is as wrong as the real one about whatever was not synchronised. test_tensorrt_double.py compares every
signature here with `tensorrt_lean`'s.
"""

from __future__ import annotations

import ctypes
import enum
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from shm.cuda.driver import bindings, call

__version__ = "11.4.0.double"
Values = dict[str, np.ndarray]
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DataType(enum.Enum):
    FLOAT, HALF, BF16, INT8, INT32, INT64, BOOL, UINT8, FP8 = range(9)


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self) -> None:
        pass

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    def __init__(self) -> None:
        pass

    def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
        raise NotImplementedError

    def notify_shape(self, tensor_name: str, shape: Any) -> None:
        raise NotImplementedError


DTYPES = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": np.uint16, "INT8": np.int8, "INT32": np.int32, "INT64": np.int64,
    "BOOL": np.bool_, "UINT8": np.uint8, "FP8": np.uint8,
}  # fmt: skip


def _add(inputs: Values) -> Values:
    return {"OUTPUT0": inputs["INPUT0"] + inputs["INPUT1"]}


def _identity(inputs: Values) -> Values:
    return {"OUTPUT" + name.removeprefix("INPUT"): value.copy() for name, value in inputs.items()}


def _nonzero(inputs: Values) -> Values:
    """How many there are only the data says."""
    return {"OUTPUT0": np.flatnonzero(inputs["INPUT0"]).astype(np.int32)}


def _reshape(inputs: Values) -> Values:
    """INPUT1 is a shape tensor: the output's shape."""
    return {"OUTPUT0": inputs["INPUT0"].reshape(inputs["INPUT1"].tolist())}


def _shape_of(inputs: Values) -> Values:
    """OUTPUT0 is a shape tensor: INPUT0's shape."""
    return {"OUTPUT0": np.array(inputs["INPUT0"].shape, np.int32)}


OPERATIONS: dict[str, Callable[[Values], Values]] = {
    "add": _add, "identity": _identity, "nonzero": _nonzero, "reshape": _reshape, "shape": _shape_of,
}  # fmt: skip


def tensor(name: str, shape: list[int], dtype: str = "FLOAT", **more: Any) -> dict[str, Any]:
    """One of a plan. More: `profiles` [[min, opt, max], …], `host`, `values` [[min, opt, max], …], `format`."""
    return {"name": name, "shape": shape, "dtype": dtype, **more}


def plan(operation: str, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], **more: Any) -> bytes:
    """A plan file. More: `profiles` (1), `fault`: "sticky" (its run loses the context), "refuse" (its run fails), "no
    memory" (there is none for its execution context).
    """
    return json.dumps({"operation": operation, "inputs": inputs, "outputs": outputs, **more}).encode()


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        try:
            return ICudaEngine(json.loads(serialized_engine), self.logger)
        except (ValueError, UnicodeDecodeError):
            self.logger.log(ILogger.Severity.ERROR, "IRuntime::deserializeCudaEngine: Error Code 1: magic tag mismatch")
            return None


class ICudaEngine:
    def __init__(self, described: dict[str, Any], logger: ILogger) -> None:
        self._logger = logger
        self._tensors = {each["name"]: each for each in (*described["inputs"], *described["outputs"])}
        self._inputs = {each["name"] for each in described["inputs"]}
        self._operation = described["operation"]
        self._fault = described.get("fault", "")
        self.num_io_tensors = len(self._tensors)
        self.num_optimization_profiles = described.get("profiles", 1)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._tensors[name]["dtype"]]

    def get_tensor_shape(self, name: str) -> list[int]:
        return self._tensors[name]["shape"]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self._tensors[name].get("host") else TensorLocation.DEVICE

    def get_tensor_format_desc(self, name: str) -> str:
        return self._tensors[name].get("format", "Row major linear FP32 format")

    def get_tensor_vectorized_dim(self, name: str) -> int:
        return 1 if "vectorized" in self.get_tensor_format_desc(name) else -1

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        return self._tensors[name]["profiles"][profile_index]

    def get_tensor_profile_values(self, name: int, profile_index: str) -> list[list[int]]:
        # The bindings' own names for these: the first is the profile, the second the tensor.
        values = self._tensors[profile_index].get("values")
        return values[name] if values else []

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> IExecutionContext | None:
        if self._fault == "no memory":
            self._logger.log(ILogger.Severity.ERROR, "Error Code 2: OutOfMemory (Requested size was 1 bytes.)")
            return None
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, IOutputAllocator] = {}
        self._kept: list[object] = []  # of the run that is under way

    def _error(self, text: str) -> bool:
        self._engine._logger.log(ILogger.Severity.ERROR, text)
        return False

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle
        self._profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(low) or any(not a <= dim <= b for a, dim, b in zip(low, shape, high, strict=True)):
            return self._error(f"IExecutionContext::setInputShape: Error Code 3: {name}: {shape} is not in the profile")
        self._shapes[name] = tuple(shape)
        return True

    def _shape(self, name: str) -> tuple[int, ...]:
        fixed = tuple(self._engine._tensors[name]["shape"])
        return self._shapes.get(name, fixed)

    def infer_shapes(self) -> list[str]:
        inputs = self._engine._inputs
        return [name for name in inputs if -1 in self._shape(name) or name not in self._addresses]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        engine = self._engine
        shape = self._shape(name)
        if name in engine._inputs or -1 not in shape or engine._operation == "nonzero":
            return shape
        if engine._operation == "reshape":
            return tuple(self._host_values("INPUT1").tolist())
        return self._shape("INPUT" + name.removeprefix("OUTPUT"))

    def _host_values(self, name: str) -> np.ndarray:
        shape, dtype = self._shape(name), DTYPES[self._engine._tensors[name]["dtype"]]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(self._addresses[name], size), dtype).reshape(shape)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if not memory or (memory % 256 and not self._engine._tensors[name].get("host")):
            return self._error(f"IExecutionContext::setTensorAddress: Error Code 3: {name}: address {memory:#x}")
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator) -> bool:
        self._allocators[name] = output_allocator
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine, stream = self._engine, stream_handle
        if engine._fault == "refuse":
            return self._error("IExecutionContext::enqueueV3: Error Code 1: an error that was asked for")
        if engine._fault == "sticky":  # as a kernel that writes to an illegal address: noticed later
            output = self._addresses["OUTPUT0"]
            call("cuMemcpyDtoDAsync", output, output + (4 << 30), 16, stream)
            return True
        self._kept.clear()
        inputs = {name: self._fetch(name, stream) for name in engine._inputs}
        if self._allocators:
            return self._execute_with_allocators(inputs, stream)
        outputs = {}
        for name in set(engine._tensors) - engine._inputs:
            outputs[name] = np.empty(self.get_tensor_shape(name), DTYPES[engine._tensors[name]["dtype"]])

        def compute(_: object) -> None:
            try:
                for name, value in OPERATIONS[engine._operation](inputs).items():
                    outputs[name][...] = value
            except Exception as error:
                print(f"the double of TensorRT failed: {error!r}", file=sys.stderr, flush=True)

        function = _HOST_FUNCTION(compute)
        self._kept += [function, inputs, outputs]
        call("cuLaunchHostFunc", stream, bindings().CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0)
        for name, value in outputs.items():
            if engine._tensors[name].get("host"):
                call("cuStreamSynchronize", stream)
                ctypes.memmove(self._addresses[name], value.ctypes.data, value.nbytes)
            elif value.nbytes:
                call("cuMemcpyHtoDAsync", self._addresses[name], value.ctypes.data, value.nbytes, stream)
        return True

    def _fetch(self, name: str, stream: int) -> np.ndarray:
        if self._engine._tensors[name].get("host"):
            return self._host_values(name)
        value = np.empty(self._shape(name), DTYPES[self._engine._tensors[name]["dtype"]])
        if value.nbytes:
            call("cuMemcpyDtoHAsync", value.ctypes.data, self._addresses[name], value.nbytes, stream)
        return value

    def _execute_with_allocators(self, inputs: Values, stream: int) -> bool:
        call("cuStreamSynchronize", stream)
        for name, value in OPERATIONS[self._engine._operation](inputs).items():
            pointer = self._allocators[name].reallocate_output_async(name, 0, value.nbytes, 256, stream)
            if not pointer:
                return self._error(f"IExecutionContext::enqueueV3: Error Code 2: {name}: OutOfMemory")
            self._kept.append(value)
            if value.nbytes:
                call("cuMemcpyHtoDAsync", pointer, value.ctypes.data, value.nbytes, stream)
            self._allocators[name].notify_shape(name, value.shape)
        return True
