"""Several instances of one model: who gets how many of the requests that wait."""

from __future__ import annotations

from broker.worker.model import RECHECK
from shm import statistics
from tests.unit.test_scheduler import add, models, request, scheduler, turn

__all__ = ["models", "scheduler", "turn"]  # fixtures


def ran(model, rows, ns, copied_ns=0):
    for instance in model.instances:
        for _ in range(20):
            instance.count_batch(rows, rows, 0, copied_ns, ns, 0)


def batch_sizes(scheduler, model, count=4):
    """How many requests each batch gets, when one instance is free and `count` requests wait."""
    held = model.free.pop()
    add(scheduler, *(request(model) for _ in range(count)))
    sizes = []
    while batch := scheduler.due(2):
        sizes.append(len(batch.requests))
        scheduler.done(batch)
    model.free.append(held)
    return sizes


def test_a_batch_that_wins_nothing_is_shared_between_the_instances(scheduler, models):
    model = models(count=2, batch=8)
    assert batch_sizes(scheduler, model) == [4], "nothing is measured: as Triton does"
    ran(model, 1, 1_000_000)
    ran(model, 2, 2_000_000)
    ran(model, 4, 4_000_000)
    assert batch_sizes(scheduler, model) == [2, 1, 1]
    ran(model, 4, 2_000_000)
    assert batch_sizes(scheduler, model) == [4], "half the time per row"


def test_a_long_run_that_wins_nothing_by_batching_gets_its_requests_one_by_one(scheduler, models):
    model = models(count=2, batch=8)
    for rows in (1, 2, 4, 8):
        ran(model, rows, rows * 7_000_000)
    assert batch_sizes(scheduler, model, 8) == [1] * 8, "in place, without a copy"
    ran(model, 8, 50_000_000)
    assert batch_sizes(scheduler, model, 8)[0] == 4, "a tenth is won per row"


def test_what_a_batch_wins_is_less_what_its_copies_take(scheduler, models):
    model = models(count=2, batch=8)
    for rows in (1, 2, 4, 8):
        ran(model, rows, rows * 5_000_000)
    ran(model, 8, 38_000_000)
    assert batch_sizes(scheduler, model, 8)[0] == 4, "a twentieth is won per row"
    ran(model, 8, 38_000_000, copied_ns=1_500_000)
    assert batch_sizes(scheduler, model, 8) == [1] * 8


def test_what_is_configured_is_not_shared_out(scheduler, models):
    single, delayed = models(count=1, batch=8), models(count=2, batch=4, delay=1)
    for model in (single, delayed):
        ran(model, 1, 1_000_000)
        ran(model, 2, 2_000_000)
        ran(model, 4, 4_000_000)
    assert delayed.share(delayed.instances[0]) == 0
    assert batch_sizes(scheduler, delayed) == [4]
    add(scheduler, *(request(single) for _ in range(4)))
    assert len(scheduler.due(2).requests) == 4


def test_sharing_is_looked_at_again_now_and_then(scheduler, models):
    model = models(count=2, batch=8)
    ran(model, 1, 1_000_000)
    ran(model, 2, 2_000_000)
    sizes = [batch_sizes(scheduler, model, 2) for _ in range(RECHECK + 1)]
    assert sizes == [[1, 1]] * RECHECK + [[2]]


def test_each_batch_counts_once_under_the_reason_for_which_it_was_closed(scheduler, models):
    model = models(batch=4)
    add(scheduler, *(request(model) for _ in range(5)))
    for _ in range(2):
        scheduler.done(scheduler.due(2))
    instance = model.instances[0]
    for _ in range(3):
        instance.count_inline(1, 1000)
    counted = instance.block[statistics.CLOSED : statistics.CLOSED + len(statistics.CLOSED_BY)]
    assert counted.tolist() == [1, 0, 0, 1]
    model.flush()
    assert counted.tolist() == [1, 0, 0, 4], "what ran at once"
