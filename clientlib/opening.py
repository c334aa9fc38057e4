"""`connect` and `connect_async`: from an address to a client of the kind that it takes.

The clients of other transports are imported when an address asks for one.
"""
# ruff: noqa: ASYNC109 (the arguments are those of `connect`)

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, overload

from clientlib.address import directory_of, wire_of, with_headers
from clientlib.arguments import seconds, shown, whole
from clientlib.async_client import AsyncClient
from clientlib.client import MAX_SLOTS, Client
from shm.errors import Code, InferError

if TYPE_CHECKING:
    from clientlib.remote.async_client import AsyncRemoteClient
    from clientlib.remote.client import RemoteClient


@overload
def connect(url: None = None, *, timeout: float = 30, slots: int = 64, spin_us: float = 50) -> Client: ...


@overload
def connect(
    url: str | os.PathLike[str] | None,
    *,
    timeout: float = 30,
    slots: int = 64,
    spin_us: float = 50,
    headers: Mapping[str, str] | None = None,
) -> Client | RemoteClient: ...


def connect(
    url: str | os.PathLike[str] | None = None,
    *,
    timeout: float = 30,
    slots: int = 64,
    spin_us: float = 50,
    headers: Mapping[str, str] | None = None,
) -> Client | RemoteClient:
    """Connect to the broker on this host, once its start-up load has ended.

    `url` is the broker's run directory, as a path or as `ipc:///run/directory`; without it TENSORBROKER_DIR or the
    default place is meant. `grpc://host:8001`, `http://host:8000` (grpcs, https) and `zmq+ipc:///run/directory` make a
    client with the same verbs, whose tensors travel in messages.
    `slots`: requests in flight per thread (remote: per client); `spin_us`: how long a waiting thread spins before it
    sleeps (0: never). `headers`: name → value, sent with every request over a wire, for a server that restricts APIs
    (gRPC's names with their prefix "triton-grpc-protocol-").
    One client serves all threads of a process. A signal handler that calls it in the middle of another call gets
    InferError UNSUPPORTED wherever it would have to wait for that call.
    Raises InferError UNAVAILABLE when there is no broker, or "starting: 3 of 7 models" after `timeout` seconds.
    """
    patience_s, slots, spin_s = seconds(timeout), whole(slots, "slots", 1, MAX_SLOTS), _spin_s(spin_us)
    if address := with_headers(wire_of(url), headers):
        from clientlib.remote import client

        return client.connect(address, patience_s, slots)
    return Client(directory_of(url), time.monotonic() + patience_s, slots, spin_s)


def _spin_s(spin_us: float) -> float:
    try:
        if 0 <= spin_us <= 1e6:
            return float(spin_us) * 1e-6
    except (TypeError, ValueError):
        pass
    raise InferError(Code.INVALID_ARG, f"spin_us must be 0 to 1000000 microseconds, got {shown(spin_us)}")


@overload
async def connect_async(url: None = None, *, timeout: float = 30, slots: int = 512) -> AsyncClient: ...


@overload
async def connect_async(
    url: str | os.PathLike[str] | None,
    *,
    timeout: float = 30,
    slots: int = 512,
    headers: Mapping[str, str] | None = None,
) -> AsyncClient | AsyncRemoteClient: ...


async def connect_async(
    url: str | os.PathLike[str] | None = None,
    *,
    timeout: float = 30,
    slots: int = 512,
    headers: Mapping[str, str] | None = None,
) -> AsyncClient | AsyncRemoteClient:
    """Connect to the broker on this host, once its start-up load has ended. Arguments are those of `connect`.

    `slots`: requests in flight for the whole loop; more queue.
    """
    patience_s, slots = seconds(timeout), whole(slots, "slots", 1, MAX_SLOTS)
    if address := with_headers(wire_of(url), headers):
        from clientlib.remote import async_client

        return await async_client.connect_async(address, patience_s, slots)
    client = AsyncClient(directory_of(url), slots)
    await client.start(patience_s)
    return client
