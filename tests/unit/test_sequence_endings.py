"""Sequences that end: what a model is told of it, and what whoever goes on is told."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from broker.repository.config import InstanceGroup, ModelConfig
from broker.repository.scheduling import SequenceBatching
from broker.worker import backends
from broker.worker.messages import Predecessor
from broker.worker.model import LoadedModel
from broker.worker.queues import Row
from broker.worker.scheduler import Scheduler
from broker.worker.sequence_endings import LOST_NS, MAX_MODELS, MAX_PAST, Endings, Pasts
from broker.worker.sequences import Sequences
from broker.worker.strategies import DirectSequences, OldestSequences
from broker.worker.turn import Turn
from shm import statistics
from shm.admission import Request
from shm.errors import Code
from shm.layout import SEQUENCE_END, SEQUENCE_START
from shm.statistics import StatisticsPage
from tests.unit.test_sequences import SIGNATURE

START, END = SEQUENCE_START, SEQUENCE_END
NATIVE, OTHER = 7, 8  # clients
NO_START = (
    "inference request for sequence 5 to model 'm' must specify the START flag on the first request of the sequence"
)


def request(number: int, flags: int = 0, now: int = 1, owner: int = NATIVE) -> Request:
    made = Request(None, 0, (1, 0, 0, 0, 0, 0, 1, number, flags, 0), None, now)
    made.plan = SimpleNamespace(owner=owner, inputs=(), model=None)
    made.signature = SIGNATURE
    return made


def sequences(oldest: bool = False, slots: int = 2, idle: int = 1000) -> Sequences:
    config = SequenceBatching(oldest=oldest, max_sequence_idle_microseconds=idle)
    queue = OldestSequences("m", config, 1, slots, batch=4) if oldest else DirectSequences("m", config, 1, slots)
    queue.endings.wanted = True
    return queue


def step(queue: Sequences, *requests: Request, now: int = 1) -> list[tuple[int | str, str]]:
    """Queue and run them; what the model is told before."""
    for each in requests:
        assert queue.add(each, now) is None
    rows = queue.take(now)
    told = queue.endings.take(0)
    queue.done(0, rows)
    return told


@pytest.mark.parametrize(("oldest", "first", "second"), [(False, 0, 1), (True, 5, 6)])
def test_by_slot_or_by_id(oldest, first, second):
    queue = sequences(oldest)
    assert step(queue, request(5, START), request(6, START | END)) == []
    assert queue.endings.take(0) == [(second, "end")]
    assert step(queue, request(5, END)) == []
    assert queue.endings.take(0) == [(first, "end")]


def test_a_new_start_is_told_before_its_step_runs():
    queue = sequences()
    step(queue, request(5, START))
    assert step(queue, request(5, START)) == [(0, "start")]
    assert len(queue) == 0


def test_silence_a_cancelled_step_and_a_client_that_is_gone():
    queue = sequences(slots=3, idle=10)
    step(queue, request(5, START), request(6, START), request(7, START, owner=OTHER))
    queue.add(request(7, owner=OTHER), 2)
    cancelled = request(6)
    queue.add(cancelled, 2)
    cancelled.ended = Code.CANCELLED
    assert queue.remove(cancelled)
    assert queue.endings.take(0) == [(1, "cancelled")]
    assert queue.late(10_001) == []
    assert queue.endings.take(0) == [(0, "idle")]
    queue.gone(OTHER)
    assert queue.endings.take(0) == [(2, "client_gone")]
    assert [verdict[0] for _, verdict in queue.late(10_002)] == [Code.CANCELLED], "its step never runs"


def test_a_client_that_is_gone_frees_slots_when_its_step_is_over():
    queue = sequences(slots=1)
    queue.add(request(5, START), 1)
    running = queue.take(1)
    queue.add(request(6, START, owner=OTHER), 1)
    queue.gone(NATIVE)
    assert queue.take(1) == (), "it still runs"
    queue.done(0, running)
    assert [row.sequence_id for row in queue.take(2)] == [6]
    assert queue.endings.take(0) == [(0, "client_gone")]


def test_what_a_model_has_never_seen_it_is_not_told_of():
    queue = sequences(slots=1)
    step(queue, request(5, START))
    queue.add(request(6, START), 1)  # in the backlog
    queue.gone(NATIVE)
    assert queue.endings.take(0) == [(0, "client_gone")]


def test_when_an_instance_goes_it_is_told_of_all_that_is_left():
    queue = sequences()
    step(queue, request(5, START), request(6, START | END))
    assert queue.unload(0) == [(1, "end"), (0, "unload")]


def test_a_model_that_does_not_ask_is_told_nothing():
    queue = sequences()
    queue.endings.wanted = False
    step(queue, request(5, START | END))
    assert len(queue) == len(queue.endings) == 0


# --- a step without a START -----------------------------------------------------------------------------------------


def ended_by(how: str, owner: int = NATIVE) -> Sequences:
    queue = sequences(idle=10)
    step(queue, request(5, START, owner=owner))
    if how == "end":
        step(queue, request(5, END, owner=owner))
    elif how == "idle":
        queue.late(1_000_000)
    elif how in ("unload", "replaced"):
        if how == "unload":
            queue.unload(0)
        else:
            queue.drain(1_000_000)
        past, queue = queue.endings.past, sequences(idle=10)
        queue.endings.past = past
    else:
        cancelled = request(5, owner=owner)
        queue.add(cancelled, 1)
        cancelled.ended = Code.CANCELLED
        queue.remove(cancelled)
    return queue


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("end", "it has had its END"),
        ("idle", "nothing of it came for max_sequence_idle_microseconds (10)"),
        ("cancelled", "a step of it was cancelled"),
        ("unload", "the model was unloaded, or replaced, and its state went with it"),
        ("replaced", "the model was unloaded, or replaced, and its state went with it"),
    ],
)
def test_whoever_goes_on_is_told_how_it_ended(how, says):
    assert ended_by(how).add(request(5), 2) == (
        Code.INVALID_ARG,
        f"{NO_START}; the sequence of this id is over: {says}",
    )


@pytest.mark.parametrize("how", ["idle", "unload", "end", "cancelled"])
def test_clients_of_triton_are_told_what_they_did_not_ask_for(how):
    code, text = ended_by(how, owner=0).add(request(5, owner=0), 2)
    assert code == Code.INVALID_ARG
    assert text.startswith(NO_START)
    assert (text == NO_START) == (how in ("end", "cancelled"))


def test_what_was_lost_with_a_process_is_told_for_as_long_as_it_would_have_lasted():
    pasts = Pasts(Predecessor("killed by SIGKILL", 1_000_000_000))
    queue = sequences()
    queue.endings.past = pasts.of("m")
    lost = (
        "; if it had begun, it must begin again: its state was lost when its worker ended, {} s ago (killed by SIGKILL)"
    )
    for owner in (0, NATIVE):
        assert queue.add(request(5, now=3_500_000_000, owner=owner), 1)[1] == NO_START + lost.format("2.5")
        assert queue.add(request(5, now=LOST_NS + 1_000_000_000, owner=owner), 1)[1] == NO_START + lost.format("60.0")
        assert queue.add(request(5, now=LOST_NS + 1_000_000_001, owner=owner), 1)[1] == NO_START
    step(queue, request(5, START | END))
    assert "it has had its END" in queue.add(request(5, now=3_500_000_000), 1)[1], "what is known goes first"


def test_models_that_were_loaded_long_ago_are_forgotten():
    pasts = Pasts()
    kept = pasts.of("m")
    kept.note((NATIVE, 5), "end")
    for number in range(MAX_MODELS - 1):
        pasts.of(f"other {number}")
    assert pasts.of("m") is kept
    for number in range(MAX_MODELS):
        pasts.of(f"new {number}")
    assert pasts.of("m") is not kept


def test_clients_of_triton_and_ids_that_nobody_knows_get_its_text():
    assert ended_by("end").add(request(5, owner=OTHER), 2) == (Code.INVALID_ARG, NO_START)
    queue = sequences()
    step(queue, request(5, START | END, owner=0))
    assert queue.add(request(5, owner=0), 2) == (Code.INVALID_ARG, NO_START)


def test_memory_of_what_is_over_is_bounded():
    endings = Endings(1)
    for number in range(2 * MAX_PAST):
        endings.past.note((NATIVE, number), "end")
    assert [bool(endings.past.of((NATIVE, number), 1000, 1)) for number in (MAX_PAST - 1, MAX_PAST)] == [False, True]


# --- a model that keeps the state itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("oldest", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_model_that_forgets_when_it_is_told_never_mixes_sequences(oldest, seed):
    """Its own state by slot or id: empty at each START, and in the end there is none of any sequence that is over."""
    rng = random.Random(seed)
    queue = sequences(oldest, slots=3, idle=50)
    state: dict[int | str, object] = {}
    live: dict[tuple[int, int], bool] = {}
    now = 1
    running: list[Row] = []

    def run() -> None:
        for which, _ in queue.endings.take(0):
            del state[which]  # a KeyError: told twice, or of one that it has not seen
        for slot, row in enumerate(running):
            if row is None:
                continue
            which = row.sequence.id if oldest else slot
            if row.sequence.started:
                assert which not in state, "what was there is over, and nobody said so"
                state[which] = row.sequence
            assert state[which] is row.sequence

    for _ in range(800):
        now += rng.randrange(1, 9_000)
        what = rng.random()
        if what < 0.5:
            number = rng.randrange(1, 6)
            known = live.get((NATIVE, number), False)
            flags = START if not known or rng.random() < 0.1 else 0
            flags |= END if rng.random() < 0.2 else 0
            if queue.add(request(number, flags, now), now) is None:
                live[NATIVE, number] = not flags & END
        elif what < 0.6:
            waiting = [each for line in queue._lines.values() for each in line.queue]
            if waiting:
                each = rng.choice(waiting)
                each.ended = Code.CANCELLED
                queue.remove(each)
        elif what < 0.65:
            queue.gone(NATIVE)
        elif running:
            queue.done(0, running)
            running = []
        if not running:
            running = list(queue.take(now))
            run()
        queue.late(now)
        live = {key: key in queue._live for key in live}
    queue.done(0, running)
    for which, _ in queue.unload(0):
        del state[which]
    assert not state


# --- in a worker's scheduler ----------------------------------------------------------------------------------------


class Told:
    """A backend that keeps the state itself."""

    def __init__(self) -> None:
        self.told: list[tuple[int | str, str]] = []
        self.closed = False
        self.block: memoryview | None = None

    def load(self, context):
        return self

    def bind(self, inputs, outputs):
        raise NotImplementedError

    def sequence_ended(self, which, reason):
        assert not self.closed
        assert self.block is None or self.block[statistics.BATCH] == 1, "it is watched as a run is"
        self.told.append((which, reason))
        if reason == "idle":
            raise RuntimeError("it cannot")

    def close(self):
        self.closed = True


@pytest.fixture
def told(monkeypatch):
    made = Told()
    monkeypatch.setattr(backends, "find", lambda config: made)
    return made


@pytest.fixture
def served(told):
    page = StatisticsPage.create()
    config = ModelConfig(
        name="m", platform="", backend="fake", directory="/nowhere", versions={1: "/nowhere"},
        default_model_filename="", max_batch_size=4, input=(), output=(), instance_group=(InstanceGroup(name="m"),),
        sequence_batching=SequenceBatching(max_sequence_idle_microseconds=10),
    )  # fmt: skip
    model = LoadedModel(config, 1, 1)
    told.block = page.block(0)
    model.load(told, "/nowhere", [told.block])
    scheduler = Scheduler(Turn())
    scheduler.serve([model])
    return scheduler, model


def put(scheduler: Scheduler, model: LoadedModel, made: Request) -> None:
    made.plan.model = model
    assert not scheduler.add([made])


def run(scheduler: Scheduler, now: int = 1) -> bool:
    """One batch; was there something to run?"""
    batch = scheduler.due(now)
    assert batch is not None
    assert not batch.endings or not batch.short()
    ran = batch.begin()
    scheduler.done(batch)
    return ran


def test_an_instance_that_has_nothing_to_do_is_told_at_once(told, served):
    scheduler, model = served
    put(scheduler, model, request(5, START))
    assert run(scheduler)
    assert not scheduler.waiting()
    assert scheduler.expired(10_000) == [], "told of, and not idle yet"
    scheduler.expired(100_000)
    assert scheduler.waiting()
    assert (len(model.queue), model.pending()) == (1, 0)
    assert not run(scheduler), "a batch without requests"
    assert told.block[statistics.BATCH] == 0
    assert told.told == [(0, "idle")], "and what it raises is nobody's matter"
    assert scheduler.idle()
    assert len(model.free) == 1


def test_the_client_is_gone(told, served):
    scheduler, model = served
    put(scheduler, model, request(5, START))
    run(scheduler)
    scheduler.gone(OTHER)
    assert not scheduler.waiting()
    scheduler.gone(NATIVE)
    assert not run(scheduler)
    assert told.told == [(0, "client_gone")]


def test_a_model_that_is_unloaded_is_told_before_it_is_closed(told, served):
    scheduler, model = served
    put(scheduler, model, request(5, START))
    run(scheduler)
    scheduler.retire(model)
    scheduler.close_retired(1)
    assert (told.told, told.closed) == ([(0, "unload")], True)
