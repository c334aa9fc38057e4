"""What the broker does to the channels of a dead worker, the only time it maps one.

`broker.logical_worker` calls `bury` at every death, as soon as it is known how it came, and `end` when no replacement
comes; `broker.resting` calls `leave` when one comes only if it is wanted. The rules are `shm.recovery`'s; what is
known of plans comes through `PlanBook`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from broker.records import ChannelRecord
from shm import recovery
from shm.errors import Code
from shm.fence import Fence
from shm.layout import DONE, MARK
from shm.worker_channel import WorkerChannel

CUT = "Server is stopping, and this request had not ended within the exit timeout (--exit-timeout-secs)"

_log = logging.getLogger(__name__)
_fence = Fence()


class PlanBook(Protocol):
    """What a coroner must know of plans; `plan_word` is index | generation << 32."""

    def retryable(self, session: int, plan_word: int) -> bool:
        """May a request of this plan that was running be run once more? False for an unknown plan."""

    def streams(self, session: int, plan_word: int) -> bool:
        """Are its requests those of a decoupled model, which never run twice?"""

    def model_of(self, session: int, plan_word: int) -> tuple[str, int] | None:
        """(model, version), None for an unknown plan."""

    def counted_for(self, session: int, plan_word: int) -> tuple[str, int] | None:
        """As `model_of`, and also of a step of an ensemble in another worker: whose statistics a request is in."""

    def is_one_client(self, session: int) -> bool:
        """False for gateways, which act for many and tell them apart themselves (`broker.gateway.offenders`)."""

    def refuse(self, session: int, model: str, until_ns: int) -> None:
        """Remember, for plans made later, that this pair is refused until then (CLOCK_MONOTONIC)."""


def bury(
    channels: Iterable[ChannelRecord],
    plans: PlanBook,
    now_ns: int,
    death: str,
    failed: Callable[[str, int], None],
    reason: str = "",
    *,
    by_itself: bool = True,
) -> list[tuple[int, str]]:
    """End what was running and must not run again, `reason` told; all else waits for the replacement.

    `death`: how the process ended. `reason`: why it was ended, as clients are to be told; "": nobody ended it, or it is
    not for them. `by_itself`: the broker has not ended it, or for what it ran.

    `failed` is called with model and version of each request that ends here: its worker cannot count it any more.
    Returns the (session, model) of each request that was alone at its second death; of one of a decoupled model, which
    has no second, at its first.
    """
    offences: list[tuple[int, str]] = []
    channels = tuple(channels)
    is_lone = by_itself and sum(map(_count_running, channels)) == 1
    for record in channels:
        session = record.session

        def cause(plan_word: int, session: int = session) -> str:
            ran = plans.counted_for(session, plan_word)
            return "" if reason or ran is None else f"model '{ran[0]}' version {ran[1]}, {death}"

        try:
            endings = recovery.bury(
                record.memory,
                record.ledger,
                record.pipe_write,
                record.slots,
                lambda word, session=session: plans.retryable(session, word),  # type: ignore[misc]
                now_ns,
                reason,
                cause,
                lambda word, session=session: is_lone and plans.streams(session, word),  # type: ignore[misc]
            )
        except Exception:  # the other channels' requests must have their endings whatever is wrong with this one
            _log.exception("channel %d cannot be buried", record.channel)
            continue
        for ending in endings:
            if owner := plans.counted_for(session, ending.plan_word):
                failed(*owner)
            model = plans.model_of(session, ending.plan_word)
            if recovery.to_blame(ending.message) and model is not None:
                offences.append((session, model[0]))
    return offences


def _count_running(record: ChannelRecord) -> int:
    try:
        return recovery.count_running(record.ledger, record.slots)
    except OSError:  # then nobody is to blame
        return 2


def leave(channel: ChannelRecord) -> bool:
    """Nobody looks at it from now on: its client rings when it publishes. After `bury`.

    False: something is there that the client will not ring for, or may be.
    """
    parts = channel.memory, channel.ledger, -1, channel.pipe_write, channel.slots
    try:
        with contextlib.closing(WorkerChannel(*parts, {})) as left:
            if any(mark and mark & 0xFF != DONE for mark in left.ledger[MARK : MARK + channel.slots]):
                return False
            left.arm()
            _fence()
            return not left.pending()
    except Exception:  # a process that looks at it can say more
        _log.exception("channel %d cannot be left", channel.channel)
        return False


def end(channels: Iterable[ChannelRecord], message: str, now_ns: int) -> int:
    """End everything that waits in these channels as UNAVAILABLE. Returns how many requests that were."""
    count = 0
    for record in channels:
        try:
            count += recovery.end_all(
                record.memory, record.ledger, record.pipe_write, record.slots, Code.UNAVAILABLE, message, now_ns
            )
        except Exception:
            _log.exception("channel %d cannot be ended", record.channel)
    return count
