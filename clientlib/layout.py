"""Where every tensor of a prepared request lies, and how a completion becomes arrays.

`sketch` turns a recipe and the model's metadata into sizes, `Sketch.place` puts them into memory. Called by
`clientlib.native`; used by every request of the plan. Knows nothing of sessions and channels.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from clientlib import raw_results, responses, shapes
from clientlib.arena import Bank, Block, Lease, aligned, owning
from clientlib.cuda_region import CudaRegion
from clientlib.failures import RoomNeeded, error_of
from clientlib.overlap import Ranges, Span
from clientlib.recipe import ArrayInput, Recipe
from clientlib.region import MappedRegion, TensorRef
from clientlib.responses import at_once
from clientlib.results import InferResult
from shm import datatypes, model_fit, views
from shm.datatypes import BYTES
from shm.errors import Code, InferError
from shm.layout import CODE_MASK
from shm.messages import ModelMetadata, TensorSpec
from shm.views import Placement

Array = npt.NDArray[Any]


class _Tensor(NamedTuple):
    """A tensor before it has a place. `region` None: in the client's own block. -1 in `shape`: open."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    byte_size: int
    region: MappedRegion | None = None
    offset: int = 0
    stride: int = 0


@final
class Placed:
    """A tensor of a plan in memory."""

    __slots__ = ("byte_size", "datatype", "dtype", "name", "offset", "own", "region", "shape", "stride")

    def __init__(self, tensor: _Tensor, region: MappedRegion, offset: int, stride: int) -> None:
        self.name = tensor.name
        self.datatype = tensor.datatype
        self.dtype = np.dtype(np.uint8) if tensor.datatype == BYTES else datatypes.numpy_dtype(tensor.datatype)
        self.shape = tensor.shape
        self.byte_size = tensor.byte_size
        self.region = region
        self.offset = offset
        self.stride = stride
        self.own = tensor.region is None  # in the client's block

    @property
    def spec(self) -> TensorSpec:
        """What the broker is told of it."""
        return TensorSpec(
            name=self.name,
            region=self.region.name,
            datatype=self.datatype,
            shape=self.shape,
            offset=self.offset,
            stride=self.stride,
            byte_size=self.byte_size,
        )

    def span(self, place: Placement) -> Span:
        """`place` counted from the start of the memory, to compare across regions."""
        return Span(self.name, self.region.identity, place.shifted(self.region.offset))

    def view(self, position: int, shape: tuple[int, ...]) -> Array:
        """An array of `shape` at a position; of GPU memory one with `__cuda_array_interface__`."""
        start = self.offset + position * self.stride
        if isinstance(self.region, CudaRegion):
            return self.region.cuda_array(shape, self.dtype, start)  # type: ignore[return-value]
        return views.array(self.region.memory.bytes, start, shape, self.dtype)

    def raw(self, position: int) -> Array:
        """The bytes of a position."""
        start = self.offset + position * self.stride
        return self.region.memory.bytes[start : start + self.byte_size]


@final
class Sketch:
    """Sizes of everything; `byte_size` is what the client's own block needs, 0 when the caller placed all tensors."""

    __slots__ = (
        "_inputs",
        "_outputs",
        "_recipe",
        "byte_size",
        "input_positions",
        "output_positions",
        "owns_outputs",
        "places",
        "raw",
        "responses",
    )

    def __init__(
        self, recipe: Recipe, inputs: Sequence[_Tensor], outputs: Sequence[_Tensor], responses: int = 0
    ) -> None:
        self._recipe, self._inputs, self._outputs = recipe, inputs, outputs
        self.responses = responses
        self.raw = recipe.raw
        self.input_positions, self.output_positions = recipe.input_positions, recipe.output_positions
        own_inputs = any(tensor.region is None for tensor in inputs)
        own_outputs = self.owns_outputs = bool(outputs) and all(tensor.region is None for tensor in outputs)
        self.places = 0
        if own_inputs or own_outputs:
            own = [*(t for t in inputs if t.region is None), *(outputs if own_outputs else ())]
            each = sum(aligned(tensor.byte_size) for tensor in own)
            at_least = max(2, 2 * recipe.output_positions)
            if responses:
                at_least = max(at_least, min(at_once(each), recipe.budget.places))
            self.places = recipe.budget.places_for(each, at_least)
            if own_inputs:
                self.input_positions = self.places
            if own_outputs:
                self.output_positions = self.places
        self.byte_size = sum(
            aligned(tensor.byte_size) * positions
            for tensors, positions in ((inputs, self.input_positions), (outputs, self.output_positions))
            for tensor in tensors
            if tensor.region is None
        )

    def place(self, block: Block | None) -> Layout:
        """Put the tensors where they belong. Raises InferError for what lies outside its region."""
        offset = block.offset if block is not None else 0
        placed: list[list[Placed]] = [[], []]
        for target, tensors, positions in (
            (placed[0], self._inputs, self.input_positions),
            (placed[1], self._outputs, self.output_positions),
        ):
            for tensor in tensors:
                if tensor.region is not None:
                    # Beside inputs of the client's own, which have as many positions as there are places, the caller's
                    # tensor is at the one position that it was given.
                    once = positions > 1 and tensors is self._inputs and self._recipe.input_positions == 1
                    target.append(Placed(tensor, tensor.region, tensor.offset, 0 if once else tensor.stride))
                    continue
                assert block is not None
                # Without gaps where that keeps positions aligned: then neighbours run as one batch without a copy.
                stride = tensor.byte_size if tensor.byte_size % 64 == 0 else aligned(tensor.byte_size)
                target.append(Placed(tensor, block.chunk.region, offset, stride))
                offset += stride * positions
        bank = Bank(block, self.places, self._recipe.widens) if block is not None and self.places else None
        return Layout(self, self._recipe.model, placed[0], placed[1], bank, block)


@final
class Layout:
    """A prepared request in memory. Shared by all its requests; only `ranges.live` and the bank change."""

    __slots__ = (
        "_block",
        "_fixed",
        "_input_views",
        "_ownable",
        "_views",
        "bank",
        "byte_size",
        "input_positions",
        "inputs",
        "mixed",
        "model",
        "outgrown",
        "output_positions",
        "outputs",
        "owns_outputs",
        "ranges",
        "raw",
        "responses",
        "writes",
    )

    def __init__(
        self,
        sketch: Sketch,
        model: str,
        inputs: list[Placed],
        outputs: list[Placed],
        bank: Bank | None,
        block: Block | None,
    ) -> None:
        self.model = model
        self.inputs, self.outputs, self.bank, self._block = inputs, outputs, bank, block
        self.input_positions, self.output_positions = sketch.input_positions, sketch.output_positions
        self.byte_size = sketch.byte_size  # of the client's own block
        self.raw = sketch.raw
        self.responses = sketch.responses  # places for responses in each output position; 0: there is one response
        self.outgrown: RoomNeeded | None = None  # what the next stream should have room for
        self.owns_outputs = sketch.owns_outputs  # they lie in places of the bank: arrays can keep those
        self.mixed = not self.owns_outputs and any(tensor.own for tensor in outputs)
        spans: list[list[Span]] = [[], []]
        for target, tensors, positions, output in (
            (spans[0], inputs, self.input_positions, False),
            (spans[1], outputs, self.output_positions, True),
        ):
            for tensor in tensors:
                place = views.resolve(tensor.spec, tensor.region.byte_size, positions, output=output, model=model)
                if not tensor.own:  # nothing else can be where the client's own places are
                    target.append(tensor.span(place))
        self.ranges = Ranges(*spans)
        self.writes = [tensor for tensor in inputs if tensor.own]
        closed = not any(shapes.is_open(tensor.datatype, tensor.shape) for tensor in outputs)
        self._fixed = closed and not any(tensor.own for tensor in outputs)
        self._ownable = closed and self.owns_outputs
        self._views: list[dict[str, Array] | None] = [None] * self.output_positions
        self._input_views: list[list[Array] | None] = [None] * (self.input_positions if self.writes else 0)

    @property
    def region_retired(self) -> str:
        """Why the client's own block is of no use any more, or ""."""
        return self._block.chunk.region.retired if self._block is not None else ""

    def write(self, place: int, values: Sequence[Array]) -> int:
        """Copy `values`, one per own input, to a place; returns how many bytes."""
        targets = self._input_views[place]
        if targets is None:
            targets = self._input_views[place] = [
                tensor.raw(place) if self.raw or tensor.datatype == BYTES else tensor.view(place, tensor.shape)
                for tensor in self.writes
            ]
        copied = 0
        for target, value in zip(targets, values, strict=True):
            target[...] = value
            copied += target.nbytes
        return copied

    def result(
        self, entry: tuple[int, ...], note: bytes, position: int, rows: int, lease: Lease | None, copied: int
    ) -> InferResult:
        """The arrays of a successful completion at output `position`."""
        keep = lease if self.owns_outputs and self.bank is not None and self.bank.can_spare() else None
        if self.raw:
            return raw_results.result(self.outputs, entry, _note_words(note), position, rows, keep, copied)
        if not rows and (self._fixed or (self._ownable and keep is not None)):
            arrays = self._views[position]
            if arrays is None:
                arrays = self._views[position] = {t.name: t.view(position, t.shape) for t in self.outputs}
            if keep is not None:
                arrays = {name: owning(view, keep) for name, view in arrays.items()}
            return InferResult(arrays, entry, copied)
        words = _note_words(note)
        arrays = {}
        for tensor in self.outputs:
            array = _array(tensor, position, rows, words)
            if tensor.own and tensor.datatype != BYTES:
                if keep is not None:
                    array = owning(array, keep)
                else:
                    array = array.copy()
                    copied += array.nbytes
            arrays[tensor.name] = array
        return InferResult(arrays, entry, copied)

    def settled(self, entry: tuple[int, ...], note: bytes, position: int, rows: int, copied: int) -> InferResult | None:
        """The result of a `mixed` plan's request while its position is still its own.

        There the client's outputs lie at the position that the caller chose: the next request overwrites them.
        """
        if entry[2] & CODE_MASK:
            return None
        try:
            return self.result(entry, note, position, rows, None, copied)
        except Exception:  # for who asks for the result to meet: the one who reaps does so for others too
            return None

    def failure(self, code: int, note: bytes) -> InferError:
        """The error that a completion carries."""
        text = note.rstrip(b"\0").decode("utf-8", "replace")
        try:
            name = Code(code)
        except ValueError:
            name = Code.UNKNOWN
        return error_of(name, text, [tensor.name for tensor in self.outputs if tensor.own])


def sketch(recipe: Recipe, model: ModelMetadata) -> Sketch:
    """Sizes and shapes of a recipe's tensors, as far as `model`'s metadata and the inputs tell."""
    inputs = [_input(name, value) for name, value in recipe.inputs.items()]
    given = {tensor.name: tensor.shape for tensor in inputs}
    rows, sizes = shapes.batch_rows(model, given), model_fit.symbol_sizes(model, given)
    first_room = shapes.first_room(sum(tensor.byte_size for tensor in inputs))
    known = {tensor.name: tensor for tensor in model.outputs}
    outputs = []
    for name, ref in _wanted(recipe, model).items():
        metadata = known.get(name)
        if metadata is None:
            raise InferError(
                Code.INVALID_ARG,
                f"unexpected inference output '{name}' for model '{model.name}', the model has outputs {list(known)}",
            )
        shape = model_fit.output_shape(metadata, rows, sizes)
        if model.decoupled:
            room = responses.room(metadata.datatype, shape, recipe.rooms.get(name))
            outputs.append(_streamed_output(name, ref, metadata.datatype, room))
        elif ref is not None:
            outputs.append(_given_output(name, ref, shape))
        elif shapes.is_open(metadata.datatype, shape):
            # A size of 0 leaves no byte to make room for, whatever the others turn out to be.
            room = 0 if 0 in shape else aligned(recipe.rooms.get(name, first_room))
            outputs.append(_Tensor(name, metadata.datatype, shape, room))
        else:
            outputs.append(_Tensor(name, metadata.datatype, shape, datatypes.byte_size(metadata.datatype, shape)))
    places = responses.places([tensor.byte_size for tensor in outputs]) if model.decoupled else 0
    if places:
        outputs = [tensor._replace(byte_size=places * tensor.byte_size) for tensor in outputs]
    return Sketch(recipe, inputs, outputs, places)


def _wanted(recipe: Recipe, model: ModelMetadata) -> dict[str, TensorRef | None]:
    if recipe.raw and isinstance(recipe.outputs, dict):
        return recipe.outputs  # these and no others
    if recipe.outputs is None or isinstance(recipe.outputs, dict):
        return {**dict.fromkeys(tensor.name for tensor in model.outputs), **(recipe.outputs or {})}
    return dict.fromkeys(recipe.outputs)


def _input(name: str, value: TensorRef | ArrayInput) -> _Tensor:
    if isinstance(value, ArrayInput):
        return _Tensor(name, value.datatype, value.shape, value.byte_size)
    return _of_ref(name, value, value.shape)


def _given_output(name: str, ref: TensorRef, shape: tuple[int, ...]) -> _Tensor:
    if len(shape) == len(ref.shape):
        # Sizes that only running the model tells are left open, whatever the caller expects them to be: the place is
        # then checked by its bytes and the result has its true shape.
        return _of_ref(
            name, ref, tuple(-1 if dim == -1 else given for dim, given in zip(shape, ref.shape, strict=True))
        )
    return _of_ref(name, ref, ref.shape)


def _streamed_output(name: str, ref: TensorRef | None, datatype: str, byte_size: int) -> _Tensor:
    if ref is not None:
        raise responses.not_placed(name)
    return _Tensor(name, datatype, (-1,), byte_size)


def _of_ref(name: str, ref: TensorRef, shape: tuple[int, ...]) -> _Tensor:
    return _Tensor(name, ref.datatype, shape, ref.byte_size, ref.region, ref.offset, ref.stride)


def _note_words(note: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(note) // 8}Q", note[: len(note) & ~7]))


def _array(tensor: Placed, position: int, rows: int, words: list[int]) -> Array:
    """The result at a position: a view, or decoded strings. Takes an open tensor's shape off `words`."""
    shape = shapes.reported(tensor.datatype, tensor.shape, rows, words)
    if tensor.datatype != BYTES:
        return tensor.view(position, shape)
    return _strings(tensor, position, shape)


def _strings(tensor: Placed, position: int, shape: tuple[int, ...]) -> Array:
    raw = tensor.raw(position).tobytes()
    count = datatypes.element_count(shape)
    elements = datatypes.decode_bytes(raw[: raw_results.strings_end(raw, count)], count, f"output '{tensor.name}'")
    return elements.reshape(shape)
