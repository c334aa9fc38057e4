"""Requests of different lengths in one rectangular batch: padded to the smallest size of `pad_to` that fits them all.

`assembled` gathers inputs with it and cuts outputs; `warm_up` makes the inputs that clients never send. Everything is
pure but for the buffer that is filled. What may be configured is checked by `broker.repository.loader.padding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from broker.repository.config import ModelConfig
from broker.repository.scheduling import MadeInput, Padding
from shm import datatypes
from shm.errors import Code, InferError

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]


class Named(Protocol):
    """A tensor of a plan."""

    name: str
    shape: Shape


@final
class Padder:
    """Of one model version with `pad_to`."""

    __slots__ = ("_fill", "_model", "_padding", "axes", "outputs")

    def __init__(self, config: ModelConfig, padding: Padding) -> None:
        self._model = config.name
        self._padding = padding
        self.axes = padding.inputs
        self.outputs = padding.outputs
        datatype = {tensor.name: tensor.datatype for tensor in config.input}
        self._fill = {name: element(padding.value, datatype[name]) for name in padding.inputs}

    def length(self, tensors: Sequence[Named]) -> int:
        """Of one request, in the variable dimension of its inputs. Raises InferError INVALID_ARG where they differ, or
        are longer than the largest size."""
        found = {tensor.name: tensor.shape[self.axes[tensor.name]] for tensor in tensors if tensor.name in self.axes}
        if not found:
            raise InferError(
                Code.INVALID_ARG, f"one of the inputs {', '.join(self.axes)} of model '{self._model}' must be sent"
            )
        (first, length), *others = found.items()
        for name, other in others:
            if other != length:
                raise InferError(
                    Code.INVALID_ARG,
                    f"inputs '{first}' and '{name}' of model '{self._model}' have {length} and {other} elements in"
                    " their variable dimension: pad_to takes them for the same dimension",
                )
        if length > self._padding.to[-1]:
            raise InferError(
                Code.INVALID_ARG,
                f"input '{first}' of model '{self._model}' has {length} elements in its variable dimension, the"
                f" largest size in pad_to is {self._padding.to[-1]}",
            )
        return length

    def size_for(self, lengths: Sequence[int]) -> int:
        """The smallest size of `pad_to` that fits all of them."""
        longest = max(lengths)
        return next(size for size in self._padding.to if size >= longest)

    def padded(self, shape: Shape, name: str, size: int) -> Shape:
        """An input's or output's shape in the batch."""
        axes = (self.axes[name],) if name in self.axes else self.outputs.get(name, ())
        return tuple(size if axis in axes else dim for axis, dim in enumerate(shape))

    def fill(self, out: Bytes, name: str, shape: Shape, parts: Sequence[tuple[Bytes, Shape]]) -> None:
        """Write the batch of input `name`, which has `shape`: the requests' own `parts`, padded at the end."""
        value, axis = self._fill[name], self.axes[name]
        batch = out.view(value.dtype).reshape(shape)
        row = 0
        for memory, own in parts:
            rows = batch[row : row + own[0]]
            inner = np.moveaxis(rows, axis, 0)
            array = np.frombuffer(memory, value.dtype).reshape(own)
            inner[: own[axis]] = np.moveaxis(array, axis, 0)
            inner[own[axis] :] = value
            row += own[0]

    def made(self, lengths: Sequence[int], sizes: Sequence[int], size: int) -> Iterator[tuple[MadeInput, Array]]:
        """See `made_inputs`."""
        return made_inputs(self._padding, lengths, sizes, size)

    def cut(self, name: str, array: Array, length: int, size: int) -> Array:
        """One request's part of output `name`, as long as its inputs were. Raises InferError INTERNAL where the model
        has not given as much as it was given."""
        for axis in self.outputs.get(name, ()):
            if axis >= array.ndim or array.shape[axis] != size:
                raise InferError(
                    Code.INTERNAL,
                    f"output '{name}' of model '{self._model}' has the shape {datatypes.shape_text(array.shape)} for"
                    f" inputs that were padded to {size}: dimension {axis} is to be cut back to {length}, so it must"
                    f" be {size}",
                )
            array = array[(slice(None),) * axis + (slice(length),)]
        return array


def made_inputs(
    padding: Padding, lengths: Sequence[int], sizes: Sequence[int], size: int
) -> Iterator[tuple[MadeInput, Array]]:
    """The mask (1 where a row has something of its own) and the rows' lengths, in the shapes that the model wants.

    `lengths`, `sizes`: of the requests, and their rows; `size`: what they are padded to.
    """
    of_rows = np.repeat(np.asarray(lengths, np.int64), sizes)
    if padding.mask is not None:
        mask = np.arange(size) < of_rows[:, None]
        yield padding.mask, _typed(padding.mask, mask, (of_rows.size, *padding.mask.shape), size)
    if padding.lengths is not None:
        yield padding.lengths, _typed(padding.lengths, of_rows, (of_rows.size, *padding.lengths.shape), size)


def _typed(made: MadeInput, values: Array, shape: Shape, size: int) -> Array:
    wanted = tuple(size if dim == -1 else dim for dim in shape)
    return values.astype(datatypes.numpy_dtype(made.datatype)).reshape(wanted)


def element(value: float, datatype: str) -> Any:
    """The bits of `value` in that datatype, as an unsigned number of its size."""
    if datatype == "BF16":
        return np.uint16(np.array(value, "<f4").view("<u4") >> 16)
    array = np.array(value, datatypes.numpy_dtype(datatype))
    return array.view(f"<u{array.itemsize}")[()]
