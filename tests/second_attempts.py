"""Tests may be tried a second time on machines that nobody watches: a pytest plugin (conftest.py).

    pytest --second-attempts=3

`make test` gives one to each of three tests in a whole run, a plain `pytest` none. A second attempt hides nothing: what
the first one said is printed whole, and a run with more such tests than it was given fails.
"""

from __future__ import annotations

import pytest


class SecondAttempts:
    """Allows `limit` tests to have one, prints them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._failed: list[pytest.TestReport] = []

    @property
    def _needed(self) -> int:
        return len({report.nodeid for report in self._failed})  # its call and its teardown may both have failed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]
            self._failed.append(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._needed > self._limit and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._failed:
            return
        terminalreporter.section(
            f"first attempts that failed: {self._needed} tests, {self._limit} may have one in a run"
        )
        for report in self._failed:
            terminalreporter.write_line(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n")
