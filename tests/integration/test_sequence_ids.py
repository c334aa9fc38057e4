"""Sequence ids as tritonclient sends them: numbers and strings, over HTTP and gRPC, with the built-in backends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.fakes.gateways import Gateway, url_of

LARGE = 2**64 - 5


def configuration(backend: str, strategy: str, kinds: tuple[str, ...], corrid: str = "") -> str:
    controls = [
        f'{{ name: "{kind}" control {{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }} }}' for kind in kinds
    ]
    if corrid:
        controls.append(f'{{ name: "CORRID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {corrid} }} }}')
    return f"""
backend: "{backend}"
max_batch_size: 4
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
instance_group {{ kind: KIND_CPU }}
sequence_batching {{ max_sequence_idle_microseconds: 60000000 {strategy} control_input [ {", ".join(controls)} ] }}
"""


ALL = ("START", "END", "READY")
OLDEST = "oldest { max_candidate_sequences: 64 }"
MODELS = {
    "plain": configuration("sequence", "direct { }", ("START", "READY")),
    "number": configuration("dyna_sequence", OLDEST, ALL, "TYPE_UINT64"),
    "text": configuration("dyna_sequence", OLDEST, ALL, "TYPE_STRING"),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("repository")
    for name, text in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        Path(root / name / "config.pbtxt").write_text(text)
    with Gateway(root, tmp_path_factory.mktemp("run")) as broker:
        broker.ready()
        yield broker


@pytest.fixture(params=["http", "grpc"])
def client(broker: Gateway, request: pytest.FixtureRequest) -> Iterator[Any]:
    module = triton_http if request.param == "http" else triton_grpc
    with module.InferenceServerClient(url_of(broker, request.param).split("//")[1]) as opened:
        opened.module = module
        yield opened


def step(client: Any, model: str, number: int | str, value: int, start: bool = False, end: bool = False) -> int:
    given = client.module.InferInput("INPUT", [1, 1], "INT32")
    given.set_data_from_numpy(np.int32([[value]]))
    result = client.infer(model, [given], sequence_id=number, sequence_start=start, sequence_end=end)
    return int(result.as_numpy("OUTPUT")[0, 0])


@pytest.mark.parametrize(("model", "number"), [("plain", 7), ("plain", LARGE), ("plain", "a text"), ("number", 1007)])
def test_ids_of_all_kinds(client, model, number):
    if number == LARGE and client.module is triton_grpc:
        number -= 2**64  # its field is signed
    assert step(client, model, number, 1, start=True) == 1
    assert step(client, model, number, 2) == 3
    assert step(client, model, number, 3, end=True) == 6 + (number if model == "number" else 0)


def test_the_model_gets_a_string_id_as_it_is(client):
    for number in ("1002", "77"):
        assert step(client, "text", number, 1, start=True) == 1
    assert step(client, "text", "77", 5) == 6
    assert step(client, "text", "1002", 2, end=True) == 3 + 1002
    assert step(client, "text", "77", 1, end=True) == 7 + 77


@pytest.mark.parametrize(
    ("model", "number", "text"),
    [
        ("number", "a", "sequence batching control 'CORRID' data-type is 'BYTES', but model 'number' expects 'UINT64'"),
        ("text", 5, "sequence batching control 'CORRID' data-type is 'UINT64', but model 'text' expects 'BYTES'"),
        ("plain", "", "inference request to model 'plain' must specify a non-zero or non-empty correlation ID"),
        ("plain", "x" * 129, "correlation ID of 129 bytes is longer than 128 bytes"),
    ],
)
def test_ids_that_a_model_cannot_take(client, model, number, text):
    with pytest.raises(InferenceServerException, match=text):
        step(client, model, number, 1, start=True)


@pytest.mark.parametrize("number", [123, "never started"])
def test_an_error_names_the_id_that_the_client_gave(client, number):
    with pytest.raises(
        InferenceServerException,
        match=rf"^\[\S+\] inference request for sequence {number} to model 'plain' must specify the START",
    ):
        step(client, "plain", number, 1)


def test_a_dead_worker_takes_its_sequences_along(broker, client):
    """What they had added up is gone: the next step is told so, and why, and a new start begins anew."""
    assert step(client, "plain", 50, 1, start=True) == 1
    (worker,) = broker.status()["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    with pytest.raises(InferenceServerException) as lost:
        step(client, "plain", 50, 1)
    assert re.fullmatch(
        r"inference request for sequence 50 to model 'plain' must specify the START flag on the first request of the"
        r" sequence; if it had begun, it must begin again: its state was lost when its worker ended, \d+\.\d s ago"
        r" \(killed by SIGKILL\)",
        lost.value.message(),
    )
    assert step(client, "plain", 50, 5, start=True) == 5
