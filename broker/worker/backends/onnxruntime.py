"""ONNX Runtime on the CPU or a GPU: IOBinding straight onto the operands' memory, no copy of ours.

Tensors of strings have no memory that a runtime could read in place: models with BYTES operands are fed through
`session.run` instead.

The device is a word and a way to addresses (`_Bound`); everything else is the same for both. On a GPU: not run on
hardware.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import onnxruntime

from broker.worker.backends import Binding, Context, OnGpu, Operand, Reshaped
from broker.worker.backends.onnxruntime_cuda import PROVIDER, check_provider, provider_options
from shm import datatypes
from shm.errors import Code, InferError

if TYPE_CHECKING:
    from broker.worker.cuda.staging import Places, Scratch
    from broker.worker.cuda.streams import Lane

# onnx.TensorProto.DataType, by KServe name: `bind_input` takes the number, which also covers what numpy lacks (BF16).
ELEMENT_TYPE = {
    "FP32": 1, "UINT8": 2, "INT8": 3, "UINT16": 4, "INT16": 5, "INT32": 6, "INT64": 7, "BYTES": 8, "BOOL": 9,
    "FP16": 10, "FP64": 11, "UINT32": 12, "UINT64": 13, "BF16": 16,
}  # fmt: skip
# `optimization.graph.level` as Triton has it; any other is the runtime's own default, all optimizations.
_GRAPH_LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
DEVICE_ALLOCATOR = "session.use_device_allocator_for_initializers"  # parameter, and the runtime's own name
_ERRORS_ONLY = 3
# What the runtime puts around its reasons: the status twice, and where in its own source the check stands.
_STATUS = re.compile(r"^(Error in execution: )?(\[ONNXRuntimeError\] : \d+ : \w+ : )?")
_SOURCE = re.compile(r"\S*/onnxruntime/\S+\.\w+:\d+ (?:[^()]*\([^()]*\)(?: const)?(?: \[with [^]]*\])? )?")
_MAX_REASON = 400
_RESHAPED = "Got invalid dimensions for output"  # as the runtime says it


def load(context: Context) -> OnnxModel:
    """A session of its own for every instance, as in Triton."""
    if context.group.kind == "KIND_GPU":
        return _load_on_gpu(context)
    return OnnxModel(_session(context, ["CPUExecutionProvider"]))


def _session(context: Context, providers: list[Any]) -> Any:
    path = os.path.join(context.directory, context.config.default_model_filename or "model.onnx")
    try:
        return onnxruntime.InferenceSession(path, _options(context), providers=providers)
    except Exception as error:  # the runtime raises classes of its own, not one base
        raise _failure(Code.INTERNAL, error) from None


def _load_on_gpu(context: Context) -> OnnxModel:
    from broker.worker.cuda.staging import Scratch, kept
    from broker.worker.cuda.streams import Lane
    from shm.cuda.driver import find_device

    device = find_device(context.device, f"instance '{context.name}'")
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls(directory="")  # CUDA and cuDNN from their packages; says nothing when they are missing
    lane = Lane(device)
    try:
        options = provider_options(context.config.parameters, device, lane.stream)
        session = _session(context, [(PROVIDER, options), "CPUExecutionProvider"])
        check_provider(onnxruntime, session, context.name)
    except BaseException:
        lane.close()
        raise
    return OnnxModel(session, "cuda", lane, Scratch(device.ordinal, kept(context.config)))


def _options(context: Context) -> Any:
    parameters = context.config.parameters
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY + 1  # errors come as exceptions, with their text
    options.intra_op_num_threads = _count(parameters, "intra_op_thread_count")
    options.inter_op_num_threads = _count(parameters, "inter_op_thread_count")
    if parameters.get("execution_mode", "0") == "1":
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    if (level := _GRAPH_LEVELS.get(context.config.graph_level)) is not None:
        options.graph_optimization_level = level
    options.enable_cpu_mem_arena = parameters.get("enable_mem_arena", "1") != "0"
    options.enable_mem_pattern = parameters.get("enable_mem_pattern", "1") != "0"
    if parameters.get(DEVICE_ALLOCATOR, "0") == "1":
        options.add_session_config_entry(DEVICE_ALLOCATOR, "1")
    # Pool threads that spin between runs take the cores that the clients of the same host need.
    options.add_session_config_entry("session.intra_op.allow_spinning", parameters.get("allow_spinning", "0"))
    return options


def _count(parameters: dict[str, str], key: str) -> int:
    text = parameters.get(key, "0")
    if not (text.isascii() and text.isdigit()):
        raise InferError(Code.INVALID_ARG, f"model parameter '{key}' must be a number of threads, got '{text}'")
    return int(text)


@final
class OnnxModel:
    """One InferenceSession. With a `lane` it is on a GPU (`broker.worker.backends.GpuModel`).

    `device`: the runtime's word for where pointers lead, "cpu" or "cuda".
    """

    __slots__ = ("_device", "_ran", "_session", "lane", "scratch")

    def __init__(
        self, session: Any, device: str = "cpu", lane: Lane | None = None, scratch: Scratch | None = None
    ) -> None:
        self._session = session
        self._device = device
        self.lane = lane
        self.scratch = scratch
        self._ran: list[_Allocated] = []  # on a GPU: what the last run allocated is kept until the next, never longer

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Strings anywhere: feed; else pointers."""
        if any(operand.datatype == "BYTES" for operand in (*inputs, *outputs)):
            return _Feed(self._session, inputs, outputs)
        if self.lane is None:
            return _Bound(self._session, inputs, outputs)
        assert self.scratch is not None
        return _BoundOnGpu(self._session, inputs, outputs, self._device, self.lane, self.scratch, self._ran)

    def close(self) -> None:
        """The session goes with its last reference."""
        self._session = None
        self._ran.clear()
        if self.lane is not None and self.scratch is not None:
            self.scratch.close()
            self.lane.close()


class _Allocated(NamedTuple):
    """Outputs for which the runtime allocates memory, of one IOBinding."""

    io: Any
    names: tuple[str, ...]
    where: tuple[str, int]

    def let_go(self) -> None:
        """An IOBinding keeps what its last run allocated, and would demand the same shape again."""
        for name in self.names:
            self.io.bind_output(name, *self.where)


class _Bound:
    """An IOBinding on raw pointers. Keeps the operands' arrays, so the memory cannot go before the binding."""

    __slots__ = ("_allocated", "_io", "_kept", "_open", "_session", "_where")

    def __init__(
        self, session: Any, inputs: list[Operand], outputs: list[Operand], where: tuple[str, int] = ("cpu", 0)
    ) -> None:
        self._session = session
        self._kept = (inputs, outputs)
        self._where = where
        self._io = session.io_binding()
        self._open = [
            (operand.name, index)
            for index, operand in enumerate(outputs)
            if operand.memory is None and operand.gpu is None
        ]
        opens = {name for name, _ in self._open}
        self._allocated = _Allocated(self._io, tuple(name for name, _ in self._open), where)
        try:
            for operand in inputs:
                self._io.bind_input(*self._place(operand, self._input(operand)))
            for operand in outputs:
                if operand.name in opens:
                    self._io.bind_output(operand.name, *where)
                else:
                    self._io.bind_output(*self._place(operand, self._output(operand)))
        except InferError:
            raise
        except Exception as error:
            raise _failure(Code.INVALID_ARG, error) from None

    def _place(self, operand: Operand, pointer: int) -> tuple[str, str, int, int, tuple[int, ...], int]:
        return operand.name, *self._where, ELEMENT_TYPE[operand.datatype], operand.shape, pointer

    def _input(self, operand: Operand) -> int:
        assert operand.memory is not None
        pointer: int = operand.memory.__array_interface__["data"][0]
        return pointer

    _output = _input

    @property
    def run(self) -> Callable[[], None]:
        """What runs it; not an attribute, which would refer back to the binding and keep clients' memory mapped."""
        return self._run_open if self._open else self._run_closed

    def _run_closed(self) -> None:
        try:
            self._session.run_with_iobinding(self._io)
        except Exception as error:
            raise _failure(Code.INTERNAL, error) from None

    def _run_open(self) -> None:
        self._allocated.let_go()  # of a run whose results nobody has taken
        self._run_closed()

    def results(self) -> list[npt.NDArray[np.generic]]:
        """They own what the run has allocated. A client may have thousands of bindings: none keeps it."""
        values = self._io.get_outputs()
        found = [_view(values[index], self._kept[1][index].datatype) for _, index in self._open]
        self._allocated.let_go()
        return found


@final
class _BoundOnGpu(_Bound):
    """The same on a GPU. Implements `broker.worker.backends.GpuBinding`."""

    __slots__ = ("_lane", "_places", "_ran")

    def __init__(
        self,
        session: Any,
        inputs: list[Operand],
        outputs: list[Operand],
        device: str,
        lane: Lane,
        scratch: Scratch,
        ran: list[_Allocated],
    ) -> None:
        from broker.worker.cuda.staging import Places

        lane.enter()
        self._lane, self._ran = lane, ran
        self._places: Places = Places(lane, scratch)
        super().__init__(session, inputs, outputs, (device, lane.device.ordinal))

    def _input(self, operand: Operand) -> int:
        return self._places.input(operand)

    def _output(self, operand: Operand) -> int:
        return self._places.output(operand)

    @property
    def run(self) -> Callable[[], None]:
        """As on the CPU, with the copies around it, on one stream; returns when the GPU is done."""
        return self._run_all

    def _run_all(self) -> None:
        self._lane.enter()
        self._places.before()
        while self._ran:  # what the instance's last run allocated; this one may be another binding's
            self._ran.pop().let_go()
        if self._open:
            self._ran.append(self._allocated)
        self._run_closed()
        self._places.after()
        self._lane.finish()

    def places(self) -> list[tuple[OnGpu, tuple[int, ...]]]:
        """Where the outputs lie that the runtime allocated."""
        found = []
        values = self._io.get_outputs()
        for _, index in self._open:
            shape = tuple(values[index].shape())
            size = datatypes.byte_size(self._kept[1][index].datatype, shape)
            found.append((OnGpu(values[index].data_ptr(), size), shape))
        return found

    def results(self) -> list[npt.NDArray[np.generic]]:
        """Copies on the host; what the runtime allocated stays until the instance's next run."""
        arrays: list[npt.NDArray[np.generic]] = []
        for (_, index), (place, shape) in zip(self._open, self.places(), strict=True):
            dtype = datatypes.numpy_dtype(self._kept[1][index].datatype)
            arrays.append(self._lane.fetch(place).view(dtype).reshape(shape))
        return arrays


@final
class _Feed:
    """`session.run` with arrays: for models with string tensors. Every output is the runtime's own."""

    __slots__ = ("_inputs", "_outputs", "_results", "_session")

    def __init__(self, session: Any, inputs: list[Operand], outputs: list[Operand]) -> None:
        self._session = session
        self._inputs = inputs
        self._outputs = outputs
        self._results: list[npt.NDArray[np.generic]] = []

    def run(self) -> None:
        feeds = {operand.name: _array(operand) for operand in self._inputs}
        try:
            self._results = self._session.run([operand.name for operand in self._outputs], feeds)
        except Exception as error:
            raise _failure(Code.INTERNAL, error) from None

    def results(self) -> list[npt.NDArray[np.generic]]:
        """Once: a client may have thousands of bindings, and none keeps what it has given."""
        found, self._results = self._results, []
        return found


def _array(operand: Operand) -> npt.NDArray[Any]:
    assert operand.memory is not None
    if operand.datatype == "BYTES":
        count = int(np.prod(operand.shape, dtype=object)) if operand.shape else 1
        flat = datatypes.decode_bytes(operand.memory, count, f"inference input '{operand.name}'")
        texts = np.empty(count, object)
        texts[:] = [_text(item, index, operand.name) for index, item in enumerate(flat)]
        return texts.reshape(operand.shape)
    return operand.memory.view(datatypes.numpy_dtype(operand.datatype)).reshape(operand.shape)


def _text(item: bytes, index: int, name: str) -> str:
    try:
        return item.decode()
    except UnicodeDecodeError as error:  # the runtime's Python interface takes strings as str only
        raise InferError(
            Code.INVALID_ARG,
            f"element {index} of inference input '{name}' is not UTF-8, which strings of ONNX models are: {error}",
        ) from None


def _view(value: Any, datatype: str) -> npt.NDArray[np.generic]:
    """The runtime's own memory as an array that keeps it, without the copy that `OrtValue.numpy()` makes."""
    shape = tuple(value.shape())
    dtype = datatypes.numpy_dtype(datatype)
    byte_size = datatypes.byte_size(datatype, shape)
    if byte_size == 0:
        return np.empty(shape, dtype)
    raw = (ctypes.c_uint8 * byte_size).from_address(value.data_ptr())
    raw.owner = value  # type: ignore[attr-defined]
    flat: npt.NDArray[Any] = np.frombuffer(memoryview(raw), np.uint8).view(dtype)
    return flat.reshape(shape)


def _failure(code: Code, error: Exception) -> InferError:
    """The runtime's reason in one line."""
    text = _SOURCE.sub("", _STATUS.sub("", " ".join(str(error).split())))
    failed = Reshaped if _RESHAPED in text else InferError
    return failed(code, f"onnx runtime error: {text[:_MAX_REASON]}")
