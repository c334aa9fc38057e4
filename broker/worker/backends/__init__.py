"""Runtimes. One module each, importable without the others, found by entry point `tensorbroker.backends`.

A backend module has `load(context) -> RuntimeModel`; a model that needs code of its own may bring it as
`<model>/backend.py` with the same function. What a backend may not do: keep an operand's memory after `run` returned,
or write an operand that is an input.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeGuard, final

import numpy as np
import numpy.typing as npt

from broker.repository.config import InstanceGroup, ModelConfig
from shm.errors import Code, InferError, described
from shm.parameters import Parameter

if TYPE_CHECKING:
    from broker.worker.cuda.staging import Scratch
    from broker.worker.cuda.streams import Lane
    from broker.worker.stream import Stream


OWN: Final = "backend.py"  # beside a model's config.pbtxt
NOTHING: Final[Mapping[str, Parameter]] = {}


class Context(NamedTuple):
    """What a backend loads: one instance of one version of a model."""

    config: ModelConfig
    version: int
    directory: str  # of the version
    group: InstanceGroup
    name: str  # of the instance: "<group>_<n>"
    device: str = ""  # UUID of the GPU that this worker runs on; "": the CPU


class OnGpu(NamedTuple):
    """[pointer, pointer + size) on the worker's GPU: an address for the driver and for runtimes, never for the host.

    `far`: it is another GPU's memory, reached over the bus.
    """

    pointer: int
    size: int
    far: bool = False


class Operand(NamedTuple):
    """A tensor in memory that the caller keeps alive. `datatype` is KServe's name.

    `memory` is the bytes as a 1-D uint8 array. For an output, `None` means: the runtime allocates it, because its
    shape is not known before the run. `gpu`: the bytes lie there instead, and `memory` is None; only models that are
    `GpuModel`s get such operands.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    memory: npt.NDArray[np.uint8] | None
    gpu: OnGpu | None = None


class _OwnCode:
    """Around a call of a backend's code. It may raise what ends a thread and is no `Exception`: `sys.exit` in a library
    that was written for a command line, `asyncio.CancelledError`. That ends the request like any exception, and not the
    worker with everybody's. KeyboardInterrupt, too: workers get no SIGINT, so it is the backend's own.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            raise InferError(Code.INTERNAL, described(error).splitlines()[0]) from error


OWN_CODE: Final = _OwnCode()


class Reshaped(InferError):
    """A run failed because an output came out in another shape than it was bound with; bound open, it tells which."""


class Binding(Protocol):
    """Operands bound to a model once, run many times."""

    def run(self) -> None:
        """Run the model. Raises InferError, or whatever the runtime raises; outputs are then undefined."""

    def results(self) -> list[npt.NDArray[np.generic]]:
        """The outputs bound with memory None and no others, in order: valid until the next `run` of this binding.

        BYTES outputs come as object arrays of `bytes` or `str`; the caller serializes them.
        """


class RuntimeModel(Protocol):
    """One loaded instance. Calls come from one thread at a time, not always the same."""

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Prepare a run on these operands. Raises InferError when the runtime cannot take them.

        One that has a third argument `parameters` is given those of the requests (see `ReadsParameters`).
        """

    def close(self) -> None:
        """Give the memory back."""


class ReadsParameters(Protocol):
    """A loaded instance that looks at the parameters of requests: only requests with equal ones run together."""

    def bind(self, inputs: list[Operand], outputs: list[Operand], parameters: Mapping[str, Parameter]) -> Binding:
        """As `RuntimeModel.bind`. `parameters`: {} for a request without any."""


class GivesParameters(Binding, Protocol):
    """A binding whose responses have parameters (`shm.parameters`)."""

    def response_parameters(self) -> Mapping[str, Parameter] | Sequence[Mapping[str, Parameter]] | None:
        """Those of the latest `run`: of every response of it, or a list with those of each row of the batch."""


class GpuBinding(Binding, Protocol):
    """A binding of a model on a GPU. When `run` returns the GPU has done all of it, copies included.

    What it copied because an operand lies elsewhere is counted in the instance's `lane.moved`.
    """

    def places(self) -> list[tuple[OnGpu, tuple[int, ...]]]:
        """As `results`, but where they lie on the GPU, and their shapes: valid until the next `run` of the instance."""


class GpuModel(RuntimeModel, Protocol):
    """An instance on a GPU: known by its `lane`. Its operands may lie on the GPU or on the host, each of its own."""

    lane: Lane
    scratch: Scratch

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> GpuBinding:
        """As of any model."""


@final
class NoRuntime:
    """An ensemble's: nothing is ever bound to it."""

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Never asked for."""
        raise NotImplementedError

    def close(self) -> None:
        """It holds nothing."""


class DecoupledModel(RuntimeModel, Protocol):
    """What `load` returns for a model with `model_transaction_policy { decoupled: true }` that answers as it likes.

    One of an installed backend that has no `execute` is run like any other and sends one response, the final one. A
    model's own code must have it.
    """

    def execute(self, streams: list[Stream]) -> None:
        """Begin to answer these requests. Each ends with its final response, sent by any thread at any time.

        What is raised ends all of them that have not ended. The instance gets its next batch when this returns.
        """


class Backend(Protocol):
    """A backend module."""

    def load(self, context: Context) -> RuntimeModel:
        """Load one instance. Raises InferError with a reason a user can act on."""


def find(config: ModelConfig) -> Backend:
    """The backend module of a model. Raises InferError when there is none or it cannot be imported."""
    if _own(config):
        return _from_file(os.path.join(config.directory, OWN))
    for entry in importlib.metadata.entry_points(group="tensorbroker.backends", name=config.backend):
        try:
            module: Backend = importlib.import_module(entry.value)
        except Exception as error:  # a runtime's own libraries fail in many ways
            raise InferError(
                Code.UNAVAILABLE,
                f"backend '{config.backend}' of model '{config.name}' cannot be imported: " + described(error),
            ) from None
        return module
    known = sorted({entry.name for entry in importlib.metadata.entry_points(group="tensorbroker.backends")})
    raise InferError(
        Code.INVALID_ARG,
        f"unable to find backend library for backend '{config.backend}' of model '{config.name}'; installed: {known}",
    )


def load_instance(backend: Backend, context: Context) -> RuntimeModel:
    """Load one instance. Raises InferError, also for a file that changes meanwhile; or whatever the backend raises."""
    context.config.check_file(context.version, context.directory)
    runtime = backend.load(context)
    context.config.check_file(context.version, context.directory)
    if not callable(getattr(runtime, "bind", None)):
        raise InferError(
            Code.INTERNAL,
            f"'load' of the backend of model '{context.config.name}' returned {type(runtime).__name__}: it must return "
            "an object with 'bind' and 'close'",
        )
    if context.config.decoupled and _own(context.config) and not callable(getattr(runtime, "execute", None)):
        raise InferError(
            Code.INTERNAL,
            f"model '{context.config.name}' has model_transaction_policy {{ decoupled: true }}, but what 'load' of its "
            f"{OWN} returned ({type(runtime).__name__}) has no 'execute': write execute(self, streams), or leave "
            "model_transaction_policy out",
        )
    return runtime


def reads_parameters(runtime: RuntimeModel) -> TypeGuard[ReadsParameters]:
    """Has its `bind` an argument for them?"""
    try:
        return "parameters" in inspect.signature(runtime.bind).parameters
    except (TypeError, ValueError):  # of an extension module, which says nothing
        return False


def gives_parameters(binding: Binding) -> TypeGuard[GivesParameters]:
    """Do its responses have parameters?"""
    return hasattr(binding, "response_parameters")


def bind(
    runtime: RuntimeModel, inputs: list[Operand], outputs: list[Operand], parameters: Mapping[str, Parameter] = NOTHING
) -> Binding:
    """Have it bind, with the parameters if it wants them."""
    with OWN_CODE:
        if reads_parameters(runtime):
            made = runtime.bind(inputs, outputs, MappingProxyType(parameters))
        else:
            made = runtime.bind(inputs, outputs)
    if not callable(getattr(made, "run", None)):
        raise InferError(
            Code.INTERNAL,
            f"'bind' of the model's backend returned {type(made).__name__}: it must return an object with 'run' and "
            "'results'",
        )
    return made


def _own(config: ModelConfig) -> bool:
    """Has the model code of its own?"""
    return os.path.exists(os.path.join(config.directory, OWN))


def _from_file(path: str) -> Backend:
    spec = importlib.util.spec_from_file_location("tensorbroker_model_backend", path)
    if spec is None or spec.loader is None:
        raise InferError(Code.INVALID_ARG, f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InferError(Code.INTERNAL, f"{path} raised {described(error)}") from error
    if not callable(getattr(module, "load", None)):
        raise InferError(Code.INVALID_ARG, f"{path} has no function 'load'")
    found: Backend = module
    return found
