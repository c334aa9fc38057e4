"""Ensembles with decoupled members through a real broker: what follows from each response, in order, and its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes.broker import Broker, eventually

INPUTS = """
input [
  { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] }
]
"""
OUT, IDX = '{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }', '{ name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] }'
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
SQUARE = (
    'backend: "square"\nmax_batch_size: 0\ninput { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }\n'
    f"output {OUT}\n{DECOUPLED}"
)
IDENTITY = (
    'backend: "identity"\nmax_batch_size: 0\n'
    'input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }\n'
    'output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }\n'
    "instance_group { count: 2 kind: KIND_CPU }\n"
)


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}\n'


def repeat(model: str, outputs: dict[str, str]) -> str:
    return step(model, {name: name for name in ("IN", "DELAY", "WAIT")}, outputs)


def ensemble(outputs: str, *steps: str) -> str:
    return (
        f'platform: "ensemble"\nmax_batch_size: 0\n{INPUTS}output [ {outputs} ]\n'
        f"ensemble_scheduling {{\n{''.join(steps)}}}\n"
    )


MODELS = {
    "repeat_int32": f'backend: "repeat"\nmax_batch_size: 0\n{INPUTS}output [ {OUT}, {IDX} ]\n{DECOUPLED}',
    "square_int32": SQUARE,
    "failing_square": SQUARE + 'parameters { key: "CUSTOM_FAIL_COUNT" value: { string_value: "1" } }\n',
    "identity_int32": IDENTITY,
    "simple": ensemble(f"{OUT}, {IDX}", repeat("repeat_int32", {"OUT": "OUT", "IDX": "IDX"})),
    "chain": ensemble(
        f"{OUT}, {IDX}",
        repeat("repeat_int32", {"OUT": "mid", "IDX": "IDX"}),
        step("identity_int32", {"INPUT0": "mid"}, {"OUTPUT0": "OUT"}),
    ),
    "fan": ensemble(
        f"{OUT}, {OUT.replace('OUT', 'OUT_2')}, {IDX}",
        repeat("repeat_int32", {"OUT": "mid", "IDX": "IDX"}),
        step("identity_int32", {"INPUT0": "mid"}, {"OUTPUT0": "OUT"}),
        step("identity_int32", {"INPUT0": "mid"}, {"OUTPUT0": "OUT_2"}),
    ),
    "repeat_square": ensemble(
        OUT, repeat("repeat_int32", {"OUT": "mid"}), step("square_int32", {"IN": "mid"}, {"OUT": "OUT"})
    ),
    "nested": ensemble(OUT, repeat("simple", {"OUT": "mid"}), step("square_int32", {"IN": "mid"}, {"OUT": "OUT"})),
    "fails": ensemble(
        OUT, repeat("repeat_int32", {"OUT": "mid"}), step("failing_square", {"IN": "mid"}, {"OUT": "OUT"})
    ),
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    root = tmp_path_factory.mktemp("decoupled")
    for name, config in MODELS.items():
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(config)
    (root / "run").mkdir(mode=0o700)
    with Broker(root / "models", root / "run") as broker:
        yield broker.ready()


@pytest.fixture
def client(broker: Broker) -> Iterator[clientlib.Client]:
    with clientlib.connect(str(broker.directory)) as client:
        yield client


def ask(values: list[int], delay_ms: int = 0) -> dict[str, np.ndarray]:
    return {
        "IN": np.array(values, np.int32),
        "DELAY": np.full(len(values), delay_ms, np.uint32),
        "WAIT": np.array([0], np.uint32),
    }


def lasting() -> dict[str, np.ndarray]:
    """One response at once, the next when nobody waits any more."""
    return {**ask([1, 1]), "DELAY": np.array([0, 100_000], np.uint32)}


def stream(client: clientlib.Client, model: str, values: list[int], **options) -> list[dict[str, int]]:
    responses = client.stream(model, ask(values), **options)
    return [{name: int(array[0]) for name, array in response.items()} for response in responses]


@pytest.mark.parametrize("model", ["simple", "chain"])
def test_every_response_of_the_member_is_one_of_the_ensemble(client, model):
    assert stream(client, model, [7, 5, 3]) == [{"OUT": out, "IDX": at} for at, out in enumerate((7, 5, 3))]
    assert stream(client, model, []) == []
    assert stream(client, model, list(range(100))) == [{"OUT": n, "IDX": n} for n in range(100)]


def test_steps_that_read_one_response_answer_together(client):
    expected = [{"OUT": n, "OUT_2": n, "IDX": at} for at, n in enumerate((4, 2))]
    assert stream(client, "fan", [4, 2]) == expected
    assert stream(client, "fan", [4, 2], outputs=["OUT_2"]) == [{"OUT_2": 4}, {"OUT_2": 2}]


@pytest.mark.parametrize("model", ["repeat_square", "nested"])
def test_a_decoupled_member_behind_another(client, model):
    assert [each["OUT"] for each in stream(client, model, [3, 0, 2])] == [3, 3, 3, 2, 2]


def test_an_error_of_a_member_ends_the_request(client):
    responses = client.stream("fails", ask([2, 2]))
    assert int(next(responses)["OUT"][0]) == 2
    with pytest.raises(InferError, match=r"in ensemble 'fails', .*intentional error.*step 1: model 'failing_square'"):
        next(responses)
    with pytest.raises(StopIteration):
        next(responses)
    assert stream(client, "simple", [1]) == [{"OUT": 1, "IDX": 0}]


def test_a_cancelled_request_ends_and_lets_its_members_go(client):
    before = client.statistics("chain")[0]["cancelled"]
    with client.stream("chain", ask([1] * 1000, delay_ms=20)) as responses:
        assert int(next(responses)["OUT"][0]) == 1

    def idle() -> bool:
        (stats,) = client.statistics("chain")
        return stats["cancelled"] == before + 1 and stats["pending"] == 0

    eventually(idle, "the ensemble's request is over")
    assert stream(client, "chain", [1]) == [{"OUT": 1, "IDX": 0}]


def test_the_ensemble_is_decoupled_because_a_member_is(client):
    assert client.models()["chain"].decoupled
    with pytest.raises(InferError, match="use stream"):
        client.infer("chain", ask([1]))


def test_many_at_once(client):
    streams = [client.stream("chain", ask(list(range(number)))) for number in range(12)]
    for number, each in enumerate(streams):
        assert [int(response["OUT"][0]) for response in each] == list(range(number))


def test_what_runs_is_in_flight_until_its_last_response(broker, client):
    def in_flight() -> int:
        return int(broker.status()["workers"][0]["in_flight"])

    with client.stream("repeat_int32", lasting()) as responses:
        next(responses)
        eventually(lambda: in_flight() == 1, "it is in flight")
    eventually(lambda: in_flight() == 0, "it is over")


def test_more_requests_than_an_ensemble_takes_are_told(broker):
    """Each has a thread in the worker: 256 of one ensemble, whoever sends them."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(clientlib.connect(str(broker.directory), slots=128)) for _ in range(6)]

        def send(number: int) -> clientlib.Stream:
            return stack.enter_context(clients[number % 6].stream("simple", lasting(), timeout=100))

        def pending() -> int:
            return int(clients[0].statistics("simple")[0]["pending"])

        streams = [send(number) for number in range(256)]
        for stream in streams:
            next(stream)  # so it is under way
        for number in range(12):
            with pytest.raises(InferError, match="as many requests under way as it takes"):
                next(send(number))
        for stream in streams:
            stream.close()
        eventually(lambda: pending() == 0, "those that were cancelled are over")
        assert stream_of(clients[0], [1]) == [1]


def stream_of(client: clientlib.Client, values: list[int]) -> list[int]:
    return [int(response["OUT"][0]) for response in client.stream("simple", ask(values))]
