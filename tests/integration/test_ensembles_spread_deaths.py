"""Ensembles with members in two workers when one of the two dies, or is told to stop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes import spread
from tests.fakes.broker import Broker, eventually
from tests.fakes.lone_worker import Gate
from tests.fakes.processes import kill_new

pytestmark = pytest.mark.timeout(120)
HOLD = np.full((1, 4), -1, np.float32)
QUICK = np.ones((1, 4), np.float32)


@contextlib.contextmanager
def served(directory: Path) -> Iterator[tuple[Broker, Gate]]:
    """A broker and the gate of its models "slow" and "once"."""
    root = directory / "repository"
    for made in (root, directory / "run"):
        made.mkdir()
    gate = Gate(root / "slow")
    spread.write(root)
    with contextlib.closing(gate), Broker(root, directory / "run") as broker:
        yield broker.ready(), gate


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Gate]]:
    with served(tmp_path_factory.mktemp("deaths")) as pair:
        yield pair


@pytest.fixture
def broker(pair: tuple[Broker, Gate]) -> Broker:
    return pair[0]


@pytest.fixture
def gate(pair: tuple[Broker, Gate]) -> Gate:
    """Each test lets through as many as come: what is left over would let through those of the next one."""
    return pair[1]


@pytest.fixture(scope="module")
def gone() -> set[int]:
    """Workers that were killed."""
    return set()


@pytest.fixture
def client(broker: Broker) -> Iterator[clientlib.Client]:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        yield client


def worker(broker: Broker, key: str) -> dict:
    return next(row for row in broker.status()["workers"] if row["key"] == key)


def kill(broker: Broker, key: str, gone: set[int]) -> None:
    kill_new(lambda: worker(broker, key)["pid"], gone)


class Asked(threading.Thread):
    """A request in a thread of its own; `outcome` is its answer or its error."""

    def __init__(self, broker: Broker, name: str, x: np.ndarray) -> None:
        super().__init__()
        self.outcome: list[object] = []
        self._asks = broker, name, x
        self.start()

    def run(self) -> None:
        broker, name, x = self._asks
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            try:
                self.outcome.append(client.infer(name, {"IN": x}, timeout=60)["OUT"])
            except InferError as error:
                self.outcome.append(error.message)

    def answer(self):
        self.join(60)
        return self.outcome[0]


@pytest.mark.parametrize("key", ["cpu/default", "cpu/other"])
def test_a_death_of_either_worker_costs_nothing(broker, client, gate, gone, key):
    asked = Asked(broker, "with_slow", HOLD / 3)
    gate.entered()
    kill(broker, key, gone)
    if key == "cpu/default":
        gate.let()  # what it left running in the other worker
    gate.entered()  # once more, alone
    gate.let()
    assert np.array_equal(asked.answer(), HOLD + 1)
    assert np.array_equal(client.infer("chain", {"IN": QUICK}, timeout=60)["OUT"], 3 * (3 * QUICK + 1))


@pytest.mark.parametrize("key", ["cpu/default", "cpu/other"])
def test_what_may_not_run_twice_ends_with_its_worker(broker, client, gate, gone, key):
    asked = Asked(broker, "with_once", HOLD / 3)
    gate.entered()
    kill(broker, key, gone)
    text = asked.answer()
    assert isinstance(text, str)
    assert "died while it ran this request" in text
    if key == "cpu/other":
        assert "in ensemble 'with_once'" in text
        assert "step 1: model 'once'" in text
    else:
        gate.let()  # what it left running in the other worker


def test_kills_under_load_lose_and_mix_nothing(broker, client, gone):
    failed: list[str] = []
    done = [0] * 3  # of each thread: what a death made run again has ended when all have gone on
    stop = threading.Event()

    def ask(number: int) -> None:
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            turn = 0
            while not stop.is_set():
                turn += 1
                x = np.full((1 + number, 4), 10_000 * number + turn % 1000, np.float32)
                try:
                    y = client.infer("chain", {"IN": x}, timeout=60)["OUT"]
                    if not np.array_equal(y, 3 * (3 * x + 1)):
                        failed.append(f"{y} of {x}")
                except InferError as error:
                    failed.append(error.message)
                done[number] += 1

    def go_on() -> None:
        before = done.copy()
        eventually(lambda: all(now > then + 7 for now, then in zip(done, before, strict=True)), "all are answered")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(done))]
    for thread in threads:
        thread.start()
    for turn in range(4):
        go_on()
        kill(broker, ("cpu/default", "cpu/other")[turn % 2], gone)
    go_on()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert [each for each in failed if "second time" not in each] == []


@pytest.mark.parametrize("name", ["with_slow", "relay"])
def test_stopping_finishes_what_was_accepted(tmp_path, name):
    """Both workers have ensembles with members in the other one; "relay" needs the way there and back."""
    with served(tmp_path) as (broker, gate), clientlib.connect(f"ipc://{broker.directory}") as client:
        if name == "relay":
            assert np.array_equal(client.infer(name, {"IN": QUICK}, timeout=60)["OUT"], 2 * (3 * (3 * QUICK + 1)))
        asked = Asked(broker, "with_slow", HOLD / 3)
        gate.entered()
        broker.process.terminate()
        eventually(lambda: "Waiting for in-flight requests" in broker.log(), "it is stopping")
        gate.let()
        assert np.array_equal(asked.answer(), HOLD + 1)
        assert broker.process.wait(30) == 0


def test_whose_steps_end_workers_is_refused_and_nobody_else(broker):
    def told(client: clientlib.Client) -> str:
        with pytest.raises(InferError) as raised:
            client.infer("with_fatal", {"IN": HOLD}, timeout=60)
        return raised.value.message

    with clientlib.connect(f"ipc://{broker.directory}") as bad, clientlib.connect(f"ipc://{broker.directory}") as good:
        expected = good.infer("with_fatal", {"IN": QUICK}, timeout=60)["OUT"]
        for _ in range(2):
            text = told(bad)
            assert "in ensemble 'with_fatal', the worker died while it ran this request, alone" in text
            assert "step 1: model 'fatal' on 'x' = 'a' [1,4]" in text
        eventually(lambda: "refused for another" in told(bad), "it is refused")
        assert np.array_equal(good.infer("with_fatal", {"IN": QUICK}, timeout=60)["OUT"], expected)
