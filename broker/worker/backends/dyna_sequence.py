"""Built-in backend `dyna_sequence`: as `sequence`, but by correlation ID instead of slot, for the strategy `oldest`.

Controls START, END, READY and CORRID; the last step of a sequence also adds the correlation ID's low 32 bits.
Parameter `execute_delay_ms`. CPU only.
"""

from __future__ import annotations

import time
from typing import Any, final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import Binding, Context, Operand
from broker.worker.backends.builtin import array_of, cpu_only, needs, number, rows_of, store, sums_of
from shm.errors import Code, InferError


def load(context: Context) -> Sums:
    """Raises InferError for GPU instances and models without the controls."""
    cpu_only(context, "dyna_sequence")
    needs(context, "dyna_sequence", ("START", "END", "READY", "CORRID"))
    return Sums(number(context, "execute_delay_ms") / 1000)


@final
class Sums:
    """One instance: a sum for every sequence that has not ended."""

    __slots__ = ("delay", "sums")

    def __init__(self, delay: float) -> None:
        self.sums: dict[int, int] = {}
        self.delay = delay

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Operands by name."""
        return _Step(self, {operand.name: operand for operand in inputs}, outputs)

    def step(self, start: bool, end: bool, identity: int, total: int) -> int:
        """One step of one sequence; returns its sum."""
        total += 0 if start else self.sums.get(identity, 0)
        if end:
            self.sums.pop(identity, None)
            return total + identity
        self.sums[identity] = total
        return total

    def close(self) -> None:
        """Nothing is held."""


@final
class _Step:
    __slots__ = ("_inputs", "_model", "_outputs", "_results")

    def __init__(self, model: Sums, inputs: dict[str, Operand], outputs: list[Operand]) -> None:
        self._model, self._inputs, self._outputs = model, inputs, outputs
        self._results: list[npt.NDArray[np.generic]] = []

    def run(self) -> None:
        if self._model.delay:
            time.sleep(self._model.delay)
        flags = [array_of(self._inputs[name]).reshape(-1) != 0 for name in ("READY", "START", "END")]
        identities = [_number(item) for item in array_of(self._inputs["CORRID"]).reshape(-1)]
        values, counts = rows_of(self._inputs, len(identities))
        totals = sums_of(values, counts)
        sums = np.zeros(len(identities), np.int64)
        for row, (ready, start, end) in enumerate(zip(*flags, strict=True)):
            if ready:
                total = self._model.step(bool(start), bool(end), identities[row], int(totals[row]))
                sums[row] = (total + (1 << 31)) % (1 << 32) - (1 << 31)
        result = np.empty(values.shape, np.int32)
        result.reshape(-1)[:] = np.repeat(sums, counts)
        self._results = store(self._outputs, {"OUTPUT": result})

    def results(self) -> list[npt.NDArray[np.generic]]:
        found, self._results = self._results, []  # there are thousands of bindings: none keeps what it gave
        return found


def _number(identity: Any) -> int:
    try:
        return int(identity or 0)
    except ValueError:
        raise InferError(Code.INVALID_ARG, f"correlation ID {identity!r} is not a number") from None
