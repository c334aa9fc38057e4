"""A lab per module; rows that end it take one of their own."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.faults.lab import FULL, Lab


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def lab(shared_lab: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The module's lab. Whoever uses it says when it must have settled: `lab.settled()`."""
    shared_lab.checked = False
    yield shared_lab
    shared_lab.end_offenders()
    assert shared_lab.checked or request.node.stash.get(_failed, False), "the row never looked at S1 … S5"


@pytest.fixture
def fresh_lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab of the test's own, for what ends it."""
    with Lab(tmp_path) as lab:
        yield lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The full numbers of turns take their time."""
    for item in items if FULL else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(3600))


_failed: pytest.StashKey[bool] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the broker had to say."""
    report = yield
    if report.when == "call" and not report.passed:
        item.stash[_failed] = True
        for lab in {id(lab): lab for lab in getattr(item, "funcargs", {}).values() if isinstance(lab, Lab)}.values():
            report.sections.append(("broker's log", lab.broker.log()[-4000:]))
    return report
