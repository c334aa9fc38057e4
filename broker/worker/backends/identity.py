"""Built-in backend `identity`: OUTPUT<i> is INPUT<i>, any datatype and shape. For tests and measurements.

Parameters as of Triton's: `execute_delay_ms`, `instance_wise_delay_multiplier` (delay x max(1, multiplier x index of
the instance)), `creation_delay_sec`. CPU only. An output whose input was not sent comes out empty.
"""

from __future__ import annotations

import time
from typing import Any, final

import numpy as np
import numpy.typing as npt

from broker.repository.config import ModelConfig
from broker.worker.backends import Binding, Context, Operand
from broker.worker.backends.builtin import array_of, cpu_only, number
from shm import datatypes
from shm.errors import Code, InferError


def load(context: Context) -> Identity:
    """Raises InferError for GPU instances, parameters that are no numbers, and outputs that cannot be their inputs."""
    cpu_only(context, "identity")
    _check(context.config)
    time.sleep(number(context, "creation_delay_sec"))
    delay = number(context, "execute_delay_ms") / 1000
    index = int(context.name.rpartition("_")[2])
    return Identity(delay * max(1.0, number(context, "instance_wise_delay_multiplier") * index))


@final
class Identity:
    """One instance."""

    __slots__ = ("_delay",)

    def __init__(self, delay: float) -> None:
        self._delay = delay

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Every output gets the input of the same number, or stays empty."""
        by_name = {operand.name: operand for operand in inputs}
        return _Copy(self._delay, [(by_name.get(_source(output.name)), output) for output in outputs])

    def close(self) -> None:
        """Nothing is held."""


@final
class _Copy:
    __slots__ = ("_delay", "_pairs", "_results")

    def __init__(self, delay: float, pairs: list[tuple[Operand | None, Operand]]) -> None:
        self._delay = delay
        self._pairs = pairs
        self._results: list[npt.NDArray[np.generic]] = []

    def run(self) -> None:
        if self._delay:
            time.sleep(self._delay)
        results: list[npt.NDArray[Any]] = []
        for source, output in self._pairs:
            if output.memory is None:
                results.append(_empty(output) if source is None else array_of(source))
            elif source is None:
                output.memory[:] = 0
            else:
                assert source.memory is not None
                if source.memory.size != output.memory.size:
                    raise InferError(
                        Code.INVALID_ARG,
                        f"output '{output.name}' has {output.memory.size} bytes, its input {source.memory.size}",
                    )
                output.memory[:] = source.memory
        self._results = results

    def results(self) -> list[npt.NDArray[np.generic]]:
        found, self._results = self._results, []  # there are thousands of bindings: none keeps what it gave
        return found


def _check(config: ModelConfig) -> None:
    """With the texts of Triton's, which also wants an input for each output, and shapes equal where they are open."""
    inputs = {tensor.name: tensor for tensor in config.input}
    for output in config.output:
        given = inputs.get(_source(output.name))
        if given is None:
            continue
        if given.datatype != output.datatype:
            types = (_triton(each.datatype) for each in (given, output))
            raise InferError(
                Code.INVALID_ARG, "expected input and output datatype to match, got {} and {}".format(*types)
            )
        fits = len(given.dims) == len(output.dims) and all(
            one == other or -1 in (one, other) for one, other in zip(given.dims, output.dims, strict=True)
        )
        if not fits and given.reshape is None and output.reshape is None:
            shapes = (datatypes.shape_text(each.dims) for each in (given, output))
            raise InferError(
                Code.INVALID_ARG, "expected input and output shape to match, got {} and {}".format(*shapes)
            )


def _source(output: str) -> str:
    return output.replace("OUTPUT", "INPUT", 1)


def _empty(output: Operand) -> npt.NDArray[Any]:
    """An output without input: its batch dimension, and nothing in it."""
    shape = tuple(
        0 if axis and (dim == -1 or len(output.shape) > 1) else max(dim, 0) for axis, dim in enumerate(output.shape)
    )
    return np.zeros(shape, datatypes.numpy_dtype(output.datatype))


def _triton(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
