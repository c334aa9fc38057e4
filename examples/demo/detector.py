"""MTCNN around its three networks: what is fed to PNet, RNet and ONet, and what their answers mean.

Owns the geometry of the cascade (image pyramid, candidates, non-maximum suppression, refinement, crops) in plain
numpy. Called by the cameras between requests; knows nothing of the broker, of video or of drawing.

Boxes are float32 arrays [n, 4] of x1, y1, x2, y2 in pixels of the frame, x2 and y2 exclusive. The networks were
trained on transposed images: their input is [N, width, height, 3], values (pixel - 127.5) / 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

CELL = 12  # pixels that one PNet cell sees
STRIDE = 2  # pixels between neighbouring PNet cells
PNET_SCORE, RNET_SCORE, ONET_SCORE = 0.7, 0.7, 0.8


@dataclass(frozen=True, slots=True)
class Faces:
    """What was found, best first. `points` [n, 5, 2]: the eyes, the nose, the corners of the mouth."""

    boxes: Floats
    scores: Floats
    points: Floats

    @classmethod
    def none(cls) -> Faces:
        """No face."""
        return cls(np.empty((0, 4), np.float32), np.empty(0, np.float32), np.empty((0, 5, 2), np.float32))


@dataclass(frozen=True, slots=True)
class Level:
    """One scale of the frame and where it lies on the canvas."""

    scale: float
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Pyramid:
    """All scales of a frame on one canvas, so that a frame is one PNet request whatever its number of scales."""

    levels: tuple[Level, ...]
    width: int
    height: int

    @property
    def grid(self) -> tuple[int, int]:
        """PNet's output cells for the canvas: (columns, rows)."""
        return cells(self.width), cells(self.height)


def cells(pixels: int) -> int:
    """How many PNet cells cover `pixels` in one direction."""
    return max(0, (pixels - 1) // STRIDE - 4)


def pyramid(width: int, height: int, min_face: int = 16, factor: float = 0.709) -> Pyramid:
    """Scales a frame until its short side is one cell, packed in rows on a canvas as wide as the first two.

    The first level shrinks a face of `min_face` pixels to one cell; each further one is `factor` of the one before.
    Levels begin at multiples of the stride, so a level's cells are cells of the canvas.
    """
    sizes: list[tuple[float, int, int]] = []
    scale = CELL / min_face
    while min(width, height) * scale >= CELL:
        sizes.append((scale, round(width * scale), round(height * scale)))
        scale *= factor
    if not sizes:
        raise ValueError(f"a frame of {width}x{height} cannot hold a face of {min_face} pixels")
    canvas_width = sum(_even(w) for _, w, _ in sizes[:2])
    levels: list[Level] = []
    x = y = row_height = 0
    for scale, w, h in sizes:
        if x + w > canvas_width:
            x, y, row_height = 0, y + row_height, 0
        levels.append(Level(scale, x, y, w, h))
        x, row_height = x + _even(w), max(row_height, _even(h))
    return Pyramid(tuple(levels), canvas_width, y + row_height)


def _even(pixels: int) -> int:
    return pixels + pixels % 2


def normalize(image: NDArray[np.uint8], out: Floats) -> None:
    """Writes an [height, width, 3] image into `out`, [width, height, 3], as the networks expect it."""
    scaled = (image - np.float32(127.5)) * np.float32(1 / 128)
    out[:] = scaled.transpose(1, 0, 2)


def candidates(
    scores: Floats, offsets: Floats, layout: Pyramid, threshold: float = PNET_SCORE
) -> tuple[Floats, Floats]:
    """Boxes and scores that PNet's answer for one canvas proposes.

    `scores` [columns, rows, 2] and `offsets` [columns, rows, 4]. Cells that see more than one level, or none, are
    not looked at.
    """
    boxes: list[Floats] = [np.empty((0, 4), np.float32)]
    found: list[Floats] = [np.empty(0, np.float32)]
    for level in layout.levels:
        left, top = level.x // STRIDE, level.y // STRIDE
        window = np.s_[left : left + cells(level.width), top : top + cells(level.height)]
        score = scores[window][..., 1]
        column, row = np.nonzero(score >= threshold)
        if not column.size:
            continue
        corner = np.stack([column, row, column, row], axis=1) * STRIDE + np.array([0, 0, CELL, CELL])
        box = refine((corner / level.scale).astype(np.float32), offsets[window][column, row])
        kept = nms(box, score[column, row], 0.5)
        boxes.append(box[kept])
        found.append(score[column, row][kept])
    box, score = np.concatenate(boxes), np.concatenate(found)
    kept = nms(box, score, 0.7)
    return box[kept], score[kept]


def nms(boxes: Floats, scores: Floats, threshold: float, *, of_smaller: bool = False) -> NDArray[np.intp]:
    """Indexes of the boxes that no better one overlaps by more than `threshold`, best first.

    Overlap is intersection over union or, `of_smaller`, over the smaller of the two areas.
    """
    order = np.argsort(-scores, kind="stable")
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    while order.size:
        best, rest = order[0], order[1:]
        kept.append(int(best))
        corner = np.maximum(boxes[best, :2], boxes[rest, :2])
        extent = np.minimum(boxes[best, 2:], boxes[rest, 2:]) - corner
        inter = np.prod(np.maximum(extent, 0), axis=1)
        whole = np.minimum(area[best], area[rest]) if of_smaller else area[best] + area[rest] - inter
        order = rest[inter <= threshold * whole]
    return np.array(kept, np.intp)


def refine(boxes: Floats, offsets: Floats) -> Floats:
    """Boxes moved by a network's offsets, which are fractions of each box's width and height."""
    size = boxes[:, 2:] - boxes[:, :2]
    moved: Floats = boxes + offsets * np.concatenate([size, size], axis=1)
    return moved


def square(boxes: Floats) -> Floats:
    """Each box grown to a square around its centre."""
    half = np.max(boxes[:, 2:] - boxes[:, :2], axis=1, keepdims=True) / 2
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    grown: Floats = np.concatenate([centre - half, centre + half], axis=1)
    return grown


def faces(boxes: Floats, offsets: Floats, points: Floats, scores: Floats, threshold: float = ONET_SCORE) -> Faces:
    """ONet's answer for `boxes`: `offsets` [n, 4], `points` [n, 10], `scores` [n, 2]."""
    passed = scores[:, 1] >= threshold
    squares, score = boxes[passed], scores[passed, 1]
    box = refine(squares, offsets[passed])
    kept = nms(box, score, 0.7, of_smaller=True)
    # Fractions of the square that ONet saw: five x, then five y.
    fractions = points[passed][kept].reshape(-1, 2, 5).transpose(0, 2, 1)
    corner, size = squares[kept, None, :2], squares[kept, None, 2:] - squares[kept, None, :2]
    return Faces(box[kept], score[kept], corner + fractions * size)


def narrowed(boxes: Floats, offsets: Floats, scores: Floats, threshold: float = RNET_SCORE) -> Floats:
    """The squares that ONet shall look at, best first: RNet's answer for `boxes`. `scores` is [n, 2]."""
    passed = scores[:, 1] >= threshold
    box, score, offset = boxes[passed], scores[passed, 1], offsets[passed]
    kept = nms(box, score, 0.7)
    return square(refine(box[kept], offset[kept]))


def crops(frame: NDArray[np.uint8], boxes: Floats, out: Floats) -> None:
    """Writes the boxes of an [height, width, 3] frame, resampled and normalized, into `out`, [n, side, side, 3].

    Bilinear; beyond the frame its border is repeated.
    """
    side, (height, width) = out.shape[1], frame.shape[:2]
    left, right, across = _taps(boxes[:, 0], boxes[:, 2], side, width)
    top, bottom, down = _taps(boxes[:, 1], boxes[:, 3], side, height)
    pixels = frame.reshape(-1, 3)

    def column(x: NDArray[np.intp]) -> Floats:
        upper = pixels[top[:, None, :] * width + x[:, :, None]].astype(np.float32)
        mixed: Floats = upper + (pixels[bottom[:, None, :] * width + x[:, :, None]] - upper) * down[:, None, :, None]
        return mixed

    near = column(left)
    near += (column(right) - near) * across[:, :, None, None]
    near -= np.float32(127.5)
    np.multiply(near, np.float32(1 / 128), out=out)


def _taps(start: Floats, stop: Floats, side: int, pixels: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """For `side` values over each range [start, stop): the two pixels to mix and the weight of the second."""
    step = (stop - start)[:, None] / side
    at = np.clip(start[:, None] + (np.arange(side, dtype=np.float32) + np.float32(0.5)) * step - 0.5, 0, pixels - 1)
    first = at.astype(np.intp)
    return first, np.minimum(first + 1, pixels - 1), (at - first).astype(np.float32)
