"""A clip as a camera would deliver it: endless, at its own pace, and what the detector sees of each frame.

Owns PyAV. Knows nothing of the broker: it writes pixels into whatever array it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from examples.demo import detector


class Clip:
    """A video file, played over and over. `rate` is in frames per second."""

    def __init__(self, path: Path) -> None:
        self._container = av.open(str(path))
        self._stream = self._container.streams.video[0]
        self._stream.codec_context.thread_count = 1  # cameras are many, cores are few
        self.rate = float(self._stream.average_rate or 25)

    def frames(self, start: int) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yields (number in the clip, frame), beginning at frame `start`, for ever."""
        while True:
            number = -1
            for number, frame in enumerate(self._container.decode(self._stream)):
                if number >= start:
                    yield number, frame
            if number < start:
                raise ValueError(f"the clip has {number + 1} frames, cannot start at frame {start}")
            self._container.seek(0)
            start = 0

    def close(self) -> None:
        """Closes the file."""
        self._container.close()


class View:
    """The part of a frame that the detector sees: full height, centred, `width` x `height` after scaling.

    Wider frames lose their sides, narrower ones get black bars, so that every camera sends the same shape.
    """

    def __init__(self, width: int, height: int, layout: detector.Pyramid) -> None:
        self._size = (width, height)
        self._layout = layout
        # A reformatter keeps its scaling tables only while the sizes stay the same: one for each level.
        self._whole = VideoReformatter()
        self._levels = [VideoReformatter() for _ in layout.levels]

    def pixels(self, frame: av.VideoFrame) -> NDArray[np.uint8]:
        """The view as [height, width, 3] RGB."""
        width, height = self._size
        scaled_width, left = self._placement(frame)
        scaled = self._whole.reformat(frame, scaled_width, height, "rgb24", interpolation="AREA").to_ndarray()
        pixels = np.zeros((height, width, 3), np.uint8)
        first, last = max(left, 0), min(left + scaled_width, width)
        pixels[:, first:last] = scaled[:, first - left : last - left]
        return pixels

    def write_canvas(self, pixels: NDArray[np.uint8], canvas: NDArray[np.float32]) -> None:
        """Writes all levels of the view into `canvas`, [canvas width, canvas height, 3], normalized."""
        source = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        for level, reformatter in zip(self._layout.levels, self._levels, strict=True):
            image = reformatter.reformat(source, level.width, level.height, interpolation="AREA").to_ndarray()
            place = canvas[level.x : level.x + level.width, level.y : level.y + level.height]
            detector.normalize(np.asarray(image, np.uint8), place)

    def to_frame(self, frame: av.VideoFrame, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Points [..., 2] of the view in pixels of the whole frame."""
        _, left = self._placement(frame)
        moved: NDArray[np.float32] = (points - np.array([left, 0], np.float32)) * (frame.height / self._size[1])
        return moved

    def _placement(self, frame: av.VideoFrame) -> tuple[int, int]:
        """Width of the scaled frame, and where its left edge lies in the view (negative: cut off)."""
        width, height = self._size
        scaled = round(frame.width * height / frame.height)
        return scaled, (width - scaled) // 2
