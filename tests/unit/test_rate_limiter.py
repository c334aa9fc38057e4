"""The rate limiter: what there is of a resource, refusals in Triton's words, turns, random walks; the flags."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from broker.flags import Given, UsageError
from broker.rate_limit_flags import rate_limit
from broker.repository.config import InstanceGroup
from broker.repository.scheduling import Allowance, Resource
from broker.worker.batch import Batch
from broker.worker.rate_limiter import CREDIT, Claim, RateLimiter, claims_of
from broker.worker.scheduler import Scheduler
from broker.worker.turn import Turn
from shm.errors import InferError
from tests.unit.test_scheduler import Models, add, request


def resource(name: str, count: int, *, is_global: bool = False) -> Resource:
    return Resource(name=name, count=count, is_global=is_global)


def given(*flags: str, mode: str = "execution_count") -> tuple[Allowance, ...] | None:
    return rate_limit(Given({"rate-limit": (mode,), "rate-limit-resource": flags}))


def test_the_flags() -> None:
    assert rate_limit(Given()) is None
    assert given("R:4", mode="off") is None
    assert given() == ()
    assert given("R:4", "S:2:10") == (
        Allowance(name="R", count=4),
        Allowance(name="S", count=2, device=10),
    )


@pytest.mark.parametrize("wrong", ["R", "R:", ":4", "R:x", "R:4:", "R:4:x", "R:4:1:2", "R:-1", "R:²", "R:99999999999"])
def test_wrong_flags(wrong: str) -> None:
    with pytest.raises(UsageError) as refused:
        given(wrong)
    assert str(refused.value) == (
        "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or '<resource_name>:<count>'. "
        f"Got {wrong}"
    )
    with pytest.raises(UsageError, match=r"^invalid argument for --rate-limit$"):
        given(mode="on")


def limited(name: str, limit: int, least: int) -> str:
    return (
        f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of one or more model '
        f"instances, the minimum required count is {least}"
    )


@pytest.mark.parametrize(
    ("flags", "claim", "text"),
    [
        (("r:1",), Claim([resource("r", 4)]), limited("r", 1, 4)),
        (("r:10:10",), Claim([resource("r", 4)]), limited("r", 0, 4)),
        (("other:1",), Claim([resource("r", 4)]), limited("r", 0, 4)),
        (("r:10:10", "r:3"), Claim([resource("r", 4)]), limited("r", 3, 4)),
        (("r:3:0", "r:2"), Claim([resource("r", 4)]), limited("r", 3, 4)),
        (("r:3:10",), Claim([resource("r", 4, is_global=True)]), limited("r", 3, 4)),
        (
            (),
            Claim([resource("r", 1), resource("r", 1, is_global=True)]),
            'Resource "r" is present as both global and device-specific resource in the model configuration.',
        ),
    ],
)
def test_what_could_never_run_is_refused(flags: tuple[str, ...], claim: Claim, text: str) -> None:
    limiter = RateLimiter(given(*flags) or ())
    fine = Claim([resource("r", 1, is_global=True)]) if "other:1" not in flags and flags else Claim()
    limiter.admit([fine])
    with pytest.raises(InferError) as refused:
        limiter.admit([claim])
    assert refused.value.code == "INVALID_ARG"
    assert refused.value.message == text
    assert limiter.fits(fine)  # what was there before is not affected
    limiter.remove([claim])  # was never admitted


@pytest.mark.parametrize("flag", ["r:4", "R:4", "r:4:2"])
def test_what_the_command_line_gives_counts(flag: str) -> None:
    limiter = RateLimiter(given(flag) or ())
    first, second, third = (Claim([resource("r", 2)], device=2) for _ in range(3))
    limiter.admit([first, second, third])
    limiter.begin(first)
    assert limiter.fits(second)
    limiter.begin(second)
    assert not limiter.fits(third)
    limiter.end(first)
    assert limiter.fits(third)


def test_by_default_there_is_as_much_as_the_largest_claim() -> None:
    limiter = RateLimiter()
    small, large, elsewhere = Claim([resource("r", 1)]), Claim([resource("r", 3)]), Claim([resource("r", 1)], device=1)
    limiter.admit([small])
    limiter.admit([large])
    limiter.admit([elsewhere])
    limiter.begin(small)
    assert not limiter.fits(large)
    assert limiter.fits(elsewhere)  # each device has its own
    assert limiter.fits(small)
    limiter.end(small)
    limiter.begin(large)
    assert not limiter.fits(small)
    limiter.end(large)
    limiter.remove([large])
    limiter.begin(small)
    assert not limiter.fits(small)


def test_a_global_resource_is_shared_by_all_devices() -> None:
    limiter = RateLimiter()
    one, other = (Claim([resource("g", 1, is_global=True)], device=device) for device in (0, 1))
    limiter.admit([one, other])
    limiter.begin(one)
    assert not limiter.fits(other)


def test_a_low_priority_number_runs_more_often() -> None:
    limiter = RateLimiter()
    claims = {name: Claim([resource("r", 1)], priority) for name, priority in (("a", 1), ("b", 2), ("c", 4))}
    limiter.admit(list(claims.values()))
    ran: Counter[str] = Counter()
    for _ in range(700):
        name = min(claims, key=lambda each: limiter.turn(claims[each]))
        limiter.begin(claims[name])
        limiter.end(claims[name])
        ran[name] += 1
    assert abs(ran["a"] - 400) + abs(ran["b"] - 200) + abs(ran["c"] - 100) < 10
    assert limiter.turn(claims["a"]) < limiter.turn(claims["c"])


def test_who_was_idle_does_not_catch_up() -> None:
    limiter = RateLimiter()
    busy, idle = Claim([resource("r", 1)]), Claim([resource("r", 1)])
    limiter.admit([busy])
    for _ in range(1000):
        limiter.begin(busy)
        limiter.end(busy)
    limiter.admit([idle])
    order = []
    for _ in range(100):
        claim = min((idle, busy), key=limiter.turn)
        limiter.begin(claim)
        limiter.end(claim)
        order.append(claim is idle)
    assert 50 <= sum(order) <= 51 + CREDIT


def test_instances_have_claims_where_the_limiter_has_a_say() -> None:
    plain = InstanceGroup(name="g", count=2)
    assert claims_of([plain]) == ()
    assert claims_of([plain, InstanceGroup(name="h")]) == ()
    first, second, third = claims_of([plain, InstanceGroup(name="h", priority=2)])
    assert (first.priority, second.priority, third.priority) == (1, 1, 2)
    (claim,) = claims_of(
        [InstanceGroup(name="g", gpus=(3,), resources=(resource("r", 2), resource("g", 1, is_global=True)))]
    )
    assert claim.needs == {(3, "r"): 2, (-1, "g"): 1}


# --- with the scheduler ---------------------------------------------------------------------------------------------


@pytest.fixture
def models() -> Iterator[Models]:
    made = Models()
    yield made
    os.close(made.page.fd)


@pytest.fixture
def scheduler() -> Scheduler:
    made = Scheduler(Turn())
    made.limiter = RateLimiter()
    return made


def run_all(scheduler: Scheduler) -> list[Batch]:
    batches = []
    while (batch := scheduler.due(10**9)) is not None:
        batches.append(batch)
    return batches


def needing(count: int, priority: int = 1, instances: int = 1) -> InstanceGroup:
    return InstanceGroup(name="m", count=instances, resources=(resource("r", count),), priority=priority)


def test_batches_begin_only_while_their_resources_are_there(scheduler: Scheduler, models: Models) -> None:
    large, small, free = models(groups=(needing(4),)), models(groups=(needing(2),)), models()
    for model in (large, small, free):
        scheduler.admit(model)
        add(scheduler, request(model), request(model))
    assert not large.alone
    assert free.alone
    first = run_all(scheduler)
    assert [batch.instance.model for batch in first] == [large, free]
    assert scheduler.next_look() == (0, True)  # nothing changes before one of them ends: nobody needs to look
    assert not scheduler.growing()
    scheduler.done(first[0])
    (second,) = run_all(scheduler)
    assert second.instance.model is small
    scheduler.done(second)
    assert run_all(scheduler)[0].instance.model is large


def test_what_a_large_claim_lacks_is_kept_for_it(scheduler: Scheduler, models: Models) -> None:
    large, small = models(groups=(needing(4),)), models(groups=(needing(2, instances=2),))
    scheduler.admit(large)
    scheduler.admit(small)
    add(scheduler, *(request(small) for _ in range(20)))
    one, other = run_all(scheduler)
    add(scheduler, request(large))
    scheduler.done(one)
    assert run_all(scheduler) == []  # there is enough for another small one, but it is not its turn
    scheduler.done(other)
    assert [batch.instance.model for batch in run_all(scheduler)] == [large]


def test_a_request_that_waits_for_a_resource_may_be_taken_back(scheduler: Scheduler, models: Models) -> None:
    model, other = models(groups=(needing(1),)), models(groups=(needing(1),))
    scheduler.admit(model)
    scheduler.admit(other)
    _, waits = add(scheduler, request(model), request(other, deadline=50))
    (running,) = run_all(scheduler)
    assert [late for late, _ in scheduler.expired(51)] == [waits]
    scheduler.done(running)
    assert scheduler.idle()


def test_a_load_that_is_refused_or_over_leaves_nothing(scheduler: Scheduler, models: Models) -> None:
    scheduler.limiter = RateLimiter(given("r:3") or ())
    refused, fine = models(groups=(needing(4),)), models(groups=(needing(3),))
    with pytest.raises(InferError, match="limited to 3"):
        scheduler.admit(refused)
    assert not refused.claims
    scheduler.admit(fine)
    scheduler.retire(fine)
    scheduler.close_retired()
    assert scheduler.limiter._limits == {}


def test_an_instance_with_a_lower_priority_number_runs_more_often(scheduler: Scheduler, models: Models) -> None:
    model = models(groups=(needing(1), needing(1, priority=3)))
    scheduler.admit(model)
    ran: Counter[int] = Counter()
    for _ in range(40):
        add(scheduler, request(model))
        (batch,) = run_all(scheduler)
        ran[batch.instance.index] += 1
        scheduler.done(batch)
    assert abs(ran[0] - 30) < 5


@pytest.mark.parametrize("seed", range(20))
def test_a_walk(seed: int, scheduler: Scheduler, models: Models) -> None:
    """Never more than there is; all that is queued runs; whoever waits is passed a bounded number of times."""
    chance = random.Random(seed)
    allowances = [Allowance(name=name, count=6) for name in "rst"] if chance.random() < 0.5 else []
    scheduler.limiter = limiter = RateLimiter(allowances)
    made = []
    for _ in range(chance.randint(2, 5)):
        groups = tuple(
            InstanceGroup(
                name="m",
                count=chance.randint(1, 2),
                priority=chance.randint(1, 4),
                resources=tuple(
                    resource(name, chance.randint(1, 5), is_global=name == "t")
                    for name in chance.sample("rst", chance.randint(0, 2))
                ),
            )
            for _ in range(chance.randint(1, 2))
        )
        model = models(groups=groups, batch=chance.choice((0, 4)), delay=chance.choice((0, 500)))
        scheduler.admit(model)
        made.append(model)
    running: list[Batch] = []
    sent = ended = 0
    now = 1
    for _ in range(800):
        now += chance.randint(0, 300_000)
        if chance.random() < 0.6:
            add(scheduler, request(chance.choice(made), now=now))
            sent += 1
        elif running:
            batch = running.pop(chance.randrange(len(running)))
            ended += len(batch.requests)
            scheduler.done(batch)
        while (batch := scheduler.due(now)) is not None:
            running.append(batch)
        in_use: Counter[tuple[int, str]] = Counter()
        for batch in running:
            if batch.instance.model.claims:
                in_use.update(batch.instance.model.claims[batch.instance.index].needs)
        assert all(count <= limiter._limits[pool] for pool, count in in_use.items())
        assert dict(in_use) == limiter._used
    while running or scheduler.waiting():
        now += 10**6
        while (batch := scheduler.due(now)) is not None:
            running.append(batch)
        assert running, "something waits although nothing runs"
        batch = running.pop(0)
        ended += len(batch.requests)
        scheduler.done(batch)
    assert ended == sent
    assert limiter._used == {}
