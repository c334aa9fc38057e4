"""Channels: made here, handed to a client and to its worker, and taken apart when the session ends.

channel memfd   client, worker, broker (which maps it only as coroner)
ledger memfd    worker, broker: the client never gets what the worker trusts
eventfd         client, worker: rings the worker
pipe            the client reads; the worker writes, the broker keeps a write end and closes its read end. So the
                client sees POLLHUP exactly when nobody is left who could write to its memory
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, final

from broker.quota import Quota
from broker.records import WORKER, ChannelRecord, Peer
from shm.errors import Code, InferError
from shm.layout import DONE, LEDGER_CTAIL, MARK, Geometry
from shm.memory import sealed_memfd

log = logging.getLogger(__name__)

MAX_CHANNELS = 64  # per session, no setting; more threads share
MAX_SLOTS = 1024


class ChannelWorker(Protocol):
    """What channels need of a worker."""

    key: str

    async def attach_channel(self, record: ChannelRecord) -> None:
        """Returns when the worker's process watches the channel."""

    async def detach_channel(self, channel: int, *, ended: bool = False) -> None:
        """Returns when the worker is idle on it. `ended`: its session has."""


@final
class Channels:
    """All channels of all sessions. `worker_of` raises InferError NOT_FOUND for an unknown key."""

    def __init__(self, worker_of: Callable[[str], ChannelWorker], quota: Quota) -> None:
        self._worker_of = worker_of
        self._quota = quota
        self._open: dict[int, tuple[ChannelRecord, ChannelWorker, Peer]] = {}
        self._numbers = itertools.count(1)
        self._completed: Counter[str] = Counter()  # by role, of channels that are closed

    def of(self, session: int) -> list[ChannelRecord]:
        """The channels of one session."""
        return [record for record, _, _ in self._open.values() if record.session == session]

    def counts(self) -> Counter[int]:
        """How many channels each session has."""
        return Counter(record.session for record, _, _ in self._open.values())

    def session_of(self, channel: int) -> int | None:
        """Whose channel it is, None when it is closed by now."""
        return self._open[channel][0].session if channel in self._open else None

    def completed(self) -> Counter[str]:
        """Requests that have ended on channels, of sessions that are gone too, by the role of their session."""
        total = self._completed.copy()
        for record, _, peer in self._open.values():
            total[peer.role] += _completed(record)
        return total

    def under_way(self) -> Counter[int]:
        """Requests of each session that workers have taken and not ended: queued and running ones."""
        total: Counter[int] = Counter()
        for record, _, _ in self._open.values():
            states = os.pread(record.ledger, 8 * record.slots, 8 * MARK)[
                ::8
            ]  # little-endian: the low byte is the state
            total[record.session] += sum(states.count(state) for state in range(1, DONE))
        return total

    async def open(self, peer: Peer, worker_key: str, slots: int) -> tuple[ChannelRecord, int]:
        """A new channel between `peer` and a worker, and the read end of its pipe, which the caller sends and closes.

        `slots` is rounded up to a power of two and cut at MAX_SLOTS; the record has the outcome.
        """
        if len(self.of(peer.session)) >= MAX_CHANNELS:
            raise InferError(
                Code.UNAVAILABLE,
                f"too many channels: a client has at most {MAX_CHANNELS}, one for each worker and thread or event loop "
                "that uses it, and all are in use: use fewer threads, connect() a second client, or have the models in "
                'fewer worker groups (the parameter "worker_group" of their configurations)',
            )
        worker = self._worker_of(worker_key)
        slots = min(1 << (slots - 1).bit_length(), MAX_SLOTS)
        record, pipe_read = self._make(peer, slots)
        self._open[record.channel] = (record, worker, peer)
        try:
            await worker.attach_channel(record)
        except BaseException:
            os.close(pipe_read)
            await self._close(record.channel)
            raise
        return record, pipe_read

    async def close(self, session: int, channel: int) -> None:
        """Take one channel apart; returns when its worker is idle on it. Raises NOT_FOUND."""
        if self.session_of(channel) != session:
            raise InferError(Code.NOT_FOUND, f"no channel {channel} in this session")
        await self._close(channel)

    async def end(self, session: int) -> None:
        """Take all channels of a session apart. Nothing is left, whatever becomes of the workers meanwhile."""
        records = self.of(session)
        results = await asyncio.gather(
            *(self._close(record.channel, ended=True) for record in records), return_exceptions=True
        )
        for record, result in zip(records, results, strict=True):
            if isinstance(result, BaseException):
                log.warning("channel %d was closed without its worker's word: %s", record.channel, result)

    def _make(self, peer: Peer, slots: int) -> tuple[ChannelRecord, int]:
        geometry = Geometry(slots)
        with ExitStack() as undo:
            byte_size = geometry.channel_bytes + geometry.ledger_bytes
            self._quota.take(peer.uid, byte_size, f"a channel of {slots} slots")
            undo.callback(self._quota.give, peer.uid, byte_size)
            memory = sealed_memfd("tensorbroker-channel", geometry.channel_bytes)
            undo.callback(os.close, memory)
            ledger = sealed_memfd("tensorbroker-ledger", geometry.ledger_bytes)
            undo.callback(os.close, ledger)
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, bell)
            pipe_read, pipe_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undo.pop_all()
        number = next(self._numbers)
        steps = peer.role == WORKER
        return ChannelRecord(number, peer.session, slots, memory, ledger, bell, pipe_write, steps), pipe_read

    async def _close(self, channel: int, *, ended: bool = False) -> None:
        record, worker, peer = self._open[channel]
        try:
            await worker.detach_channel(channel, ended=ended)
        finally:
            if self._open.pop(channel, None):
                self._completed[peer.role] += _completed(record)
                record.close()
                geometry = Geometry(record.slots)
                self._quota.give(peer.uid, geometry.channel_bytes + geometry.ledger_bytes)


def _completed(record: ChannelRecord) -> int:
    # Read, not mapped: a channel's memory is mapped by the coroner alone.
    return int.from_bytes(os.pread(record.ledger, 8, 8 * LEDGER_CTAIL), "little")
