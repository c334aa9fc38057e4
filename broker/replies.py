"""What sessions say to requests that fail or are otherwise wrong, and replies that are too long for a datagram.

Used by `broker.sessions`.
"""

from __future__ import annotations

import fcntl
import logging
import os

import msgspec

from shm.errors import Code, InferError
from shm.messages import Failure, Id

log = logging.getLogger(__name__)


class _Envelope(msgspec.Struct):
    """What can be read of a request that is otherwise wrong."""

    id: Id = 0


def failure(request_id: int, error: Exception) -> Failure:
    """What a client is told of `error`: never a traceback, never a path or a name it did not send."""
    if isinstance(error, InferError):
        return Failure(id=request_id, code=error.code, message=error.message)
    if isinstance(error, OSError):
        log.warning("a request failed: %s", error)
        return Failure(
            id=request_id, code=Code.UNAVAILABLE.name, message=f"the broker is short of resources: {error.strerror}"
        )
    log.error("a request failed by a defect of the broker", exc_info=error)
    return Failure(
        id=request_id, code=Code.INTERNAL.name, message="internal error of the broker; its log has the details"
    )


def id_of(data: bytes) -> int:
    """The id of a request that is otherwise wrong; 0 if it cannot be read."""
    try:
        return msgspec.msgpack.decode(data, type=_Envelope).id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return 0


def in_memfd(data: bytes) -> int:
    """A sealed memfd that holds `data`."""
    fd = os.memfd_create("tensorbroker-reply", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        return fd
    except BaseException:
        os.close(fd)
        raise
