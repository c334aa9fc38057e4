"""How many entries of a channel the leader queues at once, and which batches it runs itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker.worker import batch as module
from broker.worker.batch import LIGHT, SHORT_NS, TAKE_LIMIT, Batch, worth_taking


def channel(request: object) -> Any:
    return SimpleNamespace(peek=lambda now: request)


def request_of(model: object) -> object:
    return SimpleNamespace(plan=SimpleNamespace(model=model))


@pytest.mark.parametrize(
    ("request_", "count"),
    [
        (request_of(SimpleNamespace(alone=True)), 1),
        (request_of(SimpleNamespace(alone=False)), TAKE_LIMIT),
        (request_of(None), TAKE_LIMIT),  # its model has gone
        (None, TAKE_LIMIT),  # nothing that could run inline
    ],
    ids=["runs alone", "could share a batch", "model gone", "unusual"],
)
def test_what_runs_alone_is_queued_one_by_one(request_: object, count: int) -> None:
    """Else the queue of a busy worker never empties, and nothing runs inline any more."""
    assert worth_taking(channel(request_), 1) == count


@pytest.mark.parametrize(
    ("ns", "byte_size", "short"),
    [(0, 8, False), (SHORT_NS - 1, 8, True), (SHORT_NS - 1, LIGHT // 2, True), (SHORT_NS, 8, False), (1, LIGHT, False)],
    ids=["unmeasured", "short", "as much as may be", "long", "much to copy"],
)
def test_a_lone_step_of_a_sequence_is_run_by_the_leader_if_it_is_short(
    monkeypatch: pytest.MonkeyPatch, ns: int, byte_size: int, short: bool
) -> None:
    """It has no binding of its own, since its row is put together with the controls: what counts is its batch."""
    monkeypatch.setattr(module, "Plan", SimpleNamespace)
    tensors = (SimpleNamespace(place=SimpleNamespace(byte_size=byte_size)),)
    plan = SimpleNamespace(bindings={}, inputs=tensors, outputs=tensors)
    step: Any = SimpleNamespace(plan=plan, rows=1, input_position=0, output_position=0, sequence=None)
    model = SimpleNamespace(assembly=object(), in_order=None)
    instance: Any = SimpleNamespace(model=model, number=0, typical={1: ns} if ns else {})
    assert Batch(instance, [step]).short() is short
    model.assembly = None
    assert not Batch(instance, [step]).short(), "one of any other model has to be bound first"
