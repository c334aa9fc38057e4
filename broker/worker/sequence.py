"""What a worker keeps of one sequence, from its START to its END.

`Sequence` is found at `Request.sequence` by whoever runs it, `Line` is what its scheduler keeps (`sequences`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import final

from shm.admission import Request

Key = tuple[int, int]  # whose it is, its id: equal ids of two native clients are two sequences


@final
class Sequence:
    """`started`, `flags`: of the request that was taken last; there is never a second one in flight.

    `text` is "" unless the id was a string. `states` are outputs of one step that the next one reads. `again`: its
    model wants to run the request that runs once more (`iterative_sequence`); `run_flags`: then, those of this run.
    """

    __slots__ = ("again", "flags", "id", "kept", "run_flags", "started", "states", "text")

    def __init__(self, number: int, text: str = "") -> None:
        self.id = number
        self.text = text
        self.started = False
        self.again = False
        self.run_flags: int | None = None
        self.flags = 0
        self.states: dict[str, object] = {}
        self.kept: object = None  # what the last step's answer had no room for (`broker.worker.undelivered`)


@final
class Line:
    """One sequence here: what waits of it, what runs, and the slot it holds (None: in the backlog).

    `behind`: an earlier one of the same id, whose last step has to be over first: the model knows both by the id.
    """

    __slots__ = ("behind", "ended", "key", "last", "over", "own", "queue", "record", "running", "seen", "slot", "why")

    def __init__(self, key: Key, record: Sequence) -> None:
        self.key = key
        self.record = record  # of the request that was added last
        self.queue: OrderedDict[Request, None] = OrderedDict()
        self.running: Request | None = None
        self.slot: tuple[int, int] | None = None
        self.ended = False  # its END has come
        self.over = False  # and its last step has run
        self.behind: Line | None = None
        self.why = ""  # it has ended, or is about to (`broker.worker.sequence_endings`)
        self.seen: Sequence | None = None  # of the step that ran last
        self.own = 0  # the flags of a sequence that is one request without an id, run again and again
        self.last = 0  # when something was heard of it last, or its last run ended

    def ready(self) -> bool:
        """May its next step run?"""
        if not self.queue or self.running is not None:
            return False
        if self.behind is not None and self.behind.over:
            self.behind = None
        return self.behind is None
