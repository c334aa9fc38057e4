"""A real broker for the tests of a module, and the check that each test leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import models
from tests.fakes.broker import Broker, eventually


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_repository(
        tmp_path_factory.mktemp("repository"), {"add1": models.add1(), "two_input": models.two_input()}
    )


@pytest.fixture(scope="module")
def shared_broker(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(repository, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.fixture
def broker(shared_broker: Broker) -> Iterator[Broker]:
    """Afterwards: the same process, no session, no region, descriptors as before."""
    pid, before = shared_broker.pid, shared_broker.descriptors()
    yield shared_broker
    shared_broker.close_clients()
    eventually(lambda: shared_broker.descriptors() <= before, "descriptors are back")
    status = shared_broker.status()
    assert status["broker"]["pid"] == pid
    assert [session for session in status["sessions"] if session["library"] != "tensorbroker status"] == []
    assert status["regions"] == []
    assert status["quotas"]["memory_used"] == 0
