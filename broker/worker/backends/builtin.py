"""What the built-in test backends share: their parameters, and operands as arrays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.worker.backends import Context, Operand
from shm import datatypes
from shm.errors import Code, InferError

COUNTED = ("sequence", "dyna_sequence")  # backends that are told how many elements each request of a batch has
COUNTS = ":elements"  # behind the name of a ragged input: the input that says so


def number(context: Context, parameter: str) -> float:
    """A model parameter as a number, 0 when it is not there. Raises InferError for anything else."""
    text = context.config.parameters.get(parameter, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InferError(Code.INVALID_ARG, f"model parameter '{parameter}' must be a number of 0 or more, got '{text}'")
    return value


def cpu_only(context: Context, backend: str) -> None:
    """Raises InferError for an instance that is not on the CPU."""
    if context.group.kind not in ("KIND_CPU", "KIND_AUTO"):
        raise InferError(Code.INVALID_ARG, f"'{backend}' backend only supports CPU instances")


def decoupled_only(context: Context, backend: str) -> None:
    """Raises InferError unless the model may send any number of responses."""
    if not context.config.decoupled:
        raise InferError(
            Code.INVALID_ARG,
            f"backend '{backend}' only supports decoupled models: put `model_transaction_policy {{ decoupled: true }}` "
            "in config.pbtxt",
        )


def no_bindings(backend: str) -> InferError:
    """For `bind` of a backend that answers streams only."""
    return InferError(Code.UNSUPPORTED, f"backend '{backend}' only supports decoupled models")


def sleep_unless(ended: Callable[[], bool], seconds: float) -> None:
    """A delay that is part of a test model's contract; over at once when `ended` says so."""
    until = time.monotonic() + seconds
    while (remaining := until - time.monotonic()) > 0 and not ended():
        time.sleep(min(remaining, 0.01))


def needs(context: Context, backend: str, controls: tuple[str, ...]) -> None:
    """Raises InferError unless the model is a sequence model with these control inputs."""
    sequence = context.config.sequence_batching
    names = {control.name for control in sequence.control_input} if sequence else set()
    if not names.issuperset(controls):
        quoted = ", ".join(f"'{name}'" for name in controls)
        raise InferError(
            Code.INVALID_ARG, f"backend '{backend}' needs sequence_batching with the control inputs {quoted}"
        )


def array_of(operand: Operand) -> npt.NDArray[Any]:
    """An input as an array of its shape; strings as bytes objects."""
    assert operand.memory is not None
    if operand.datatype == datatypes.BYTES:
        count = datatypes.element_count(operand.shape)
        return datatypes.decode_bytes(operand.memory, count, f"inference input '{operand.name}'").reshape(operand.shape)
    return operand.memory.view(datatypes.numpy_dtype(operand.datatype)).reshape(operand.shape)


def rows_of(inputs: Mapping[str, Operand], rows: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """INPUT of a batch, and how many elements each of its rows has: told where it is ragged, else the same of all."""
    values = array_of(inputs["INPUT"])
    counts = inputs.get("INPUT" + COUNTS)
    if counts is not None:
        return values, array_of(counts).astype(np.int64)
    return values, np.full(rows, values.size // max(rows, 1), np.int64)


def sums_of(values: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The sum of each row."""
    total = np.concatenate(([0], np.cumsum(values.reshape(-1), dtype=np.int64)))
    ends = np.cumsum(counts)
    sums: npt.NDArray[np.int64] = total[ends] - total[ends - counts]
    return sums


def store(outputs: list[Operand], values: dict[str, npt.NDArray[Any]]) -> list[npt.NDArray[np.generic]]:
    """Write outputs that have memory; returns the others, in order. Raises InferError for an unknown name or size."""
    opened: list[npt.NDArray[np.generic]] = []
    for output in outputs:
        if output.name not in values:
            raise InferError(Code.INVALID_ARG, f"the backend has no output '{output.name}'")
        value = values[output.name]
        if output.memory is None:
            opened.append(value)
            continue
        raw = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
        if raw.size != output.memory.size:
            raise InferError(
                Code.INVALID_ARG, f"output '{output.name}' has {output.memory.size} bytes, the model gives {raw.size}"
            )
        output.memory[:] = raw
    return opened
