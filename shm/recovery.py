"""What happens to a channel when its worker has died. Two callers, one rule book.

The broker, as coroner (`bury`), runs at once: it redoes the ledger and gives an ending to what must not run again.
The replacement (`recover`) does the same first, finds those done, and gets back what is left to run. Both may be
interrupted at any store and done again from the start: the completion tail is the commit point, everything after it is
redone from it.

Precondition: the dead worker's pidfd is readable, so that none of its threads can store anything any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, final

from shm.errors import Code
from shm.layout import (
    COMPLETION,
    CTAIL,
    DONE,
    FINAL,
    HEAD,
    LEDGER_CTAIL,
    MARK,
    RESPONDED,
    STARTED,
    SUBMISSION,
)
from shm.worker_channel import BoundPlan, Request, Verdict, WorkerChannel, admit

DIED = "the worker died while it ran this request"


class Ending(NamedTuple):
    """An ending the coroner gave. `attempts` ≥ 2: it was running alone when the worker died again."""

    plan_word: int
    attempts: int
    message: str


class Recovered(NamedTuple):
    """`suspects` were running when the worker died: each runs alone, before `fresh` and before new work."""

    suspects: list[Request]
    fresh: list[Request]


def recover(channel: WorkerChannel, now_ns: int) -> Recovered:
    """Take over `channel`, its plans bound already. Also right for a channel that never had a worker."""
    _redo(channel)
    suspects: list[Request] = []
    fresh: list[Request] = []
    for request, state, cancel in _unfinished(channel, now_ns):
        verdict = _sentence(request, state, request.plan is not None and request.plan.retryable)
        verdict = verdict or admit(request, cancel, now_ns)
        if verdict is not None:
            request.fail(*verdict)
            channel.complete((request,))
            continue
        assert request.plan is not None
        request.plan.busy[request.output_position] = 1
        request.started = True
        (suspects if state == STARTED else fresh).append(request)
    channel.arm()
    channel.ring()  # the dead worker may have published without ringing
    suspects.sort(key=lambda request: request.position)
    fresh.sort(key=lambda request: request.position)
    return Recovered(suspects, fresh)


def bury(
    memory_fd: int, ledger_fd: int, pipe_fd: int, slots: int, retryable: Callable[[int], bool], now_ns: int
) -> list[Ending]:
    """The coroner's part: end what was running and must not run again; the rest waits for the replacement."""
    channel = WorkerChannel(memory_fd, ledger_fd, -1, pipe_fd, slots, {})
    _redo(channel)
    endings: list[Ending] = []
    for request, state, _ in _unfinished(channel, now_ns):
        word = _plan_word(channel, request.slot)
        verdict = _sentence(request, state, retryable(word))
        if verdict is not None:
            request.fail(*verdict)
            channel.complete((request,))
            endings.append(Ending(word, request.attempts, verdict[1]))
    channel.ring()
    return endings


def end_all(memory_fd: int, ledger_fd: int, pipe_fd: int, slots: int, code: Code, message: str, now_ns: int) -> int:
    """No replacement can start: end everything taken and everything published. Returns how many endings."""
    plans: Mapping[int, BoundPlan] = _Closed(code, message)
    channel = WorkerChannel(memory_fd, ledger_fd, -1, pipe_fd, slots, plans)
    _redo(channel)
    count = 0
    for request, _, _ in _unfinished(channel, now_ns):
        request.fail(code, message)
        channel.complete((request,))
        count += 1
    while channel.pending():
        taken: list[Request] = []
        for request, admitted in channel.take(slots, now_ns, taken):
            if not admitted:
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
            if mark >> 16 == position:
                ledger[MARK + slot] = mark & ~0xFF | (DONE if entry[2] & FINAL else RESPONDED)
        number += 1
    ledger[LEDGER_CTAIL] = number
    words[CTAIL] = number
    head = ledger[HEAD]
    for slot in range(geometry.slots):
        head = max(head, ledger[MARK + slot] >> 16)  # taken, the store of HEAD is missing
    ledger[HEAD] = head
    channel.resume(head, number)


def _unfinished(channel: WorkerChannel, now_ns: int) -> Iterator[tuple[Request, int, int]]:
    """(request, state, cancel word) of every mark that is not DONE; each becomes live on the channel."""
    for slot in range(channel.geometry.slots):
        mark = channel.ledger[MARK + slot]
        position, attempts, state = mark >> 16, mark >> 8 & 0xFF, mark & 0xFF
        if not mark or state == DONE:
            continue
        entry = _submission(channel, slot)
        # The slot is the client's memory: it may hold another position by now. The ledger says which one was taken.
        plan = channel.plans.get(entry[1]) if entry[0] == position else None
        request = Request(channel, slot, (position, *entry[1:]), plan, now_ns)
        request.attempts = attempts
        channel.live[slot] = request
        yield request, state, entry[12]


def _sentence(request: Request, state: int, retryable: bool) -> Verdict | None:
    """Why a request that the dead worker had must not run again."""
    if state == RESPONDED:
        return Code.UNAVAILABLE, f"{DIED}, after its first response"
    if state == STARTED and request.attempts >= 2:
        return Code.UNAVAILABLE, f"{DIED}, alone and for the second time"
    if state == STARTED and not retryable:
        return Code.UNAVAILABLE, f"{DIED}, and its model does not allow it to run twice"
    return None


def _submission(channel: WorkerChannel, slot: int) -> tuple[int, ...]:
    return SUBMISSION.unpack_from(channel.memory, (channel.geometry.submissions + 8 * slot) * 8)


def _plan_word(channel: WorkerChannel, slot: int) -> int:
    return _submission(channel, slot)[1]


@final
class _ClosedPlan:
    """Refuses everything."""

    input_positions = output_positions = rows = 0
    retryable = False
    busy = bytearray(1)

    def __init__(self, verdict: Verdict) -> None:
        self.closed: Verdict | None = verdict

    def conflict(self, input_position: int, output_position: int) -> str:
        return ""

    def refused(self, now_ns: int) -> Verdict | None:
        return None


class _Closed(dict[int, BoundPlan]):
    """Every plan word names a plan that refuses everything."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__()
        self._plan = _ClosedPlan((code, message))

    def get(self, key: int, default: object = None) -> _ClosedPlan:
        return self._plan
