"""Models that have their requests run again and again, through a real broker: the built-in `iterative_sequence`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

import clientlib
from clientlib import InferError
from tests.fakes.gateways import Gateway

MODEL = """backend: "iterative_sequence"
max_batch_size: {batch}
input {{ name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }}
model_transaction_policy {{ decoupled: true }}
instance_group {{ kind: KIND_CPU }}
parameters {{ key: "execute_delay_ms" value: {{ string_value: "{delay}" }} }}
{scheduling}
"""
ITERATIVE = "sequence_batching {{ iterative_sequence: true {strategy} }}"
SCHEDULING = {
    "direct": (4, 0, ITERATIVE.format(strategy="direct { }")),
    "oldest": (4, 0, ITERATIVE.format(strategy="oldest { max_candidate_sequences: 2 }")),
    "lone": (1, 0, ITERATIVE.format(strategy="")),
    "slow": (2, 3, ITERATIVE.format(strategy="")),
    "plain": (1, 0, ""),
    "once": (1, 0, "sequence_batching { direct { } }"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("repository")
    for name, (batch, delay, scheduling) in SCHEDULING.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(MODEL.format(batch=batch, delay=delay, scheduling=scheduling))
    with Gateway(root, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.fixture
def client(served: Gateway) -> Iterator[clientlib.Client]:
    with clientlib.connect(f"ipc://{served.directory}") as client:
        yield client


def given(count: int) -> dict[str, np.ndarray]:
    return {"INPUT": np.full((1, 1), count, np.int32)}


@pytest.mark.parametrize("model", ["direct", "oldest", "lone"])
@pytest.mark.parametrize("count", [1, 2, 7, 600])
def test_every_run_has_its_response(client: clientlib.Client, model: str, count: int) -> None:
    values = [int(result["OUTPUT"][0, 0]) for result in client.stream(model, given(count))]
    assert values == list(range(count - 1, -1, -1))


@pytest.mark.parametrize("model", ["direct", "oldest", "lone"])
def test_more_requests_than_slots(client: clientlib.Client, model: str) -> None:
    counts = [3, 40, 1, 17, 8, 25, 2, 30, 5]
    streams = [client.stream(model, given(count)) for count in counts]
    for count, stream in zip(counts, streams, strict=True):
        assert [int(result["OUTPUT"][0, 0]) for result in stream] == list(range(count - 1, -1, -1))


def test_over_http(served: Gateway) -> None:
    status, body = served._request("POST", "/v2/models/direct/generate_stream", b'{"INPUT": 3}', "http")
    assert status == 200
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]
    assert [event["OUTPUT"] for event in events] == [2, 1, 0]


def test_a_cancelled_request_is_not_run_on(served: Gateway, client: clientlib.Client) -> None:
    stream = client.stream("slow", given(100_000))
    assert int(next(stream)["OUTPUT"][0, 0]) == 99_999
    stream.cancel()
    with pytest.raises(InferError) as ended:
        for _ in stream:
            pass
    assert ended.value.code == "CANCELLED"
    assert [int(result["OUTPUT"][0, 0]) for result in client.stream("slow", given(3))] == [2, 1, 0]


def test_a_client_that_leaves_frees_its_slots(served: Gateway) -> None:
    leaving = clientlib.connect(f"ipc://{served.directory}")
    streams = [leaving.stream("slow", given(100_000)) for _ in range(2)]
    for stream in streams:
        next(stream)
    leaving.close()
    with clientlib.connect(f"ipc://{served.directory}") as other:
        assert [int(r["OUTPUT"][0, 0]) for r in other.stream("slow", given(2), timeout=60)] == [1, 0]


@pytest.mark.parametrize("model", ["plain", "once"])
def test_other_models_cannot_have_requests_run_again(client: clientlib.Client, model: str) -> None:
    options = {"sequence_id": 5, "sequence_start": True} if model == "once" else {}
    tensor = client.create_region(f"in-{model}", 64).tensor((1, 1), "INT32")
    tensor.array()[:] = 2
    plan = client.prepare(model, {"INPUT": tensor})
    with pytest.raises(InferError, match="Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"):
        for _ in plan.stream(**options):
            pass
