"""What an inference returns: arrays by output name, and what it cost.

Made by `clientlib.layout` from a completion; knows nothing of channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import numpy.typing as npt

from shm.parameters import Parameter, unpack


class Timing(NamedTuple):
    """Nanoseconds that a request spent queued, preparing its inputs, in the model, and placing its outputs."""

    queue_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int


@final
class InferResult(Mapping[str, npt.NDArray[Any]]):
    """A mapping of output names to arrays.

    An output that the caller placed is a view of that range: the next request that writes there changes it. Any other
    array owns its memory and outlives the client.
    """

    __slots__ = ("_arrays", "_copied", "_entry", "shapes")

    def __init__(
        self,
        arrays: dict[str, npt.NDArray[Any]],
        entry: tuple[Any, ...],
        copied: int = 0,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._arrays = arrays
        self._entry = entry
        self._copied = copied
        self.shapes = shapes or {}  # of raw results (see `clientlib.recipe.Recipe`), whose arrays are bytes

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"no output {name!r}: the result has {', '.join(map(repr, self._arrays))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """What the model said beside the arrays: bool, int, float and str by name. {} for most models."""
        return unpack(self._entry[8]) if len(self._entry) > 8 else {}

    @property
    def timing(self) -> Timing:
        """Where the time went, in nanoseconds; all 0 over grpc://, http:// and zmq+ipc://, whose messages lack it."""
        return Timing(*self._entry[3:7])

    @property
    def copied_bytes(self) -> int:
        """Tensor bytes that were copied between this call and the model, by either side."""
        copied: int = self._entry[7]
        return copied + self._copied

    @property
    def copied_here(self) -> int:
        """The part of `copied_bytes` that this process copied."""
        return self._copied

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}: {array.dtype} {list(array.shape)}" for name, array in self._arrays.items())
        return f"<InferResult {arrays}; {self.copied_bytes} bytes copied>"
