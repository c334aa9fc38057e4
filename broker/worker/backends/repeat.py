"""Built-in backend `repeat`: one response per element of IN, decoupled. For tests and measurements.

As Triton's: inputs IN INT32 [n], DELAY UINT32 [n] and WAIT UINT32 [1], both in milliseconds; outputs OUT INT32 [1] (the
element) and IDX UINT32 [1] (its index). Response i comes DELAY[i] after the one before it; the instance is busy for
WAIT. The end of the responses is an empty final response. CPU only, no batching.
"""

from __future__ import annotations

import threading
import time
from typing import Any, final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import Binding, Context, Operand
from broker.worker.backends.builtin import cpu_only, decoupled_only, no_bindings, sleep_unless
from broker.worker.stream import Stream
from shm.datatypes import shape_text
from shm.errors import Code, InferError


def load(context: Context) -> Repeat:
    """Raises InferError for GPU instances and models that are not decoupled."""
    cpu_only(context, "repeat")
    decoupled_only(context, "repeat")
    if context.config.max_batch_size:
        raise InferError(Code.INVALID_ARG, "repeat backend only supports models with max_batch_size == 0")
    return Repeat()


@final
class Repeat:
    """One instance."""

    __slots__ = ()

    def execute(self, streams: list[Stream]) -> None:
        """Answer each in a thread of its own; returns after the longest WAIT."""
        for stream in streams:
            count, delay, wait = (stream.inputs[name].reshape(-1) for name in ("IN", "DELAY", "WAIT"))
            if count.size != delay.size or wait.size != 1:
                stream.send(error=_refusal(stream), final=True)
                continue
            threading.Thread(target=_answer, args=(stream, count, delay), name="repeat", daemon=True).start()
            time.sleep(int(wait[0]) / 1000)  # as Triton's: the instance is busy, whatever its client does

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Never: it answers streams only."""
        raise no_bindings("repeat")

    def close(self) -> None:
        """It holds nothing."""


def _refusal(stream: Stream) -> InferError:
    given, delays, wait = (shape_text(stream.inputs[name].shape) for name in ("IN", "DELAY", "WAIT"))
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
