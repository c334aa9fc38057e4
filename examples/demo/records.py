"""What a camera process tells the demo, one JSON object per line of its standard output."""

from __future__ import annotations

from typing import final

import msgspec


@final
class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to one model since the last report: how long each took, and the bytes the broker copied for all."""

    microseconds: list[int]
    copied_bytes: int


@final
class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What happened since the last report. `frame_microseconds`: from the decoded frame to its faces."""

    frame_microseconds: list[int]
    requests: dict[str, Requests]
    faces: int
    dropped: int
    errors: int
    error: str = ""


@final
class Best(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The frame with the surest face, saved as it was decoded; boxes and points in pixels of that picture."""

    picture: str
    frame: int
    boxes: list[tuple[float, float, float, float]]
    scores: list[float]
    points: list[list[tuple[float, float]]]


Record = Report | Best

encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def decode(line: bytes) -> Record:
    """The record of one line. Raises `msgspec.DecodeError`."""
    return _decoder.decode(line)
