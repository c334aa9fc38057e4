"""`infer(model, arrays)`: which arrays were given, and the plan that serves such arrays.

The plans are kept in a bounded LRU by signature, so that only the first request of a kind costs a round trip to the
broker. Used by both clients; no I/O.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, final

import numpy as np
import numpy.typing as npt

from clientlib.recipe import ArrayInput, Budget, Outputs, Recipe, check_outputs
from clientlib.region import TensorRef
from shm import datatypes
from shm.datatypes import BYTES
from shm.errors import Code, InferError

P = TypeVar("P")
MAX_PLANS = 64


class Request(NamedTuple):
    """The arguments of one `infer`: `key` is the same for all requests that one plan can serve."""

    key: Hashable
    recipe: Recipe
    values: list[npt.NDArray[Any]]  # what to copy: one array per ArrayInput, in their order


def request(
    model: str,
    version: str,
    inputs: Mapping[str, npt.NDArray[Any] | TensorRef],
    outputs: Outputs,
    parameters: Mapping[str, object] | None,
    budget: Budget,
) -> Request:
    """Look at the arguments of an `infer`. Raises InferError for what is neither an array nor a tensor in a region."""
    if parameters:
        raise InferError(
            Code.UNSUPPORTED,
            f"request parameters ({', '.join(map(repr, parameters))}) are not carried to models yet; priority and "
            "timeout are arguments of their own",
        )
    if not isinstance(inputs, Mapping):
        raise InferError(Code.INVALID_ARG, f"inputs must map names to arrays, got {type(inputs).__name__}")
    values: list[npt.NDArray[Any]] = []
    kinds: dict[str, TensorRef | ArrayInput] = {}
    for name, value in inputs.items():
        if isinstance(value, TensorRef):
            kinds[name] = value
        else:
            kinds[name], array = _array_input(name, value)
            values.append(array)
    chosen = check_outputs(outputs)
    wanted: Hashable = tuple(chosen.items()) if isinstance(chosen, Mapping) else chosen
    recipe = Recipe(model, version, kinds, chosen, 1, 1, budget)
    return Request((model, version, tuple(kinds.items()), wanted), recipe, values)


def _array_input(name: str, value: Any) -> tuple[ArrayInput, npt.NDArray[Any]]:
    if not isinstance(value, np.ndarray):
        if not hasattr(value, "__array__"):
            raise InferError(
                Code.INVALID_ARG,
                f"input '{name}' must be a numpy array or a tensor in a region, got {type(value).__name__}: "
                "numpy.asarray(value, dtype=…) makes one, with the datatype that the model expects",
            )
        value = np.asarray(value)
    datatype = datatypes.datatype_of(value.dtype)
    if datatype == BYTES:
        data = np.frombuffer(datatypes.encode_bytes(value), np.uint8)
        return ArrayInput(datatype, value.shape, data.nbytes), data
    return ArrayInput(datatype, value.shape, value.nbytes), value


@final
class Automatic(Generic[P]):
    """The plans, the one used longest ago goes first. Any thread."""

    __slots__ = ("_lock", "_plans")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[Hashable, P] = OrderedDict()

    def find(self, key: Hashable) -> P | None:
        """The plan of a signature, used now."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
            return plan

    def keep(self, key: Hashable, plan: P) -> P:
        """Remember a new plan; returns the one to use: another thread may have been faster."""
        with self._lock:
            kept = self._plans.setdefault(key, plan)
            dropped = [self._plans.popitem(last=False) for _ in range(len(self._plans) - MAX_PLANS)]
        del dropped  # outside the lock: their release runs other code
        return kept

    def drop(self, key: Hashable) -> None:
        """Forget a plan that the model no longer fits."""
        with self._lock:
            dropped = self._plans.pop(key, None)
        del dropped

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            plans, self._plans = self._plans, OrderedDict()
        plans.clear()
