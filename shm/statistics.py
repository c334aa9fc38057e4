"""The statistics page: counters that workers write and the broker reads, without a message between them.

The broker owns the memory, so counters go on over a worker's death. Each model instance has a block of its own, and
only the thread that runs the instance writes it: no lock, no lost update. The broker adds blocks up when asked.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import final

from shm.memory import map_words, sealed_memfd

BLOCK = 1024  # words
BLOCKS = 512

# Words of an instance's block
BATCH = 0  # rows of the batch that runs now; 0 = idle
STARTED = 1  # CLOCK_MONOTONIC ns when it started
EXPECTED = 2  # ns: the longest run measured at this size or larger; 0 = unmeasured
SUCCESS, FAIL, CANCELLED, EXPIRED = 3, 4, 5, 6  # requests, by ending
QUEUE_NS, INPUT_NS, INFER_NS, OUTPUT_NS = 7, 8, 9, 10  # sums over successful requests
INFERENCES = 11  # rows (Triton's inference_count)
EXECUTIONS = 12  # model runs (execution_count)
LAST_MS = 13  # wall clock, ms since the epoch, of the last inference
FAIL_NS = 14
LASTING = 15  # requests of a decoupled model that it has been given and that have not ended
COPIED = 16  # .. +7: bytes copied, by reason
REASONS = ("policy", "gather", "scatter", "output", "align", "cache", "transfer", "peer")
RETRIED = 24  # requests run again after a worker's death
PENDING = 25  # requests queued for the model now (first instance's block only)
REFUSED_EARLY = 26  # of FAIL: requests that ended before the model ran them, and not by its fault
# Of models with a response cache, in the first instance's block, by the loop's leader; CACHE_KEEP_NS by each instance
CACHE_HITS, CACHE_HIT_NS = 27, 28  # answered without a run; not in SUCCESS
CACHE_MISSES, CACHE_MISS_NS = 29, 30  # looked up in vain
CACHE_KEEP_NS = 31  # keeping what was missed
LATENCY = 32  # .. +LATENCIES-1: successful requests by duration (queue to output), see BOUNDS_NS
BOUNDS_NS = (*(digit * 10**power for power in range(4, 10) for digit in (1, 2, 5)), 10**10)  # 10 µs … 10 s
LATENCIES = len(BOUNDS_NS) + 1  # the last: longer than all bounds
HIT_LATENCY = LATENCY + LATENCIES  # .. +LATENCIES-1: the same of cache hits
CLOSED = HIT_LATENCY + LATENCIES  # .. +3: batches that were formed, by why they were closed
CLOSED_BY = ("full", "preferred", "delay", "idle")  # see `broker.worker.queues`
FULL, PREFERRED, DELAY, IDLE = range(len(CLOSED_BY))
# What a replacement of the worker judges hangs by until it has measured something itself
LONGEST = CLOSED + len(CLOSED_BY)  # ns: the longest run of any size, or preparation of one, since the load
LARGEST = LONGEST + 1  # 1 + rows of the largest batch among those runs; 0: none was measured
CLOSING = LARGEST + 1  # CLOCK_MONOTONIC ns when `close` of the backend began that goes on; 0: none does
CACHED = CLOSING + 1  # 1: answers of this model are kept, in the first instance's block
# Successful requests by durations that the model itself asks for (`model_metrics`): the broker writes the bounds
OWN_BUCKETS = 16  # of one model, at most
OWN_BOUNDS = CACHED + 1  # .. +OWN_BUCKETS-1: ns, ascending, NO_BOUND behind the last; the first 0: there are none
NO_BOUND = 2**64 - 1
OWN_WORDS = OWN_BUCKETS + 2  # counts up to each bound and above all of them, and the sum of all durations, ns
OWN_LATENCY = OWN_BOUNDS + OWN_BUCKETS  # OWN_WORDS of what instances ran
OWN_HIT_LATENCY = OWN_LATENCY + OWN_WORDS  # and of cache hits
BATCHES = OWN_HIT_LATENCY + OWN_WORDS  # 4 words per batch size 1..MAX_BATCH: executions, input ns, infer ns, output ns
RESPONSE_WORDS, RESPONSE_INDICES = 10, 32  # later responses of a request are counted at the last index
RESPONSES = BLOCK - RESPONSE_WORDS * RESPONSE_INDICES  # of decoupled models, see `broker.worker.response_statistics`
MAX_BATCH = (RESPONSES - BATCHES) // 4  # larger batches are counted at this size

# Words of a worker's own block
LOST_WAKEUPS = 3
TAKEN = 4  # requests taken from channels
IN_FLIGHT = 5
REFUSED = 6  # entries that broke a rule of the channel
RECOVERED = 7
CACHE_SIZE, CACHE_USED, CACHE_ENTRIES = 8, 9, 10  # the response cache: bytes it may take, bytes and entries in it now
CACHE_EVICTIONS, CACHE_ALL_HITS, CACHE_ALL_MISSES = 11, 12, 13
CACHE_LOOKUP_NS, CACHE_INSERTION_NS = 14, 15
CACHE_COUNTERS = (CACHE_EVICTIONS, CACHE_ALL_HITS, CACHE_ALL_MISSES, CACHE_LOOKUP_NS, CACHE_INSERTION_NS)
GPU_OPENS, GPU_CLOSES, GPU_EVICTIONS = 16, 17, 18  # of clients' allocations on GPUs (`broker.worker.cuda.regions`)
GPU_OPEN_BYTES, PINNED_BYTES = 19, 20  # of those now open; of host regions that a GPU reads and writes by itself
GPU_WAITS, GPU_WAIT_NS = 21, 22  # requests whose producer's stream was not done yet, and how long it was waited for
GPU_PEER_BYTES = 24  # of GPU_OPEN_BYTES: those of other GPUs than the worker's own
GPU_USED = 23  # bytes of the worker's own GPU that are in use, by whomever; 0: not known
GPU_NOW = (GPU_OPEN_BYTES, GPU_PEER_BYTES, PINNED_BYTES, GPU_USED)  # what ends with the worker's process


def bucket(ns: int) -> int:
    """Which of the LATENCIES a duration is counted in: the first whose bound it does not exceed."""
    return bisect_left(BOUNDS_NS, ns)


def count_latency(block: memoryview, ns: int, count: int = 1) -> None:
    """`count` requests that took `ns` each."""
    block[LATENCY + bucket(ns)] += count
    if block[OWN_BOUNDS]:
        count_own_latency(block, ns, count)


def count_own_latency(block: memoryview, ns: int, count: int = 1) -> None:
    """That part of `count_latency` which goes by the model's own bounds, where it has any."""
    _count_own(block, OWN_LATENCY, ns, count)


def count_hit_latency(block: memoryview, ns: int) -> None:
    """A request that the cache answered in `ns`."""
    block[HIT_LATENCY + bucket(ns)] += 1
    if block[OWN_BOUNDS]:
        _count_own(block, OWN_HIT_LATENCY, ns, 1)


def _count_own(block: memoryview, at: int, ns: int, count: int) -> None:
    block[at + bisect_left(block[OWN_BOUNDS : OWN_BOUNDS + OWN_BUCKETS].tolist(), ns)] += count
    block[at + OWN_WORDS - 1] += ns * count


@final
class StatisticsPage:
    """Maps the page. Made by the broker (`create`), opened by workers from the descriptor they are sent."""

    __slots__ = ("_memory", "fd", "words")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory, self.words = map_words(fd, BLOCKS * BLOCK * 8)

    @classmethod
    def create(cls) -> StatisticsPage:
        """A new page of zeros, all blocks free."""
        return cls(sealed_memfd("tensorbroker-statistics", BLOCKS * BLOCK * 8))

    def block(self, index: int) -> memoryview:
        """The words of block `index`."""
        return self.words[index * BLOCK : (index + 1) * BLOCK]
