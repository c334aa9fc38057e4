"""Results as bytes in KServe's encoding, for who passes them on: no element is decoded, no caller's memory is read.

Used by `clientlib.layout` for the plans of recipes that are `raw`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from clientlib import shapes
from clientlib.arena import Lease, owning
from clientlib.results import InferResult
from shm import datatypes
from shm.datatypes import BYTES

if TYPE_CHECKING:
    from clientlib.layout import Placed

_length = struct.Struct("<I").unpack_from


def result(
    outputs: Sequence[Placed],
    entry: tuple[int, ...],
    words: list[int],
    position: int,
    rows: int,
    keep: Lease | None,
    copied: int,
) -> InferResult:
    """The result at output `position`: arrays of bytes of the client's own outputs, shapes of all.

    `words` are the shapes of open outputs, as the completion reports them. `keep` is the lease of the place when the
    arrays may hold it; without it they are copies, counted on top of `copied`.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for tensor in outputs:
        shape = found[tensor.name] = shapes.reported(tensor.datatype, tensor.shape, rows, words)
        if not tensor.own:
            continue
        view = tensor.raw(position)
        if tensor.datatype == BYTES:
            view = view[: strings_end(view, datatypes.element_count(shape))]
        elif shape != tensor.shape:
            view = view[: datatypes.byte_size(tensor.datatype, shape)]
        if keep is not None:
            arrays[tensor.name] = owning(view, keep)
        else:
            arrays[tensor.name] = view.copy()
            copied += view.nbytes
    return InferResult(arrays, entry, copied, found)


def strings_end(buffer: Any, count: int) -> int:
    """Where `count` elements of BYTES end in `buffer`, which a worker has written."""
    end, size = 0, len(buffer)
    for _ in range(count):
        if end + 4 > size:
            break
        end += 4 + _length(buffer, end)[0]
    return min(end, size)
