"""Which ZeroMQ sessions there are, in a file of the run directory: what a gateway that died leaves to the next one.

Sessions belong to principals of the broker, which does not know whose processes they are. The next gateway watches them
again, so that a client that dies while there is no gateway is noticed all the same. Used by `zmq.server`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, final

import msgspec

from shm.zmq_messages import TOKEN

log = logging.getLogger(__name__)

FILE: Final = "zmq.sessions"


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`started`: of its process, in clock ticks since boot, which tells it from a later one with that pid."""

    token: Annotated[str, msgspec.Meta(pattern=TOKEN)]
    pid: int
    started: int
    patience_s: float

    def alive(self) -> bool:
        """May its process still be there? One that cannot be told is given the time of its heartbeats."""
        return not self.started or self.started == started(self.pid)


@final
class Journal:
    """The file. Losing it costs what it is for, so nothing here raises."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, FILE)

    def read(self) -> list[Session]:
        """What the last gateway wrote; nothing if it wrote nothing that can be read."""
        try:
            return msgspec.json.decode(Path(self._path).read_bytes(), type=list[Session])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("ZeroMQ: the sessions of the last gateway cannot be read: %s", error)
            return []

    def write(self, sessions: Iterable[Session]) -> None:
        """Replace it."""
        data = msgspec.json.encode(list(sessions))
        new = f"{self._path}.new"
        try:
            if data == b"[]":
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
                return
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(data)
            os.rename(new, self._path)
        except OSError as error:
            log.warning("ZeroMQ: the list of sessions cannot be written: %s", error)


def started(pid: int) -> int:
    """When process `pid` was started, in clock ticks since boot; 0 if that cannot be told."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
