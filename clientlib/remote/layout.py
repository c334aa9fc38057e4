"""Where the tensors of a remote request lie: how it becomes a message, and an answer becomes arrays.

Made by `clientlib.remote.core` from a recipe; used by every request of a plan. Knows no wire. Bytes that travel in
messages are counted as copied, once each way; where the server shares the memory, nothing travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from clientlib.arena import aligned
from clientlib.overlap import Ranges, Span
from clientlib.recipe import ArrayInput, Recipe
from clientlib.region import MappedRegion, TensorRef
from clientlib.remote.transport import InferAnswer, InferRequest, InputTensor, OutputTensor, WantedOutput
from clientlib.results import InferResult
from shm import datatypes, views
from shm.datatypes import BYTES
from shm.errors import Code, InferError
from shm.messages import TensorSpec
from shm.parameters import encoded, is_reserved
from shm.views import Placement

Array = npt.NDArray[Any]


@final
class Position:
    """The positions that one live request uses, as `clientlib.overlap` wants them."""

    __slots__ = ("input_slot", "output_slot")

    def __init__(self, input_slot: int, output_slot: int) -> None:
        self.input_slot = input_slot
        self.output_slot = output_slot


@final
class Layout:
    """A prepared request. `rows`: of one position, 0 when the model has no batch dimension or nobody asked.

    `names`: the outputs to ask for, None for all. `shared`: the server reads and writes the regions itself.
    """

    __slots__ = (
        "_inputs",
        "_parameters",
        "_places",
        "model",
        "names",
        "positions",
        "ranges",
        "rows",
        "shared",
        "version",
    )

    def __init__(self, recipe: Recipe, names: Sequence[str] | None, rows: int, *, shared: bool) -> None:
        """Raises InferError for what lies outside its region, or in what is read-only."""
        self.model, self.version = recipe.model, recipe.version
        self._parameters = recipe.parameters
        self.names, self.rows, self.shared = names, rows, shared
        self.positions = recipe.input_positions, recipe.output_positions
        self._inputs: Mapping[str, TensorRef | ArrayInput] = recipe.inputs
        placed = recipe.outputs.items() if isinstance(recipe.outputs, dict) else ()
        self._places: dict[str, TensorRef] = {name: ref for name, ref in placed if ref is not None}
        inputs = [
            self._span(name, ref, recipe.input_positions, output=False)
            for name, ref in self._inputs.items()
            if isinstance(ref, TensorRef)
        ]
        outputs = [self._span(name, ref, recipe.output_positions, output=True) for name, ref in self._places.items()]
        for output in outputs:
            for other in inputs:
                # A request may pair any input position with any output position.
                if output.memory == other.memory and views.meets(output.place, other.place):
                    raise InferError(
                        Code.INVALID_ARG,
                        f"overlapping tensors for model '{self.model}': output '{output.name}' overlaps input "
                        f"'{other.name}'; give each a range of its own",
                    )
        self.ranges = Ranges(inputs, outputs)

    @property
    def places_outputs(self) -> bool:
        """Did the caller place any?"""
        return bool(self._places)

    @property
    def placed(self) -> Iterable[str]:
        """The outputs that the caller placed."""
        return tuple(self._places)

    @property
    def regions(self) -> Iterable[MappedRegion]:
        """The regions that a request uses."""
        refs = (*self._inputs.values(), *self._places.values())
        return [ref.region for ref in refs if isinstance(ref, TensorRef)]

    def request(self, at: Position, rows: int, values: Iterable[Array] = ()) -> tuple[InferRequest, int]:
        """The message of a request, and how many bytes of inputs travel in it. `values`: one per `ArrayInput`.

        Data are views of the regions and of `values`.
        """
        if rows > self.rows:
            raise InferError(Code.INVALID_ARG, f"{rows} rows asked of a plan prepared for {self.rows}")
        arrays = iter(values)
        inputs, copied = [], 0
        for name, value in self._inputs.items():
            shape = (rows, *value.shape[1:]) if rows else value.shape
            if isinstance(value, ArrayInput):
                data = _encoded(next(arrays), value.datatype)
            else:
                data = _input_bytes(value, at.input_slot, shape if rows else None)
                if self.shared:
                    start = value.offset + at.input_slot * value.stride
                    inputs.append(InputTensor(name, value.datatype, shape, None, value.region.name, start, data.nbytes))
                    continue
            copied += data.nbytes
            inputs.append(InputTensor(name, value.datatype, shape, data))
        wanted = self._wanted(at.output_slot)
        return InferRequest(self.model, self.version, inputs, wanted, parameters=self._parameters), copied

    def result(self, answer: InferAnswer, at: Position, copied: int, *, partial: bool = False) -> InferResult:
        """The arrays of an answer; placed outputs are written where they belong, all or none of them.

        Raises InferError when one has no room, or is not what was asked for. `copied`: bytes of inputs that travelled;
        `partial`: outputs may be missing.
        """
        copied += answer.copied
        parts = [(tensor, self._places.get(tensor.name)) for tensor in answer.outputs]
        for tensor, ref in parts:
            _check_answer(tensor, ref)
        named = {tensor.name for tensor, _ in parts}
        for name in (*self._places, *(self.names or ())):
            if name not in named and not partial:
                raise InferError(Code.INTERNAL, f"the server's answer has no output '{name}'")
        arrays = {}
        for tensor, ref in parts:
            if tensor.data is not None:
                copied += len(tensor.data)
            arrays[tensor.name] = _own(tensor) if ref is None else _placed(tensor, ref, at.output_slot)
        entry = (0, 0, 0, *answer.timing, copied)
        given = {name: value for name, value in answer.parameters.items() if not is_reserved(name)}
        return InferResult(arrays, (*entry, encoded(given)) if given else entry)

    def failure(self, error: InferError) -> InferError:
        """A request's error, with the code that it has everywhere: on Triton's wires this one has another."""
        if self._places and "should be at least" in error.message and error.code == Code.INTERNAL.name:
            return InferError(Code.INVALID_ARG, error.message)
        return error

    def _span(self, name: str, ref: TensorRef, positions: int, *, output: bool) -> Span:
        spec = TensorSpec(
            name=name,
            region=ref.region.name,
            datatype=ref.datatype,
            shape=ref.shape,
            offset=ref.offset,
            stride=ref.stride,
            byte_size=ref.byte_size,
        )
        if output and not ref.region.memory.writable:
            raise InferError(
                Code.INVALID_ARG, f"output '{name}' lies in region '{ref.region.name}', which is read-only"
            )
        place: Placement = views.resolve(spec, ref.region.byte_size, positions, output=output, model=self.model)
        return Span(name, ref.region.identity, place.shifted(ref.region.offset))

    def _wanted(self, position: int) -> list[WantedOutput] | None:
        if self.names is None:
            return None
        wanted = []
        for name in self.names:
            ref = self._places.get(name) if self.shared else None
            if ref is None:
                wanted.append(WantedOutput(name))
            else:
                start = ref.offset + position * _stride(ref)
                wanted.append(WantedOutput(name, ref.region.name, start, ref.byte_size))
        return wanted


def move(request: InferRequest, region: MappedRegion) -> int:
    """Put the inputs that travel in the message into `region` instead. Returns how many bytes."""
    end = moved = 0
    for tensor in request.inputs:
        if tensor.data is not None and (size := len(tensor.data)):
            region.memory.bytes[end : end + size] = np.frombuffer(tensor.data, np.uint8)
            tensor.data, tensor.region, tensor.offset, tensor.byte_size = None, region.name, end, size
            end += aligned(size)
            moved += size
    return moved


def _encoded(array: Array, datatype: str) -> memoryview:
    """An array's bytes as they travel; a view where it is stored that way already."""
    # Strings come encoded, and bfloat16 has no buffer of its own.
    if datatype != BYTES:
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def _input_bytes(ref: TensorRef, position: int, shape: tuple[int, ...] | None) -> memoryview:
    """What lies at a position; of its first rows alone, if `shape` is theirs."""
    start = ref.offset + position * ref.stride
    raw = ref.region.memory.bytes[start : start + ref.byte_size]
    if shape is not None:
        if ref.datatype == BYTES:
            raw = raw[: _strings_end(raw, datatypes.element_count(shape))]
        else:
            raw = raw[: datatypes.byte_size(ref.datatype, shape)]
    return raw.data


def _stride(ref: TensorRef) -> int:
    return ref.stride or ref.byte_size  # back to back, as `views.resolve` has it for outputs


def _check_answer(tensor: OutputTensor, ref: TensorRef | None) -> None:
    data, name = tensor.data, tensor.name
    if data is None:
        if ref is None:
            raise InferError(Code.INTERNAL, f"the server's answer has no data for output '{name}'")
        return
    size = len(data)
    count = datatypes.element_count(tensor.shape)
    expected = size if tensor.datatype == BYTES else count * datatypes.element_size(tensor.datatype)
    if size != expected:
        raise InferError(
            Code.INTERNAL,
            f"the server's answer has {size} bytes for output '{name}', {tensor.datatype} "
            f"{datatypes.shape_text(tensor.shape)} takes {expected}",
        )
    if ref is None:
        return
    if ref.datatype != tensor.datatype:
        raise InferError(
            Code.INVALID_ARG,
            f"inference output '{name}' data-type is '{ref.datatype}', but the model gives '{tensor.datatype}'",
        )
    if size > ref.byte_size:
        raise InferError(
            Code.INVALID_ARG,
            f"shared memory size specified with the request for output '{name}' ({ref.byte_size} bytes) should be at "
            f"least {size} bytes to hold the results",
        )


def _own(tensor: OutputTensor) -> Array:
    """An array that owns its memory, which the application may write."""
    data = tensor.data
    assert data is not None
    if tensor.datatype == BYTES:
        return _strings(data, tensor)
    array = np.frombuffer(data, datatypes.numpy_dtype(tensor.datatype)).reshape(tensor.shape)
    return array if array.flags.writeable and array.flags.aligned else array.copy()


def _placed(tensor: OutputTensor, ref: TensorRef, position: int) -> Array:
    """The caller's range, with the result in it."""
    start = ref.offset + position * _stride(ref)
    memory = ref.region.memory.bytes
    if tensor.data is not None:
        memory[start : start + len(tensor.data)] = np.frombuffer(tensor.data, np.uint8)
    if tensor.datatype == BYTES:
        raw = memory[start : start + ref.byte_size]
        return _strings(raw[: _strings_end(raw, datatypes.element_count(tensor.shape))].data, tensor)
    return views.array(memory, start, tensor.shape, datatypes.numpy_dtype(tensor.datatype))


def _strings(data: bytes | bytearray | memoryview, tensor: OutputTensor) -> Array:
    count = datatypes.element_count(tensor.shape)
    return datatypes.decode_bytes(data, count, f"output '{tensor.name}'").reshape(tensor.shape)


def _strings_end(raw: npt.NDArray[np.uint8], count: int) -> int:
    """Where the first `count` strings of a range end; its end, when it holds fewer."""
    view, end, position = raw.data, len(raw), 0
    for _ in range(count):
        if position + 4 > end:
            return end
        position += 4 + int.from_bytes(view[position : position + 4], "little")
    return min(position, end)
