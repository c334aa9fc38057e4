"""What the broker remembers of a client, a channel and a region: the descriptors it keeps, and whose they are.

Plain data. Sessions make these records, workers are brought up from them; only the session that made a record closes
its descriptors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

from broker.worker.messages import AddRegion
from shm.cuda.descriptor import CudaEvents, CudaMemory
from shm.messages import RegionInfo, RegionRecord
from shm.regions import FileIdentity
from shm.sockets import close_all

CLIENT, GATEWAY, WORKER = "client", "gateway", "worker"  # roles
OURS = (GATEWAY, WORKER)  # what the broker starts itself


@final
@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a session, as the kernel names it.

    `role` GATEWAY: one that the broker started itself, which may act for principals. A principal is such a record too,
    with a negative session number and no process. WORKER: one that runs ensembles with members in other workers.
    """

    session: int
    pid: int
    uid: int
    role: str = CLIENT


@final
@dataclass(slots=True)
class ChannelRecord:
    """One client ↔ worker channel. The client's own descriptors (the pipe's read end) are not kept."""

    channel: int
    session: int
    slots: int
    memory: int  # sealed memfd that client and worker share
    ledger: int  # sealed memfd that only worker and broker see
    bell: int  # eventfd: client → worker
    pipe_write: int  # worker → client; kept so that the client sees POLLHUP only when broker and worker are gone
    steps: bool = False  # the client is another worker: its requests are steps of ensembles

    def close(self) -> None:
        """Close what the broker keeps. The worker must be idle on the channel."""
        close_all((self.memory, self.ledger, self.bell, self.pipe_write))


@final
@dataclass(slots=True)
class RegionEntry:
    """One registered range of memory. (`region`, `generation`) is never used twice in one run of the broker."""

    region: int
    generation: int
    name: str
    kind: str  # "pool", "system" or "cuda"; "events": no memory, but a ring of events (`shm.cuda.sync`)
    fd: int  # -1: GPU memory with a handle
    byte_size: int
    offset: int
    file_size: int
    device: int
    inode: int
    writable: bool
    session: int = 0
    owner_pid: int = 0
    owner_uid: int = 0
    key: str = ""  # POSIX name of a system region; the GPU's number of a principal's CUDA region
    token: str = ""  # under which other sessions may open it
    source: tuple[int, int] | None = None  # (region, generation) that this one was opened from by a token
    cuda: CudaMemory | None = None  # what "cuda" regions are
    events: CudaEvents | None = None  # what "events" are
    owner_session: int = 0  # whose memory it is, if another session's
    draining: bool = False  # retired; some worker has not acknowledged it yet

    @property
    def identity(self) -> tuple[int, int]:
        """What plans hold of a region."""
        return self.region, self.generation

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a worker needs of it beside the message."""
        return (self.fd,) if self.fd >= 0 else ()

    def close(self) -> None:
        """Close the descriptor, once."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def entry_of(
    peer: Peer,
    identity: tuple[int, int],
    name: str,
    kind: str,
    fd: int,
    byte_size: int,
    offset: int,
    source: FileIdentity,
) -> RegionEntry:
    """A region of `peer`. `identity`: (region, generation); `source`: the file behind `fd`."""
    return RegionEntry(
        region=identity[0],
        generation=identity[1],
        name=name,
        kind=kind,
        fd=fd,
        byte_size=byte_size,
        offset=offset,
        file_size=source.file_size,
        device=source.device,
        inode=source.inode,
        writable=source.writable,
        session=peer.session,
        owner_pid=peer.pid,
        owner_uid=peer.uid,
    )


def record(entry: RegionEntry, *, show_key: bool = True) -> RegionRecord:
    """The row of `entry` for its owner; without `key`, for everybody else."""
    return RegionRecord(
        name=entry.name,
        kind=entry.kind,
        byte_size=entry.byte_size,
        offset=entry.offset,
        key=entry.key if show_key else "",
        generation=entry.generation,
        owner_pid=entry.owner_pid,
        owner_uid=entry.owner_uid,
        state="draining" if entry.draining else "active",
    )


def add_region(entry: RegionEntry) -> AddRegion:
    """What a worker is told of it."""
    return AddRegion(
        region=entry.region,
        generation=entry.generation,
        name=entry.name,
        kind=entry.kind,
        byte_size=entry.byte_size,
        offset=entry.offset,
        file_size=entry.file_size,
        device=entry.device,
        inode=entry.inode,
        writable=entry.writable,
        cuda=entry.cuda,
        events=entry.events,
        owner=entry.owner_session or entry.session,
    )


def region_info(entry: RegionEntry) -> RegionInfo:
    """What its owner is told when it is registered or opened."""
    return RegionInfo(
        name=entry.name,
        kind=entry.kind,
        region=entry.region,
        generation=entry.generation,
        byte_size=entry.byte_size,
        offset=entry.offset,
        file_size=entry.file_size,
        writable=entry.writable,
        device=entry.device,
        inode=entry.inode,
    )
