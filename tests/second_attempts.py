"""Tests of real processes may be tried a second time on machines that nobody watches: a pytest plugin (conftest.py).

    pytest --second-attempts=2

`make test` gives two to a whole run, a plain `pytest` none. A second attempt hides nothing: what the first one said is
printed whole, and a run that needed more than it was given fails. Tests without processes never get one.
"""

from __future__ import annotations

import pytest

OF_PROCESSES = ("tests/integration/", "tests/faults/")


class SecondAttempts:
    """Allows `limit` of them, counts and prints them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._failed: list[pytest.TestReport] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.nodeid.startswith(OF_PROCESSES):
                item.add_marker(pytest.mark.flaky(reruns=1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]
            self._failed.append(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if len(self._failed) > self._limit and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._failed:
            return
        terminalreporter.section(f"{len(self._failed)} first attempts that failed; {self._limit} may, in one run")
        for report in self._failed:
            terminalreporter.write_line(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n")
