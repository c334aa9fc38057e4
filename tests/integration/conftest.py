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


@pytest.fixture(scope="module")
def at_rest(shared_broker: Broker) -> int:
    """Its descriptors while it has no client."""
    return shared_broker.descriptors()


@pytest.fixture
def broker(shared_broker: Broker, at_rest: int) -> Iterator[Broker]:
    """Afterwards: the same process, no session, no region, descriptors as before."""
    # The session of the check below may have been closed by us and not yet by the broker.
    eventually(lambda: shared_broker.descriptors() <= at_rest, "the test before has left nothing")
    pid = shared_broker.pid
    yield shared_broker
    shared_broker.close_clients()
    eventually(lambda: shared_broker.descriptors() <= at_rest, "descriptors are back")

    def left() -> list[object]:
        status = shared_broker.status()
        assert status["broker"]["pid"] == pid
        others = [session for session in status["sessions"] if session["library"] != "tensorbroker status"]
        return [*others, *status["regions"], *([used] if (used := status["quotas"]["memory_used"]) else [])]

    eventually(lambda: not left(), "sessions, regions and their memory are gone")
