"""Threads of one client that call a model on arrays at the same time: places for their tensors are made as needed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import clientlib
from clientlib import automatic, claims
from clientlib import client as client_module
from clientlib.recipe import Budget
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway
from tests.fakes.lone_worker import WAIT, Gate
from tests.integration.test_principals import CONFIG

HOLD, X = np.full((1, 4), WAIT, np.float32), np.ones((1, 4), np.float32)
THREADS = 40


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    gate = Gate(tmp_path_factory.mktemp("repository") / "gate")
    patient = 'parameters { key: "hang_timeout_s" value { string_value: "100" } }'  # what the gate holds is no hang
    (gate.directory / "config.pbtxt").write_text(CONFIG.format(gate.directory) + patient)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def broker(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(gate.directory.parent, tmp_path_factory.mktemp("run")) as running:
        yield running.ready()


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for arrays of several MiB."""
    monkeypatch.setattr(client_module, "BUDGET", Budget(places=2, byte_size=0))


class Callers:
    """Threads that call the model once each, behind one whose call the gate holds."""

    def __init__(self, client: clientlib.Client, ask: Callable[[np.ndarray], np.ndarray] | None = None) -> None:
        """`ask`: by default `infer`."""
        self._ask = ask or (lambda x: client.infer("gate", {"x": x})["y"])
        self.right = 0
        self.problems: list[BaseException] = []
        self._threads = [threading.Thread(target=self._call, args=(HOLD if not at else X,)) for at in range(THREADS)]

    def start(self, gate: Gate) -> None:
        self._threads[0].start()
        gate.entered()
        for thread in self._threads[1:]:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
        assert not self.problems
        assert self.right == THREADS

    def _call(self, x: np.ndarray) -> None:
        try:
            y = self._ask(x)
            self.right += bool((y == x + 1).all())
        except BaseException as error:
            self.problems.append(error)


@pytest.mark.usefixtures("few_places")
def test_who_finds_no_place_free_has_more_of_them_made(broker: Gateway, gate: Gate) -> None:
    """All but those that had come before wait in the model's queue, where they can become one batch."""
    with clientlib.connect(broker.directory) as client:
        callers = Callers(client)
        callers.start(gate)
        eventually(lambda: client.statistics("gate")[0]["pending"] >= THREADS - 8)
        gate.let()
        callers.join()


@pytest.mark.usefixtures("few_places")
def test_without_more_places_requests_wait_for_those_before_them(
    broker: Gateway, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: every one of these ends. What ends a wait is a second in which no request is there."""
    monkeypatch.setattr(automatic, "WIDE", Budget(places=2, byte_size=0))
    monkeypatch.setattr(claims, "FULL_WAIT_S", 0.02)
    with clientlib.connect(broker.directory) as client:
        callers = Callers(client)
        callers.start(gate)
        threading.Event().wait(10 * claims.FULL_WAIT_S)
        assert not callers.problems
        gate.let()
        callers.join()


@pytest.mark.usefixtures("few_places")
def test_streams_that_find_no_place_take_turns(broker: Gateway, gate: Gate) -> None:
    with clientlib.connect(broker.directory) as client:

        def ask(x: np.ndarray) -> np.ndarray:
            (result,) = client.stream("gate", {"x": x})
            return result["y"]

        callers = Callers(client, ask)
        callers.start(gate)
        gate.let()
        callers.join()


@pytest.mark.usefixtures("few_places")
def test_more_places_are_not_waited_for_beyond_a_deadline(
    broker: Gateway, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that does not respond makes none; a second is what it has."""
    monkeypatch.setattr(client_module, "CALL_S", 3600.0)
    with clientlib.connect(broker.directory) as client:
        client.infer("gate", {"x": X})
        holders = [threading.Thread(target=client.infer, args=("gate", {"x": HOLD})) for _ in range(2)]
        for holder in holders:
            holder.start()
        gate.entered()
        eventually(lambda: client.statistics("gate")[0]["pending"])
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            refused: list[BaseException] = []

            def ask() -> None:
                try:
                    client.infer("gate", {"x": X}, timeout=0.1)
                except clientlib.InferError as error:
                    refused.append(error)

            asks = threading.Thread(target=ask, daemon=True)
            asks.start()
            asks.join(30)
            assert [str(error) for error in refused], "it still waits"
        finally:
            os.kill(broker.pid, signal.SIGCONT)
            gate.let()
            gate.entered()
            gate.let()
            for holder in holders:
                holder.join()


def test_a_result_keeps_no_client(broker: Gateway) -> None:
    client = clientlib.connect(broker.directory)
    y = client.infer("gate", {"x": X})["y"]
    known = weakref.ref(client)
    del client
    gc.collect()
    assert known() is None
    assert (y == X + 1).all()


@pytest.mark.usefixtures("few_places")
def test_a_signal_handler_is_told_that_the_requests_it_waits_for_are_those_it_interrupted(
    broker: Gateway, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the places, and go on when it returns: without an end it would wait for ever."""
    monkeypatch.setattr(claims, "FULL_WAIT_S", 0.02)
    with clientlib.connect(broker.directory) as client:
        tensor = client.create_region("r", 4096).tensor((1, 4), "FP32")
        tensor.array()[:] = WAIT
        plan = client.prepare("gate", {"x": tensor})
        held = [plan.submit() for _ in range(2)]
        gate.entered()
        told: list[str] = []

        def handler(*_: object) -> None:
            try:
                plan.infer()
            except clientlib.InferError as error:
                told.append(error.message)
            gate.let(2)

        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            for pending in held:
                pending.result(timeout=60)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert len(told) == 1
        assert "all 2 places of this plan are in use" in told[0]
