"""tensorbroker's client library: run models that a broker on this host serves, on memory both can see.

    import clientlib
    client = clientlib.connect()
    out = client.model("yolo")({"images": frame})      # numpy in, numpy out
    for part in client.stream("chat", {"text": text}):  # of a model that sends any number of responses
        ...

`connect` and `connect_async` make clients; the functions below them use one default client of the process, connected
when first used. See `Client` for what each does.
"""

from __future__ import annotations

from clientlib.async_client import AsyncClient
from clientlib.async_pending import AsyncPending
from clientlib.async_plans import AsyncPlan
from clientlib.async_streams import AsyncStream
from clientlib.callable_model import AsyncModel, Model
from clientlib.client import Client
from clientlib.cuda_region import CudaRegion
from clientlib.default import (
    alloc_cuda,
    create_region,
    infer,
    keep_loaded,
    load,
    model,
    models,
    open_region,
    prepare,
    regions,
    register_cuda_shm,
    register_system_shm,
    statistics,
    stream,
    unload,
    unregister,
)
from clientlib.opening import connect, connect_async
from clientlib.pending import Pending
from clientlib.plans import Plan
from clientlib.region import AsyncRegion, Region, TensorRef
from clientlib.results import InferResult, Timing
from clientlib.streams import Stream
from shm.errors import ConnectionLost, ForkedError, InferError

__all__ = [
    "AsyncClient",
    "AsyncModel",
    "AsyncPending",
    "AsyncPlan",
    "AsyncRegion",
    "AsyncStream",
    "Client",
    "ConnectionLost",
    "CudaRegion",
    "ForkedError",
    "InferError",
    "InferResult",
    "Model",
    "Pending",
    "Plan",
    "Region",
    "Stream",
    "TensorRef",
    "Timing",
    "alloc_cuda",
    "connect",
    "connect_async",
    "create_region",
    "infer",
    "keep_loaded",
    "load",
    "model",
    "models",
    "open_region",
    "prepare",
    "regions",
    "register_cuda_shm",
    "register_system_shm",
    "statistics",
    "stream",
    "unload",
    "unregister",
]
