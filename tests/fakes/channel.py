"""A channel with both ends in one process: real memory, eventfd and pipe, no broker and no worker process.

`Twin` makes the descriptors as the broker does and opens either side any number of times, so that a test can let a
worker "die" and a replacement take over. `Plan` is what the worker's admission needs of a plan, `Pending` what the
client leaves in a slot.
"""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from types import TracebackType

from shm.admission import BoundPlan, Request, Verdict
from shm.client_channel import ClientChannel
from shm.errors import Code
from shm.layout import CODE_MASK, COMPLETION, CTAIL, FINAL, Geometry
from shm.memory import sealed_memfd
from shm.sockets import close_all
from shm.worker_channel import WorkerChannel

PLAN = 7 << 32 | 3  # a plan word: generation 7, index 3
NOW = 1_000_000  # what a test's worker takes for the time, in ns


class Plan:
    """A bound plan whose answers a test sets."""

    model_name = "m"

    def __init__(
        self, input_positions: int = 1, output_positions: int = 1, rows: int = 1, retryable: bool = True
    ) -> None:
        self.input_positions = input_positions
        self.output_positions = output_positions
        self.rows = rows
        self.retryable = retryable
        self.closed: Verdict | None = None
        self.refused_until_ns = 0
        self.signature: object = None
        self.simple = True
        self.busy = bytearray(output_positions)

    def conflict(self, input_position: int, output_position: int) -> str:
        return f"output position {output_position} is in use" if self.busy[output_position] else ""


class Pending:
    """Keeps every completion of one request: `entries` laid out as `shm.layout.COMPLETION`, `notes` beside them."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, ...]] = []
        self.notes: list[bytes] = []

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        self.entries.append(entry)
        self.notes.append(note)

    @property
    def finals(self) -> int:
        return sum(1 for entry in self.entries if entry[2] & FINAL)

    @property
    def code(self) -> Code:
        """The code of the only completion."""
        (entry,) = self.entries
        return Code(entry[2] & CODE_MASK)

    @property
    def text(self) -> str:
        return self.notes[-1].rstrip(b"\0").decode()


class Twin:
    """Descriptors of one channel. A context manager that closes them and every client side it opened."""

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.geometry = Geometry(slots)
        self.memory_fd = sealed_memfd("test-channel", self.geometry.channel_bytes)
        self.ledger_fd = sealed_memfd("test-ledger", self.geometry.ledger_bytes)
        self.bell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.pipe_read, self.pipe_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._clients: list[ClientChannel] = []
        self._workers: list[WorkerChannel] = []

    def client(self, spin_s: float = 0.0) -> ClientChannel:
        """The client's side, over duplicates of the descriptors."""
        client = ClientChannel(os.dup(self.memory_fd), os.dup(self.bell_fd), os.dup(self.pipe_read), self.slots, spin_s)
        self._clients.append(client)
        return client

    def worker(self, plans: Mapping[int, BoundPlan]) -> WorkerChannel:
        """The worker's side as it finds channel and ledger now."""
        worker = WorkerChannel(self.memory_fd, self.ledger_fd, self.bell_fd, self.pipe_write, self.slots, plans)
        self._workers.append(worker)
        return worker

    def worker_was_rung(self) -> bool:
        """Was the worker rung since the last look?"""
        try:
            return os.eventfd_read(self.bell_fd) > 0
        except BlockingIOError:
            return False

    def client_was_rung(self) -> bool:
        """Is there a ring in the pipe that the client has not read?"""
        poller = select.poll()
        poller.register(self.pipe_read, select.POLLIN)
        return bool(poller.poll(0))

    def hang_up(self) -> None:
        """Broker and worker are gone: the client sees POLLHUP."""
        os.close(self.pipe_write)
        self.pipe_write = -1

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for worker in self._workers:
            worker.close()
        close_all([self.memory_fd, self.ledger_fd, self.bell_fd, self.pipe_read, self.pipe_write])

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def submit(
    client: ClientChannel, output_position: int = 0, deadline_ns: int = 0, flags: int = 0
) -> tuple[int, Pending]:
    pending = Pending()
    ident = client.submit(pending, PLAN, 0, output_position, 0, deadline_ns, 0, 0, flags)
    assert ident
    return ident, pending


def take(worker: WorkerChannel, limit: int = 100) -> list[Request]:
    """Take what must all be admitted."""
    out: list[Request] = []
    assert worker.take(limit, NOW, out) == []
    return out


def respond(worker: WorkerChannel, request: Request, status: int) -> None:
    """Commit one response of `request` (its last if `status` has FINAL), and mark nothing."""
    number, geometry = worker.words[CTAIL], worker.geometry
    at = 8 * (geometry.completions + 8 * (number & geometry.completion_mask))
    COMPLETION.pack_into(worker.memory, at, number + 1, request.position << 16 | request.slot, status, 0, 0, 0, 0, 0)
    worker.words[CTAIL] = number + 1
