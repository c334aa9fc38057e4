"""What happens to a channel when its worker has died. Two callers, one rule book.

The broker, as coroner (`bury`), runs once it knows how the worker died, or at most 50 ms after the death: it redoes the
ledger and gives an ending to what must not run again. The replacement (`recover`) does the same first, finds those
done, and gets back what is left to run. Both may be interrupted at any store and done again from the start: the
completion tail is the commit point, everything after it is redone from it.

Precondition: the dead worker's pidfd is readable, so that none of its threads can store anything any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shm.admission import Request, Verdict, admit
from shm.errors import Code
from shm.layout import (
    AHEAD,
    AWAY,
    COMPLETION,
    CTAIL,
    DONE,
    FINAL,
    HEAD,
    LEDGER_CTAIL,
    MARK,
    NOTE_BYTES,
    REPLACED,
    RESPONDED,
    STARTED,
    SUBMISSION,
)
from shm.worker_channel import WorkerChannel

DIED = "the worker died while it ran this request"
ALONE = f"{DIED}, alone"  # then nothing else can have ended the worker, as far as anybody knows: see `to_blame`
TWICE = f"{ALONE} and for the second time"
_NOT_AGAIN = "it is not run again (with the model parameter retry 'false' it would have ended at the first death)"


class Ending(NamedTuple):
    """An ending the coroner gave."""

    plan_word: int
    attempts: int
    message: str


def to_blame(message: str) -> bool:
    """Is this what is told of a request that has ended a worker? Of an ensemble it says first which step, then this."""
    return ALONE in message


class Recovered(NamedTuple):
    """`suspects` were running when the worker died: each runs alone, before `fresh` and before new work."""

    suspects: list[Request]
    fresh: list[Request]


def recover(channel: WorkerChannel, now_ns: int) -> Recovered:
    """Take over `channel`, its plans bound already. Also right for a channel that never had a worker."""
    _redo(channel)
    suspects: list[Request] = []
    fresh: list[Request] = []
    for request, state, entry in _unfinished(channel, now_ns):
        verdict = _sentence(request, state, None if request.plan is None else request.plan.retryable)
        verdict = verdict or admit(request, entry[12], now_ns)
        if verdict is not None:
            request.fail(*verdict)
            channel.complete((request,))
            continue
        assert request.plan is not None
        request.plan.busy[request.output_position] = 1
        request.started = True
        (suspects if state == STARTED else fresh).append(request)
    channel.words[AHEAD] = channel.words[AWAY] = 0
    channel.arm()
    channel.ring()  # the dead worker may have published without ringing
    return Recovered(suspects, fresh)


def bury(
    memory_fd: int,
    ledger_fd: int,
    pipe_fd: int,
    slots: int,
    retryable: Callable[[int], bool],
    now_ns: int,
    reason: str = "",
    cause: Callable[[int], str] = lambda plan_word: "",
    alone: Callable[[int], bool] = lambda plan_word: False,
) -> list[Ending]:
    """The coroner's part: end what was running and must not run again; the rest waits for the replacement.

    `reason`: why the worker was ended, as its clients are to be told; "": nobody ended it, or it is not for them.
    `cause`: what it ran for a plan, and how it died; "": that is not known, or `reason` says it.
    `alone`: did the worker run nothing but a request of this plan, and is that held against one that runs no more?
    """
    endings: list[Ending] = []
    with contextlib.closing(WorkerChannel(memory_fd, ledger_fd, -1, pipe_fd, slots, {})) as channel:
        channel.words[AWAY] = REPLACED  # clients that have a choice send new requests elsewhere
        _redo(channel)
        for request, state, entry in _unfinished(channel, now_ns):
            verdict = _sentence(request, state, retryable(entry[1]), alone(entry[1]))
            if verdict is not None:
                parts = (cause(entry[1]), _NOT_AGAIN if verdict[1] is TWICE else "")
                known = "; ".join(part for part in parts if part)
                request.fail(verdict[0], _told(reason, f"{verdict[1]}: {known}" if known else verdict[1]))
                channel.complete((request,))
                endings.append(Ending(entry[1], request.attempts, verdict[1]))
        channel.ring()
    return endings


def count_running(ledger_fd: int, slots: int) -> int:
    """How many requests of a channel the dead worker ran, by its marks: at most more than it was."""
    marks = memoryview(os.pread(ledger_fd, 8 * slots, 8 * MARK)).cast("Q")
    return sum(mark & 0xFF in (STARTED, RESPONDED) for mark in marks)


def end_all(memory_fd: int, ledger_fd: int, pipe_fd: int, slots: int, code: Code, message: str, now_ns: int) -> int:
    """No replacement can start: end everything taken and everything published by now. Returns how many endings."""
    count = 0
    with contextlib.closing(WorkerChannel(memory_fd, ledger_fd, -1, pipe_fd, slots, {})) as channel:
        _redo(channel)
        for request, _, _ in _unfinished(channel, now_ns):
            request.fail(code, message)
            channel.complete((request,))
            count += 1
        # Once, not until nothing is there: a client that goes on publishing must not hold the broker. Without plans
        # nothing is admitted.
        for request, _ in channel.take(4 * slots, now_ns, []):
            request.fail(code, message)
            channel.complete((request,))
            count += 1
        channel.ring()
    return count


def _redo(channel: WorkerChannel) -> None:
    """Carry into the marks what was committed but not marked, then continue from the committed tail."""
    words, ledger, geometry = channel.words, channel.ledger, channel.geometry
    number, upto = ledger[LEDGER_CTAIL], words[CTAIL]
    if not 0 <= upto - number <= 2 * geometry.slots:
        upto = number  # forged by the client: believe the ledger
    while number < upto:
        at = (geometry.completions + 8 * (number & geometry.completion_mask)) * 8
        entry = COMPLETION.unpack_from(channel.memory, at)
        slot, position = entry[1] & 0xFFFF, entry[1] >> 16
        if slot < geometry.slots:
            mark = ledger[MARK + slot]
            # Forward only: what the client wrote there may neither revive a request nor name an empty mark.
            if mark >> 16 == position and 0 < mark & 0xFF < DONE:
                ledger[MARK + slot] = mark & ~0xFF | (DONE if entry[2] & FINAL else RESPONDED)
        number += 1
    ledger[LEDGER_CTAIL] = number
    words[CTAIL] = number
    head = ledger[HEAD]
    for slot in range(geometry.slots):
        head = max(head, ledger[MARK + slot] >> 16)  # taken, the store of HEAD is missing
    ledger[HEAD] = head
    channel.resume(head, number)


def _unfinished(channel: WorkerChannel, now_ns: int) -> Iterator[tuple[Request, int, tuple[int, ...]]]:
    """(request, state, submission) of every mark that is not DONE, oldest first; each becomes live on the channel."""
    geometry = channel.geometry
    marks = channel.ledger[MARK : MARK + geometry.slots]
    # By position: of two whose outputs overlap, the one that was admitted is the older.
    for mark, slot in sorted((mark, slot) for slot, mark in enumerate(marks) if mark and mark & 0xFF != DONE):
        position, attempts, state = mark >> 16, mark >> 8 & 0xFF, mark & 0xFF
        entry = SUBMISSION.unpack_from(channel.memory, (geometry.submissions + 8 * slot) * 8)
        # The slot is the client's memory: it may hold another position by now. The ledger says which one was taken.
        plan = channel.plans.get(entry[1])
        if entry[0] != position:
            entry, plan = (position, *[0] * 12), None
        request = Request(channel, slot, entry, plan, now_ns)
        request.attempts = attempts
        channel.live[slot] = request
        yield request, state, entry


def _told(reason: str, sentence: str) -> str:
    """Both, with as much of the reason as a note has room for: whose fault a death is shows in the sentence."""
    if not reason:
        return sentence
    room = max(0, NOTE_BYTES - len(f"; {sentence}".encode()))
    return f"{reason.encode(errors='replace')[:room].decode(errors='ignore')}; {sentence}"


def _sentence(request: Request, state: int, retryable: bool | None, alone: bool = False) -> Verdict | None:
    """Why a request that the dead worker had must not run again. `retryable` None: its plan cannot be bound again.
    `alone`: as `bury` has it.
    """
    died = ALONE if alone else DIED
    if state == RESPONDED:
        return Code.UNAVAILABLE, f"{died}, after its first response"
    if state == STARTED and request.attempts >= 2:
        return Code.UNAVAILABLE, TWICE
    if state == STARTED and retryable is None:
        return Code.UNAVAILABLE, f"{DIED}, and its plan is gone, perhaps with a region of it: prepare it again"
    if state == STARTED and not retryable:
        return Code.UNAVAILABLE, (
            f"{died}, and its model does not allow it to run twice (parameter retry; never with sequences or streams)"
        )
    return None
