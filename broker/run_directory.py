"""The run directory: where a broker and its clients meet, and the lock that makes sure only one broker is there.

Owned by `broker.server`. It must not know what is said over the socket.

The lock, not a pid file, tells whether a broker lives: the kernel drops it with the process. The socket is replaced
only under the lock *and* after nobody answered on it, because files in a temporary directory can be cleaned away
under a running broker and the next one would then get a fresh lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from typing import final

from shm import sockets
from shm.run_directory import SOCKET

LOCK = "broker.lock"
BACKLOG = 128


class RunDirectoryError(Exception):
    """The directory cannot be used; the message says why and what to do."""


class AlreadyRunning(RunDirectoryError):
    """Another broker serves this directory."""

    def __init__(self, path: str, pid: int) -> None:
        who = f"pid {pid}" if pid > 0 else "pid unknown"
        super().__init__(f"already running ({who}) in {path}; give this one another --directory, or stop that one")
        self.pid = pid


@final
class RunDirectory:
    """A claimed run directory. `release` (or the end of the process) gives it back."""

    __slots__ = ("_lock", "_socket", "path")

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._socket = -1  # O_PATH: while it is open, no other file can get our socket's inode number

    @classmethod
    def claim(cls, path: str) -> RunDirectory:
        """Create `path` if needed (0700), verify that nobody else can write there, and take its lock.

        Raises AlreadyRunning, or RunDirectoryError for a directory that is not safely ours.
        """
        path = os.path.abspath(path)  # a bare name has no parent to make, and one with a slash at its end has itself
        directory = _open_directory(path)
        try:
            return cls(path, _lock(path, directory))
        finally:
            os.close(directory)

    @property
    def socket_path(self) -> str:
        """Where clients connect."""
        return os.path.join(self.path, SOCKET)

    def listen(self) -> socket.socket:
        """The listening socket (0600). A socket that a dead broker left is replaced. Raises AlreadyRunning."""
        self._remove_stale_socket()
        listener = sockets.seqpacket()
        try:
            previous = os.umask(0o177)
            try:
                with sockets.address(self.socket_path) as address:
                    listener.bind(address)
            finally:
                os.umask(previous)
            self._socket = os.open(self.socket_path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise RunDirectoryError(f"cannot listen on {self.socket_path}: {error.strerror}") from error
        return listener

    def release(self) -> None:
        """Remove our socket and lock file and let the lock go. Another broker's files are left alone."""
        for fd, name in ((self._socket, SOCKET), (self._lock, LOCK)):
            path = os.path.join(self.path, name)
            if fd >= 0:
                if _same_file(fd, path):
                    os.unlink(path)
                os.close(fd)

    def _remove_stale_socket(self) -> None:
        try:
            mode = os.lstat(self.socket_path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise RunDirectoryError(f"{self.socket_path} exists and is not a socket; remove it or use --directory")
        with sockets.seqpacket() as probe, sockets.address(self.socket_path) as address:
            try:
                probe.connect(address)
            except BlockingIOError:
                raise AlreadyRunning(self.path, 0) from None
            except OSError as error:
                if error.errno != errno.ECONNREFUSED:
                    raise RunDirectoryError(f"cannot examine {self.socket_path}: {error.strerror}") from error
            else:
                raise AlreadyRunning(self.path, sockets.peer_credentials(probe)[0])
        os.unlink(self.socket_path)


def _open_directory(path: str) -> int:
    """A descriptor of `path`, made 0700 if absent. Raises RunDirectoryError unless only we can write there."""
    try:
        with contextlib.suppress(FileExistsError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise RunDirectoryError(f"run directory {path} is a symlink or not a directory; use --directory") from error
        raise RunDirectoryError(f"cannot use run directory {path}: {error.strerror}") from error
    status = os.fstat(fd)
    problem = ""
    if status.st_uid != os.geteuid():
        problem = f"belongs to uid {status.st_uid}, this broker runs as uid {os.geteuid()}"
    elif status.st_mode & 0o022:
        problem = f"has mode {stat.S_IMODE(status.st_mode):04o}: others could replace the socket (chmod 700 it)"
    if problem:
        os.close(fd)
        raise RunDirectoryError(f"run directory {path} {problem}; or give another --directory")
    return fd


def _lock(path: str, directory: int) -> int:
    """The locked descriptor of the lock file, which then holds our pid."""
    while True:
        fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise AlreadyRunning(path, int(text) if text.isdecimal() else 0) from None
        if _same_file(fd, LOCK, directory):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
        os.close(fd)  # its owner removed it between our open and our lock: this lock would protect nothing


def _same_file(fd: int, path: str, directory: int | None = None) -> bool:
    with contextlib.suppress(FileNotFoundError):
        here, there = os.fstat(fd), os.stat(path, dir_fd=directory, follow_symlinks=False)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
    return False
