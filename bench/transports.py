"""What carries a message between two processes and back, by itself: every transport that `bench.hop` compares.

A transport is made before the fork that separates its two ends. `client()` gives the call that makes one round trip,
`serve()` answers for ever. Messages are 64 bytes, as a submission is.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

from shm.client_channel import ClientChannel
from shm.fence import Fence
from shm.layout import Geometry
from shm.memory import sealed_memfd
from shm.worker_channel import WorkerChannel

MESSAGE = bytes(range(64))
SPIN_S = 50e-6
SLOTS = 64
LIMIT_S = 10.0  # of one wait
_now = time.perf_counter


class Transport(Protocol):
    """Both ends, before the fork. `descriptors`: of both, closed when it is no longer used."""

    descriptors: tuple[int, ...]

    def client(self) -> Callable[[], object]: ...

    def serve(self) -> NoReturn: ...


class Sockets:
    """A unix SEQPACKET socket, both sides blocking."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptors = ()  # the sockets close themselves

    def client(self) -> Callable[[], object]:
        def ask() -> None:
            self._near.send(MESSAGE)
            self._near.recv(64)

        return ask

    def serve(self) -> NoReturn:
        while True:
            self._far.send(self._far.recv(64))


class Pipes:
    """A pipe each way, both sides blocking."""

    def __init__(self) -> None:
        self._there, self._back = os.pipe(), os.pipe()
        self.descriptors = (*self._there, *self._back)

    def client(self) -> Callable[[], object]:
        def ask() -> None:
            os.write(self._there[1], MESSAGE)
            os.read(self._back[0], 64)

        return ask

    def serve(self) -> NoReturn:
        while True:
            os.write(self._back[1], os.read(self._there[0], 64))


class Eventfds:
    """A message in shared memory and an eventfd each way, both sides blocking."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)
        self._there, self._back = self.descriptors = os.eventfd(0), os.eventfd(0)

    def client(self) -> Callable[[], object]:
        def ask() -> None:
            self._memory[:64] = MESSAGE
            os.eventfd_write(self._there, 1)
            os.eventfd_read(self._back)

        return ask

    def serve(self) -> NoReturn:
        while True:
            os.eventfd_read(self._there)
            self._memory[64:128] = self._memory[:64]
            os.eventfd_write(self._back, 1)


class _Bell:
    """A word to wait for: spin up to 50 µs, then ask to be rung and sleep; as channels do it, without a channel."""

    def __init__(self, words: memoryview, at: int, descriptors: tuple[int, int]) -> None:
        self._words = words
        self._at = at  # the counter; the next word says that somebody sleeps
        self._read, self._write = descriptors
        self._fence = Fence()
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def publish(self, value: int) -> None:
        words = self._words
        words[self._at] = value
        self._fence()
        if words[self._at + 1]:
            os.write(self._write, (1).to_bytes(8, "little"))

    def wait(self, value: int) -> None:
        words, at = self._words, self._at
        end = _now() + SPIN_S
        while _now() < end:
            if words[at] == value:
                return
            os.sched_yield()
        words[at + 1] = 1
        self._fence()
        while words[at] != value:
            if not self._poll.poll(LIMIT_S * 1000):
                raise RuntimeError("the other side says nothing")
            os.read(self._read, 8)
        words[at + 1] = 0


class Words:
    """Shared words and the channel's doorbells: an eventfd there, a pipe back."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)
        words = memoryview(self._memory).cast("Q")
        bell, pipe = os.eventfd(0), os.pipe()
        self.descriptors = (bell, *pipe)
        self._there, self._back = _Bell(words, 8, (bell, bell)), _Bell(words, 16, pipe)

    def client(self) -> Callable[[], object]:
        position = 0

        def ask() -> None:
            nonlocal position
            position += 1
            self._memory[1024:1088] = MESSAGE
            self._there.publish(position)
            self._back.wait(position)

        return ask

    def serve(self) -> NoReturn:
        position = 0
        while True:
            position += 1
            self._there.wait(position)
            self._memory[1088:1152] = self._memory[1024:1088]
            self._back.publish(position)


class Channel:
    """The product's channel with all its checks and its ledger, but no scheduler and no model behind it."""

    def __init__(self) -> None:
        geometry = Geometry(SLOTS)
        self._memory = sealed_memfd("bench-channel", geometry.channel_bytes)
        self._ledger = sealed_memfd("bench-ledger", geometry.ledger_bytes)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._pipe = os.pipe2(os.O_NONBLOCK)
        self.descriptors = (self._memory, self._ledger, self._bell, *self._pipe)

    def client(self) -> Callable[[], object]:
        channel = ClientChannel(os.dup(self._memory), self._bell, self._pipe[0], SLOTS, SPIN_S)  # never closed: ours
        ended = _Ended()

        def ask() -> None:
            channel.submit(ended, 1, 0, 0, 0, 0)
            while not channel.reap():
                channel.wait(LIMIT_S)

        return ask

    def serve(self) -> NoReturn:
        channel = WorkerChannel(self._memory, self._ledger, self._bell, self._pipe[1], SLOTS, {1: _Plan()})
        fence, poll = Fence(), select.epoll()
        poll.register(self._bell, select.EPOLLIN | select.EPOLLET)
        while True:
            request = channel.peek(time.monotonic_ns()) if channel.pending() else None
            if request is not None:
                channel.begin(request)
                channel.finish(request)
                continue
            end = _now() + SPIN_S
            while not channel.pending() and _now() < end:
                os.sched_yield()
            if channel.pending():
                continue
            channel.arm()
            fence()
            if not channel.pending():
                poll.poll()
            channel.disarm()


class _Ended:
    """What a submission leaves in its slot."""

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        pass


class _Plan:
    """What admission asks of a plan."""

    input_positions = output_positions = rows = 1
    retryable = simple = True
    closed = None
    refused_until_ns = 0
    signature = None

    def __init__(self) -> None:
        self.busy = bytearray(1)

    def conflict(self, input_position: int, output_position: int) -> str:
        return ""


TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "shared words, spin then doorbell": Words,
    "channel with its checks": Channel,
    "shared memory + eventfd": Eventfds,
    "pipe": Pipes,
    "unix SEQPACKET": Sockets,
}
