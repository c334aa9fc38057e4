"""What the registry asks about GPU memory. The broker carries handles and descriptors of it to workers, and no more: it
never loads the driver, never opens or maps such memory and has no context.

Called by `broker.registry`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from broker.records import RegionEntry
from shm.cuda.descriptor import LEGACY, CudaMemory
from shm.errors import Code, InferError
from shm.regions import FileIdentity

NO_FILE = -1  # as `device` of an identity: no (device, inode) of a file is equal


def check_served(name: str, memory: CudaMemory, served: Collection[str]) -> None:
    """Is there a worker on the memory's GPU? `served`: UUIDs. Raises UNSUPPORTED, as Triton without GPUs words it."""
    if memory.device in served:
        return
    where = f"workers run on {', '.join(sorted(served))}" if served else "its workers run on the CPU only"
    raise InferError(
        Code.UNSUPPORTED,
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported: this broker has no worker on "
        f"{memory.device}; {where}. Use create_region(), and let the data be copied",
    )


class GpuWorker(Protocol):
    """What is asked of a worker. `device`: the UUID of its GPU, "" on the CPU."""

    key: str
    device: str


W = TypeVar("W", bound=GpuWorker)


def reaching(workers: Sequence[W], regions: Iterable[RegionEntry]) -> list[W]:
    """Those of `workers`, of which there is one, that reach all `regions`. Raises UNSUPPORTED where none does."""
    left = list(workers)
    for entry in regions:
        if entry.cuda is not None:
            near = [worker for worker in left if worker.device == entry.cuda.device]
            if not near:
                check_reach(entry.name, entry.cuda, left[0])
            left = near
    return left


def check_reach(name: str, memory: CudaMemory, worker: GpuWorker) -> None:
    """Does `worker` run on the memory's GPU? Raises UNSUPPORTED."""
    if worker.device != memory.device:
        raise InferError(
            Code.UNSUPPORTED,
            f"shared memory region '{name}' is memory of {memory.device}, but the model runs in worker '{worker.key}', "
            "which cannot reach it; use a region of the host, or an instance_group with that GPU",
        )


def identity_of(memory: CudaMemory, *, writable: bool) -> FileIdentity:
    """What tells allocations apart, for the check that no output overlaps another's memory.

    Equal handles are one allocation. Descriptors of VMM memory say nothing about it: each registration of one counts
    as memory of its own.
    """
    if memory.kind == LEGACY:
        number = int.from_bytes(hashlib.blake2b(memory.handle, digest_size=8).digest(), "little") >> 1
    else:
        number = secrets.randbits(63)
    return FileIdentity(device=NO_FILE, inode=number, file_size=memory.allocation_size, writable=writable)
