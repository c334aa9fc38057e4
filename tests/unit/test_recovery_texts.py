"""What a client reads of a request that ended with its worker."""

from __future__ import annotations

import pytest

from shm.recovery import TWICE, bury, recover
from tests.fakes.channel import PLAN, Plan, Twin, submit, take
from tests.fakes.deaths import LATER


@pytest.fixture
def twin():
    with Twin() as twin:
        yield twin


def test_a_long_reason_leaves_room_for_whose_fault_it_was(twin):
    """Who ends workers is known by the end of the text."""
    client = twin.client()
    _, pending = submit(client)
    worker = twin.worker({PLAN: Plan()})
    worker.start(take(worker))
    replacement = twin.worker({PLAN: Plan()})
    replacement.start(recover(replacement, LATER).suspects)
    told = f"model '{'ж' * 1000}' version 1 hung"
    bury(twin.memory_fd, twin.ledger_fd, twin.pipe_write, twin.slots, lambda word: True, LATER, told)
    client.reap()
    assert pending.text.startswith("model 'жжж")
    assert f"ж; {TWICE}: it is not run again (with the model parameter retry" in pending.text


@pytest.mark.parametrize("retryable", [True, False])
def test_an_ending_says_what_ran_how_the_worker_died_and_which_setting_decides(twin, retryable):
    client = twin.client()
    _, pending = submit(client)
    worker = twin.worker({PLAN: Plan()})
    worker.start(take(worker))
    if retryable:
        replacement = twin.worker({PLAN: Plan()})
        replacement.start(recover(replacement, LATER).suspects)
    parts = twin.memory_fd, twin.ledger_fd, twin.pipe_write, twin.slots
    ran = {PLAN: "model 'm' version 1, killed by SIGSEGV"}
    (ending,) = bury(*parts, lambda word: retryable, LATER, cause=ran.__getitem__)
    client.reap()
    tail = ": model 'm' version 1, killed by SIGSEGV"
    if retryable:
        tail += "; it is not run again (with the model parameter retry 'false' it would have ended at the first death)"
    else:
        assert ending.message.endswith(
            "does not allow it to run twice (parameter retry; never with sequences or streams)"
        )
    assert pending.text == ending.message + tail
    assert (ending.message == TWICE) is retryable
