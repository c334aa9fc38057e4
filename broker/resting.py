"""A worker at rest: it serves nothing, so it has no process, while what its clients have there stays as it is.

Used by `broker.logical_worker`. Nobody looks at their channels meanwhile, so each is left as a worker leaves one before
it sleeps: a client that publishes rings, the broker hears it, and the process that starts finds what was published.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
from collections.abc import Iterable
from typing import final

from broker.coroner import leave
from broker.desired_state import DesiredState
from broker.records import ChannelRecord
from broker.supervision import Idleness

_log = logging.getLogger(__name__)


@final
class Rest:
    """Whether a worker is to rest, and its rest. `begun`: its process is to end, or has ended, for that."""

    __slots__ = ("_bells", "_idleness", "_taken", "begun")

    def __init__(self, after_s: float) -> None:
        self.begun = False
        self._idleness = Idleness(after_s)
        self._taken = 0
        self._bells: select.epoll | None = None  # while it rests

    def is_due(self, idle: bool, taken: int, now_ns: int) -> bool:
        """Has it been `idle` for long, and asked nothing? Called at every look. `taken`: requests, as it counts them.

        Requests of a model that is not there count: its process would be ended, and started for the next of them.
        """
        asked = taken != self._taken
        self._taken = taken
        return self._idleness.is_long(idle and not asked, now_ns)

    def begin(self, state: DesiredState) -> None:
        """The process is about to be ended: what is asked of the worker from now on is for the next one."""
        self.begun = True
        state.wanted.clear()
        state.up.clear()

    async def last(self, channels: Iterable[ChannelRecord], wanted: asyncio.Event) -> None:
        """Returns when it is `wanted`, or when there is something to do on a channel. Its process has ended."""
        try:
            with select.epoll() as self._bells:
                if self._hear(self._bells, tuple(channels)):
                    await _readable(self._bells, wanted)
        except OSError as error:  # no descriptor for it: a process that serves nothing costs less than a request
            _log.warning("a worker that serves nothing cannot rest: %s", error.strerror)
        finally:
            self._bells = None
            self.begun = False
            self._idleness.is_long(False, 0)  # counts anew, also when it is up again before the next look

    def forget(self, channel: ChannelRecord) -> None:
        """Its doorbell is about to be closed, which alone would not end the watch: the client has one more."""
        if self._bells is not None:
            with contextlib.suppress(OSError):
                self._bells.unregister(channel.bell)

    def _hear(self, bells: select.epoll, channels: tuple[ChannelRecord, ...]) -> bool:
        """Have all of them ring. False: there is something to do already."""
        for channel in channels:  # by edges and never read, since clients share what the descriptor stands for
            bells.register(channel.bell, select.EPOLLIN | select.EPOLLET)
        bells.poll(0, len(channels) + 1)  # rings of before: whatever they were for shows below
        return all([leave(channel) for channel in channels])


async def _readable(bells: select.epoll, wanted: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    loop.add_reader(bells, wanted.set)
    try:
        await wanted.wait()
    finally:
        loop.remove_reader(bells)
