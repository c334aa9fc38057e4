"""What the broker remembers of a client, a channel and a region: the descriptors it keeps, and whose they are.

Plain data. Sessions make these records, workers are brought up from them; only the session that made a record closes
its descriptors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

from shm.sockets import close_all


@final
@dataclass(frozen=True, slots=True)
class Peer:
    """The client process at the other end of a session, as the kernel names it."""

    session: int
    pid: int
    uid: int


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
    kind: str  # "pool" or "system"
    fd: int
    byte_size: int
    offset: int
    file_size: int
    device: int
    inode: int
    writable: bool
    session: int = 0
    owner_pid: int = 0
    owner_uid: int = 0
    key: str = ""  # POSIX name of a system region
    token: str = ""  # under which other sessions may open it
    source: tuple[int, int] | None = None  # (region, generation) that this one was opened from by a token
    draining: bool = False  # retired; some worker has not acknowledged it yet

    @property
    def identity(self) -> tuple[int, int]:
        """What plans hold of a region."""
        return self.region, self.generation

    def close(self) -> None:
        """Close the descriptor, once."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
