"""The process's default client, and the client's verbs as functions.

Connected by the first call; a forked child connects its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from clientlib import process
from clientlib.automatic import Inputs
from clientlib.callable_model import Model
from clientlib.client import Client
from clientlib.cuda_region import CudaRegion
from clientlib.interrupted import Turn
from clientlib.opening import connect
from clientlib.plans import Plan
from clientlib.recipe import Outputs, Slots
from clientlib.region import Region, TensorRef
from clientlib.results import InferResult
from clientlib.streams import Stream
from shm.messages import ModelMetadata, RegionRecord
from shm.parameters import Parameter


class _Default:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = Turn()
        self._client: Client | None = None
        process.tell_after_fork(self)

    def __call__(self) -> Client:
        client = self._client
        if client is None or client.native.closed:
            client = self._turn.run(self._connected)
        return client

    def _connected(self) -> Client:
        with self._lock:
            if self._client is None or self._client.native.closed:
                self._client = connect()
            return self._client

    def leave_to_parent(self) -> None:
        """The client is the parent's, and another of its threads may hold the lock."""
        self._lock = threading.Lock()
        self._client = None


_default = _Default()


def models() -> dict[str, ModelMetadata]:
    """As `Client.models`."""
    return _default().models()


def model(name: str, version: str | int = "") -> Model:
    """As `Client.model`."""
    return _default().model(name, version)


def statistics(model: str = "", version: str | int = "") -> list[dict[str, Any]]:
    """As `Client.statistics`."""
    return _default().statistics(model, version)


def load(
    model: str, *, config: Mapping[str, Any] | str | None = None, files: Mapping[str, bytes] | None = None
) -> None:
    """As `Client.load`."""
    _default().load(model, config=config, files=files)


def unload(model: str, *, unload_dependents: bool = False) -> None:
    """As `Client.unload`."""
    _default().unload(model, unload_dependents=unload_dependents)


def keep_loaded(model: str, version: str | int = "") -> AbstractContextManager[Model]:
    """As `Client.keep_loaded`."""
    return _default().keep_loaded(model, version)


def create_region(name: str, byte_size: int) -> Region:
    """As `Client.create_region`."""
    return _default().create_region(name, byte_size)


def register_system_shm(name: str, key: str, byte_size: int, offset: int = 0) -> Region:
    """As `Client.register_system_shm`."""
    return _default().register_system_shm(name, key, byte_size, offset)


def register_cuda_shm(
    name: str,
    tensor: object = None,
    *,
    pointer: int | None = None,
    byte_size: int | None = None,
    device: str | None = None,
) -> CudaRegion:
    """As `Client.register_cuda_shm`."""
    return _default().register_cuda_shm(name, tensor, pointer=pointer, byte_size=byte_size, device=device)


def alloc_cuda(name: str, byte_size: int, device: str | None = None) -> CudaRegion:
    """As `Client.alloc_cuda`."""
    return _default().alloc_cuda(name, byte_size, device)


def open_region(token: str, name: str | None = None) -> Region:
    """As `Client.open_region`."""
    return _default().open_region(token, name)


def regions() -> list[RegionRecord]:
    """As `Client.regions`."""
    return _default().regions()


def unregister(name: str | None = None) -> None:
    """As `Client.unregister`."""
    _default().unregister(name)


def prepare(
    model: str,
    inputs: Mapping[str, TensorRef],
    outputs: Outputs = None,
    slots: Slots = 1,
    version: str | int = "",
    parameters: Mapping[str, Parameter] | None = None,
) -> Plan:
    """As `Client.prepare`."""
    return _default().prepare(model, inputs, outputs, slots, version, parameters)


def infer(
    model: str,
    inputs: Inputs,
    outputs: Outputs = None,
    timeout: float | None = None,
    priority: int = 0,
    parameters: Mapping[str, Parameter] | None = None,
    version: str | int = "",
) -> InferResult:
    """As `Client.infer`."""
    return _default().infer(model, inputs, outputs, timeout, priority, parameters, version)


def stream(
    model: str,
    inputs: Inputs,
    outputs: Outputs = None,
    timeout: float | None = None,
    priority: int = 0,
    parameters: Mapping[str, Parameter] | None = None,
    version: str | int = "",
) -> Stream:
    """As `Client.stream`."""
    return _default().stream(model, inputs, outputs, timeout, priority, parameters, version)
