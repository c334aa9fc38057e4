"""A worker that dies after any store, again and again: nothing lost, one ending each, no run too many.

The states come from `tests.fakes.deaths`; each is taken over by a replacement (whose own stores are deaths too), and by
the coroner where the test says so.
"""

from __future__ import annotations

import gc
import os

import pytest

from shm import recovery
from shm.admission import Request
from shm.errors import Code
from shm.layout import CTAIL, DONE, FINAL, HEAD, LEDGER_CTAIL, MARK, RESPONDED, STARTED, TAKEN
from shm.recovery import Ending, bury, end_all, recover
from shm.worker_channel import WorkerChannel
from tests.fakes.channel import NOW, PLAN, Plan, Twin, respond, submit, take
from tests.fakes.deaths import DEADLINE, FRAGILE, LATER, Ask, State, Stores, World, explore


def live(world: World, state: State) -> None:
    """A replacement takes over; afterwards every request must have its one ending, and the right one."""
    marks, committed = world.marks(), world.committed()
    world.life(LATER if marks else NOW)  # deadlines pass with the first death
    for ask, ident, before in zip(world.asks, world.idents, state.endings, strict=False):
        ((code, died),) = ask.endings
        if died and not before and ident not in committed:
            attempts, step = marks[ident]
            assert step == STARTED or (step == RESPONDED and ask.responses)
            assert attempts == 2 or ask.plan_word == FRAGILE
        if not died:
            assert ask.heard == ask.responses or ask.endings[0][0] != Code.OK, "a response is lost"
            allowed = {Code.OK}
            if ask.cancel:
                allowed = {Code.CANCELLED} if ask.cancel == "early" else {Code.OK, Code.CANCELLED}
            if ask.deadline:
                allowed |= {Code.UNAVAILABLE}
            assert code in allowed
    assert all(len(ask.endings) == 1 for ask in world.asks)


def inter(world: World, state: State) -> None:
    """The coroner ends exactly what must not run again, and nothing twice."""
    marks, committed = world.marks(), world.committed()
    fragile = {ident for ask, ident in zip(world.asks, world.idents, strict=False) if ask.plan_word == FRAGILE}
    guilty = {
        ident: attempts
        for ident, (attempts, step) in marks.items()
        if (step == RESPONDED or (step == STARTED and (attempts == 2 or ident in fragile))) and ident not in committed
    }
    endings = bury_in(world.twin, LATER)
    assert sorted(ending.attempts for ending in endings) == sorted(guilty.values())
    assert world.committed() == committed | guilty.keys()
    assert bury_in(world.twin, LATER) == []


def bury_in(twin: Twin, now: int) -> list[Ending]:
    return bury(twin.memory_fd, twin.ledger_fd, twin.pipe_write, twin.slots, lambda word: word == PLAN, now)


def end_all_in(twin: Twin) -> int:
    return end_all(
        twin.memory_fd, twin.ledger_fd, twin.pipe_write, twin.slots, Code.UNAVAILABLE, "no worker can start", LATER
    )


# --- every death ----------------------------------------------------------------------------------------------------

OK, DIED = (Code.OK, False), (Code.UNAVAILABLE, True)
CANCELLED, EXPIRED = (Code.CANCELLED, False), (Code.UNAVAILABLE, False)

# slots, largest batch (0: inline), requests, all the endings that are seen
WORLDS = {
    "a batch of three, and their second run": (4, 3, [Ask(), Ask(), Ask()], {OK, DIED}),
    "a slot used again": (1, 1, [Ask(), Ask()], {OK, DIED}),
    "inline": (2, 0, [Ask(), Ask("late"), Ask(deadline=DEADLINE)], {OK, DIED, CANCELLED, EXPIRED}),
    "one by one": (2, 1, [Ask(), Ask("late")], {OK, DIED, CANCELLED}),
    "several responses": (2, 2, [Ask(responses=2), Ask(), Ask(responses=1)], {OK, DIED}),
    "more responses than the channel may leave unread": (1, 1, [Ask(responses=3)], {OK, DIED}),
    "must not run twice": (2, 2, [Ask(plan_word=FRAGILE), Ask(), Ask(plan_word=FRAGILE)], {OK, DIED}),
    "cancelled or expired": (
        2,
        2,
        [Ask(), Ask("late"), Ask(deadline=DEADLINE), Ask("early")],
        {OK, DIED, CANCELLED, EXPIRED},
    ),
}


def endings_in(states: list[State]) -> set[tuple[Code, bool]]:
    return {ending for state in states for endings in state.endings for ending in endings}


@pytest.mark.parametrize("name", WORLDS)
def test_whenever_workers_die_every_request_ends_once(name):
    slots, batch, asks, expected = WORLDS[name]
    with Twin(slots) as twin:
        states = explore(World(twin, asks, batch), live)
    assert endings_in(states) == expected


@pytest.mark.parametrize("asks", [[Ask(), Ask()], [Ask(plan_word=FRAGILE), Ask("late")]])
def test_the_coroner_may_come_between_any_two_and_be_interrupted_too(asks):
    with Twin(2) as twin:
        states = explore(World(twin, asks), live, inter)
    assert DIED in endings_in(states)


def test_half_a_completion_is_never_read():
    asks = [Ask("early"), Ask(), Ask("early")]  # refused ones carry a note
    with Twin(4) as twin:
        world = World(twin, asks)
        world.client_step()
        first = world.save()
        with Stores(world, half_done=True) as stores:
            live(world, first)
        complete = {world.essence(state) for state in stores.states}
        assert len(complete) < len(stores.states)
        for state in stores.states:
            world.restore(state)
            live(world, state)


def test_end_all_may_be_interrupted_at_any_store_and_done_again():
    with Twin(2) as twin:
        world = World(twin, [Ask(), Ask("late")])
        states = explore(world, live)
        for state in states:
            world.restore(state)
            submitted = len(world.idents)
            ended = len(world.committed()) + sum(map(len, state.endings))
            with Stores(world) as stores:
                assert end_all_in(twin) == submitted - ended
            for left in stores.states:
                world.restore(left)
                end_all_in(twin)
                assert end_all_in(twin) == 0
                world.client.reap()
                assert all(len(ask.endings) == 1 for ask in world.asks[:submitted])
                assert world.client.outstanding == 0


def test_the_search_notices_when_the_ledger_is_not_redone(monkeypatch):
    def forget(channel: WorkerChannel) -> None:
        channel.resume(channel.ledger[HEAD], channel.ledger[LEDGER_CTAIL])

    monkeypatch.setattr(recovery, "_redo", forget)
    with Twin(2) as twin, pytest.raises(AssertionError):
        explore(World(twin, [Ask(), Ask()]), live)


def test_the_search_sees_each_store():
    with Twin(4) as twin:
        world = World(twin, [Ask(), Ask()])
        world.client_step()
        worker = twin.worker({PLAN: Plan(output_positions=2)})
        requests: list[Request] = []
        with Stores(world) as stores:
            worker.take(4, NOW, requests)
        assert [(len(taken), state) for taken, state in map(ledger_of, stores.states)] == [(1, 0), (2, 0), (2, 2)]
        with Stores(world) as stores:
            worker.start([requests[0]])
        assert len(stores.states) == 1


def ledger_of(state: State) -> tuple[list[int], int]:
    words = memoryview(state.ledger).cast("Q")
    return [word for word in words[MARK:] if word], words[HEAD]


# --- single cases ---------------------------------------------------------------------------------------------------


@pytest.fixture
def twin():
    with Twin(slots=4) as twin:
        yield twin


def test_a_half_answered_request_is_not_run_again(twin):
    client = twin.client()
    _, pending = submit(client)
    worker = twin.worker({PLAN: Plan()})
    (request,) = take(worker)
    worker.start([request])
    respond(worker, request, Code.OK)
    assert recover(twin.worker({PLAN: Plan()}), LATER) == ([], [])
    client.reap()
    assert [entry[2] & 0xFF for entry in pending.entries] == [Code.OK, Code.UNAVAILABLE]
    assert pending.finals == 1
    assert "after its first response" in pending.text


def test_a_fully_answered_request_is_done_though_nothing_was_marked(twin):
    client = twin.client()
    _, pending = submit(client)
    worker = twin.worker({PLAN: Plan()})
    (request,) = take(worker)
    worker.start([request])
    respond(worker, request, Code.OK)
    respond(worker, request, FINAL)
    replacement = twin.worker({PLAN: Plan()})
    assert recover(replacement, LATER) == ([], [])
    assert replacement.ledger[MARK + request.slot] & 0xFF == DONE
    client.reap()
    assert len(pending.entries) == 2
    assert pending.finals == 1


def test_the_coroner_ends_a_half_answered_request_and_names_its_plan(twin):
    client = twin.client()
    _, pending = submit(client)
    worker = twin.worker({PLAN: Plan()})
    (request,) = take(worker)
    worker.start([request])
    respond(worker, request, Code.OK)
    ((word, attempts, message),) = bury_in(twin, LATER)
    assert (word, attempts) == (PLAN, 1)
    client.reap()
    assert pending.text == message


def test_recovery_arms_the_channel_and_rings_the_client_once(twin):
    replacement = twin.worker({})
    assert recover(replacement, NOW) == ([], [])  # a new channel is taken over the same way
    client = twin.client()
    assert twin.client_was_rung()
    client.drain_pipe()
    submit(client)
    assert twin.worker_was_rung()
    assert not twin.client_was_rung()


def test_recovery_gives_the_output_positions_to_what_it_hands_over(twin):
    client = twin.client()
    for position in range(3):
        submit(client, position)
    worker = twin.worker({PLAN: Plan(output_positions=4)})
    first, second, _ = take(worker)
    worker.start([first])
    worker.complete([second])
    plan = Plan(output_positions=4)
    replacement = twin.worker({PLAN: plan})
    suspects, fresh = recover(replacement, LATER)
    assert [request.output_position for request in suspects] == [0]
    assert [request.output_position for request in fresh] == [2]
    assert list(plan.busy) == [1, 0, 1, 0]
    replacement.complete(suspects + fresh)
    assert not any(plan.busy)


def test_of_two_with_one_output_the_older_goes_on_whatever_its_slot(twin):
    client = twin.client()
    worker = twin.worker({PLAN: Plan(output_positions=4)})
    submit(client, 1)
    _, older = submit(client, 0)
    worker.complete(take(worker)[:1])
    client.reap()
    _, younger = submit(client, 0)  # in the first slot
    assert [admitted for _, admitted in worker.take(4, NOW, [])] == [False]  # and dies before it publishes that
    replacement = twin.worker({PLAN: Plan(output_positions=4)})
    _, fresh = recover(replacement, LATER)
    replacement.complete(fresh)
    client.reap()
    assert older.code is Code.OK
    assert younger.code is Code.INVALID_ARG


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (None, Code.NOT_FOUND),
        ("closed", Code.UNSUPPORTED),
        ("refused", Code.UNAVAILABLE),
        ("smaller", Code.INVALID_ARG),
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_what_is_left_passes_the_admission_check_again(twin, plan, code, started):
    client = twin.client()
    _, pending = submit(client, 1)
    worker = twin.worker({PLAN: Plan(output_positions=2)})
    (request,) = take(worker)
    if started:
        worker.start([request])
    bound = Plan(output_positions=1 if plan == "smaller" else 2)
    if plan == "closed":
        bound.closed = Code.UNSUPPORTED, "closed"
    if plan == "refused":
        bound.refused_until_ns = LATER + 1
    assert recover(twin.worker({PLAN: bound} if plan else {}), LATER) == ([], [])
    client.reap()
    # Without its plan nobody can say that a running request may run again.
    assert pending.code is (Code.UNAVAILABLE if started and plan is None else code)


def test_a_client_that_rewrote_a_taken_slot_gets_an_error(twin):
    client = twin.client()
    ident, pending = submit(client)
    worker = twin.worker({PLAN: Plan()})
    take(worker)
    worker.words[worker.geometry.submissions + 8 * (ident & 0xFFFF)] = 99
    assert recover(twin.worker({PLAN: Plan()}), LATER) == ([], [])
    client.reap()
    assert pending.code is Code.NOT_FOUND


@pytest.mark.parametrize("tail", [9, 2**40, 2**64 - 1])
def test_a_forged_completion_tail_is_not_believed(twin, tail):
    client = twin.client()
    _, pending = submit(client)
    worker = twin.worker({PLAN: Plan()})
    take(worker)
    worker.words[CTAIL] = tail
    replacement = twin.worker({PLAN: Plan()})
    suspects, fresh = recover(replacement, LATER)
    assert (len(suspects), len(fresh)) == (0, 1)
    replacement.complete(fresh)
    client.reap()
    assert pending.code is Code.OK


@pytest.mark.parametrize(("position", "status"), [(1, 0), (0, 0), (0, FINAL), (7, FINAL)])
def test_a_forged_completion_revives_nothing_and_invents_nothing(twin, position, status):
    client = twin.client()
    submit(client)
    worker = twin.worker({PLAN: Plan()})
    (request,) = take(worker)
    worker.complete([request])
    before = bytes(worker.ledger[MARK : MARK + 4])
    for slot in (0, 1, 2, 3, 4, 65535):
        request.slot, request.position = slot, position
        respond(worker, request, status)
    replacement = twin.worker({PLAN: Plan()})
    assert recover(replacement, LATER) == ([], [])
    assert bytes(replacement.ledger[MARK : MARK + 4]) == before
    assert replacement.words[CTAIL] == 7  # nothing was added


def test_a_client_that_goes_on_publishing_cannot_hold_end_all(twin, monkeypatch):
    client = twin.client()
    submit(client)
    complete = WorkerChannel.complete

    def complete_and_publish(channel: WorkerChannel, requests: list[Request]) -> None:
        complete(channel, requests)
        client.reap()
        submit(client)

    monkeypatch.setattr(WorkerChannel, "complete", complete_and_publish)
    assert end_all_in(twin) == 1
    assert client.outstanding == 1


def test_coroners_keep_nothing_open(twin):
    client = twin.client()
    for position in range(3):
        submit(client, position)
    worker = twin.worker({PLAN: Plan(output_positions=3)})
    worker.start(take(worker))
    gc.disable()  # closed at once, not whenever a cycle is found
    try:
        before = os.listdir("/proc/self/fd")
        assert bury_in(twin, LATER) == []
        assert os.listdir("/proc/self/fd") == before
        assert end_all_in(twin) == 3
        assert os.listdir("/proc/self/fd") == before
    finally:
        gc.enable()
    states = {word & 0xFF for word in worker.ledger[MARK : MARK + 3]}
    assert states == {DONE}
    assert states.isdisjoint({TAKEN, STARTED, RESPONDED})
