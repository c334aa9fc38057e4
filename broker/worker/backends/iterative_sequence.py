"""Built-in backend `iterative_sequence`: INPUT INT32 [1] = n has the responses n - 1, …, 0, one per run. For tests.

As Triton's: every run sends one response OUTPUT INT32 and has the request rescheduled, until that is 0. Needs a
decoupled model with `sequence_batching { iterative_sequence: true }`. Parameter `execute_delay_ms`: what a run takes.
CPU only.
"""

from __future__ import annotations

import time
from typing import final

import numpy as np

from broker.worker.backends import Binding, Context, Operand
from broker.worker.backends.builtin import cpu_only, decoupled_only, no_bindings, number
from broker.worker.stream import Stream


def load(context: Context) -> IterativeSequence:
    """Raises InferError for GPU instances and models that are not decoupled."""
    cpu_only(context, "iterative_sequence")
    decoupled_only(context, "iterative_sequence")
    return IterativeSequence(number(context, "execute_delay_ms") / 1e3)


@final
class IterativeSequence:
    """One instance."""

    __slots__ = ("_delay_s",)

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def execute(self, streams: list[Stream]) -> None:
        """One response to each."""
        time.sleep(self._delay_s)
        for stream in streams:
            if stream.cancelled:
                stream.send(final=True)
                continue
            given = stream.inputs["INPUT"]
            value = stream.kept.get("next", int(given.reshape(-1)[0])) - 1
            stream.kept["next"] = value
            last = value <= 0
            stream.send({"OUTPUT": np.full(given.shape, value, np.int32)}, final=last)
            if not last:
                stream.reschedule()

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Never: it answers streams only."""
        raise no_bindings("iterative_sequence")

    def close(self) -> None:
        """It holds nothing."""
