from __future__ import annotations

import os
from typing import Any

import pytest

from broker.statistics_blocks import StatisticsBlocks
from broker.worker.backends import NoRuntime
from broker.worker.model import Instance
from shm import statistics as words
from shm.errors import InferError
from shm.statistics import BLOCKS, StatisticsPage


@pytest.fixture
def blocks():
    page = StatisticsPage.create()
    yield StatisticsBlocks(page)
    os.close(page.fd)


def test_blocks_stay_with_their_owner(blocks):
    first = blocks.take(("m", 1), 2)
    assert blocks.take(("m", 2), 1)[0] not in first
    assert blocks.take(("m", 1), 2) == first
    grown = blocks.take(("m", 1), 3)
    assert grown[:2] == first
    assert blocks.take(("m", 1), 1) == first[:1]
    assert {blocks.owner(block) for block in grown} == {("m", 1)}


def test_two_workers_never_share_a_block_and_counters_move_along(blocks):
    here = blocks.take(("m", 1), 2, "cpu/default")
    there = blocks.take(("m", 1), 2, "cpu/other")
    assert set(here).isdisjoint(there)
    assert blocks.take(("m", 1), 2, "cpu/default") == here
    for block in (*here, *there):
        blocks.page.block(block)[words.INFERENCES] = 3
    assert blocks.model_stats("m", 1)["inference_count"] == 12
    assert blocks.has_room(("m", 1), 2, "cpu/other")
    assert not blocks.has_room(("m", 1), BLOCKS - 3, "cpu/third")
    assert sorted(blocks.give_back(("m", 1))) == sorted((*here, *there))


def test_no_room_is_said_with_numbers_and_changes_nothing(blocks):
    blocks.take(("m", 1), BLOCKS - 2)
    assert blocks.has_room(("n", 1), 2)
    assert not blocks.has_room(("n", 1), 3)
    with pytest.raises(InferError, match="no room for 3 more statistics blocks"):
        blocks.take(("n", 1), 3)
    assert len(blocks.take(("n", 1), 2)) == 2


def test_requests_that_ended_with_their_worker_are_failures_of_their_model(blocks):
    blocks.lost("m", 1, "w", 10)
    blocks.take(("m", 1), 1, "w")
    blocks.take(("m", 2), 1, "w")
    blocks.lost("m", 1, "w", 20)
    blocks.lost("m", 1, "w", 30)
    assert [blocks.model_stats("m", version)["inference_stats"]["fail"]["count"] for version in (1, 2)] == [2, 0]
    blocks.give_back(("m", 1))
    blocks.take(("m", 1), 1)
    assert blocks.model_stats("m", 1)["inference_stats"]["fail"]["count"] == 0


def test_a_request_that_ended_with_its_worker_took_as_long_as_the_run_that_it_was_in(blocks):
    idle, young, old = (blocks.page.block(block) for block in blocks.take(("m", 1), 3, "w"))
    (elsewhere,) = (blocks.page.block(block) for block in blocks.take(("m", 1), 1, "v"))
    for page, batch, started in ((idle, 0, 10), (young, 1, 400), (old, 2, 300), (elsewhere, 1, 20)):
        page[words.BATCH], page[words.STARTED] = batch, started
    young[words.FAIL], young[words.FAIL_NS] = 1, 7
    blocks.lost("m", 1, "w", 1000)
    assert blocks.model_stats("m", 1)["inference_stats"]["fail"] == {"count": 2, "ns": 707}
    blocks.abandon(blocks.take(("m", 1), 3, "w"))
    blocks.lost("m", 1, "w", 2000)
    blocks.lost("m", 1, "w", 0)
    assert blocks.model_stats("m", 1)["inference_stats"]["fail"] == {"count": 4, "ns": 707}


def test_a_worker_that_is_gone_gives_its_block_back_and_its_cache_goes_on_counting(blocks):
    page = blocks.of_worker("w")
    page[words.CACHE_ALL_HITS], page[words.CACHE_USED], page[words.IN_FLIGHT] = 3, 100, 2
    blocks.abandon_worker("w")
    assert (page[words.CACHE_ALL_HITS], page[words.CACHE_USED], page[words.IN_FLIGHT]) == (3, 0, 0)
    blocks.give_back_worker("w")
    assert blocks.cached_before[words.CACHE_ALL_HITS] == 3
    assert len(blocks.take(("m", 1), BLOCKS)) == BLOCKS
    assert not any(page)


def test_what_waits_or_runs_in_blocks_is_seen(blocks):
    taken = blocks.take(("m", 1), 3)
    assert not blocks.at_work(taken)
    for word in (words.BATCH, words.PENDING, words.LASTING, words.CLOSING):
        blocks.page.block(taken[2])[word] = 1
        assert blocks.at_work(taken)
        assert not blocks.at_work(taken[:2])
        assert blocks.busy("m", 1)
        assert blocks.closing("m", 1) is (word == words.CLOSING)
        blocks.page.block(taken[2])[word] = 0


def test_given_back_blocks_are_zero_when_taken_again(blocks):
    taken = blocks.take(("m", 1), BLOCKS)
    for block in taken:
        blocks.page.block(block)[words.SUCCESS] = 5
    blocks.give_back(("m", 1))
    assert not any(any(blocks.page.block(block)) for block in blocks.take(("n", 1), BLOCKS))
    blocks.give_back(("unknown", 1))


def test_a_dead_process_runs_and_queues_nothing(blocks):
    (block,) = blocks.take(("m", 1), 1)
    page = blocks.page.block(block)
    page[words.BATCH], page[words.PENDING], page[words.SUCCESS], page[words.CLOSING] = 4, 7, 9, 5
    blocks.abandon([block])
    assert (page[words.BATCH], page[words.PENDING], page[words.SUCCESS], page[words.CLOSING]) == (0, 0, 9, 0)


def test_counters_of_instances_are_added_up_in_tritons_form(blocks):
    for at, block in enumerate(blocks.take(("m", 3), 2), 1):
        page = blocks.page.block(block)
        values = {
            words.SUCCESS: 10,
            words.FAIL: 1,
            words.FAIL_NS: 77,
            words.CANCELLED: 2,
            words.EXPIRED: 3,
            words.QUEUE_NS: 100,
            words.INPUT_NS: 200,
            words.INFER_NS: 300,
            words.OUTPUT_NS: 400,
            words.INFERENCES: 40,
            words.EXECUTIONS: 5,
            words.RETRIED: 6,
            words.COPIED + 1: 1000,
            words.CLOSED + words.DELAY: 5,
        }
        for word, value in values.items():
            page[word] = value * at
        page[words.LAST_MS] = 1_000_000 - at
        page[words.BATCHES + 4 * 7 : words.BATCHES + 4 * 8] = memoryview(
            b"".join(value.to_bytes(8, "little") for value in (at, 20, 30, 40))
        ).cast("Q")
    blocks.page.block(blocks.take(("m", 3), 2)[0])[words.PENDING] = 8
    assert blocks.model_stats("m", 3) == {
        "name": "m",
        "version": "3",
        "last_inference": 999_999,
        "inference_count": 120,
        "execution_count": 15,
        "inference_stats": {
            "success": {"count": 30, "ns": 3000},
            "fail": {"count": 3, "ns": 231},
            "queue": {"count": 30, "ns": 300},
            "compute_input": {"count": 30, "ns": 600},
            "compute_infer": {"count": 30, "ns": 900},
            "compute_output": {"count": 30, "ns": 1200},
            "cache_hit": {"count": 0, "ns": 0},
            "cache_miss": {"count": 0, "ns": 0},
        },
        "batch_stats": [
            {
                "batch_size": 8,
                "compute_input": {"count": 3, "ns": 40},
                "compute_infer": {"count": 3, "ns": 60},
                "compute_output": {"count": 3, "ns": 80},
            }
        ],
        "memory_usage": [],
        "cancelled": 6,
        "expired": 9,
        "retried": 18,
        "pending": 8,
        "closed_batches": {"full": 0, "preferred": 0, "delay": 15, "idle": 0},
        "copied_bytes": {**dict.fromkeys(words.REASONS, 0), "gather": 3000},
    }


def test_distributions_are_added_up_too(blocks):
    for block in blocks.take(("m", 3), 2):
        page = blocks.page.block(block)
        page[words.LATENCY + 1], page[words.LATENCY + words.LATENCIES - 1], page[words.REFUSED_EARLY] = 2, 3, 4
    found = blocks.distribution("m", 3)
    assert (found["latency"][1], found["latency"][-1], sum(found["latency"]), found["refused_early"]) == (4, 6, 10, 8)


def test_a_version_without_blocks_has_zeros(blocks):
    stats = blocks.model_stats("m", 1)
    assert (stats["inference_count"], stats["batch_stats"], stats["last_inference"]) == (0, [], 0)
    assert set(blocks.distribution("m", 1)["latency"]) == {0}


# --- what a hang is judged by -----------------------------------------------------------------------------------------


def test_a_replacement_judges_by_the_longest_run_of_the_worker_before_until_it_has_measured_one(blocks):
    (number,) = blocks.take(("m", 1), 1)
    block = blocks.page.block(number)

    def expected(instance: Instance, rows: int) -> int:
        instance.begin(rows, 1)
        instance.end(rows, 0)
        return block[words.EXPECTED]

    model: Any = None
    first = Instance(model, "m", NoRuntime(), block)
    assert expected(first, 4) == 0
    for rows, took in ((4, 700), (4, 90), (1, 50)):
        first.begin(rows, 1)
        first.end(rows, took)
    assert (expected(first, 1), expected(first, 2), expected(first, 8)) == (50, 700, 0)
    second = Instance(model, "m", NoRuntime(), block)
    # Its first run may take what the first one took; of larger batches nothing is known.
    assert (expected(second, 1), expected(second, 4), expected(second, 5)) == (700, 700, 0)
    second.begin(1, 1)
    second.end(1, 60)
    assert (expected(second, 1), expected(second, 4)) == (60, 700)
    blocks.unmeasured([number])  # other files may take longer
    assert expected(Instance(model, "m", NoRuntime(), block), 1) == 0


def test_preparing_alone_is_no_measure_and_counts_with_a_run(blocks, monkeypatch):
    (number,) = blocks.take(("m", 1), 1)
    block, times = blocks.page.block(number), iter((100, 1000))
    monkeypatch.setattr("broker.worker.model.time.monotonic_ns", lambda: next(times))
    monkeypatch.setattr("broker.worker.model.backends.bind", lambda *_: None)
    monkeypatch.setattr("broker.worker.model.backends.gives_parameters", lambda _: False)
    model: Any = None
    first = Instance(model, "m", NoRuntime(), block)
    first.bind([], [], 0, {})
    again = Instance(model, "m", NoRuntime(), block)
    again.begin(0, 1)
    assert block[words.EXPECTED] == 0
    again.end(0, 30)
    last = Instance(model, "m", NoRuntime(), block)
    last.begin(0, 1)
    assert block[words.EXPECTED] == 900
