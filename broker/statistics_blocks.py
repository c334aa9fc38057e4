"""Who has which block of the statistics page, and the counters added up in Triton's form.

`broker.workers` takes a block per worker, `broker.models` one per model instance. A block stays with its owner over
reloads and worker deaths, so that counters only grow. No two workers write to one: a model that moves to another worker
gets blocks for it there, while requests that were accepted may still run in the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, final

from shm.errors import Code, InferError
from shm.statistics import (
    BATCH,
    BATCHES,
    BLOCK,
    BLOCKS,
    CACHE_COUNTERS,
    CACHE_ENTRIES,
    CACHE_HIT_NS,
    CACHE_HITS,
    CACHE_KEEP_NS,
    CACHE_MISS_NS,
    CACHE_MISSES,
    CACHE_SIZE,
    CACHE_USED,
    CACHED,
    CANCELLED,
    CLOSED,
    CLOSED_BY,
    CLOSING,
    COPIED,
    EXECUTIONS,
    EXPIRED,
    FAIL,
    FAIL_NS,
    GPU_NOW,
    HIT_LATENCY,
    IN_FLIGHT,
    INFER_NS,
    INFERENCES,
    INPUT_NS,
    LARGEST,
    LAST_MS,
    LASTING,
    LATENCIES,
    LATENCY,
    LONGEST,
    MAX_BATCH,
    NO_BOUND,
    OUTPUT_NS,
    OWN_BOUNDS,
    OWN_BUCKETS,
    OWN_HIT_LATENCY,
    OWN_LATENCY,
    OWN_WORDS,
    PENDING,
    QUEUE_NS,
    REASONS,
    REFUSED_EARLY,
    RESPONSE_INDICES,
    RESPONSE_WORDS,
    RESPONSES,
    RETRIED,
    STARTED,
    SUCCESS,
    TAKEN,
    StatisticsPage,
)

_AT_WORK = (BATCH, PENDING, LASTING, CLOSING)
Owner = tuple[str, int]  # (model, version), or (worker key, 0)


@final
class StatisticsBlocks:
    """Gives out the blocks of one page."""

    __slots__ = ("_blocks", "_free", "_lost", "_owners", "cached_before", "page")

    def __init__(self, page: StatisticsPage) -> None:
        self.page = page
        self._free = list(range(BLOCKS - 1, -1, -1))
        self._blocks: dict[Owner, dict[str, list[int]]] = {}  # by the worker that writes to them
        self._owners: dict[int, Owner] = {}
        self.cached_before: Counter[int] = Counter()  # by word of CACHE_COUNTERS: of workers that are gone
        # Count and ns; not in a block, which only a worker writes, and that worker is dead.
        self._lost: dict[Owner, tuple[int, int]] = {}

    def has_room(self, owner: Owner, count: int, worker: str = "") -> bool:
        """Would `take` succeed?"""
        return count - len(self._blocks.get(owner, {}).get(worker, ())) <= len(self._free)

    def take(self, owner: Owner, count: int, worker: str = "") -> tuple[int, ...]:
        """The first `count` blocks of `owner` in this worker, those it had before among them.

        Raises InferError UNAVAILABLE.
        """
        blocks = self._blocks.setdefault(owner, {}).setdefault(worker, [])
        missing = count - len(blocks)
        if not self.has_room(owner, count, worker):
            raise InferError(
                Code.UNAVAILABLE,
                f"no room for {missing} more statistics blocks: all models' instances and workers together have at "
                f"most {BLOCKS}; lower the count of an instance_group",
            )
        for _ in range(missing):
            block = self._free.pop()
            self._owners[block] = owner
            blocks.append(block)
        return tuple(blocks[:count])

    def unmeasured(self, blocks: Sequence[int]) -> None:
        """A load begins: what runs of another one took tells nothing of it."""
        for block in blocks:
            self.page.words[block * BLOCK + LONGEST] = self.page.words[block * BLOCK + LARGEST] = 0

    def bound(self, owner: Owner, bounds: Sequence[int]) -> None:
        """From now on its requests are counted by these durations, too: ns, ascending, at most OWN_BUCKETS.

        What was counted by others is forgotten.
        """
        wanted = [*bounds, *[NO_BOUND] * (OWN_BUCKETS - len(bounds))] if bounds else [0] * OWN_BUCKETS
        for block in self._of(owner):
            if block[OWN_BOUNDS:OWN_LATENCY].tolist() != wanted:
                for at, word in enumerate([*wanted, *[0] * (2 * OWN_WORDS)], OWN_BOUNDS):
                    block[at] = word

    def of_worker(self, key: str) -> memoryview:
        """The words of a worker's own block."""
        return self.page.block(self.take((key, 0), 1)[0])

    def load(self, key: str) -> int:
        """How many requests a worker has that wait or run."""
        return self.of_worker(key)[IN_FLIGHT]

    def taken(self, key: str) -> int:
        """How many requests a worker's processes have taken, refused ones among them."""
        return self.of_worker(key)[TAKEN]

    def give_back(self, owner: Owner) -> list[int]:
        """Forget an owner and its counters. Returns the blocks that are free now."""
        self._lost.pop(owner, None)
        blocks = [block for held in self._blocks.pop(owner, {}).values() for block in held]
        for block in blocks:
            del self._owners[block]
            self.page.words[block * BLOCK : (block + 1) * BLOCK] = memoryview(bytes(BLOCK * 8)).cast("Q")
            self._free.append(block)
        return blocks

    def give_back_worker(self, key: str) -> None:
        """Forget a worker that is gone. What its response cache has counted goes on counting."""
        words = self.of_worker(key)
        for word in CACHE_COUNTERS:
            self.cached_before[word] += words[word]
        self.give_back((key, 0))

    def owner(self, block: int) -> Owner:
        """Whose block it is."""
        return self._owners[block]

    def lost(self, model: str, version: int, worker: str, now_ns: int) -> None:
        """A request that ran failed with its worker. Counts as a failure of the model, if that is still known.

        Call it before `abandon`. Like any failure it took as long as the run that failed. Of several that ran at once
        the page does not say which was whose, so the longest counts; of none (a decoupled model that had been given
        its requests, an ensemble between steps) when it began is known nowhere outside of the dead process.
        """
        owner = (model, version)
        if owner in self._blocks:
            runs = (self.page.block(block) for block in self._blocks[owner].get(worker, ()))
            took_ns = max((now_ns - words[STARTED] for words in runs if words[BATCH]), default=0)
            count, total_ns = self._lost.get(owner, (0, 0))
            self._lost[owner] = count + 1, total_ns + max(0, took_ns)

    def ran_last(self, worker: str) -> str:
        """The model that ran last in this worker, as the end of a sentence; "": none has run there."""
        words = self.page.words
        held = ((owner, block) for owner, workers in self._blocks.items() for block in workers.get(worker, ()))
        last = max(((words[block * BLOCK + STARTED], owner) for owner, block in held), default=(0, ("", 0)))
        return f"; model '{last[1][0]}' version {last[1][1]} ran last" if last[0] else ""

    def abandon(self, blocks: Sequence[int]) -> None:
        """The process that wrote these blocks is dead: nothing runs there and nothing is queued."""
        for block in blocks:
            for word in _AT_WORK:
                self.page.words[block * BLOCK + word] = 0

    def at_work(self, blocks: Iterable[int]) -> bool:
        """Does something wait or run in one of these blocks, or is it being closed?"""
        words = self.page.words
        return any(words[block * BLOCK + at] for block in blocks for at in _AT_WORK)

    def abandon_worker(self, key: str) -> None:
        """Its process is gone and no other one is to come: what it had shows no more. Counters stay."""
        words = self.of_worker(key)
        for word in (IN_FLIGHT, CACHE_SIZE, CACHE_USED, CACHE_ENTRIES, *GPU_NOW):
            words[word] = 0

    def busy(self, model: str, version: int) -> bool:
        """Does one of its requests wait or run, or is it being closed?"""
        return any(block[word] for block in self._of((model, version)) for word in _AT_WORK)

    def closing(self, model: str, version: int) -> bool:
        """Does `close` of its backend go on?"""
        return any(block[CLOSING] for block in self._of((model, version)))

    def last_ms(self, model: str, version: int) -> int:
        """When it last ran: wall clock, ms since the epoch; 0: never."""
        return max((block[LAST_MS] for block in self._of((model, version))), default=0)

    def in_flight(self, model: str, version: int, ensemble: bool) -> int:
        """How many of its requests wait or run; of a batch that runs, how many rows."""
        blocks = self._of((model, version))
        waiting = sum(block[PENDING] for block in blocks)
        if ensemble:  # waiting is all that it does
            return waiting
        return waiting + sum(max(block[BATCH], block[LASTING]) for block in blocks)

    def model_stats(self, model: str, version: int) -> dict[str, Any]:
        """One entry of Triton's `model_stats` (durations in ns), with our own keys beside it."""
        blocks = self._of((model, version))

        def total(word: int) -> int:
            return sum(block[word] for block in blocks)

        ran, hits, executions = total(SUCCESS), total(CACHE_HITS), total(EXECUTIONS)
        hit_ns = total(CACHE_HIT_NS)
        durations = {name: total(word) for name, word in _DURATIONS}
        lost, lost_ns = self._lost.get((model, version), (0, 0))
        return {
            "name": model,
            "version": str(version),
            "last_inference": self.last_ms(model, version),
            "inference_count": total(INFERENCES),
            "execution_count": executions,
            "inference_stats": {
                "success": _duration(ran + hits, sum(durations.values()) + hit_ns),
                "fail": _duration(total(FAIL) + lost, total(FAIL_NS) + lost_ns),
                **{name: _duration(ran, ns) for name, ns in durations.items()},
                "queue": _duration(ran + hits, durations["queue"]),  # of hits 0 ns, but counted, as in Triton
                "cache_hit": _duration(hits, hit_ns),
                "cache_miss": _duration(total(CACHE_MISSES), total(CACHE_MISS_NS) + total(CACHE_KEEP_NS)),
            },
            "batch_stats": _batch_stats(blocks),
            **_response_stats(blocks),
            "memory_usage": [],
            "cancelled": total(CANCELLED),
            "expired": total(EXPIRED),
            "retried": total(RETRIED),
            "pending": total(PENDING),
            "closed_batches": {reason: total(CLOSED + at) for at, reason in enumerate(CLOSED_BY)},
            "copied_bytes": {reason: total(COPIED + at) for at, reason in enumerate(REASONS)},
        }

    def distribution(self, model: str, version: int) -> dict[str, Any]:
        """What `model_stats` has no place for: successful requests by duration, failures that were not the model's."""
        blocks = self._of((model, version))
        return {
            "latency": [
                sum(block[LATENCY + at] + block[HIT_LATENCY + at] for block in blocks) for at in range(LATENCIES)
            ],
            "cached": any(block[CACHED] for block in blocks),
            "refused_early": sum(block[REFUSED_EARLY] for block in blocks),
        }

    def own_distribution(self, model: str, version: int, bounds: int) -> dict[str, Any]:
        """By the `bounds` durations that `bound` was given: how many up to each, how many above, and the sum in ns."""
        sums = [
            sum(block[OWN_LATENCY + at] + block[OWN_HIT_LATENCY + at] for block in self._of((model, version)))
            for at in range(OWN_WORDS)
        ]
        return {"counts": sums[: bounds + 1], "ns": sums[-1]}

    def _of(self, owner: Owner) -> list[memoryview]:
        return [self.page.block(block) for held in self._blocks.get(owner, {}).values() for block in held]


_DURATIONS = (
    ("queue", QUEUE_NS),
    ("compute_input", INPUT_NS),
    ("compute_infer", INFER_NS),
    ("compute_output", OUTPUT_NS),
)


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}


def _batch_stats(blocks: list[memoryview]) -> list[dict[str, Any]]:
    stats: list[dict[str, Any]] = []
    for size in range(1, MAX_BATCH + 1):
        at = BATCHES + 4 * (size - 1)
        executions = sum(block[at] for block in blocks)
        if executions:
            parts = (sum(block[at + part] for block in blocks) for part in (1, 2, 3))
            names = ("compute_input", "compute_infer", "compute_output")
            durations = {name: _duration(executions, ns) for name, ns in zip(names, parts, strict=True)}
            stats.append({"batch_size": size, **durations})
    return stats


def _response_stats(blocks: list[memoryview]) -> dict[str, Any]:
    """Of decoupled models, by the index of a response in its request; nothing for those that have sent none."""
    stats: dict[str, Any] = {}
    for index in range(RESPONSE_INDICES):
        at = RESPONSES + RESPONSE_WORDS * index
        words = [sum(block[at + word] for block in blocks) for word in range(RESPONSE_WORDS)]
        success, success_ns, fail, fail_ns, empty, empty_ns, cancel, cancel_ns, infer_ns, output_ns = words
        if success or fail or empty or cancel:
            stats[str(index)] = {
                "compute_infer": _duration(success + fail + empty, infer_ns),
                "compute_output": _duration(success + fail, output_ns),
                "success": _duration(success, success_ns),
                "fail": _duration(fail, fail_ns),
                "empty_response": _duration(empty, empty_ns),
                "cancel": _duration(cancel, cancel_ns),
            }
    return {"response_stats": stats} if stats else {}
