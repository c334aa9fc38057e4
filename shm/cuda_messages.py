"""Session messages about GPUs: memory and events of a client's that workers there open. Part of `shm.messages`."""

from __future__ import annotations

from shm.cuda.descriptor import CudaEvents, CudaMemory
from shm.message_values import Message, Name


class RegisterCuda(Message, frozen=True, kw_only=True, tag=True):
    """Memory of a GPU, which the broker only passes on to workers there."""

    name: Name
    memory: CudaMemory
    writable: bool = True


class RegisterEvents(Message, frozen=True, kw_only=True, tag=True):
    """A ring of events, under a name as of a region, which `Prepare.events` names and `Unregister` ends."""

    name: Name
    events: CudaEvents
