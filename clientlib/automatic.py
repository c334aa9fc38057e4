"""`infer(model, arrays)`: which arrays were given, and the plan that serves such arrays.

The plans are kept in a bounded LRU by signature, so that only the first request of a kind costs a round trip to the
broker. Used by both clients; no I/O.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar, final

import numpy as np
import numpy.typing as npt

from clientlib.arena import Bank
from clientlib.arguments import model_text, parameters_of, text, version_text
from clientlib.failures import PlanOutdated
from clientlib.recipe import ArrayInput, Budget, Outputs, Recipe, check_outputs
from clientlib.region import TensorRef
from shm import datatypes
from shm.errors import Code, InferError
from shm.parameters import Parameter, key_of


class _Placed(Protocol):
    @property
    def recipe(self) -> Recipe:
        """What it was made of."""

    @property
    def places_byte_size(self) -> int:
        """What the plan takes of the client's own memory."""


P = TypeVar("P", bound=_Placed)
Array = npt.NDArray[Any]
Inputs = Mapping[str, Array | TensorRef]
NOTHING: dict[str, Parameter] = {}
MAX_PLANS = 64
WIDE = Budget(places=64, byte_size=64 << 20, least=4)  # of plans that several threads use at a time
MAX_BYTES = 256 << 20  # of places, for all plans but the last


@final
class Request:
    """The arguments of one `infer`. `key` is the same for all requests that one plan can serve.

    `values` are what to copy: one array per input that is no tensor in a region, in their order.
    """

    __slots__ = ("_chosen", "_inputs", "_model", "_parameters", "_version", "key", "values")

    def __init__(
        self,
        model: str,
        version: str | int,
        inputs: Inputs,
        outputs: Outputs,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        """Raises InferError for inputs that are neither arrays nor tensors in a region, and for other parameters than
        a request can have.
        """
        if type(model) is not str:
            model = model_text(model)
        if type(version) is not str:
            version = version_text(version)
        self._model, self._version = model, version
        if not isinstance(inputs, Mapping):
            raise InferError(Code.INVALID_ARG, f"inputs must map names to arrays, got {type(inputs).__name__}")
        self._inputs: dict[str, TensorRef | Array] = {}
        self.values: list[Array] = []
        signature: list[Hashable] = [model, version]
        for name, value in inputs.items():
            if not isinstance(value, TensorRef):
                value = _array(name, value)
                self.values.append(_bytes_of(value) if value.dtype.kind in "OSU" else value)
                signature += (name, value.dtype, value.shape, self.values[-1].nbytes)
            else:
                signature += (name, value)
            self._inputs[name] = value
        chosen = self._chosen = None if outputs is None else check_outputs(outputs)
        if chosen is not None:
            signature.append(tuple(chosen.items()) if isinstance(chosen, Mapping) else tuple(chosen))
        self._parameters = NOTHING
        if parameters is not None:
            self._parameters = parameters_of(parameters)
            if self._parameters:
                signature.append(key_of(self._parameters))
        self.key = tuple(signature)

    def recipe(self, budget: Budget, widens: bool = False) -> Recipe:
        """What to prepare for requests of this kind."""
        values = iter(self.values)
        model_text(self._model)
        version_text(self._version)
        inputs = {
            text(name, "the name of an input"): value
            if isinstance(value, TensorRef)
            else ArrayInput(datatypes.datatype_of(value.dtype), value.shape, next(values).nbytes)
            for name, value in self._inputs.items()
        }
        version, own = self._version, self._parameters
        return Recipe(self._model, version, inputs, self._chosen, 1, 1, budget, parameters=own, widens=widens)


@contextlib.contextmanager
def told_apart(model: str) -> Iterator[None]:
    """Around a second attempt: who called `infer` has no plan to prepare again."""
    try:
        yield
    except PlanOutdated:
        raise InferError(
            Code.UNAVAILABLE,
            f"model '{model}' was reloaded with other inputs or outputs once more while this was asked: ask again",
        ) from None


def _array(name: str, value: object) -> Array:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__array__"):
        try:
            return np.asarray(value)
        except Exception as error:  # whatever the value's own code raises: memory of a device, a tensor with a gradient
            raise InferError(
                Code.INVALID_ARG, f"input '{name}', {type(value).__name__}, does not become a numpy array: {error}"
            ) from error
    raise InferError(
        Code.INVALID_ARG,
        f"input '{name}' must be a numpy array or a tensor in a region, got {type(value).__name__}: "
        "numpy.asarray(value, dtype=…) makes one, with the datatype that the model expects",
    )


def _bytes_of(strings: Array) -> Array:
    return np.frombuffer(datatypes.encode_bytes(strings), np.uint8)


@final
class Automatic(Generic[P]):
    """The plans, the one used longest ago goes first. Any thread."""

    __slots__ = ("_byte_size", "_lock", "_plans")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # its holder may be interrupted by a signal handler that calls, too
        self._plans: OrderedDict[Hashable, tuple[P, int]] = OrderedDict()
        self._byte_size = 0

    def find(self, key: Hashable) -> P | None:
        """The plan of a signature, used now."""
        # Without the lock: each step is atomic, and a signal handler that asks must not find it held below.
        found = self._plans.get(key)
        if found is None:
            return None
        try:  # not `suppress`, which would cost more than the rest
            self._plans.move_to_end(key)
        except KeyError:  # dropped meanwhile
            pass
        return found[0]

    def keep(self, key: Hashable, plan: P, byte_size: int) -> P:
        """Remember a new plan with `byte_size` of places. Returns the one to use: another thread may be first."""
        with self._lock:
            if key not in self._plans:
                self._plans[key] = plan, byte_size
                self._byte_size += byte_size
            dropped = self._shrink()
            plan = self._plans.get(key, (plan,))[0]
        del dropped  # outside the lock: its release runs other code
        return plan

    def widen(self, key: Hashable, plan: P, bank: Bank, prepare: Callable[[Recipe], P]) -> None:
        """No place of `plan`, those of `bank`, is free: one that `prepare` makes with more of them takes over.

        Where that cannot be had, or would cost other plans theirs, requests take turns in the places that there are.
        """
        each = plan.places_byte_size // bank.places
        more = each * WIDE.places_for(each, 1) - plan.places_byte_size
        if bank.outgrown or more <= 0 or self._byte_size + more > MAX_BYTES:
            return
        try:
            wide = prepare(dataclasses.replace(plan.recipe, budget=WIDE, widens=False))
        except InferError:
            return
        if self._replace(key, plan, wide):
            bank.outgrown = True

    def _replace(self, key: Hashable, plan: P, wide: P) -> bool:
        """False: `plan` has been dropped meanwhile, or replaced."""
        with self._lock:
            before = self._plans.get(key)
            found = before is not None and before[0] is plan
            if before is not None and found:
                self._plans[key] = wide, wide.places_byte_size
                self._plans.move_to_end(key)
                self._byte_size += wide.places_byte_size - before[1]
            dropped = self._shrink()
        del dropped  # outside the lock
        return found

    def _shrink(self) -> list[tuple[P, int]]:
        """What there is no room for any more."""
        dropped = []
        while len(self._plans) > MAX_PLANS or (self._byte_size > MAX_BYTES and len(self._plans) > 1):
            _, oldest = self._plans.popitem(last=False)
            self._byte_size -= oldest[1]
            dropped.append(oldest)
        return dropped

    def failed(self, key: Hashable, plan: P, error: InferError) -> None:
        """After an error that says that the model or a region may have changed: look again next time."""
        if isinstance(error, PlanOutdated) or error.code in ("NOT_FOUND", "INVALID_ARG"):
            self.drop(key, plan)

    def drop(self, key: Hashable, plan: P) -> None:
        """Forget a plan that the model no longer fits, unless another thread was faster to replace it."""
        with self._lock:
            found = self._plans.get(key)
            if found is not None and found[0] is plan:
                del self._plans[key]
                self._byte_size -= found[1]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            plans, self._plans = self._plans, OrderedDict()
            self._byte_size = 0
        plans.clear()
