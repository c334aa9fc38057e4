"""A client of a gateway whose requests end workers: the others go on. Real broker and gateway."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from shm.recovery import ALONE, TWICE
from tests.fakes import models
from tests.fakes.gateways import Gateway, url_of

CONFIG = """
backend: "deadly"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
STREAMS = CONFIG + "model_transaction_policy { decoupled: true }"
BACKEND = """
import os

def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs):
        return Run(inputs[0], outputs[0])

    def execute(self, streams):
        for stream in streams:
            if stream.inputs["x"][0] == 13:
                stream.send({"y": stream.inputs["x"]})  # a death after the first response
                os._exit(1)
            stream.send({"y": stream.inputs["x"]}, final=True)

    def close(self):
        pass

class Run:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def run(self):
        if self.x.memory.view("float32")[0] == 13:
            os._exit(1)
        self.y.memory[:] = self.x.memory

    def results(self):
        return []
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Gateway]:
    root = tmp_path / "models"
    for name in ("deadly", "other"):
        (models.write_model(root, name, config=CONFIG) / "backend.py").write_text(BACKEND)
    (models.write_model(root, "streams", config=STREAMS) / "backend.py").write_text(BACKEND)
    with Gateway(root, tmp_path / "run") as broker:
        yield broker.ready()


def ask(broker: Gateway, value: float, model: str = "deadly", **headers: str) -> str:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [value]}]}
    connection = http.client.HTTPConnection("127.0.0.1", broker.ports["http"], timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return answer.get("error") or str(answer["outputs"][0]["data"])


def is_refused(text: str, model: str) -> bool:
    return (
        re.search(rf"requests of this client for model '{model}' are refused for another \d+ s: two of", text)
        is not None
    )


def generated(broker: Gateway, value: float) -> str:
    """What `generate_stream` says of it, from a host that is not this one."""
    connection = http.client.HTTPConnection("127.0.0.1", broker.ports["http"], timeout=60)
    try:
        body, headers = json.dumps({"x": [value]}), {"Forwarded": "for=10.0.0.1"}
        connection.request("POST", "/v2/models/streams/generate_stream", body, headers)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def streamed(client: clientlib.Client, value: float) -> str:
    """The first value, or the text of the first error."""
    try:
        (first, *_) = [
            result["y"][0] for result in client.stream("streams", {"x": np.full(1, value, np.float32)}, timeout=60)
        ]
    except clientlib.InferError as error:
        return error.message
    return str(first)


def test_streams_that_end_workers_are_held_against_their_clients_alone(broker: Gateway) -> None:
    for _ in range(2):
        assert f"{ALONE}, after its first response" in generated(broker, 13)
    assert is_refused(generated(broker, 1), "streams")
    for url in (url_of(broker, "grpc"), f"ipc://{broker.directory}"):
        with clientlib.connect(url) as client:
            assert streamed(client, 1) == "1.0", "another client"
            for _ in range(2):
                assert f"{ALONE}, after its first response" in streamed(client, 13)
            assert is_refused(streamed(client, 1), "streams")
    ages = [row["last_death_age_s"] for row in broker.status()["workers"] if row["last_death"]]
    assert ages
    assert min(ages) >= 0


def test_one_client_that_ends_workers_is_refused_alone(broker: Gateway) -> None:
    far = {"Forwarded": "for=10.0.0.1"}  # a caller without a principal
    for _ in range(2):
        assert ask(broker, 13, **far).startswith(f"[request id: <id_unknown>] {TWICE}: model 'deadly' version 1, ")
    assert is_refused(ask(broker, 1, **far), "deadly")
    assert ask(broker, 2) == "[2.0]", "another client of the same gateway, and of the same plan"
    assert ask(broker, 3, "other", **far) == "[3.0]"
    with clientlib.connect(url_of(broker, "grpc")) as client:
        assert client.infer("deadly", {"x": np.full(1, 4, np.float32)}, timeout=30)["y"].tolist() == [4]
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        for _ in range(2):
            with pytest.raises(clientlib.InferError, match=TWICE):
                client.infer("deadly", {"x": np.full(1, 13, np.float32)}, timeout=60)
        with pytest.raises(clientlib.InferError, match="are refused for another"):
            client.infer("deadly", {"x": np.ones(1, np.float32)}, timeout=60)
    assert ask(broker, 5) == "[5.0]"
