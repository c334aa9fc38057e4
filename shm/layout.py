"""Where everything lies in a channel and its ledger. 64-bit words; N slots, a power of two.

The geometry follows from N alone, which both sides are told by the broker: nothing in the memory says where anything
is, so nobody can move it.

Channel memfd (mapped by the client and the worker, both may write all of it):
     8  TAIL      client   submissions published: THE publication of a submission
     9  CONSUMED  client   completions read
    10  WAITING   client   0, or a stamp: ring me once for this stamp
    11  SENT      client   CLOCK_MONOTONIC ns of the latest submission or cancel that found ARMED to be PARKED
    12  ASKS      client   not 0: this client has a choice of workers and reads AHEAD
    16  CTAIL     worker   completions published: THE COMMIT POINT, one store commits a whole batch
    24  ARMED     worker   0, or a stamp: ring me once for this stamp (a channel without traffic lately is armed),
                           or PARKED: do not ring, nothing can begin to run before the worker looks by itself
    25  AWAY      broker   REPLACED from a worker's death until its replacement has the channel (which writes 0),
                           SILENT while its process does not respond, which may yet go on with what it has
    26  AHEAD     worker   how long (ns, coarse) what waits and runs there will take, of all clients
    64  RING[4N]  client   slot | CANCEL; position p lies at p & (4N-1)
        SLOT[N]x8  client  one submission, `SUBMISSION`; word 7 is written by a cancel
        COMP[2N]x8 worker  one completion, `COMPLETION`
        NOTE[2N]x64 worker 512 bytes beside COMP[c], valid when its NOTE flag is set
Ledger memfd (mapped by the worker, and by the broker after a worker's death; never sent to a client):
     0  HEAD   submissions taken        1  CTAIL  completions committed and marked
     8  MARK[N]  position << 16 | attempts << 8 | state

A stamp names one sleep and no other, over replacements of the worker too. It has to be rung for once only, although the
sleeper may take milliseconds to wake and clear it: who was rung looks at everything before it sleeps again. (A count of
what was taken is no stamp: a ring may come late, when what it was for has been taken and the sleeper sleeps again.)

A position in a tag, a mark or an ident is always p + 1, so that zeroed memory names no submission.
"""

from __future__ import annotations

import struct
from typing import final

from shm.memory import pages

TAIL, CONSUMED, WAITING, SENT, ASKS = 8, 9, 10, 11, 12
CTAIL, ARMED, AWAY, AHEAD = 16, 24, 25, 26
PARKED = 1  # no stamp: those are times
REPLACED, SILENT = 1, 2
RING = 64
CANCEL = 1 << 32  # in a RING word: look at the slot's cancel word

# position · plan index u32 | generation u32 · request id · deadline ns (0 none) · input position · output position ·
# rows (0 = as prepared) · sequence id · flags · priority · wait event + 1 · caller · cancel = position
SUBMISSION = struct.Struct("@QQQQHHIQHHHHQ")
# (caller: for whom a session that acts for several does so, the same number in all such sessions; 0: itself)
SEQUENCE_START, SEQUENCE_END = 1, 2  # flags
SEQUENCE_AGAIN = 8  # a flag: the step has run, its result did not fit; there is more room for it now
QUEUE_TIMEOUT = 4  # a flag: the deadline is Triton's `timeout`, which counts where the model's queue lets it

# completion number + 1 · ident = position << 16 | slot · code | FINAL | NOTED | GIVEN
# · queue, input, infer, output ns · copied
COMPLETION = struct.Struct("@8Q")
FINAL = 1 << 32
NOTED = 1 << 33
GIVEN = 1 << 34  # the note ends with parameters of the response (`shm.parameters`)
CODE_MASK = 0xFFFFFFFF
NOTE_BYTES = 512

HEAD, LEDGER_CTAIL, MARK = 0, 1, 8
TAKEN, STARTED, RESPONDED, DONE = 1, 2, 3, 4

MAX_SLOTS = 1024


@final
class Geometry:
    """Word offsets and sizes for a channel of `slots` slots."""

    __slots__ = (
        "channel_bytes",
        "completion_mask",
        "completions",
        "ledger_bytes",
        "notes",
        "ring_mask",
        "slots",
        "submissions",
    )

    def __init__(self, slots: int) -> None:
        if not (0 < slots <= MAX_SLOTS and slots & (slots - 1) == 0):
            raise ValueError(f"slots must be a power of two up to {MAX_SLOTS}, got {slots}")
        self.slots = slots
        self.ring_mask = 4 * slots - 1
        self.completion_mask = 2 * slots - 1
        self.submissions = RING + 4 * slots
        self.completions = self.submissions + 8 * slots
        self.notes = self.completions + 8 * 2 * slots
        self.channel_bytes = pages((self.notes + 64 * 2 * slots) * 8)
        self.ledger_bytes = pages((MARK + slots) * 8)
