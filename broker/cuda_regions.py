"""What the registry and the plans ask about GPU memory and events. The broker carries their handles and descriptors to
workers, and no more: it never loads the driver, never opens or maps such memory and has no context.

Called by `broker.registry` and `broker.plans`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from broker.records import RegionEntry
from shm.cuda.descriptor import LEGACY, CudaEvents, CudaMemory, allocation_of
from shm.errors import Code, InferError
from shm.regions import FileIdentity

OfGpu = CudaMemory | CudaEvents
NO_FILE = -1  # as `device` of an identity: no (device, inode) of a file is equal


def check_served(name: str, what: OfGpu, served: Collection[str]) -> None:
    """Do workers see its GPU? `served`: UUIDs. Raises UNSUPPORTED, as Triton without GPUs words it."""
    if what.device in served:
        return
    where = f"workers run on {', '.join(sorted(served))}" if served else "its workers run on the CPU only"
    raise InferError(
        Code.UNSUPPORTED,
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported: this broker has no worker on "
        f"{what.device}; {where}. Use create_region(), and let the data be copied",
    )


class GpuWorker(Protocol):
    """What is asked of a worker. `device`: the UUID of its GPU, "" on the CPU."""

    key: str
    device: str


W = TypeVar("W", bound=GpuWorker)


def nearest(workers: Sequence[W], regions: Iterable[RegionEntry]) -> Sequence[W]:
    """Those of `workers` that a plan on `regions` should go to: on a GPU that has some of them; else on the CPU, where
    they are copied; else all: a worker of another GPU says itself whether it reaches them.
    """
    devices = {entry.cuda.device for entry in regions if entry.cuda is not None}
    if not devices:
        return workers
    for wanted in (devices, {""}):
        if near := [worker for worker in workers if worker.device in wanted]:
            return near
    return workers


def ring_of(ring: RegionEntry, regions: Iterable[RegionEntry]) -> RegionEntry:
    """The ring that a plan on `regions` names, if it is one, of their GPU. Raises InferError INVALID_ARG."""
    if ring.events is None:
        raise InferError(Code.INVALID_ARG, f"'{ring.name}' is a {ring.kind} region, no ring of events")
    devices = {entry.cuda.device for entry in regions if entry.cuda is not None}
    if devices != {ring.events.device}:
        where = f"on {', '.join(sorted(devices))}" if devices else "on no GPU"
        raise InferError(
            Code.INVALID_ARG,
            f"the events of '{ring.name}' are of {ring.events.device}, the plan's memory is {where}: a plan's events "
            "are of the one GPU that it has memory of",
        )
    return ring


def identity_of(memory: OfGpu, fd: int, *, writable: bool) -> FileIdentity:
    """What tells allocations apart, for the check that no output overlaps another's memory.

    Equal handles are one allocation, and so are equal files behind descriptors of VMM memory. Where a descriptor does
    not tell (`allocation_of`), each registration counts as memory of its own.
    """
    if isinstance(memory, CudaEvents):  # which nothing overlaps
        return FileIdentity(NO_FILE, secrets.randbits(63), 0, writable)
    size = memory.allocation_size
    if memory.kind == LEGACY:
        number = int.from_bytes(hashlib.blake2b(memory.handle, digest_size=8).digest(), "little") >> 1
        return FileIdentity(device=NO_FILE, inode=number, file_size=size, writable=writable)
    device, inode = allocation_of(fd) or (NO_FILE, secrets.randbits(63))
    return FileIdentity(device=device, inode=inode, file_size=size, writable=writable)
