"""Built-in backend `repeat`: one response per element of IN, decoupled. For tests and measurements.

As Triton's: inputs IN INT32 [n], DELAY UINT32 [n] and WAIT UINT32 [1], both in milliseconds; outputs OUT INT32 [1] (the
element) and IDX UINT32 [1] (its index). Response i comes DELAY[i] after the one before it; the instance is busy for
WAIT. The end of the responses is an empty final response. Of a model that is not decoupled IN has one element, whose
response comes when both have passed. CPU only, no batching.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import Binding, Context, Operand
from broker.worker.backends.builtin import array_of, cpu_only, sleep_unless, store
from broker.worker.stream import Stream
from shm.datatypes import shape_text
from shm.errors import Code, InferError, fresh


def load(context: Context) -> Repeat:
    """Raises InferError for GPU instances and models that batch."""
    cpu_only(context, "repeat")
    if context.config.max_batch_size:
        raise InferError(Code.INVALID_ARG, "repeat backend only supports models with max_batch_size == 0")
    return Repeat()


MAX_MS: Final = 600_000  # a client's word must not keep an instance for longer


@final
class Repeat:
    """One instance."""

    __slots__ = ()

    def execute(self, streams: list[Stream]) -> None:
        """Answer each in a thread of its own; returns after the longest WAIT."""
        for stream in streams:
            count, delay, wait = (stream.inputs[name].reshape(-1) for name in ("IN", "DELAY", "WAIT"))
            if count.size != delay.size or wait.size != 1:
                stream.send(error=_refusal(stream.inputs), final=True)
                continue
            if (late := _too_long(delay, wait)) is not None:
                stream.send(error=late, final=True)
                continue
            threading.Thread(target=_answer, args=(stream, count, delay), name="repeat", daemon=True).start()
            _be_busy(stream, int(wait[0]) / 1000)

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """For a model that is not decoupled."""
        return _Once({operand.name: array_of(operand) for operand in inputs}, outputs)

    def close(self) -> None:
        """It holds nothing."""


@final
class _Once:
    """A run that gives one response."""

    __slots__ = ("_inputs", "_outputs", "_results")

    def __init__(self, inputs: dict[str, npt.NDArray[Any]], outputs: list[Operand]) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._results: list[npt.NDArray[np.generic]] = []

    def run(self) -> None:
        values, delay, wait = (self._inputs[name].reshape(-1) for name in ("IN", "DELAY", "WAIT"))
        if values.size != delay.size or wait.size != 1:
            raise _refusal(self._inputs)
        if values.size != 1:
            text = shape_text(self._inputs["IN"].shape)
            raise InferError(Code.INVALID_ARG, f"a model that is not decoupled has one response, got IN {text}")
        if (late := _too_long(delay, wait)) is not None:
            raise fresh(late)
        time.sleep(max(int(delay[0]), int(wait[0])) / 1000)
        made = {"OUT": values.astype(np.int32), "IDX": np.zeros(1, np.uint32)}
        self._results = store(self._outputs, made)

    def results(self) -> list[npt.NDArray[np.generic]]:
        found, self._results = self._results, []  # there are thousands of bindings: none keeps what it gave
        return found


def _be_busy(stream: Stream, seconds: float) -> None:
    """As Triton's: the instance is busy, whatever its client does. But it does not hang."""
    until = time.monotonic() + seconds
    while (remaining := until - time.monotonic()) > 0:
        time.sleep(min(remaining, 1.0))
        _ = stream.cancelled  # a sign of life


def _too_long(delay: npt.NDArray[Any], wait: npt.NDArray[Any]) -> InferError | None:
    """Both come from the client, up to 49 days, and an instance that is busy for it shows signs of life."""
    longest = max(int(delay.max(initial=0)), int(wait[0]))
    if longest <= MAX_MS:
        return None
    return InferError(Code.INVALID_ARG, f"expected DELAY and WAIT of at most {MAX_MS} ms, got {longest}")


def _refusal(inputs: Mapping[str, npt.NDArray[Any]]) -> InferError:
    given, delays, wait = (shape_text(inputs[name].shape) for name in ("IN", "DELAY", "WAIT"))
    if given != delays:
        return InferError(Code.INVALID_ARG, f"expected IN and DELAY shape to match, got {given} and {delays}")
    return InferError(Code.INVALID_ARG, f"expected WAIT shape to be [1], got {wait}")


def _answer(stream: Stream, values: npt.NDArray[Any], delays: npt.NDArray[Any]) -> None:
    for index, (value, delay) in enumerate(zip(values, delays, strict=True)):
        sleep_unless(lambda: stream.cancelled, int(delay) / 1000)
        if stream.cancelled:
            break
        stream.send({"OUT": np.array([value], np.int32), "IDX": np.array([index], np.uint32)})
    stream.send(final=True)
