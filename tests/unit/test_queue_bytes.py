"""`max_queue_bytes`: what waits has so many bytes at most. On a clock of the test's own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from broker.repository.config import InstanceGroup, ModelConfig
from broker.repository.scheduling import DynamicBatching, QueuePolicy
from broker.worker.batcher import DynamicBatcher, SingleQueue, has_timeouts, queue_for
from broker.worker.levels import FULL
from broker.worker.model import LoadedModel
from broker.worker.queue_bytes import ByteBound, bounded, input_bytes
from shm.errors import Code
from tests.unit.test_batcher import Queued

MS = 1_000_000
NATIVE, GATEWAY = 7, 0  # who sends


def plan(*row_bytes: int, owner: int = NATIVE, byte_size: int = 0) -> SimpleNamespace:
    tensors = [SimpleNamespace(row_bytes=each, place=SimpleNamespace(byte_size=byte_size)) for each in row_bytes]
    return SimpleNamespace(inputs=tensors, owner=owner)


@dataclass(eq=False)
class Sized(Queued):
    plan: SimpleNamespace = field(default_factory=lambda: plan(10))


def of(size: int, owner: int = NATIVE, **fields) -> Sized:
    return Sized(plan=plan(size, owner=owner), **fields)


def config(most: str, batching: DynamicBatching | None = None, batch: int = 8) -> ModelConfig:
    return ModelConfig(
        name="m",
        platform="",
        backend="none",
        directory="",
        versions={},
        default_model_filename="",
        max_batch_size=batch,
        input=(),
        output=(),
        instance_group=(InstanceGroup(name="m"),),
        dynamic_batching=batching,
        parameters={"max_queue_bytes": most},
    )


def test_bytes_are_those_of_all_inputs_and_of_the_rows_that_are_sent():
    assert input_bytes(Sized(rows=3, plan=plan(10, 4))) == 42
    assert input_bytes(Sized(rows=3, plan=plan(0, byte_size=100))) == 100, "strings: as much as there is room for"
    assert input_bytes(Sized(rows=0, plan=plan(10, byte_size=100))) == 100


@pytest.mark.parametrize("inside", [SingleQueue(), DynamicBatcher(4, DynamicBatching())])
def test_no_more_waits_than_allowed(inside):
    queue = ByteBound(inside, 100)
    first, second, third = of(60), of(40), of(1)
    assert queue.add(first, 0) is None
    assert queue.add(second, 0) is None
    code, text = queue.add(third, 0)
    assert code == Code.UNAVAILABLE
    assert text == f"{FULL[1]}: the inputs that wait have 100 bytes, these 1, max_queue_bytes is 100"
    assert len(queue) == 2
    assert queue.remove(second)
    assert queue.add(third, 0) is None
    assert queue.take(0)[0] is first


def test_a_request_that_is_too_large_waits_alone():
    queue = ByteBound(SingleQueue(), 100)
    assert queue.add(of(1000), 0) is None
    assert queue.add(of(1), 0) is not None
    queue.take(0)
    assert queue.add(of(1), 0) is None
    assert queue.add(of(1000), 0) is not None


def test_clients_of_triton_get_its_text():
    queue = ByteBound(SingleQueue(), 100)
    queue.add(of(100), 0)
    assert queue.add(of(1, owner=GATEWAY), 0) == FULL


def test_when_to_try_again_is_told_when_enough_has_run_to_know():
    queue = ByteBound(SingleQueue(), 100)

    def refusal(now):
        verdict = queue.add(of(50), now)
        assert verdict is not None
        return verdict[1]

    queue.add(of(50), 0)
    queue.add(of(50), 0)
    assert "try again" not in refusal(0), "nothing has run"
    for batch in range(1, 7):  # 50 bytes each 20 ms
        queue.take(batch * 20 * MS)
        queue.add(of(50), batch * 20 * MS)
    assert refusal(120 * MS).endswith("; try again in 20 ms")


def test_a_pause_is_no_pace():
    queue = ByteBound(SingleQueue(), 100)
    for second in range(10):  # each finds nothing waiting
        queue.add(of(50), second * 1000 * MS)
        queue.take(second * 1000 * MS)
    queue.add(of(100), 11_000 * MS)
    assert "try again" not in queue.add(of(50), 11_000 * MS)[1]


def test_the_oldest_go_where_that_is_configured():
    policy = QueuePolicy(drop_oldest=True)
    queue = ByteBound(DynamicBatcher(1, DynamicBatching(default_queue_policy=policy)), 100)
    old = [of(50), of(50)]
    for request in old:
        queue.add(request, 1)
    newest = of(80)
    assert queue.add(newest, 2) is None
    assert queue.late_at
    gone = queue.late(2)
    assert [request for request, _ in gone] == old
    text = "a newer request took its place: too many bytes wait (max_queue_bytes, drop_oldest)"
    assert {verdict[1] for _, verdict in gone} == {text}
    assert queue.take(3) == [newest]


def test_the_oldest_go_without_batches_too():
    queue = ByteBound(SingleQueue(), 100, drop_oldest=True)
    old = [of(50, client="x"), of(50, client="x")]
    for request in old:
        queue.add(request, 1)
    newest = of(30, client="y")
    assert queue.add(newest, 2) is None
    assert (queue.late_at, len(queue)) == (1, 3)
    text = "a newer request took its place: too many bytes wait (max_queue_bytes, drop_oldest)"
    assert queue.late(2) == [(old[0], (Code.UNAVAILABLE, text))]
    assert queue.add(of(60, client="x"), 3) is None
    assert [request for request, _ in queue.late(3)] == [old[1]]
    assert {queue.take(4)[0].client for _ in range(2)} == {"x", "y"}
    assert len(queue) == 0
    last = of(500, client="x")
    assert queue.add(last, 5, free=1) is None, "where nothing waits it is let in"
    assert queue.add(of(500, client="x"), 5, free=1) is None
    assert not queue.late(5), "one that an idle instance can take is not dropped"
    assert queue.take(6) == [last]


@pytest.mark.parametrize("batch", [0, 4])
def test_a_model_without_batches_obeys_drop_oldest(batch):
    parameters = {"max_queue_bytes": "100", "drop_oldest": "True"}
    queue = LoadedModel(replace(config("", batch=batch), parameters=parameters), 1, 1).queue
    old, new = of(80), of(90)
    assert queue.add(old, 1) is queue.add(new, 1) is None
    assert [request for request, _ in queue.late(1)] == [old]


def test_who_has_it_and_what_follows():
    assert isinstance(bounded(SingleQueue(), config("")), SingleQueue)
    lone = LoadedModel(config("100"), 1, 1)
    assert isinstance(lone.queue, ByteBound)
    assert lone.alone, "a lone request is run at once as ever"
    batching = DynamicBatching(default_queue_policy=QueuePolicy(drop_oldest=True))
    assert has_timeouts(config("100", batching)), "what is dropped leaves by itself"
    assert has_timeouts(config("100"))
    assert not has_timeouts(config("0"))
    assert isinstance(queue_for(config("100", batching, batch=1), 1), DynamicBatcher)


@pytest.mark.parametrize("inside", [SingleQueue(), DynamicBatcher(4, DynamicBatching())])
def test_a_client_that_has_less_is_not_kept_out(inside):
    queue = ByteBound(inside, 100)
    greedy = [of(25, client="x") for _ in range(4)]
    for request in greedy:
        assert queue.add(request, 1) is None
    modest, large = of(30, client="y"), of(60, client="z")
    assert queue.add(large, 1) is not None, "it would have more than the others then"
    assert queue.add(modest, 1) is None
    assert (queue.late_at, len(queue)) == (1, 5)
    assert [request for request, _ in queue.late(1)] == [greedy[3], greedy[2]]
    assert len(queue) == 3
    assert queue.add(of(25, client="x"), 1) is not None
    assert not queue.late(1)


def test_one_that_is_refused_for_another_can_be_cancelled_first():
    queue = ByteBound(SingleQueue(), 100)
    greedy = [of(50, client="x") for _ in range(2)]
    for request in greedy:
        queue.add(request, 1)
    queue.add(of(10, client="y"), 1)
    assert queue.remove(greedy[1])
    assert not queue.remove(greedy[1])
    assert not queue.late(1)
    assert len(queue) == 2


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_bytes_are_those_of_what_waits(seed):
    rng = random.Random(seed)
    policy = QueuePolicy(
        drop_oldest=rng.random() < 0.5,
        max_queue_size=rng.choice([0, 5]),
        default_timeout_microseconds=rng.choice([0, 50]),
    )
    queue = ByteBound(DynamicBatcher(4, DynamicBatching(default_queue_policy=policy)), 200)
    waiting: list[Sized] = []
    now = 1
    for _ in range(600):
        now += rng.randrange(20_000)
        what = rng.random()
        if what < 0.6:
            request = of(rng.choice([1, 30, 90, 300]), arrival=now, client=rng.choice("xy"))
            if queue.add(request, now) is None:
                waiting.append(request)
        elif what < 0.75 and waiting:
            request = waiting.pop(rng.randrange(len(waiting)))
            assert queue.remove(request)
        else:
            for request in queue.take(now):
                waiting.remove(request)
        for request, _ in queue.late(now):
            waiting.remove(request)
        total = sum(input_bytes(request) for request in waiting)
        assert len(queue) == len(waiting)
        assert total <= 200 or len(waiting) == 1
        assert queue._total == total
        lines = {request.client: 0 for request in waiting}
        for request in waiting:
            lines[request.client] += input_bytes(request)
        assert {client: line.total for client, line in queue._lines.items()} == lines
