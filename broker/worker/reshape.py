"""Triton's `reshape`: one tensor in two shapes, the clients' (`dims`) and the model's (`reshape`).

Plans and answers have the clients' shape; the operands of a runtime have the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from broker.repository.config import ModelConfig
from shm.datatypes import shape_text
from shm.errors import Code, InferError

Shape = tuple[int, ...]


class Reshape(NamedTuple):
    """Both shapes of a tensor, batch dimension included; the k-th -1 of the one is the k-th of the other."""

    client: Shape
    model: Shape

    def to_model(self, shape: Shape) -> Shape:
        """What the runtime gets for a client's `shape`; sizes that are -1 there stay open."""
        return _filled(self.model, self.client, shape)

    def to_client(self, name: str, shape: Shape) -> Shape:
        """What a client is told of an output that came out as `shape`. Raises InferError if the model says otherwise"""
        if len(shape) != len(self.model) or any(
            want not in (-1, came) for want, came in zip(self.model, shape, strict=True)
        ):
            raise InferError(
                Code.INTERNAL,
                f"output '{name}' came out as {shape_text(shape)}, the configuration says {shape_text(self.model)}"
                f" (reshaped to {shape_text(self.client)})",
            )
        return _filled(self.client, self.model, shape)


def reshapes(config: ModelConfig) -> dict[str, Reshape]:
    """The tensors whose shape at the client is not the model's."""
    batch = (-1,) if config.max_batch_size > 0 else ()
    return {
        tensor.name: Reshape(batch + tensor.dims, batch + tensor.reshape)
        for tensor in (*config.input, *config.output)
        if tensor.reshape is not None and tensor.reshape != tensor.dims
    }


def _filled(wanted: Shape, given: Shape, shape: Sequence[int]) -> Shape:
    variable = iter([size for dim, size in zip(given, shape, strict=True) if dim == -1])
    return tuple(next(variable) if dim == -1 else dim for dim in wanted)
