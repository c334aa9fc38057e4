"""Plans that several threads find in need of preparing anew, and requests on words that are not the plan's any more."""

from __future__ import annotations

import time

import numpy as np
import pytest

from clientlib.client import Client
from clientlib.link import Bound
from clientlib.session import Procedure
from clientlib.sync_session import SyncSession
from shm.errors import InferError
from tests.fakes.small_broker import SmallBroker, doubling


class Interleaved:
    """What one of two threads does in `bind`, call by call."""

    def __init__(self, client: Client, procedure: Procedure[Bound]) -> None:
        assert client.native.link is not None
        session = client.native.link.session
        assert isinstance(session, SyncSession)
        self._session = session
        self._procedure = procedure
        self._call = next(procedure)

    def go_on(self) -> Bound | None:
        """To the next call; what it was after, at the end."""
        answer = self._session.call(self._call, time.monotonic() + 30)
        try:
            self._call = self._procedure.send(answer)
        except StopIteration as end:
            bound: Bound = end.value
            return bound
        return None

    def end(self) -> Bound:
        while (bound := self.go_on()) is None:
            pass
        return bound


@pytest.mark.parametrize("first_ends", [0, 1])
def test_one_preparation_serves_all_that_saw_the_need(
    client: Client, small_broker: SmallBroker, first_ends: int
) -> None:
    region, plan = doubling(client)
    plan.infer()
    assert plan.prepared is not None
    plan.prepared.moved = True
    assert client.native.link is not None
    both = [Interleaved(client, client.native.bind(client.native.link, plan)) for _ in range(2)]
    first = both[first_ends].end()
    second = both[1 - first_ends].end()
    assert first.word == second.word == plan.prepared.word
    client.prepare("echo", {"x": region.tensor((1,), "BYTES", byte_size=8)})  # with which the others are released
    (session,) = small_broker._sessions
    assert len(session.plans) == 2
    assert first.word in session.plans
    assert plan.infer()["y"].tolist() == [[0, 2, 4, 6]]


def test_a_plan_that_its_worker_has_not_is_prepared_again(client: Client, small_broker: SmallBroker) -> None:
    region, plan = doubling(client)
    plan.infer()
    (session,) = small_broker._sessions
    for _ in range(2):
        session.plans.clear()
        assert plan.infer()["y"].tolist() == [[0, 2, 4, 6]]
    session.plans.clear()
    pending = plan.submit()
    with pytest.raises(InferError, match="not bound here"):
        pending.result(30)
    assert plan.submit().result(30)["y"].tolist() == [[0, 2, 4, 6]]
    region.array((1, 4), np.float32)[:] = 1
    assert plan.infer()["y"].tolist() == [[2, 2, 2, 2]]


def test_a_word_that_was_replaced_does_not_make_the_plan_look_again(client: Client) -> None:
    _, plan = doubling(client)
    plan.infer()
    before = plan.prepared
    assert before is not None
    plan.look_again(before.word)
    assert before.moved
    plan.infer()
    after = plan.prepared
    assert after is not None
    assert after is not before
    plan.look_again(before.word)
    assert not after.moved
    plan.infer()
    assert plan.prepared is after
