"""The statistics of one model instance: what has run is added to its block of the statistics page.

`broker.worker.model.Instance` is one of these. Only the thread that runs the instance writes.
"""

from __future__ import annotations

import time

from shm import statistics

FLUSH = 64  # inline executions remembered at most


def follow(known: int, took: int) -> int:
    """What a run takes as long as nobody takes its core away; 0 = unmeasured.

    It follows shorter runs quickly and longer ones slowly: on a busy host a short run is often preempted for
    milliseconds, which says nothing about the model.
    """
    if not known:
        return took
    return (known + took) >> 1 if took < known else known + (took - known >> 4)


class Counted:
    """The counters of an instance, and what its runs usually take."""

    __slots__ = ("_rows", "_took", "block", "forms_batches", "typical")

    def __init__(self, block: memoryview) -> None:
        self.block = block
        self.forms_batches = True  # an ensemble does not: its members' batches count
        self.typical: dict[int, int] = {}  # rows → ns as `follow` has it, the copies of a batch included
        self._rows: list[int] = []  # of the executions remembered by `count_inline`
        self._took: list[int] = []  # ns, of the same

    def count_batch(
        self, count: int, rows: int, queue_ns: int, input_ns: int, infer_ns: int, output_ns: int, size: int = 0
    ) -> None:
        """Add one successful execution of `count` requests; `queue_ns` is their sum. `size`: with empty slots, the
        rows that the model ran.

        Each request spent the whole batch's time, as in Triton. In the latency histogram all of a batch are counted
        with their mean wait: one look-up per batch, not per request.
        """
        block = self.block
        block[statistics.SUCCESS] += count
        block[statistics.QUEUE_NS] += queue_ns
        block[statistics.INPUT_NS] += input_ns * count
        block[statistics.INFER_NS] += infer_ns * count
        block[statistics.OUTPUT_NS] += output_ns * count
        block[statistics.INFERENCES] += rows or count
        block[statistics.EXECUTIONS] += 1
        block[statistics.LAST_MS] = int(time.time() * 1000)
        took = queue_ns // count + input_ns + infer_ns + output_ns
        statistics.count_latency(block, took, count)
        self.typical[rows] = follow(self.typical.get(rows, 0), input_ns + infer_ns + output_ns)
        at = statistics.BATCHES + 4 * (min(size or rows or 1, statistics.MAX_BATCH) - 1)
        block[at] += 1
        block[at + 1] += input_ns
        block[at + 2] += infer_ns
        block[at + 3] += output_ns

    def count_inline(self, rows: int, infer_ns: int) -> None:
        """As `count_batch` for one request run in place, but only remembered: `flush` adds it up off the hot path."""
        self._rows.append(rows)
        self._took.append(infer_ns)
        if len(self._rows) >= FLUSH:
            self.flush()

    def flush(self) -> None:
        """Write what `count_inline` remembered."""
        done, self._rows = self._rows, []
        if not done:
            return
        took, self._took = self._took, []
        count, infer_ns = len(done), sum(took)
        block = self.block
        if self.forms_batches:
            block[statistics.CLOSED + statistics.IDLE] += count
        block[statistics.SUCCESS] += count
        block[statistics.INFER_NS] += infer_ns
        block[statistics.INFERENCES] += sum(done) or count
        block[statistics.EXECUTIONS] += count
        block[statistics.LAST_MS] = int(time.time() * 1000)
        for rows in set(done):
            at = statistics.BATCHES + 4 * (min(rows or 1, statistics.MAX_BATCH) - 1)
            same = done.count(rows)
            block[at] += same
            block[at + 2] += infer_ns * same // count
        for each in took:
            block[statistics.LATENCY + statistics.bucket(each)] += 1
        if block[statistics.OWN_BOUNDS]:
            for each in took:
                statistics.count_own_latency(block, each)

    def leaves(self) -> None:
        """Its backend is about to be closed: the broker sees for how long that goes on."""
        self.block[statistics.CLOSING] = time.monotonic_ns()

    def has_left(self) -> None:
        """It is closed."""
        self.block[statistics.CLOSING] = 0

    def count_copy(self, reason: str, byte_size: int) -> None:
        """Every copied byte is counted, with its reason."""
        self.block[statistics.COPIED + statistics.REASONS.index(reason)] += byte_size
