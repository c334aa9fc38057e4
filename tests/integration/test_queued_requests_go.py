"""A queued request that nobody waits for any more is gone at once, whatever it came by: its model never sees it."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

import clientlib
from shm.errors import InferError
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway, url_of
from tests.fakes.lone_worker import WAIT, Gate
from tests.integration.test_principals import CONFIG

HOLD, X = np.full((1, 4), WAIT, np.float32), np.ones((1, 4), np.float32)
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,1,1,1]}]}'


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


Queue = Callable[[Gateway], Callable[[], None]]  # sends a request; what it returns lets go of it


def times_out(url: str) -> Queue:
    """A blocking call whose time runs out while it waits. On a busy machine the first may end before it is seen."""

    def queue(broker: Gateway) -> Callable[[], None]:
        client = clientlib.connect(url_of(broker, url))
        errors: list[InferError] = []
        seen = threading.Event()

        def ask() -> None:
            for timeout in (0.5, 4.0, 15.0):
                try:
                    client.infer("gate", {"x": X}, timeout=timeout)
                except InferError as error:
                    errors.append(error)
                if seen.is_set():
                    break

        thread = threading.Thread(target=ask)
        thread.start()

        def let_go() -> None:
            seen.set()
            thread.join(60)
            client.close()
            assert {error.code for error in errors} == {"UNAVAILABLE"}

        return let_go

    return queue


def is_cancelled(broker: Gateway) -> Callable[[], None]:
    client = clientlib.connect(url_of(broker, "native"))
    region = client.create_region("r", 8192)
    region.array((1, 4), np.float32)[:] = X
    inputs, outputs = {"x": region.tensor((1, 4), "FP32")}, {"y": region.tensor((1, 4), "FP32", 4096)}
    pending = client.prepare("gate", inputs, outputs).submit()

    def let_go() -> None:
        pending.cancel()
        with pytest.raises(InferError, match="CANCELLED"):
            pending.result(timeout=30)
        client.close()

    return let_go


def hangs_up(broker: Gateway) -> Callable[[], None]:
    connection = http.client.HTTPConnection("127.0.0.1", broker.ports["http"], timeout=30)
    connection.request("POST", "/v2/models/gate/infer", BODY)
    return connection.close


def ends_its_rpc(broker: Gateway) -> Callable[[], None]:
    client = triton_grpc.InferenceServerClient(f"127.0.0.1:{broker.ports['grpc']}")
    given = triton_grpc.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(X)
    call = client.async_infer("gate", [given], callback=lambda result, error: None)

    def let_go() -> None:
        call.cancel()
        client.close()

    return let_go


def leaves(broker: Gateway) -> Callable[[], None]:
    client = clientlib.connect(url_of(broker, "native"))
    region = client.create_region("r", 8192)
    inputs, outputs = {"x": region.tensor((1, 4), "FP32")}, {"y": region.tensor((1, 4), "FP32", 4096)}
    client.prepare("gate", inputs, outputs).submit()
    return client.close


WAYS: dict[str, Queue] = {
    "native timeout": times_out("native"),
    "http timeout": times_out("http"),
    "grpc timeout": times_out("grpc"),
    "zmq timeout": times_out("zmq"),
    "native cancel": is_cancelled,
    "native session ends": leaves,
    "http hang-up": hangs_up,
    "grpc cancel": ends_its_rpc,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_gone_while_another_still_runs(broker: Gateway, gate: Gate, way: str) -> None:
    def counters() -> dict[str, Any]:
        (row,) = client.statistics("gate")
        return row

    with clientlib.connect(url_of(broker, "native")) as client:
        before = counters()["execution_count"]
        running = threading.Thread(target=lambda: client.infer("gate", {"x": HOLD}))
        running.start()
        gate.entered()
        try:
            let_go = WAYS[way](broker)
            eventually(lambda: counters()["pending"] == 1, "it is queued")
            let_go()
            eventually(lambda: counters()["pending"] == 0, "it is not queued any more")
            assert counters()["execution_count"] == before  # the other one has not ended
        finally:
            gate.let()
            running.join(30)
        assert np.array_equal(client.infer("gate", {"x": X})["y"], X + 1)
        eventually(lambda: counters()["execution_count"] >= before + 2, "both are counted")
        assert counters()["execution_count"] == before + 2
        eventually(lambda: [r["name"] for r in broker.status()["regions"] if r["name"] == "r"] == [], "nor its region")
