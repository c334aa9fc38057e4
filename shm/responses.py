"""Responses of decoupled models on a channel: what the note of a part says, and how a response is cut into parts.

A plan of a decoupled model has `responses` places in each output position, each with a room for every output (see
`shm.messages.Prepare`). A request's parts are numbered 0, 1, 2, …, over all its responses; part n lies in place
n mod `responses`, and is written only when the client has read part n - `responses`. A response larger than its rooms
comes in several parts: part j carries the bytes [j * room, (j + 1) * room) of every output that has so many. All of
them carry the same note:

    for each output of the plan, in its order:   ABSENT   or   rank, dimensions …, bytes of the whole output

Used by workers (`pack`) and clients (`unpack`, who trust no word of it).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from shm.errors import Code, InferError
from shm.layout import NOTE_BYTES

ABSENT = 2**64 - 1  # instead of a rank: the response does not have this output
WORDS = NOTE_BYTES // 8


class Extent(NamedTuple):
    """One output of one response."""

    shape: tuple[int, ...]
    byte_size: int


def pack(extents: Sequence[Extent | None]) -> bytes:
    """The note of a response. Raises InferError when it has more dimensions than a note has room for."""
    words: list[int] = []
    for extent in extents:
        if extent is None:
            words.append(ABSENT)
        else:
            words.extend((len(extent.shape), *extent.shape, extent.byte_size))
    if len(words) > WORDS:
        raise InferError(
            Code.INTERNAL,
            f"the outputs of a response have {len(words)} ranks, dimensions and sizes together, a response can report "
            f"{WORDS}: ask for fewer outputs",
        )
    return struct.pack(f"<{len(words)}Q", *words)


def unpack(note: bytes, outputs: int) -> list[Extent | None]:
    """What `pack` was given, for a plan of so many outputs. Raises ValueError for a note that it did not make."""
    words = struct.unpack(f"<{len(note) // 8}Q", note[: len(note) & ~7])
    extents: list[Extent | None] = []
    at = 0
    for _ in range(outputs):
        if at >= len(words):
            raise ValueError("the note of a response is too short")
        rank = words[at]
        at += 1
        if rank == ABSENT:
            extents.append(None)
            continue
        if at + rank + 1 > len(words):
            raise ValueError(f"the note of a response has an output of rank {rank}")
        extents.append(Extent(words[at : at + rank], words[at + rank]))
        at += rank + 1
    return extents


def part_count(extents: Sequence[Extent | None], rooms: Sequence[int]) -> int:
    """In how many parts a response comes, at least one."""
    pairs = zip(extents, rooms, strict=True)
    return max((-(-extent.byte_size // room) for extent, room in pairs if extent is not None), default=1) or 1
