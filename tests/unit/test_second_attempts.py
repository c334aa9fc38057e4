"""The plugin that allows a few second attempts (tests/second_attempts.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.second_attempts import SecondAttempts

pytest_plugins = ("pytester",)

FAILS_ONCE = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range(3))
def test_fails_once(number):
    tried = pathlib.Path(__file__).with_name(f"tried-{number}")
    if not tried.exists():
        tried.touch()
        raise AssertionError(f"attempt one of {number}")
"""


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


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """With the options of this one."""
    pytester.makeconftest("from tests.conftest import pytest_addoption, pytest_configure")
    folder = pytester.path / "tests" / "integration"
    folder.mkdir(parents=True)
    (folder / "test_once.py").write_text(FAILS_ONCE)
    return pytester


@pytest.mark.parametrize(("given", "status"), [(2, pytest.ExitCode.TESTS_FAILED), (3, pytest.ExitCode.OK)])
def test_pytest_itself_says_what_failed_first_and_how_the_run_ended(
    project: pytest.Pytester, given: int, status: pytest.ExitCode
) -> None:
    result = project.runpytest_inprocess(f"--second-attempts={given}", "-p", "no:cacheprovider")
    assert result.ret == status
    assert result.parseoutcomes() == {"passed": 3, "rerun": 3}
    expected = [f"*3 first attempts that failed; {given} may, in one run*"]
    for number in range(3):
        expected += [
            f"tests/integration/test_once.py::test_fails_once[[]{number}] (call)",
            f"E *AssertionError: attempt one of {number}",
        ]
    result.stdout.fnmatch_lines(expected)


def test_without_the_option_a_test_is_tried_once(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes() == {"failed": 3}
