"""A taken submission, and the one check that decides whether it may run.

Used by `shm.worker_channel` for new work and by `shm.recovery` for what a dead worker left. Knows slots, plans as far
as admission asks, and endings; no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, final

from shm.errors import Code
from shm.layout import NOTE_BYTES, QUEUE_TIMEOUT
from shm.parameters import beside

Verdict = tuple[Code, str]

EXPIRED: Verdict = (Code.UNAVAILABLE, "Request timeout expired")


def refused(model: str, left_ns: int) -> Verdict:
    """Of a client whose requests for `model` have ended workers, for as long as that is held against it."""
    return Code.UNAVAILABLE, (
        f"requests of this client for model '{model}' are refused for another {math.ceil(left_ns / 1e9)} s: two of "
        "them ended a worker while running alone"
    )


class BoundPlan(Protocol):
    """What admission asks of a plan."""

    model_name: str
    input_positions: int
    output_positions: int
    rows: int
    owner: int  # whose sequences its requests belong to; 0: those of all clients of the gateways, as in Triton
    retryable: bool
    closed: Verdict | None  # why no request is taken any more
    refused_until_ns: int  # CLOCK_MONOTONIC; 0 = not refused
    signature: object  # equal for requests that may share a batch; None: runs alone
    simple: bool  # open, and no other plan's ranges can overlap this one's: only `busy` and the deadline remain
    busy: bytearray  # one byte per output position: a live request writes there

    def conflict(self, input_position: int, output_position: int) -> str:
        """The overlap with another live request's ranges, in words, or "": then a plan that had to look holds them."""


class Publishes(Protocol):
    """The channel a request came from."""

    def start(self, requests: Sequence[Request]) -> None:
        """Mark that the model is about to see the requests."""

    def complete(self, requests: Sequence[Request]) -> None:
        """Publish the endings."""


@final
class Request:
    """One taken submission. `ended` is set when it must not run any more (cancelled, expired).

    `deadline`: ends it while it waits; 0: none. A `queue_timeout` is none of these once it is admitted.
    """

    __slots__ = (
        "arrival",
        "attempts",
        "channel",
        "code",
        "copied",
        "deadline",
        "ended",
        "entry",
        "infer_ns",
        "input_ns",
        "input_position",
        "note",
        "output_ns",
        "output_position",
        "parameters",
        "plan",
        "position",
        "priority",
        "queue_ns",
        "rows",
        "sequence",
        "signature",
        "slot",
        "started",
    )

    plan: BoundPlan | None
    sequence: object  # what a sequence scheduler keeps of the sequence that this request belongs to

    def __init__(self, channel: Publishes, slot: int, entry: tuple[int, ...], plan: BoundPlan | None, now: int) -> None:
        self.channel = channel
        self.slot = slot
        self.plan = plan
        self.signature = plan.signature if plan is not None else None
        self.entry = entry
        self.position = entry[0]
        self.deadline = entry[3]
        self.input_position = entry[4]
        self.output_position = entry[5]
        self.rows = entry[6] or (plan.rows if plan is not None else 0)
        self.priority = entry[9]
        self.arrival = now
        self.sequence = None
        self.attempts = 0
        self.started = False
        self.ended = Code.OK
        self.code = Code.OK
        self.note = b""
        self.parameters = b""  # of the response, packed; see `give`
        self.queue_ns = self.input_ns = self.infer_ns = self.output_ns = self.copied = 0

    @property
    def request_id(self) -> int:
        """The client's own number for it."""
        return self.entry[2]

    @property
    def sequence_id(self) -> int:
        """0: not part of a sequence."""
        return self.entry[7]

    @property
    def flags(self) -> int:
        """SEQUENCE_START, SEQUENCE_END, SEQUENCE_AGAIN, QUEUE_TIMEOUT."""
        return self.entry[8]

    @property
    def wait_event(self) -> int:
        """1 + the event, in the ring of its plan, that its client's work on a GPU ends with; 0: that has ended."""
        return self.entry[10]

    @property
    def client(self) -> int:
        """Whose turn it takes where others wait: its session's, or that of the caller whom a gateway names.

        Only sessions that act for others have plans without an owner; what any other one says here counts for nothing.
        """
        plan = self.plan
        return 0 if plan is None else plan.owner or -1 - self.entry[11]

    @property
    def queue_timeout(self) -> int:
        """When it has waited as long as its sender wants, if its queue takes that into account; 0: no matter."""
        return self.entry[3] if self.entry[8] & QUEUE_TIMEOUT else 0

    def give(self, parameters: bytes) -> None:
        """What the model says beside its response (`shm.parameters.pack`), once the note is made: b"" is nothing.

        Raises InferError where they have no room beside it.
        """
        if parameters:
            beside(self.note, parameters)
            self.note = self.note or bytes(8)  # which is read as nothing, but published
        self.parameters = parameters

    def fail(self, code: Code, message: str) -> None:
        """Give the request its ending; `complete` publishes it."""
        self.code = code
        self.parameters = b""
        note = message.encode(errors="replace")
        if len(note) > NOTE_BYTES:
            note = note[:NOTE_BYTES].decode(errors="ignore").encode()  # no half character
        self.note = note


def admit(request: Request, cancel: int, now: int) -> Verdict | None:
    """The one admission check, for new work and for what a recovery finds: why this request must not run, or None."""
    plan = request.plan
    if (
        plan is not None
        and plan.simple
        and plan.closed is None
        and request.input_position < plan.input_positions
        and request.output_position < plan.output_positions
        and request.rows <= plan.rows
        and not request.deadline
        and cancel != request.position
        and now >= plan.refused_until_ns
        and not plan.busy[request.output_position]
    ):
        return None  # nearly always
    if request.deadline and request.queue_timeout:
        request.deadline = 0
    if plan is None:
        return Code.NOT_FOUND, "the request names a plan that is not bound here: prepare it again"
    if plan.closed is not None:
        return plan.closed
    if now < plan.refused_until_ns:
        return refused(plan.model_name, plan.refused_until_ns - now)
    if request.input_position >= plan.input_positions or request.output_position >= plan.output_positions:
        return Code.INVALID_ARG, (
            f"position {request.input_position}/{request.output_position} is outside the plan's"
            f" {plan.input_positions} input and {plan.output_positions} output positions"
        )
    if request.rows > plan.rows:
        return Code.INVALID_ARG, f"{request.rows} rows asked of a plan prepared for {plan.rows}"
    if request.deadline and now >= request.deadline:
        return EXPIRED
    if cancel == request.position:
        return Code.CANCELLED, "the request was cancelled"
    overlap = plan.conflict(request.input_position, request.output_position)
    if overlap:
        return Code.INVALID_ARG, overlap
    return None
