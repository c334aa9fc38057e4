"""Built-in backend `implicit_state`: steps whose input TEST_CASE says what they do with the state. For tests.

0: asks for a state that the model does not have; 1: writes a state but does not keep it; 2: input and output state are
one buffer. 3 (growable memory) exists on GPUs only. OUTPUT is INPUT plus the state.
"""

from __future__ import annotations

from typing import final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import Binding, Context, Operand
from broker.worker.backends.builtin import array_of, cpu_only, needs, store
from shm.errors import Code, InferError


def load(context: Context) -> States:
    """Raises InferError for GPU instances and models without the controls."""
    cpu_only(context, "implicit_state")
    needs(context, "implicit_state", ("START", "END", "READY"))
    sequence = context.config.sequence_batching
    return States(context.config.name, bool(sequence and sequence.state))


@final
class States:
    """One instance."""

    __slots__ = ("has_state", "name")

    def __init__(self, name: str, has_state: bool) -> None:
        self.name = name
        self.has_state = has_state

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Operands by name."""
        return _Step(self, {operand.name: operand for operand in inputs}, outputs)

    def close(self) -> None:
        """Nothing is held."""


@final
class _Step:
    __slots__ = ("_inputs", "_model", "_outputs", "_results")

    def __init__(self, model: States, inputs: dict[str, Operand], outputs: list[Operand]) -> None:
        self._model, self._inputs, self._outputs = model, inputs, outputs
        self._results: list[npt.NDArray[np.generic]] = []

    def run(self) -> None:
        case = int(array_of(self._inputs["TEST_CASE"]).reshape(-1)[0])
        if case == 0:
            reason = (
                "state 'undefined_state' is not a valid state name"
                if self._model.has_state
                else "unable to add state 'undefined_state', state configuration is missing for model"
                f" '{self._model.name}'"
            )
            raise InferError(Code.INVALID_ARG, reason)
        if case not in (1, 2) or not self._model.has_state:
            raise InferError(Code.UNSUPPORTED, f"test case {case} is not supported by model '{self._model.name}'")
        value, state = array_of(self._inputs["INPUT"]), array_of(self._inputs["INPUT_STATE"])
        result = value + state
        kept = state if case == 1 else result
        self._results = store(self._outputs, {"OUTPUT": result, "OUTPUT_STATE": kept})

    def results(self) -> list[npt.NDArray[np.generic]]:
        found, self._results = self._results, []  # there are thousands of bindings: none keeps what it gave
        return found
