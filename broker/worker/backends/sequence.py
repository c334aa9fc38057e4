"""Built-in backend `sequence`: adds up INPUT per batch slot; OUTPUT is the sum so far. For tests of sequence batching.

INPUT and OUTPUT are INT32 vectors, which may be ragged; controls START and READY. Parameter `execute_delay_ms`. CPU
only.
"""

from __future__ import annotations

import time
from typing import final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import Binding, Context, Operand
from broker.worker.backends.builtin import array_of, cpu_only, needs, number, rows_of, store, sums_of


def load(context: Context) -> Accumulator:
    """Raises InferError for GPU instances and models without the controls."""
    cpu_only(context, "sequence")
    needs(context, "sequence", ("START", "READY"))
    return Accumulator(max(1, context.config.max_batch_size), number(context, "execute_delay_ms") / 1000)


@final
class Accumulator:
    """One instance: a sum for every slot."""

    __slots__ = ("delay", "sums")

    def __init__(self, slots: int, delay: float) -> None:
        self.sums = np.zeros(slots, np.int32)
        self.delay = delay

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Operands by name; what the model has besides is not looked at."""
        return _Step(self, {operand.name: operand for operand in inputs}, outputs)

    def close(self) -> None:
        """Nothing is held."""


@final
class _Step:
    __slots__ = ("_inputs", "_model", "_outputs", "_results")

    def __init__(self, model: Accumulator, inputs: dict[str, Operand], outputs: list[Operand]) -> None:
        self._model, self._inputs, self._outputs = model, inputs, outputs
        self._results: list[npt.NDArray[np.generic]] = []

    def run(self) -> None:
        if self._model.delay:
            time.sleep(self._model.delay)
        start, ready = (array_of(self._inputs[name]).reshape(-1) != 0 for name in ("START", "READY"))
        values, counts = rows_of(self._inputs, start.size)
        totals = sums_of(values, counts).astype(np.int32)
        sums = self._model.sums[: start.size]
        np.copyto(sums, np.where(start, totals, sums + totals), where=ready)
        result = np.empty(values.shape, np.int32)
        result.reshape(-1)[:] = np.repeat(np.where(ready, sums, 0), counts)
        self._results = store(self._outputs, {"OUTPUT": result})

    def results(self) -> list[npt.NDArray[np.generic]]:
        found, self._results = self._results, []  # there are thousands of bindings: none keeps what it gave
        return found
