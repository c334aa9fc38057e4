"""How the two sides of a channel wake each other, and threads that share one."""

from __future__ import annotations

import os
import select
import threading
import time

import pytest

from shm import client_channel
from shm.client_channel import LATE_MS, SLEEP_MS, ClientChannel
from shm.errors import Code
from shm.layout import ARMED, FINAL, SENT, WAITING
from shm.publishing import HOLD_NS
from tests.fakes.channel import PLAN, Plan, Twin, submit, take


@pytest.fixture
def twin():
    with Twin(slots=4) as twin:
        yield twin


@pytest.fixture
def client(twin):
    return twin.client()


@pytest.fixture
def worker(twin):
    return twin.worker({PLAN: Plan(output_positions=8)})


def test_the_worker_is_rung_only_while_it_is_armed(twin, client, worker):
    ident, _ = submit(client)
    assert not twin.worker_was_rung()
    worker.arm()
    submit(client, 1)
    assert twin.worker_was_rung()
    take(worker)
    worker.arm()
    client.cancel(ident)
    assert twin.worker_was_rung()
    worker.disarm()
    submit(client, 2)
    assert not twin.worker_was_rung()


def test_a_sleeper_is_rung_once_however_long_it_takes_to_wake(twin, client, worker):
    worker.arm()
    submit(client)
    assert twin.worker_was_rung()
    submit(client, 1)
    assert not twin.worker_was_rung()  # it has not woken yet, and will see both
    first, second = take(worker)
    worker.arm()
    submit(client, 2)
    assert twin.worker_was_rung()
    assert not client.rest()
    worker.complete([first])
    assert twin.client_was_rung()
    client.drain_pipe()
    worker.complete([second])
    assert not twin.client_was_rung()
    client.reap()
    assert not client.rest()
    worker.complete(take(worker))
    assert twin.client_was_rung()


def run_inline(worker, now, *, more):
    request = worker.peek(now)
    worker.begin(request)
    worker.finish(request, more)


def test_a_sleeper_is_not_rung_for_each_of_many_that_end_soon(twin, client, worker):
    for position in range(3):
        submit(client, position)
    assert not client.rest()
    run_inline(worker, 1_000, more=True)
    run_inline(worker, 2_000, more=True)
    assert not twin.client_was_rung()
    assert worker.held == 1_000
    run_inline(worker, 3_000, more=False)
    assert twin.client_was_rung()
    assert not worker.held
    assert client.reap() == 3


def test_a_sleeper_is_not_kept_waiting_for_long(twin, client, worker):
    for position in range(3):
        submit(client, position)
    assert not client.rest()
    run_inline(worker, 1_000, more=True)
    run_inline(worker, 1_000 + HOLD_NS, more=True)
    assert twin.client_was_rung()


def test_what_is_held_is_rung_for_when_the_worker_turns_elsewhere(twin, client, worker):
    submit(client)
    assert not client.rest()
    run_inline(worker, 1_000, more=True)
    assert not twin.client_was_rung()
    worker.ring_held()
    assert twin.client_was_rung()
    client.drain_pipe()
    worker.ring_held()
    assert not twin.client_was_rung()  # once per sleep


def test_the_client_is_rung_only_while_it_waits(twin, client, worker):
    submit(client)
    submit(client, 1)
    first, second = take(worker)
    worker.complete([first])
    assert not twin.client_was_rung()
    assert client.rest()  # there already: do not go to sleep
    client.reap()
    assert not client.rest()
    worker.complete([second])
    assert twin.client_was_rung()
    client.stir()
    assert worker.words[WAITING] == 0
    client.drain_pipe()
    assert not twin.client_was_rung()
    client.drain_pipe()
    assert not client.gone


def test_wait_returns_at_once_when_completions_are_there(client, worker):
    submit(client)
    worker.complete(take(worker))
    client.wait(3600)
    assert client.reap() == 1


@pytest.mark.parametrize("spin_s", [0.0, 1e-6])
def test_wait_sleeps_on_the_pipe_and_empties_it(twin, worker, spin_s):
    client = twin.client(spin_s)
    submit(client)
    requests = take(worker)
    client.rest()
    worker.complete(requests)
    client.wait(3600)
    assert client.reap() == 1
    worker.ring()
    client.wait(3600)  # returns for a ring without a completion too: the caller looks and waits again
    assert not twin.client_was_rung()
    assert (client.gone, client.lost_wakeups) == (False, 0)


def test_wait_notices_that_broker_and_worker_are_gone(twin, client, worker):
    _, pending = submit(client)
    _, ended = submit(client, 1)
    worker.complete(take(worker)[1:])
    twin.hang_up()
    client.reap()
    client.wait(3600)
    assert client.gone
    assert client.abandoned() == [pending]
    assert client.outstanding == 0
    assert ended.code is Code.OK
    assert client.abandoned() == []


def test_a_hang_up_behind_a_ring_is_noticed_at_the_next_wait(twin, client, worker):
    worker.ring()
    twin.hang_up()
    client.wait(3600)
    assert not client.gone
    client.wait(3600)
    assert client.gone


def test_drain_pipe_notices_a_hang_up(twin, client):
    twin.hang_up()
    client.drain_pipe()
    assert client.gone


@pytest.mark.parametrize("late", [False, True])
def test_a_wake_up_by_the_bound_with_work_present_is_counted_unless_the_ring_was_on_its_way(client, worker, late):
    submit(client)
    requests = take(worker)
    sleeps = []

    class Deaf:
        """A completion comes while the client sleeps, and the ring later or never."""

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            sleeps.append(timeout_ms)
            if len(sleeps) == 1:
                worker.complete(requests)
                return []
            return [(client.pipe_fd, select.POLLIN)] if late else []

    client._poller = Deaf()
    client.wait(3600)
    assert sleeps == [SLEEP_MS, LATE_MS]
    assert client.lost_wakeups == (not late)
    assert client.reap() == 1


def test_neither_side_ever_blocks_on_a_bell(twin, client, worker):
    worker.arm()
    worker.words[WAITING] = 1
    for _ in range(100_000):  # more than a pipe holds
        worker.ring()
    os.eventfd_write(twin.bell_fd, 2**64 - 2)  # the most that its counter holds
    submit(client)  # the counter is full
    worker.complete(take(worker))
    assert client.reap() == 1


def test_ringing_a_client_that_is_gone_is_harmless(twin, worker):
    os.close(twin.pipe_read)
    twin.pipe_read = os.dup(twin.bell_fd)
    worker.ring()


# --- threads --------------------------------------------------------------------------------------------------------


def test_threads_submit_while_one_reaps(twin, client, worker):
    each, threads = 60, 3
    room = threading.Semaphore(4)
    settled: list[tuple[int, ...]] = []
    failures: list[str] = []

    class Settled:
        def settle(self, entry: tuple[int, ...], note: bytes) -> None:
            settled.append(entry)
            room.release()

    def run(number: int) -> None:
        for count in range(each):
            if not room.acquire(timeout=30):
                failures.append("no room")
                return
            ident = client.submit(Settled(), PLAN, 0, number, 0, 0, request_id=number << 32 | count)
            if not ident:
                failures.append("full")
                return

    plan = worker.plans[PLAN]
    plan.conflict = lambda *_: ""  # each thread has several requests on its position
    submitters = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in submitters:
        thread.start()
    taken: list[int] = []
    give_up = time.monotonic() + 30
    while len(settled) < threads * each and time.monotonic() < give_up and not failures:
        requests = take(worker)
        for request in requests:
            worker.start([request])
            request.copied = request.request_id
        taken.extend(request.request_id for request in requests)
        worker.complete(requests)
        with client.role:
            client.reap()
    for thread in submitters:
        thread.join()
    assert failures == []
    expected = [number << 32 | count for number in range(threads) for count in range(each)]
    assert sorted(entry[7] for entry in settled) == expected
    for number in range(threads):  # each thread's requests in its order
        own = [request_id for request_id in taken if request_id >> 32 == number]
        assert own == sorted(own)
    assert all(entry[2] == FINAL for entry in settled)
    assert (client.outstanding, worker.broken, worker.refused) == (0, "", 0)


def test_a_ring_that_comes_late_is_not_the_last(twin, client, worker):
    """It is for what the worker has taken already: the worker sleeps again, and the next submission must ring it."""
    worker.arm()
    submit(client)
    take(worker)  # before the client's ring for it came
    worker.arm()
    client._ring(worker.words[ARMED])
    assert twin.worker_was_rung()
    worker.disarm()
    worker.arm()
    submit(client, 1)
    assert twin.worker_was_rung()


def test_a_ring_of_the_worker_that_comes_late_is_not_the_last(twin, client, worker):
    submit(client)
    submit(client, 1)
    first, second = take(worker)
    worker.complete([first])
    client.reap()
    assert not client.rest()
    worker._rung = client._words[WAITING]
    worker.ring()  # late, for the first
    client.drain_pipe()
    client.stir()
    assert not client.rest()
    worker.complete([second])
    assert twin.client_was_rung()


# --- while every instance is at work --------------------------------------------------------------------------------


def test_a_parked_worker_is_not_rung_and_learns_when_a_request_came(twin, client, worker):
    began = time.monotonic_ns()
    worker.park(began)
    submit(client)
    sent = time.monotonic_ns()
    assert not twin.worker_was_rung()
    requests = []
    worker.take(8, sent + 10**9, requests)
    assert began <= requests[0].arrival <= sent


@pytest.mark.parametrize("lie", [0, 1, 2**64 - 1, 10**18], ids=["nothing", "long ago", "the end of time", "tomorrow"])
def test_a_client_cannot_lie_about_when_its_request_came(client, worker, lie):
    worker.park(10**9)
    submit(client)
    worker.words[SENT] = lie
    requests = []
    worker.take(8, 2 * 10**9, requests)
    assert requests[0].arrival == 2 * 10**9


def test_what_came_before_the_last_look_did_not_come_now(client, worker):
    """The time of the request before stays in the channel when the next one's is not there yet."""
    worker.park(10)
    requests = []
    for looked in (30, 40):
        submit(client, looked // 10)
        worker.words[SENT] = 20
        worker.take(8, looked, requests)
    assert [request.arrival for request in requests] == [20, 40]


@pytest.mark.parametrize("wake", ["arm", "disarm"])
def test_a_worker_that_looks_again_goes_by_its_own_clock(twin, client, worker, wake):
    worker.park(1)
    getattr(worker, wake)()
    submit(client)
    assert twin.worker_was_rung() == (wake == "arm")
    requests = []
    worker.take(8, 2**62, requests)
    assert requests[0].arrival == 2**62


@pytest.mark.parametrize(
    ("took_us", "spun_us"), [(0, 50), (10, 70), (60, 170), (150, 200), (201, 0)], ids=lambda value: f"{value}us"
)
def test_a_client_spins_longer_for_what_takes_longer_and_not_at_all_for_what_takes_long(
    twin, monkeypatch, took_us, spun_us
):
    client, worker = twin.client(spin_s=50e-6), twin.worker({PLAN: Plan()})
    if not client._spin:
        pytest.skip("no full fence here: clients never spin")
    submit(client)
    (request,) = take(worker)
    request.infer_ns = took_us * 1000
    worker.complete([request])
    client.reap()
    submit(client)
    clock = iter(range(10_000))
    monkeypatch.setattr(client_channel, "_perf", lambda: next(clock) * 1e-6)  # each look at it takes 1 µs
    monkeypatch.setattr(client_channel.threading, "active_count", lambda: 1)  # other tests leave threads behind
    slept: list[float] = []
    monkeypatch.setattr(ClientChannel, "_sleep", lambda self, timeout_s: slept.append(timeout_s))
    client.wait(1.0)
    looks = next(clock)
    assert slept == [1.0]
    assert looks == pytest.approx(spun_us + 2 if spun_us else 0, abs=1)
