"""A run of a TensorRT engine on given operands: profile, shapes, addresses, shape tensors, outputs of unknown size.

Made by `broker.worker.backends.tensorrt`. An execution context knows one set of shapes and addresses: a binding sets
its own when another one ran before it, and only enqueues when it ran itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import OnGpu, Operand
from broker.worker.backends.tensorrt_engine import IoTensor, Shape
from broker.worker.cuda.staging import DeviceBuffer, Places, size_of
from broker.worker.cuda.streams import Bytes, address
from shm import datatypes
from shm.datatypes import shape_text
from shm.errors import Code, InferError, fresh

if TYPE_CHECKING:
    from broker.worker.backends.tensorrt import TensorRTModel


@final
class Bound:
    """Implements `broker.worker.backends.GpuBinding`."""

    __slots__ = ("_context", "_hosts", "_inputs", "_model", "_outputs", "_places", "_profile")

    def __init__(self, model: TensorRTModel, inputs: list[Operand], outputs: list[Operand]) -> None:
        self._model = model
        tensors = model.engine.tensors
        self._profile = _profile_for(tensors, inputs, model.profiles)
        self._context = model.context(self._profile)
        self._places = Places(model.lane, model.scratch)
        self._hosts: list[_Host] = []
        self._inputs: list[tuple[IoTensor, Operand, int]] = []
        for operand in inputs:
            tensor = tensors[operand.name]
            if tensor.host:
                self._hosts.append(_Host(tensor, operand, self._profile))
            else:
                self._inputs.append((tensor, operand, self._places.input(operand)))
        self._outputs = [_Output(model, tensors[operand.name], operand, self._places) for operand in outputs]
        self._outputs += [
            _Output(model, tensor, Operand(tensor.name, tensor.datatype, tensor.shape, None), self._places)
            for tensor in tensors.values()
            if not tensor.is_input and tensor.name not in {operand.name for operand in outputs}
        ]  # every tensor of an engine has an address, wanted or not

    def run(self) -> None:
        """Raises InferError with TensorRT's reason, CudaError for the driver's."""
        model, lane = self._model, self._model.lane
        lane.enter()
        again = model.last is not self or bool(self._hosts)
        model.last = None  # until all of it is set
        self._places.before()
        if again:
            self._set()
        if not self._context.execute_async_v3(lane.stream):
            for output in self._outputs:
                output.check()
            raise InferError(Code.INTERNAL, f"TensorRT failed to run the model: {model.engine.log.take()}")
        self._places.after()
        lane.finish()
        for output in self._outputs:
            output.finish()
        model.last = None if model.scratch.lent else self  # what was lent ends with this binding

    def results(self) -> list[npt.NDArray[np.generic]]:
        """Copies on the host, of the outputs without memory."""
        arrays = []
        for operand, (place, shape) in zip(self._unplaced(), self.places(), strict=True):
            data = self._model.lane.fetch(place)
            arrays.append(data.view(datatypes.numpy_dtype(operand.datatype)).reshape(shape))
        return arrays

    def places(self) -> list[tuple[OnGpu, Shape]]:
        """Where those lie."""
        return [output.result() for output in self._outputs if output.wanted]

    def _unplaced(self) -> list[Operand]:
        return [output.operand for output in self._outputs if output.wanted]

    def _set(self) -> None:
        context, log = self._context, self._model.engine.log
        for tensor, operand, pointer in self._inputs:
            if -1 in tensor.shape and not context.set_input_shape(tensor.name, operand.shape):
                raise InferError(
                    Code.INVALID_ARG, f"input '{tensor.name}' of shape {shape_text(operand.shape)}: {log.take()}"
                )
            if not context.set_tensor_address(tensor.name, pointer):
                raise InferError(Code.INTERNAL, f"input '{tensor.name}' cannot be bound: {log.take()}")
        for host in self._hosts:
            host.set(context, self._model)
        missing = context.infer_shapes()
        if missing:
            raise InferError(
                Code.INVALID_ARG, f"the engine needs more to know its shapes: {', '.join(missing)}. {log.take()}"
            )
        for output in self._outputs:
            output.set(context)


def _profile_for(tensors: dict[str, IoTensor], inputs: list[Operand], profiles: Sequence[int]) -> int:
    """Of the optimization profiles that have all these shapes the one that was built for what comes closest to them.

    Raises InferError INVALID_ARG.
    """
    for operand in inputs:
        known = tensors.get(operand.name)
        if known is None or not known.is_input:
            raise InferError(Code.INVALID_ARG, f"the engine has no input '{operand.name}'")
    shapes = [(tensors[operand.name], operand.shape) for operand in inputs]
    fitting = [profile for profile in profiles if all(tensor.fits(shape, profile) for tensor, shape in shapes)]
    if fitting:
        return min(fitting, key=lambda profile: sum(tensor.distance(shape, profile) for tensor, shape in shapes))
    for operand in inputs:
        tensor = tensors[operand.name]
        if not any(tensor.fits(operand.shape, profile) for profile in profiles):
            them = (tensor.ranges[profile] for profile in profiles)
            ranges = " or ".join(f"{shape_text(low)} to {shape_text(high)}" for low, high in them)
            raise InferError(
                Code.INVALID_ARG,
                f"input '{operand.name}' of shape {shape_text(operand.shape)} is outside of the engine's optimization "
                f"profiles, which have {ranges}",
            )
    raise InferError(
        Code.INVALID_ARG,
        "no optimization profile of the engine has the shapes of all inputs: "
        + ", ".join(f"'{operand.name}' {shape_text(operand.shape)}" for operand in inputs),
    )


@final
class _Host:
    """A shape tensor: its values lie on the host and decide other shapes, so a copy is taken before each run.

    A client that writes them meanwhile cannot make TensorRT plan with one value and run with another.
    """

    __slots__ = ("_operand", "_profile", "_tensor", "_values")

    def __init__(self, tensor: IoTensor, operand: Operand, profile: int) -> None:
        self._tensor, self._operand, self._profile = tensor, operand, profile
        count = max(1, datatypes.element_count(operand.shape))
        self._values = np.zeros(count, datatypes.numpy_dtype(tensor.datatype))

    def set(self, context: Any, model: TensorRTModel) -> None:
        operand, name = self._operand, self._tensor.name
        raw = operand.memory
        if operand.gpu is not None:
            raw = model.lane.fetch(operand.gpu)
            model.lane.moved["transfer"] += raw.size
        assert raw is not None
        self._values.view(np.uint8)[: raw.size] = raw
        low, high = self._tensor.values[self._profile]
        given = self._values.tolist()[: len(low)]
        if any(not a <= value <= b for a, value, b in zip(low, given, high, strict=True)):
            raise InferError(
                Code.INVALID_ARG,
                f"shape tensor '{name}' is {given}, the engine's optimization profile has {list(low)} to {list(high)}",
            )
        if -1 in self._tensor.shape:
            context.set_input_shape(name, operand.shape)
        if not context.set_tensor_address(name, address(self._values)):
            raise InferError(Code.INTERNAL, f"shape tensor '{name}' cannot be bound: {model.engine.log.take()}")


@final
class _Output:
    """One output. `wanted`: it has no memory, what comes out is asked for by `places`."""

    __slots__ = (
        "_allocator",
        "_host",
        "_model",
        "_own",
        "_places",
        "_pointer",
        "_shape",
        "_tensor",
        "operand",
        "wanted",
    )

    def __init__(self, model: TensorRTModel, tensor: IoTensor, operand: Operand, places: Places) -> None:
        self._model, self._tensor, self.operand, self._places = model, tensor, operand, places
        self.wanted = operand.memory is None and operand.gpu is None
        self._shape: Shape = ()
        self._own = OnGpu(0, 0)
        self._allocator: Any = None
        self._host: npt.NDArray[Any] | None = None  # a shape tensor's values
        self._pointer = 0 if self.wanted or tensor.host else places.output(operand)

    def set(self, context: Any) -> None:
        """Shapes of the inputs are known: give it its memory."""
        name = self._tensor.name
        self._shape = tuple(context.get_tensor_shape(name))
        if -1 in self._shape:  # known after the run only
            self._allocator = self._allocator or _allocator(self._model)
            if not context.set_output_allocator(name, self._allocator):
                raise InferError(Code.INTERNAL, f"output '{name}' cannot be bound: {self._model.engine.log.take()}")
            return
        byte_size = datatypes.byte_size(self._tensor.datatype, self._shape)
        if not self.wanted:
            _check_shape(self.operand, self._shape, byte_size)
        if self._tensor.host:
            kind = datatypes.numpy_dtype(self._tensor.datatype)
            self._host = np.zeros(max(1, datatypes.element_count(self._shape)), kind)
            pointer = address(self._host)
        elif self.wanted:
            self._own = self._places.own(self.operand, byte_size)
            pointer = self._own.pointer
        else:
            pointer = self._pointer
        if not context.set_tensor_address(name, pointer):
            raise InferError(Code.INTERNAL, f"output '{name}' cannot be bound: {self._model.engine.log.take()}")

    def check(self) -> None:
        """The run has failed: was it for want of this output's memory? Raises CudaError then."""
        if self._allocator is not None:
            self._allocator.check()

    def finish(self) -> None:
        """The run is done: what came out elsewhere goes to the operand's memory. Raises InferError if it is no fit."""
        if self._allocator is not None:
            self._shape, self._own = self._allocator.result()
            if not self.wanted:
                _check_shape(self.operand, self._shape, datatypes.byte_size(self._tensor.datatype, self._shape))
                self._move()
        elif self._host is not None:
            self._own = OnGpu(address(self._host), self._host.nbytes)
            if not self.wanted:
                self._give()

    def result(self) -> tuple[OnGpu, Shape]:
        size = datatypes.byte_size(self._tensor.datatype, self._shape)
        if self._host is not None and size:
            # To the GPU, because that is where results are looked for; a few bytes.
            place = self._places.own(self.operand, size)
            self._model.lane.copy_in(place.pointer, self._host.view(np.uint8)[:size])
            self._model.lane.finish()
            return place, self._shape
        return OnGpu(self._own.pointer, size), self._shape

    def _move(self) -> None:
        lane, operand, size = self._model.lane, self.operand, size_of(self.operand)
        if operand.gpu is not None:
            lane.copy(operand.gpu.pointer, self._own.pointer, size)
        elif operand.memory is not None:
            lane.copy_out(operand.memory, self._own.pointer)
        lane.finish()
        lane.moved["output"] += size

    def _give(self) -> None:
        assert self._host is not None
        data: Bytes = self._host.view(np.uint8)[: size_of(self.operand)]
        if self.operand.gpu is not None:
            self._model.lane.copy_in(self.operand.gpu.pointer, data)
            self._model.lane.finish()
            self._model.lane.moved["transfer"] += data.size
        elif self.operand.memory is not None:
            self.operand.memory[:] = data


def _check_shape(operand: Operand, shape: Shape, byte_size: int) -> None:
    if shape != operand.shape or byte_size != size_of(operand):
        raise InferError(
            Code.INVALID_ARG,
            f"output '{operand.name}' has shape {shape_text(shape)}, the plan says {shape_text(operand.shape)}: leave "
            "the dimension open (-1) and give it room by byte_size",
        )


def _allocator(model: TensorRTModel) -> Any:
    """Memory for an output whose size only the run tells: the instance's, by name, whichever of the thousands of
    bindings runs. A class of TensorRT's module is the base.
    """
    scratch = model.scratch

    class Allocator(model.engine.trt.IOutputAllocator):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.buffer: DeviceBuffer | None = None
            self.shape: Shape = ()
            self.error: InferError | None = None

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            try:
                self.buffer = scratch.get("allocated", tensor_name, size)
                return self.buffer.pointer
            except InferError as error:  # TensorRT's own frames lie between here and the run
                self.error = fresh(error)
                return 0

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return self.reallocate_output_async(tensor_name, memory, size, alignment, 0)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shape = tuple(shape)

        def check(self) -> None:
            error, self.error = self.error, None
            if error is not None:
                raise fresh(error)

        def result(self) -> tuple[Shape, OnGpu]:
            assert self.buffer is not None
            return self.shape, OnGpu(self.buffer.pointer, self.buffer.size)

    return Allocator()
