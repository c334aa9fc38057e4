"""What a request may carry beside its tensors: its deadline, rows, priority, sequence, positions.

Checked here for every verb of every client, before a submission or a message is made of it.
"""

from __future__ import annotations

import struct
import time

from clientlib.arguments import FOREVER_S, seconds, whole
from shm.errors import Code, InferError
from shm.layout import QUEUE_TIMEOUT, SEQUENCE_END, SEQUENCE_START
from shm.messages import MAX_POSITIONS

_now_ns = time.monotonic_ns
NOT_CARRIED = (TypeError, ValueError, struct.error)  # what an argument of the wrong kind raises on its way
Options = tuple[int, int, int, bool, bool]  # rows, priority, sequence_id, sequence_start, sequence_end
# Those of gateways: and in place of a deadline Triton's `timeout`, and for whom (`caller` of `shm.layout.SUBMISSION`).
AnyOptions = Options | tuple[int, int, int, bool, bool, int, int]
Route = tuple[int, bool, bool]  # sequence_id, sequence_start, sequence_end: what decides where a request goes
NO_ROUTE: Route = (0, False, False)
CARRIED = struct.Struct("=HHIHQ")  # input slot, output slot, rows, priority, sequence id: as `shm.layout.SUBMISSION`
MAX_PRIORITY = 2**16 - 1
MAX_SEQUENCE_ID = 2**64 - 1


def deadline_ns_of(timeout: float) -> int:
    """The deadline that a submission carries; 0 for a timeout of inf. Raises InferError for what is no timeout."""
    patience_s = seconds(timeout)
    return _now_ns() + int(patience_s * 1e9) if patience_s < FOREVER_S else 0


def remaining_s(deadline_ns: int) -> float | None:
    """Seconds until the deadline of a submission; None when it has none."""
    return (deadline_ns - _now_ns()) * 1e-9 if deadline_ns else None


def check_options(
    rows: int, priority: int, sequence_id: int, start: int, end: int, queue_timeout_ns: int = 0, caller: int = 0
) -> int:
    """The flags of a submission. Raises InferError for numbers that a submission cannot carry.

    `queue_timeout_ns`: in place of a deadline, Triton's `timeout` as CLOCK_MONOTONIC; 0: none. `caller`: see
    `AnyOptions`.
    """
    whole(rows, "rows", 0, 2**32 - 1)
    whole(priority, "priority", 0, MAX_PRIORITY)
    whole(sequence_id, "sequence_id", 0, MAX_SEQUENCE_ID)
    if (start or end) and not sequence_id:
        raise InferError(Code.INVALID_ARG, "sequence_start and sequence_end need a sequence_id other than 0")
    flags = (SEQUENCE_START if start else 0) | (SEQUENCE_END if end else 0)
    return flags | QUEUE_TIMEOUT if queue_timeout_ns else flags


def check_all(
    input_slot: int,
    output_slot: int | None,
    rows: int,
    priority: int,
    sequence_id: int,
    sequence_start: int,
    sequence_end: int,
    queue_timeout_ns: int = 0,
    caller: int = 0,
) -> None:
    """Raises InferError for the argument that a submission could not carry. Asked when it failed, not before."""
    whole(input_slot, "input_slot", 0, MAX_POSITIONS - 1)
    if output_slot is not None:
        whole(output_slot, "output_slot", 0, MAX_POSITIONS - 1)
    check_options(rows, priority, sequence_id, False, False)
    whole(sequence_start, "sequence_start", 0, 1)
    whole(sequence_end, "sequence_end", 0, 1)
