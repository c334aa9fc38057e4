"""The plugin that allows a few second attempts (tests/second_attempts.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.second_attempts import SecondAttempts


def finished(attempts: SecondAttempts, outcomes: str) -> object:
    for outcome in outcomes.split():
        attempts.pytest_runtest_logreport(SimpleNamespace(outcome=outcome))  # type: ignore[arg-type]
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    attempts.pytest_sessionfinish(session)  # type: ignore[arg-type]
    return session.exitstatus


def test_a_run_that_needed_more_than_it_was_given_fails() -> None:
    assert finished(SecondAttempts(2), "passed rerun passed rerun passed") == pytest.ExitCode.OK
    assert finished(SecondAttempts(2), "rerun passed rerun passed rerun passed") == pytest.ExitCode.TESTS_FAILED


def test_only_tests_with_processes_get_one() -> None:
    marked = []

    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

        def add_marker(self, marker: pytest.MarkDecorator) -> None:
            assert marker.mark.kwargs == {"reruns": 1}
            marked.append(self.nodeid)

    places = ["tests/unit/a.py::t", "tests/conformance/a.py::t", "tests/integration/a.py::t", "tests/faults/a.py::t"]
    SecondAttempts(1).pytest_collection_modifyitems([Item(place) for place in places])  # type: ignore[list-item]
    assert marked == places[2:]
