"""Steps on their way to another worker: order, plans still to come, full channels, cancels, deadlines, ends."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from broker.worker.ensembles.remote.channel import Lane
from shm.admission import EXPIRED, Request, Verdict
from shm.costs import costs_ns
from shm.errors import Code, InferError
from shm.layout import AHEAD, AWAY, CODE_MASK
from tests.fakes.channel import PLAN, Plan, Twin, take

STOPPED = (Code.UNAVAILABLE, "it is stopping")


class Step:
    """As `broker.worker.ensembles.remote.run.RemoteStep`, with a plan word that the test sets."""

    def __init__(self, lane: Lane, number: int, word: int = PLAN, sequence: int = 0, deadline: int = 0) -> None:
        entry = (1, 0, number, deadline, 0, 0, 0, sequence, 0, 0, 0, 0, 0)
        self.step = Request(None, number, entry, None, 0)  # type: ignore[arg-type]
        self.ident = 0
        self.light = True
        self.known: int | InferError = word
        self.ends: list[tuple[Code, str]] = []
        self._lane = lane

    def word(self) -> int:
        if isinstance(self.known, InferError):
            raise self.known
        return self.known

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        self._lane.ended(self)
        self.ends.append((Code(entry[2] & CODE_MASK), note.rstrip(b"\0").decode()))

    def fail(self, verdict: Verdict) -> None:
        self.ends.append(verdict)


class Bench:
    """A lane and the other worker's end of its channel."""

    def __init__(self, slots: int, waits: bool = True) -> None:
        self.twin = Twin(slots)
        self.asked = 0
        self.lane = Lane("cpu/other", lambda: None, self._reopen, slots, waits)
        self.steps: list[Step] = []

    def _reopen(self, lane: Lane) -> None:
        self.asked += 1

    def open(self, outputs: int = 64) -> None:
        self.lane.opened(self.twin.client())
        self.worker = self.twin.worker({PLAN: Plan(output_positions=outputs)})

    def submit(self, **more) -> Step:
        step = Step(self.lane, len(self.steps), **more)
        self.steps.append(step)
        self.lane.submit(step)
        return step

    def serve(self) -> list[int]:
        """Run one that has been published after the other; the numbers of those that were admitted."""
        numbers = []
        while self.worker.pending():
            out: list[Request] = []
            notable = self.worker.take(1, 1, out)
            for request, admitted in notable:
                if not admitted:
                    self.worker.complete((request,))
            for request in out:
                self.worker.complete((request,))
                numbers.append(request.request_id)
        self.lane.look(1)
        return numbers


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(4)
    yield bench
    bench.twin.close()


def test_steps_wait_for_the_channel_which_is_asked_for_once(bench):
    first, second = bench.submit(), bench.submit()
    assert bench.asked == 1
    assert not bench.twin.worker_was_rung()
    bench.open()
    bench.lane.look(1)
    assert bench.serve() == [0, 1]
    assert first.ends == second.ends == [(Code.OK, "")]


def test_without_a_channel_they_fail_and_the_next_one_asks_again(bench):
    step = bench.submit()
    bench.lane.failed(InferError(Code.NOT_FOUND, "no worker 'cpu/other'"))
    assert step.ends == [(Code.NOT_FOUND, "no worker 'cpu/other'")]
    bench.submit()
    assert bench.asked == 2


def test_a_step_whose_plan_is_being_prepared_holds_up_those_behind_it(bench):
    bench.open()
    first, second = bench.submit(word=0), bench.submit()
    bench.lane.look(1)
    assert bench.serve() == []
    first.known = PLAN
    bench.lane.look(1)
    assert bench.serve() == [0, 1]
    assert second.ends == [(Code.OK, "")]


def test_a_plan_that_cannot_be_had_ends_its_step_only(bench):
    bench.open()
    first, second = bench.submit(word=0), bench.submit()
    first.known = InferError(Code.INVALID_ARG, "it does not fit")
    bench.lane.look(1)
    assert first.ends == [(Code.INVALID_ARG, "it does not fit")]
    assert bench.serve() == [1]
    assert second.ends == [(Code.OK, "")]


def test_more_steps_than_slots_go_in_their_order(bench):
    bench.open()
    for _ in range(11):
        bench.submit()
    assert [bench.serve() for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], []]
    assert all(step.ends == [(Code.OK, "")] for step in bench.steps)


def test_a_cancel_takes_back_what_waits_and_asks_for_what_has_gone(bench):
    bench.open()
    gone, waiting = bench.submit(), bench.submit(word=0)
    bench.lane.cancel(waiting.step)
    assert waiting.ends == [(Code.CANCELLED, "the request was cancelled")]
    bench.lane.cancel(gone.step)
    assert bench.serve() == []  # the other worker has refused it
    assert gone.ends[0][0] == Code.CANCELLED
    bench.lane.cancel(gone.step)
    assert len(gone.ends) == 1


def test_a_cancelled_step_of_a_sequence_gets_there_all_the_same(bench):
    bench.open()
    waiting = bench.submit(word=0, sequence=7)
    bench.lane.cancel(waiting.step)
    assert waiting.ends == []
    waiting.known = PLAN
    bench.lane.look(1)
    out: list[Request] = []
    ((request, admitted),) = bench.worker.take(10, 1, out)
    assert (request.sequence_id, request.code, admitted) == (7, Code.CANCELLED, False)


def test_a_deadline_ends_what_waits(bench):
    late, in_time = bench.submit(deadline=50), bench.submit(deadline=70)
    bench.lane.look(60)
    assert late.ends == [EXPIRED]
    assert in_time.ends == []


def test_nothing_goes_after_the_end(bench):
    bench.open()
    waiting = bench.submit(word=0)
    bench.lane.close(STOPPED)
    later = bench.submit()
    assert waiting.ends == later.ends == [STOPPED]


def test_what_runs_is_asked_to_end_and_ends_once(bench):
    bench.open()
    step = bench.submit()
    (request,) = take(bench.worker)
    bench.worker.start([request])
    bench.lane.cancel(step.step)
    bench.worker.take(10, 1, [])
    bench.worker.complete((request,))
    bench.lane.look(1)
    assert step.ends == [(Code.OK, "")]


def test_where_steps_keep_their_slots_for_long_one_too_many_is_refused_and_not_queued():
    bench = Bench(4, waits=False)
    early = bench.submit()  # before there is a channel, all of them wait
    bench.open()
    bench.lane.look(1)
    steps = [bench.submit() for _ in range(3)]
    refused = bench.submit()
    assert refused.ends == [(Code.UNAVAILABLE, "4 requests have responses to come from 'cpu/other'")]
    assert bench.serve() == [0, 1, 2, 3]
    assert all(step.ends == [(Code.OK, "")] for step in (early, *steps))
    again = bench.submit()
    bench.serve()
    assert again.ends == [(Code.OK, "")]
    bench.twin.close()


def test_what_a_step_costs_follows_from_what_is_there_and_for_how_long(bench):
    def cost(now):
        return costs_ns([bench.lane.seen(now)])[0]

    assert cost(1) == 1000, "nothing is known"
    bench.open()
    for _ in range(3):
        bench.submit()
    assert cost(1000) == 4 * 1000
    assert cost(6000) == 4 * 5000, "none has ended for long"
    bench.serve()
    assert cost(7000) == 1000
    bench.worker.words[AHEAD] = 1 << 20
    assert cost(7000) == (1 << 20) + 1000, "others' requests, as it says"
    bench.worker.words[AWAY] = 1
    assert bench.lane.seen(7000) is None


def test_who_watches_is_not_rung_and_has_it_ring_afterwards(bench):
    bench.open()
    assert not bench.lane.watch(), "nothing is under way"
    step = bench.submit()
    assert bench.lane.rest()
    assert bench.lane.watch()
    bench.worker.complete(take(bench.worker))
    assert not bench.twin.client_was_rung()
    assert bench.lane.came()
    bench.lane.look(1, wait=False)
    bench.lane.unwatch(1)
    assert step.ends == [(Code.OK, "")]
    bench.submit()
    bench.worker.complete(take(bench.worker))
    assert bench.twin.client_was_rung()


def test_what_ended_unseen_is_settled_when_the_watch_ends(bench):
    bench.open()
    step = bench.submit()
    assert bench.lane.watch()
    bench.worker.complete(take(bench.worker))
    bench.lane.unwatch(1)
    assert step.ends == [(Code.OK, "")]


def test_many_steps_and_large_ones_are_left_to_the_session_s_thread():
    bench = Bench(16)
    bench.open()
    first = bench.submit()
    first.light = False
    assert not bench.lane.watch()
    first.light = True
    assert bench.lane.watch()
    for _ in range(8):
        bench.submit()
    assert not bench.lane.watch()
    bench.serve()
    bench.twin.close()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_step_ends_once_and_in_order(seed):
    chance = random.Random(seed)
    bench = Bench(4)
    try:
        bench.open()
        served: list[int] = []
        for _ in range(200):
            event = chance.randrange(7)
            if event < 2:
                bench.submit(word=chance.choice((PLAN, PLAN, 0)), deadline=chance.choice((0, 0, 0, 1000)))
            elif event == 2 and bench.steps:
                chance.choice(bench.steps).known = PLAN
            elif event == 3 and bench.steps:
                bench.lane.cancel(chance.choice(bench.steps).step)
            elif event == 6 and bench.lane.watch():
                served += bench.serve()
                bench.lane.unwatch(1)
            elif event == 4:
                bench.lane.look(chance.choice((1, 1, 1, 2000)))
            else:
                served += bench.serve()
        for step in bench.steps:
            step.known = PLAN
        while bench.lane.rest():
            bench.lane.look(1)
            served += bench.serve()
        assert served == sorted(served)
        assert all(len(step.ends) == 1 for step in bench.steps)
        assert {step.step.request_id for step in bench.steps if step.ends == [(Code.OK, "")]} == set(served)
    finally:
        bench.twin.close()
