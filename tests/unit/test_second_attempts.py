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
    """`outcomes`: of one test after the other; those of one test are joined by "+"."""
    for number, of_one in enumerate(outcomes.split()):
        for outcome in of_one.split("+"):
            report = SimpleNamespace(outcome=outcome, nodeid=f"test {number}")
            attempts.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    attempts.pytest_sessionfinish(session)  # type: ignore[arg-type]
    return session.exitstatus


def test_a_run_that_needed_more_than_it_was_given_fails() -> None:
    assert finished(SecondAttempts(2), "passed rerun+passed rerun+passed") == pytest.ExitCode.OK
    assert finished(SecondAttempts(2), "rerun+passed rerun+passed rerun+passed") == pytest.ExitCode.TESTS_FAILED


def test_a_test_whose_end_fails_too_counts_once() -> None:
    assert finished(SecondAttempts(1), "rerun+rerun+passed") == pytest.ExitCode.OK


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
    expected = [f"*first attempts that failed: 3 tests, {given} may have one in a run*"]
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
