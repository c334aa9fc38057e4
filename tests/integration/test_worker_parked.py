"""A worker all of whose instances are at work: its channels are left alone until one of them is free."""

from __future__ import annotations

import contextlib
import time

from shm import statistics
from shm.errors import Code
from shm.layout import ARMED, PARKED
from tests.fakes.broker import eventually
from tests.fakes.lone_worker import WAIT, Gate, LoneWorker, Session


def parked(client: Session) -> None:
    """Wait until nobody leads: its channel is not to ring."""
    eventually(lambda: client.client._words[ARMED] == PARKED, "the worker is parked")


def test_while_every_instance_is_at_work_clients_need_not_ring(tmp_path):
    with LoneWorker() as worker, contextlib.ExitStack() as stack:
        gate = Gate(tmp_path / "gate")
        stack.callback(gate.close)
        clients = [stack.enter_context(Session(worker).attach()) for _ in range(2)]
        config = gate.config(count=2)
        block = worker.load(config)
        plans = [client.bind(config, at=1024 * number) for number, client in enumerate(clients)]
        busy = [plan.submit(WAIT, 0) for plan in plans]
        gate.entered(2)
        for client in clients:
            parked(client)
        sent = [plan.submit(10, 1) for plan in plans]
        eventually(lambda: block[statistics.PENDING] == 2, "both are queued")  # the worker has looked all the same
        cancelled, late = plans[0].submit(20, 2), plans[1].submit(20, 2, deadline_ns=time.monotonic_ns() + 50_000_000)
        cancelled.cancel()
        assert cancelled.wait().code == Code.CANCELLED
        assert late.wait().code == Code.UNAVAILABLE
        for client in clients:
            parked(client)
        gate.let(2)
        assert [one.result() for one in sent] == [11, 11]
        assert [one.result() for one in busy] == [0, 0]
        assert all(one.pending.entries[0][3] > 0 for one in sent)  # what it waited is counted
        assert plans[0].infer(5, 3) == 6
