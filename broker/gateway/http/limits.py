"""What one HTTP peer, and all of them together, may cost. Used by the other modules of `broker.gateway.http`."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Final, final

READ_SIZE: Final = 256 << 10  # bytes of a body that wait to be taken before the socket is left alone
SEND_SIZE: Final = 256 << 10  # bytes of a reply that wait for the socket, and what is handed over at once
ONE_WRITE: Final = 64 << 10  # bytes of a reply that is joined: one system call, one segment
PIPELINE: Final = 16  # requests that wait for the one before
MAX_LINE: Final = 16 << 10  # bytes of a request line
MAX_FIELD: Final = 16 << 10  # bytes of a header
MAX_HEADERS: Final = 100
MAX_CHUNKS: Final = 65536  # non-empty ones of one body
MAX_DEPTH: Final = 100  # nested JSON arrays
BODIES: Final = 16  # times --http-max-input-size: bytes of bodies in memory, of all connections
_MAX_CONNECTIONS: Final = 4096


@final
@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a peer has for each state. A body must bring `body_progress` bytes each `body` seconds."""

    first_byte: float = 2.0
    head: float = 10.0
    body: float = 10.0
    body_progress: int = 16 << 10
    send: float = 5.0
    idle: float = 60.0
    discard: float = 10.0


def connections_allowed() -> int:
    """A third of the descriptors: gRPC, regions and workers need theirs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft if soft != resource.RLIM_INFINITY else 3 * _MAX_CONNECTIONS
    return max(8, min(_MAX_CONNECTIONS, limit // 3))
