"""What runs next: real queues, models whose runtime is never asked."""

from __future__ import annotations

import os

import pytest

from broker.repository.config import InstanceGroup, ModelConfig
from broker.repository.scheduling import DynamicBatching, QueuePolicy
from broker.worker.backends import Binding, Context
from broker.worker.batch import SHORT_NS
from broker.worker.model import LoadedModel, instance_count, not_loaded
from broker.worker.scheduler import Scheduler
from broker.worker.turn import Turn
from shm import statistics
from shm.admission import EXPIRED
from shm.recovery import Recovered
from shm.statistics import StatisticsPage
from tests.fakes.channel import Twin
from tests.fakes.loaded import make_request

NEVER = 1 << 62


class Runtime:
    """Loads and closes."""

    def __init__(self) -> None:
        self.closed = 0

    def load(self, context: Context) -> Runtime:
        return self

    def bind(self, inputs: object, outputs: object) -> Binding:
        raise NotImplementedError

    def close(self) -> None:
        self.closed += 1


class Models:
    """Models by need, each with blocks of its own."""

    def __init__(self) -> None:
        self.page = StatisticsPage.create()
        self._blocks = iter(range(100))
        self.runtimes: dict[LoadedModel, Runtime] = {}

    def __call__(
        self,
        count: int = 1,
        batch: int = 0,
        delay: int = 0,
        groups: tuple[InstanceGroup, ...] = (),
        most: int = 0,
    ) -> LoadedModel:
        batching = DynamicBatching(
            max_queue_delay_microseconds=delay, default_queue_policy=QueuePolicy(max_queue_size=most)
        )
        config = ModelConfig(
            name="m",
            platform="",
            backend="none",
            directory="",
            versions={1: ""},
            default_model_filename="",
            max_batch_size=batch,
            input=(),
            output=(),
            instance_group=groups or (InstanceGroup(name="m", count=count),),
            dynamic_batching=batching if batch else None,
        )
        model = LoadedModel(config, 1, 1)
        runtime = self.runtimes[model] = Runtime()
        blocks = [self.page.block(next(self._blocks)) for _ in range(instance_count(config.instance_group))]
        model.load(runtime, "", blocks)
        return model


class PlanOf:
    """As much of a plan as the scheduler reads."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.owner = self.session = 0
        self.key = 1
        self.rows = 1
        self.signature = ("s",)


def request(model: LoadedModel, deadline: int = 0, now: int = 1):
    return make_request(PlanOf(model), deadline=deadline, now=now)


@pytest.fixture
def models():
    made = Models()
    yield made
    os.close(made.page.fd)


@pytest.fixture
def turn():
    return Turn()


@pytest.fixture
def scheduler(turn):
    return Scheduler(turn)


def add(scheduler, *requests):
    assert scheduler.add(list(requests)) == []
    return requests


def test_an_instance_runs_one_batch_at_a_time(scheduler, models):
    model = models(count=2)
    first, second, third = add(scheduler, *(request(model) for _ in range(3)))
    batches = [scheduler.due(0), scheduler.due(0)]
    assert [batch.requests for batch in batches] == [[first], [second]]
    assert batches[0].instance is not batches[1].instance
    assert scheduler.due(0) is None
    assert scheduler.waiting()
    scheduler.done(batches[1])
    batch = scheduler.due(0)
    assert batch.requests == [third]
    assert batch.instance is batches[1].instance
    assert not scheduler.waiting()
    assert not scheduler.idle()
    scheduler.done(batch)
    scheduler.done(batches[0])
    assert scheduler.idle()
    assert len(model.free) == 2


def test_a_queue_grows_while_an_instance_is_free(scheduler, models):
    model = models(batch=4, delay=1000)
    assert not scheduler.growing()
    add(scheduler, request(model))
    assert scheduler.due(2) is None
    assert scheduler.growing()
    batch = scheduler.due(2_000_000)
    add(scheduler, request(model))
    assert not scheduler.growing()  # its only instance is at work
    scheduler.done(batch)


def test_a_limit_counts_what_idle_instances_cannot_take(scheduler, models):
    model = models(count=2, batch=1, most=1)
    burst = [request(model) for _ in range(5)]
    assert [each for each, _ in scheduler.add(burst)] == burst[3:], "two begin, one waits"
    batches = [scheduler.due(1), scheduler.due(1)]
    assert [batch.requests for batch in batches] == [burst[:1], burst[1:2]]
    assert scheduler.add([request(model)]), "nothing is idle"
    scheduler.done(batches[0])
    scheduler.adopt(Recovered([request(model)], []))
    assert scheduler.add([request(model)]), "a suspect comes first, alone"
    scheduler.done(batches[1])
    scheduler.done(scheduler.due(1))
    assert scheduler.add([request(model)]) == []


def test_models_take_turns(scheduler, models):
    one, two = models(), models()
    add(scheduler, *(request(one) for _ in range(3)), *(request(two) for _ in range(2)))
    order = []
    while (batch := scheduler.due(0)) is not None:
        order.append(batch.instance.model)
        scheduler.done(batch)
    assert order == [one, two, one, two, one]


def test_a_model_whose_batch_waits_does_not_hold_others(scheduler, models):
    waiting, ready = models(batch=4, delay=100), models()
    add(scheduler, request(waiting, now=1000), request(ready, now=1000))
    batch = scheduler.due(1001)
    assert batch.instance.model is ready
    assert scheduler.due(1001) is None
    assert scheduler.next_look() == (101_000, True)
    assert len(scheduler.due(101_000).requests) == 1


def test_when_to_look_again(scheduler, models):
    model, batching = models(), models(batch=4, delay=100)
    assert scheduler.next_look() == (0, False)
    (running,) = add(scheduler, request(model))
    batch = scheduler.due(0)
    assert batch.requests == [running]
    assert scheduler.next_look() == (0, True)
    add(scheduler, request(model, deadline=NEVER))
    assert scheduler.next_look() == (NEVER, True), "its instance is taken: only the deadline can come"
    add(scheduler, request(batching, now=5000))
    assert scheduler.next_look() == (105_000, True)
    add(scheduler, request(batching, now=6000, deadline=50_000))
    assert scheduler.next_look() == (50_000, True)


def test_pending_is_what_is_queued(scheduler, models):
    model = models()
    block = model.instances[0].block
    requests = add(scheduler, *(request(model) for _ in range(3)))
    scheduler.next_look()
    assert block[statistics.PENDING] == 3
    batch = scheduler.due(0)
    assert block[statistics.PENDING] == 2
    assert scheduler.remove(requests[1])
    assert scheduler.remove(requests[2])
    assert block[statistics.PENDING] == 0
    scheduler.done(batch)


# --- cancels ----------------------------------------------------------------------------------------------------------


def test_a_queued_request_is_cancelled_a_running_one_is_not(scheduler, models):
    model = models()
    running, queued, last = add(scheduler, *(request(model) for _ in range(3)))
    batch = scheduler.due(0)
    assert not scheduler.remove(running)
    assert scheduler.remove(queued)
    assert not scheduler.remove(queued)
    assert scheduler.remove(last)
    assert not scheduler.waiting()
    scheduler.done(batch)
    assert scheduler.idle()


def test_a_request_queued_for_a_replaced_model_is_found(scheduler, models):
    old, new = models(), models()
    kept, cancelled = add(scheduler, request(old), request(old))
    for queued in (kept, cancelled):
        queued.plan.model = new
    assert scheduler.remove(cancelled)
    assert scheduler.due(0).requests == [kept]


def test_what_a_channel_has_queued_is_dropped(scheduler, models):
    model = models()
    with Twin() as twin:
        channel = twin.worker({})
        running, first, other, second = add(scheduler, *(request(model) for _ in range(4)))
        batch = scheduler.due(0)
        channel.live = [running, first, None, second]
        assert scheduler.drop(channel) == [first, second]
        scheduler.done(batch)
        assert scheduler.due(0).requests == [other]


# --- suspects -------------------------------------------------------------------------------------------------------


def test_suspects_run_first_and_alone(scheduler, models):
    one, two = models(count=2), models()
    suspects, fresh, new = [request(one), request(two)], [request(one)], request(two)
    assert scheduler.adopt(Recovered(suspects, fresh)) == []
    add(scheduler, new)
    for suspect in suspects:
        batch = scheduler.due(0)
        assert (batch.requests, batch.alone) == ([suspect], True)
        assert scheduler.due(0) is None, "nothing runs beside it"
        assert scheduler.alone
        assert not batch.short(), "never by the leader: it may kill the worker, or take for ever"
        scheduler.done(batch)
    batches = [scheduler.due(0), scheduler.due(0)]
    assert [batch.requests for batch in batches] == [fresh, [new]]
    assert not any(batch.alone for batch in batches)


def test_a_suspect_waits_for_what_runs(scheduler, models):
    model = models(count=2)
    add(scheduler, request(model), request(model))
    batches = [scheduler.due(0), scheduler.due(0)]
    suspect = request(model)
    scheduler.adopt(Recovered([suspect], []))
    for batch in batches:
        assert scheduler.due(0) is None
        assert not scheduler.alone
        scheduler.done(batch)
    assert scheduler.due(0).requests == [suspect]


def test_a_suspect_waits_for_what_the_leader_runs_itself(scheduler, turn, models):
    model = models()
    term = turn.take()
    turn.enter()
    turn.commit(1)
    instance = model.free.pop()
    scheduler.adopt(Recovered([request(model)], []))
    assert scheduler.due(0) is None
    turn.depose(1 << 62, 10)
    assert scheduler.due(0) is None, "a deposed leader's batch runs on"
    assert not scheduler.idle()
    model.free.append(instance)
    assert not turn.leave(term)
    assert scheduler.due(0).alone


def test_nothing_new_begins_while_a_suspect_waits(scheduler, models):
    one, two = models(), models(batch=4)
    add(scheduler, request(one))
    batch = scheduler.due(0)
    scheduler.adopt(Recovered([request(one)], []))
    add(scheduler, request(two))
    assert scheduler.due(0) is None
    assert scheduler.next_look() == (0, True), "not due: a leader would look all the time"
    scheduler.done(batch)
    assert scheduler.due(0).alone


def test_suspects_are_cancelled_and_expire_like_others(scheduler, models):
    model = models()
    first, second, third = suspects = [request(model, deadline) for deadline in (90, 0, 70)]
    scheduler.adopt(Recovered(list(suspects), []))
    assert scheduler.deadline == 70
    assert scheduler.remove(second)
    assert scheduler.expired(70) == [(third, EXPIRED)]
    assert scheduler.deadline == 90
    assert scheduler.expired(90) == [(first, EXPIRED)]
    assert scheduler.deadline == 0
    assert scheduler.idle()


# --- retired models -------------------------------------------------------------------------------------------------


def test_a_retired_model_is_closed_when_it_has_nothing_left_to_do(scheduler, models):
    model = models(count=2)
    runtime = models.runtimes[model]
    add(scheduler, request(model), request(model), request(model))
    batches = [scheduler.due(0), scheduler.due(0)]
    scheduler.retire(model)
    for batch in batches:
        scheduler.close_retired()
        assert not runtime.closed
        scheduler.done(batch)
    scheduler.close_retired()
    assert not runtime.closed, "one is queued"
    last = scheduler.due(0)
    scheduler.close_retired()
    assert len(model.free) == 1
    scheduler.done(last)
    scheduler.close_retired()
    assert runtime.closed == 2
    assert scheduler.retired == []
    scheduler.close_retired()
    assert runtime.closed == 2


def test_a_retired_model_waits_for_its_suspects(scheduler, models):
    model, other = models(), models()
    add(scheduler, request(other))
    batch = scheduler.due(0)
    scheduler.adopt(Recovered([request(model)], []))
    scheduler.retire(model)
    scheduler.close_retired()
    assert not models.runtimes[model].closed
    scheduler.done(batch)
    scheduler.done(scheduler.due(0))
    scheduler.close_retired()
    assert models.runtimes[model].closed


def test_nothing_begins_on_a_closed_model(scheduler, models):
    model, other = models(), models()
    scheduler.retire(model)
    scheduler.close_retired()
    assert model.closed == not_loaded(model.name)
    assert model.free == [], "the leader's inline path asks nobody"
    late, fine = request(model), request(other)
    assert scheduler.add([late, fine]) == [(late, not_loaded(model.name))]
    assert scheduler.adopt(Recovered([], [late])) == [(late, not_loaded(model.name))]
    assert scheduler.due(0).requests == [fine]
    assert not scheduler.waiting()


# --- short or long --------------------------------------------------------------------------------------------------


def test_only_what_was_measured_to_be_short_is_short(scheduler, models):
    model = models(batch=4)
    add(scheduler, request(model), request(model))
    batch = scheduler.due(0)
    assert len(batch.requests) == 2
    assert not batch.short(), "never measured"
    batch.instance.count_batch(2, 2, 0, 0, SHORT_NS - 1, 0)
    assert batch.short()
    for _ in range(2):
        batch.instance.count_batch(2, 2, 0, 0, 100 * SHORT_NS, 0)
    assert not batch.short(), "it became slow"
    for _ in range(8):
        batch.instance.count_batch(2, 2, 0, 0, SHORT_NS // 2, 0)
    assert batch.short(), "two runs that were interrupted say nothing about the model"
