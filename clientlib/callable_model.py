"""A model as an application sees it: its metadata, and a call.

Made by the clients' `model`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, final

from clientlib.async_streams import AsyncStream
from clientlib.automatic import Inputs
from clientlib.process import StaysHere
from clientlib.recipe import Outputs
from clientlib.results import InferResult
from clientlib.streams import Stream
from shm.messages import ModelMetadata, TensorMetadata
from shm.parameters import Parameter

Known = Mapping[tuple[str, str], ModelMetadata]  # by name and version asked for


class Metadata(StaysHere):
    """What both kinds of model know. `inputs` and `outputs` have name, datatype, shape (batch dimension included)."""

    __slots__ = ("_known", "_version", "name")
    elsewhere = "connect() and model() there"

    def __init__(self, known: Known, name: str, version: str) -> None:
        self.name = name
        self._known = known
        self._version = version

    @property
    def metadata(self) -> ModelMetadata:
        """What the broker said last: a call that finds the model reloaded asks it again."""
        return self._known[self.name, self._version]

    @property
    def inputs(self) -> tuple[TensorMetadata, ...]:
        """The inputs, -1 in a shape where any size goes."""
        return self.metadata.inputs

    @property
    def outputs(self) -> tuple[TensorMetadata, ...]:
        """The outputs, -1 in a shape where the size depends on the request."""
        return self.metadata.outputs

    @property
    def max_batch_size(self) -> int:
        """The largest first dimension; 0 for a model without a batch dimension."""
        return self.metadata.max_batch_size

    @property
    def zero_copy(self) -> bool:
        """Does the model read every input where it lies? `inputs[i].zero_copy_reason` says why or why not."""
        return all(tensor.zero_copy for tensor in self.metadata.inputs)

    def __repr__(self) -> str:
        return f"<model {self.name!r} version {self.metadata.version}, {self.metadata.state}>"


class Infers(Protocol):
    """A client for threads, as far as a model needs it."""

    def infer(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs,
        timeout: float | None,
        priority: int,
        parameters: Mapping[str, Parameter] | None,
        version: str,
    ) -> InferResult:
        """As `Client.infer`."""

    def stream(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs,
        timeout: float | None,
        priority: int,
        parameters: Mapping[str, Parameter] | None,
        version: str,
    ) -> Stream:
        """As `Client.stream`."""


class InfersAsync(Protocol):
    """A client for an event loop, as far as a model needs it."""

    def infer(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs,
        timeout: float | None,
        priority: int,
        parameters: Mapping[str, Parameter] | None,
        version: str,
    ) -> Coroutine[Any, Any, InferResult]:
        """As `AsyncClient.infer`."""

    def stream(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs,
        timeout: float | None,
        priority: int,
        parameters: Mapping[str, Parameter] | None,
        version: str,
    ) -> AsyncStream:
        """As `AsyncClient.stream`."""


@final
class Model(Metadata):
    """A model of a client for threads: call it with arrays, get arrays."""

    __slots__ = ("_client",)

    def __init__(self, client: Infers, known: Known, name: str, version: str) -> None:
        super().__init__(known, name, version)
        self._client = client

    def infer(
        self,
        inputs: Inputs,
        outputs: Outputs = None,
        timeout: float | None = None,
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> InferResult:
        """As `Client.infer`."""
        return self._client.infer(self.name, inputs, outputs, timeout, priority, parameters, self._version)

    __call__ = infer

    def stream(
        self,
        inputs: Inputs,
        outputs: Outputs = None,
        timeout: float | None = None,
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Stream:
        """As `Client.stream`."""
        return self._client.stream(self.name, inputs, outputs, timeout, priority, parameters, self._version)


@final
class AsyncModel(Metadata):
    """A model of a client for an event loop: call it with arrays, await arrays."""

    __slots__ = ("_client",)

    def __init__(self, client: InfersAsync, known: Known, name: str, version: str) -> None:
        super().__init__(known, name, version)
        self._client = client

    def infer(
        self,
        inputs: Inputs,
        outputs: Outputs = None,
        timeout: float | None = None,
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Coroutine[Any, Any, InferResult]:
        """As `AsyncClient.infer`."""
        return self._client.infer(self.name, inputs, outputs, timeout, priority, parameters, self._version)

    __call__ = infer

    def stream(
        self,
        inputs: Inputs,
        outputs: Outputs = None,
        timeout: float | None = None,
        priority: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> AsyncStream:
        """As `AsyncClient.stream`."""
        return self._client.stream(self.name, inputs, outputs, timeout, priority, parameters, self._version)
