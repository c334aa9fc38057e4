"""A real broker for the tests of a module, and the check that each test leaves it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import models
from tests.fakes.broker import Broker, HandClient, eventually


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_repository(
        tmp_path_factory.mktemp("repository"), {"add1": models.add1(), "two_input": models.two_input()}
    )


@pytest.fixture(scope="module")
def shared_broker(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(repository, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


def descriptors_alone(broker: Broker) -> int:
    """Its open descriptors while it has one session."""
    with contextlib.closing(HandClient(broker.path)) as client:
        assert client.ask("Hello", protocol=1)["type"] == "Welcome"
        eventually(lambda: len(client.ask("GetStatus")["status"]["sessions"]) == 1, "other sessions are gone")
        return broker.descriptors()


@pytest.fixture
def broker(shared_broker: Broker) -> Iterator[Broker]:
    """Afterwards: the same process, no session, no region, descriptors as before."""
    pid, before = shared_broker.pid, descriptors_alone(shared_broker)
    yield shared_broker
    shared_broker.close_clients()
    eventually(lambda: descriptors_alone(shared_broker) <= before, "descriptors are back")

    def left() -> list[object]:
        status = shared_broker.status()
        assert status["broker"]["pid"] == pid
        others = [session for session in status["sessions"] if session["library"] != "tensorbroker status"]
        return [*others, *status["regions"], *([used] if (used := status["quotas"]["memory_used"]) else [])]

    eventually(lambda: not left(), "sessions, regions and their memory are gone")
