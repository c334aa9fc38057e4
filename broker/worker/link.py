"""The worker's end of its link to the broker. Any thread may send; only the control thread receives."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import threading
from typing import final

from broker.worker.last_words import end, is_closed
from broker.worker.messages import LinkMessage, Refused, ToWorker, decode_to_worker, encode, sendable
from shm import sockets
from shm.errors import can_be_told, described

SEND_MS = 10_000


@final
class Link:
    """One SEQPACKET socket made by the broker."""

    __slots__ = ("_lock", "_socket")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For the control thread's poll."""
        return self._socket.fileno()

    def send(self, message: LinkMessage) -> None:
        """Send one message; a broker that does not read for ten seconds is as good as gone."""
        data = encode(message)
        with self._lock:
            while True:
                try:
                    sockets.send(self._socket, data)
                    return
                except BlockingIOError:
                    if not select.select([], [self._socket], [], SEND_MS / 1000)[1]:
                        os._exit(1)
                except OSError as error:
                    if is_closed(error):
                        end(error)
                    os._exit(0)  # the broker is gone, and so is every reason to be here

    def receive(self) -> tuple[ToWorker, list[int]] | None:
        """The next message and its descriptors, or None when none is there. Exits when the broker is gone.

        A message that came without its descriptors, because this process has no room for them, is refused here.
        """
        while True:
            try:
                received = sockets.receive(self._socket)
            except BlockingIOError:
                return None
            except sockets.DescriptorsLost as lost:
                number = decode_to_worker(lost.data).id
                self.send(Refused(id=number, code="UNAVAILABLE", message=no_descriptors()))
                continue
            if received is None:
                os._exit(0)
            data, fds = received
            return decode_to_worker(data), fds


def is_lacking(error: BaseException) -> bool:
    """Has this process, or the machine, no descriptor or no thread left, which passes?"""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN)


def refusal(number: int, error: BaseException) -> Refused:
    """The answer to request `number`, which ended in `error`."""
    code, text, lacking = "INTERNAL", described(error), is_lacking(error)
    if can_be_told(error):
        code, text = error.code, error.message
    elif lacking and isinstance(error, OSError):
        code, text = "UNAVAILABLE", str(error.strerror) if error.errno == errno.EAGAIN else no_descriptors()
    return Refused(id=number, code=code, message=sendable(text), lacking=lacking)


def no_descriptors() -> str:
    """What a client is told when this process has no descriptor left for what it asks."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"the worker has no descriptor left for this ({limit} allowed): raise RLIMIT_NOFILE or unregister regions"
