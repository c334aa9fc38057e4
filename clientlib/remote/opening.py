"""Which transport serves which URL; its module, and with it the wire's package, is imported when it is first asked for.

Called by the remote clients when they connect.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple, cast

from clientlib.address import Address
from clientlib.remote.transport import AsyncTransport, Transport, missing


class _Wire(NamedTuple):
    name: str
    threads: str  # the module with `connect`
    loops: str  # … with `connect_async`
    extra: str  # what to install


_HTTP = _Wire("HTTP", "clientlib.remote.http_transport", "clientlib.remote.http_async", "http")
_GRPC = _Wire("gRPC", "clientlib.remote.grpc_transport", "clientlib.remote.grpc_transport", "grpc")
_ZEROMQ = _Wire("ZeroMQ", "clientlib.remote.zmq_transport", "clientlib.remote.zmq_async", "zmq")
_WIRES = {"http": _HTTP, "https": _HTTP, "grpc": _GRPC, "grpcs": _GRPC, "zmq+ipc": _ZEROMQ}


def connect(address: Address) -> Transport:
    """A transport for threads. Raises InferError UNSUPPORTED when its package is not installed."""
    wire = _WIRES[address.scheme]
    return cast(Transport, _module(wire, wire.threads).connect(address))


def connect_async(address: Address) -> AsyncTransport:
    """A transport for the running event loop. Raises InferError UNSUPPORTED when its package is not installed."""
    wire = _WIRES[address.scheme]
    return cast(AsyncTransport, _module(wire, wire.loops).connect_async(address))


def _module(wire: _Wire, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing(wire.name, wire.extra, error) from error
