"""Memory of a model instance in which the rows of a batch lie side by side. Used by `broker.worker.model` and by who
runs batches (`execute`, `gathered`).
"""

from __future__ import annotations

from typing import final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import Binding


@final
class BatchBuffers:
    """Where rows of several requests lie side by side (the instance's memory), and the bindings on it by row count."""

    __slots__ = ("bindings", "inputs", "outputs")

    def __init__(self, inputs: list[npt.NDArray[np.uint8]], outputs: list[npt.NDArray[np.uint8] | None]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.bindings: dict[int, Binding] = {}


def aligned_buffer(byte_size: int) -> npt.NDArray[np.uint8]:
    """Private memory on a 64-byte boundary, as vector kernels like it."""
    raw = np.empty(byte_size + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64
    return raw[start : start + byte_size]
