"""How many entries of a channel the leader queues at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker.worker.batch import TAKE_LIMIT, worth_taking


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
