"""A client of a gateway whose requests end workers: the others go on. Real broker and gateway."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from shm.admission import REFUSED
from shm.recovery import TWICE
from tests.fakes import models
from tests.fakes.gateways import Gateway, url_of

CONFIG = """
backend: "deadly"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
BACKEND = """
import os

def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs):
        return Run(inputs[0], outputs[0])

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


def test_one_client_that_ends_workers_is_refused_alone(broker: Gateway) -> None:
    far = {"Forwarded": "for=10.0.0.1"}  # a caller without a principal
    for _ in range(2):
        assert ask(broker, 13, **far).startswith(f"[request id: <id_unknown>] {TWICE}: model 'deadly' version 1, ")
    assert ask(broker, 1, **far) == f"[request id: <id_unknown>] {REFUSED[1]}"
    assert ask(broker, 2) == "[2.0]", "another client of the same gateway, and of the same plan"
    assert ask(broker, 3, "other", **far) == "[3.0]"
    with clientlib.connect(url_of(broker, "grpc")) as client:
        assert client.infer("deadly", {"x": np.full(1, 4, np.float32)}, timeout=30)["y"].tolist() == [4]
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        for _ in range(2):
            with pytest.raises(clientlib.InferError, match=TWICE):
                client.infer("deadly", {"x": np.full(1, 13, np.float32)}, timeout=60)
        with pytest.raises(clientlib.InferError, match="are refused for a minute"):
            client.infer("deadly", {"x": np.ones(1, np.float32)}, timeout=60)
    assert ask(broker, 5) == "[5.0]"
