"""Reading files of a model repository without being blocked or flooded.

Links are followed, as in Triton: the repository is the operator's. What a configuration names that came with a load
must lie in the model's directory (`named`).
"""

from __future__ import annotations

import os
import stat

from broker.repository.loader.failure import ModelError
from broker.repository.scan import ModelDirectory, broken_link, is_inside


def named(model: ModelDirectory, directory: str, name: str) -> str | None:
    """The path of the file that the configuration calls `name`, below `directory`; None where that leads elsewhere."""
    path = os.path.join(directory, name)
    if not name or "\0" in name or os.path.isabs(name) or os.pardir in name.split("/"):
        return None
    return path if model.links or is_inside(path, directory) else None


def read_file(path: str, limit: int, limit_text: str) -> bytes:
    """The whole file. Raises ModelError: missing, not a regular file, larger than `limit`."""
    try:
        # O_NONBLOCK: opening a FIFO that nobody writes would otherwise wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelError(broken_link(path) or f"{path}: cannot be opened: {error.strerror}") from error
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
