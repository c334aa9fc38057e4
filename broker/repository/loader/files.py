"""Reading files of a model repository without being led out of it, blocked or flooded."""

from __future__ import annotations

import os
import stat

from broker.repository.loader.failure import ModelError
from broker.repository.scan import is_inside


def read_file(path: str, repository: str, limit: int, limit_text: str) -> bytes:
    """The whole file. Raises ModelError: missing, not a regular file, outside `repository`, larger than `limit`."""
    if not is_inside(path, repository):
        raise ModelError(f"{path}: is a link out of the model repository {repository}")
    try:
        # O_NONBLOCK: opening a FIFO that nobody writes would otherwise wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path}: is not a regular file")
        if status.st_size > limit:
            raise ModelError(f"{path}: has {status.st_size} bytes, the limit is {limit_text}")
        with open(descriptor, "rb", closefd=False) as file:
            # The size may have changed since fstat: never take more than was allowed.
            return file.read(status.st_size)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
