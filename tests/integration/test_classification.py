"""Classification with a model's label file, as an unmodified tritonclient asks for it over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.fakes import models
from tests.fakes.gateways import Gateway

CLIENTS: dict[str, Any] = {"http": triton_http, "grpc": triton_grpc}
X = np.array([[1, 9, 5, 7], [4, 3, 2, 1]], np.float32)  # y = x + 1
LONG = b"n" * (80 << 10)  # more than one datagram from the broker to the gateway holds


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Gateway]:
    repository = tmp_path / "repository"
    named = models.write_model(
        repository, "named", models.add1(), config='output { name: "y" label_filename: "names" }'
    )
    (named / "names").write_bytes(b"cat\n\n" + LONG + b"\n")
    models.write_model(repository, "nameless", models.add1())
    with Gateway(repository, tmp_path / "run", "--model-control-mode=explicit", "--load-model=*") as broker:
        broker.ready()
        yield broker


def classes(served: Gateway, protocol: str, model: str, count: int) -> list[list[bytes]]:
    triton = CLIENTS[protocol]
    with triton.InferenceServerClient(f"127.0.0.1:{served.ports[protocol]}") as client:
        tensor = triton.InferInput("x", X.shape, "FP32")
        tensor.set_data_from_numpy(X)
        result = client.infer(model, [tensor], outputs=[triton.InferRequestedOutput("y", class_count=count)])
        found: list[list[bytes]] = result.as_numpy("y").tolist()
        return found


def test_names_follow_the_index_and_are_those_of_the_latest_load(served: Gateway, tmp_path: Path) -> None:
    expected = [
        [b"10.000000:1", b"8.000000:3", b"6.000000:2:" + LONG],
        [b"5.000000:0:cat", b"4.000000:1", b"3.000000:2:" + LONG],
    ]
    for protocol in CLIENTS:
        assert classes(served, protocol, "named", 3) == expected
        assert classes(served, protocol, "nameless", 1) == [[b"10.000000:1"], [b"5.000000:0"]]
    (tmp_path / "repository" / "named" / "names").write_text("bird\nfish\n")
    for protocol in CLIENTS:
        assert classes(served, protocol, "named", 3) == expected, "the file counts when the model is loaded"
    assert served.post("/v2/repository/models/named/load", {})[0] == 200
    for protocol in CLIENTS:
        assert classes(served, protocol, "named", 1) == [[b"10.000000:1:fish"], [b"5.000000:0:bird"]]
