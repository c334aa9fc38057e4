"""What a worker keeps of one sequence, from its START to its END: found at `Request.sequence` by whoever runs it."""

from __future__ import annotations

from typing import final


@final
class Sequence:
    """`started`, `flags`: of the request that was taken last; there is never a second one in flight.

    `text` is "" unless the id was a string. `states` are outputs of one step that the next one reads. `again`: its
    model wants to run the request that runs once more (`iterative_sequence`); `run_flags`: then, those of this run.
    """

    __slots__ = ("again", "flags", "id", "run_flags", "started", "states", "text")

    def __init__(self, number: int, text: str = "") -> None:
        self.id = number
        self.text = text
        self.started = False
        self.again = False
        self.run_flags: int | None = None
        self.flags = 0
        self.states: dict[str, object] = {}
