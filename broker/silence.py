"""What is done about a worker's process that gives no sign of life, before it is given up: who can avoids it.

The broker asks another worker where one will do: `first_to_respond`, for `broker.plans` and `broker.workers`. Clients
are told by `look`, which `broker.logical_worker` calls at each of its looks: where other workers serve their model as
well, they read in their channels that this one is away, nearly as after a death, and send new requests elsewhere; who
has no choice waits. It may only be busy: when it answers, that ends. A sequence that begins does not avoid it where
another client may look for one of the same id there (`clientlib.homes`): unlike a dead one, it may go on with what it
had.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from broker.records import ChannelRecord
from broker.worker_process import WorkerProcess
from shm.layout import AWAY, SILENT

WORD = 8  # bytes
_log = logging.getLogger(__name__)


class Responds(Protocol):
    """What is asked of a worker."""

    state: str

    async def responds(self) -> bool:
        """Is it up, and does it give a sign of life soon?"""


W = TypeVar("W", bound=Responds)


async def first_to_respond(workers: Sequence[W]) -> W:
    """The first of `workers`, the best one first, that is not stopped or stuck. Where all are, one that is on its way
    up, or the best: it is waited for.
    """
    if len(workers) > 1:
        for worker in workers:
            if await worker.responds():
                return worker
    return next((worker for worker in workers if worker.state == "starting"), workers[0])


def look(worker: str, process: WorkerProcess, channels: Iterable[ChannelRecord], limit_s: float) -> float:
    """Has `process`, which is up, become silent, or does it speak again? `limit_s`: to answer, else it is silent.

    Returns for how many seconds it has not responded; 0 while it is not silent.
    """
    owes = process.owes_s > limit_s
    # At two looks: after a pause of the broker's own the answer may be there unread.
    silent = owes and process.suspected
    process.suspected = owes
    silent_s = process.owes_s if silent else 0.0
    if silent == process.shunned:
        return silent_s
    process.shunned = silent
    for record in channels:
        mark_away(record, away=silent)
    if silent:
        what = f"has not responded for {limit_s:g} s: requests that other workers can take go there"
        _log.warning("worker '%s' (pid %d) %s", worker, process.pid, what)
    else:
        _log.info("worker '%s' (pid %d) responds again", worker, process.pid)
    return silent_s


def mark_away(record: ChannelRecord, *, away: bool) -> None:
    """Only while its worker is alive and has the channel: then nobody else writes that word. Written, not mapped: a
    channel's memory is mapped by the coroner alone.
    """
    with contextlib.suppress(OSError):  # there is no memory for a page of it that nobody has touched so far
        os.pwrite(record.memory, (SILENT if away else 0).to_bytes(WORD, "little"), WORD * AWAY)
