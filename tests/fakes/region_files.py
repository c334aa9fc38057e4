"""Real memfds and files of /dev/shm for tests of regions, and the fixtures `fds` and `prefix`."""

import fcntl
import mmap
import os
import uuid
from pathlib import Path

import pytest

from shm.errors import InferError

SHM = Path("/dev/shm")
UID = os.getuid()
PAGE = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MFD_HUGETLB = 4
as_root = pytest.mark.skipif(UID != 0, reason="needs root")


@pytest.fixture
def fds():
    """A list of descriptors to close at the end."""
    opened = []
    yield opened
    for fd in opened:
        os.close(fd)


@pytest.fixture
def prefix():
    """A name nobody else uses; whatever starts with it in /dev/shm is removed at the end."""
    name = f"tensorbroker-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    for path in SHM.glob(f"{name}*"):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def system_object(name, content=b"", size=None, mode=0o600):
    path = SHM / name
    path.write_bytes(content)
    if size is not None:
        os.truncate(path, size)
    path.chmod(mode)
    return path


def memfd(byte_size=PAGE, seals=SEALS, allocate=True):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if allocate:
        os.posix_fallocate(fd, 0, byte_size)
    else:
        os.ftruncate(fd, byte_size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def refusal(function, *arguments, code="INVALID_ARG"):
    with pytest.raises(InferError) as caught:
        function(*arguments)
    assert caught.value.code == code
    return caught.value.message


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))
