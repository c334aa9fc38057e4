"""Responses of models with code of their own have parameters, over every way out, each those of its own request."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import eventually, steady
from tests.fakes.gateways import Gateway, url_of

SAYS = """
import numpy as np

WRONG = {
    "count": {str(n): n for n in range(17)},
    "size": {"long": "x" * 381},
    "type": {"list": [1]},
    "int": {"whole": 2**63},
    "name": {"triton_final_response": True},
    "mapping": 7,
    "rows": [{}] * 9,
}

def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs, parameters):
        return Run(inputs[0].memory.view(np.float32), outputs[0], parameters)

    def execute(self, streams):
        for stream in streams:
            for part in range(3):
                given = {**stream.parameters, "part": part}
                stream.send({"Y": stream.inputs["X"]}, parameters=WRONG.get(given.get("wrong"), given))
            stream.send(final=True)

    def close(self): pass

class Run:
    def __init__(self, x, y, parameters):
        self.x, self.y, self.parameters = x, y, parameters

    def run(self):
        if self.y.memory is not None:
            self.y.memory[:] = self.x.view(np.uint8)

    def results(self):
        return [self.x.reshape(-1, 1) * 1 if len(self.y.shape) > 1 else self.x * 1] if self.y.memory is None else []

    def response_parameters(self):
        if "wrong" in self.parameters:
            return WRONG[self.parameters["wrong"]]
        if "nothing" in self.parameters:
            return None
        return [{**self.parameters, "x": x} for x in self.x] if len(self.y.shape) > 1 else self.parameters
"""
SAY = """
backend: "says"
max_batch_size: %d
%s
input { name: "X" data_type: TYPE_FP32 dims: [ %s ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ %s ] }
"""
OF_SAYS = """
platform: "ensemble"
max_batch_size: 0
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling { step {
  model_name: "say_open" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }
"""
X = np.ones(1, np.float32)
GIVEN = {"text": "välue", "whole": 7, "large": 2**62 + 1, "real": 0.5, "yes": True}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = models.write_repository(tmp_path_factory.mktemp("repository"), {"add1": models.add1()})
    for name, config in (
        ("say", SAY % (8, "dynamic_batching { max_queue_delay_microseconds: 20000 }", "1", "1")),
        ("say_open", SAY % (0, "", "1", "-1")),
        ("say_cached", SAY % (8, "response_cache { enable: true }", "1", "1")),
        ("say_steps", SAY % (8, "sequence_batching { max_sequence_idle_microseconds: 60000000 }", "1", "1")),
        ("say_stream", SAY % (0, "model_transaction_policy { decoupled: true }", "1", "-1")),
        ("of_says", OF_SAYS),
    ):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        if name != "of_says":
            (root / name / "backend.py").write_text(SAYS)
    with Gateway(root, tmp_path_factory.mktemp("run"), "--cache-config=local,size=1048576") as broker:
        yield broker.ready()


@pytest.fixture(params=["native", "http", "grpc", "zmq"])
def client(broker: Gateway, request: pytest.FixtureRequest) -> Iterator[Any]:
    urls = {"native": broker.directory, "zmq": f"zmq+ipc://{broker.directory}"}
    with clientlib.connect(urls.get(request.param) or url_of(broker, request.param)) as client:
        yield client


def same(found: Any, wanted: dict[str, Any]) -> bool:
    """Also in their types."""
    return {k: (type(v), v) for k, v in found.items()} == {k: (type(v), v) for k, v in wanted.items()}


def test_responses_have_parameters(client):
    for _ in range(3):  # the later ones are of a kind that other models answer at once
        result = client.infer("say", {"X": np.array([[2]], np.float32)}, parameters=GIVEN)
        assert same(result.parameters, {**GIVEN, "x": 2.0})
        assert result["Y"].tolist() == [[2]]
        assert client.infer("say", {"X": np.array([[2]], np.float32)}, parameters={"nothing": 1}).parameters == {}
        assert same(client.infer("say_open", {"X": X}, parameters=GIVEN).parameters, GIVEN)
        assert client.infer("say_open", {"X": X}).parameters == {}
    several = client.infer("say", {"X": np.array([[3], [4]], np.float32)}, parameters={"a": 1})
    assert same(several.parameters, {"a": 1, "x": 4.0})
    assert client.infer("add1", {"x": np.ones((1, 4), np.float32)}).parameters == {}
    # As in Triton, parameters of members' responses are not the ensemble's.
    assert client.infer("of_says", {"X": X}, parameters=GIVEN).parameters == {}


def test_cached_answers_keep_them(client):
    x = {"X": np.array([[7]], np.float32)}
    for _ in range(2):
        assert same(client.infer("say_cached", x, parameters=GIVEN).parameters, {**GIVEN, "x": 7.0})
        assert same(client.infer("say_cached", x).parameters, {"x": 7.0})


def test_steps_of_sequences_have_them(broker):
    with clientlib.connect(broker.directory) as client:
        region = client.create_region("steps", 4096)
        region.array((1, 1), np.float32)[:] = 5
        plan = client.prepare("say_steps", {"X": region.tensor((1, 1), "FP32")}, parameters={"a": "b"})
        for step in range(3):
            result = plan.infer(sequence_id=9, sequence_start=not step, sequence_end=step == 2)
            assert same(result.parameters, {"a": "b", "x": 5.0})


def test_every_row_of_a_batch_has_its_own(broker):
    def ask(first: int) -> list[tuple[float, Any]]:
        with clientlib.connect(broker.directory) as client:
            found = []
            for value in range(first, first + 25):
                result = client.infer("say", {"X": np.array([[value]], np.float32)})
                found.append((value, result["Y"][0, 0], dict(result.parameters)))
            return found

    def counted() -> tuple[int, int]:
        (stats,) = client.statistics("say")
        return stats["execution_count"], stats["inference_count"]

    with clientlib.connect(broker.directory) as client:
        before = steady(counted)
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(ask, range(0, 800, 100)):
            assert all(y == value and said == {"x": value} for value, y, said in found)
    with clientlib.connect(broker.directory) as client:
        eventually(lambda: counted()[1] - before[1] == 200, "all are counted")
        assert counted()[0] - before[0] < 200


def test_every_response_of_a_stream_has_its_own(broker):
    for url in (broker.directory, url_of(broker, "grpc")):
        with (
            clientlib.connect(url) as client,
            client.stream("say_stream", {"X": X}, parameters=GIVEN) as responses,
        ):
            for part, response in enumerate(responses):
                assert same(response.parameters, {**GIVEN, "part": part})
            assert part == 2


@pytest.mark.parametrize(("module", "front"), [(triton_http, "http"), (triton_grpc, "grpc")])
def test_tritonclient_gets_them(broker, module, front):
    given = module.InferInput("X", [1, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1), np.float32))
    with module.InferenceServerClient(url_of(broker, front).split("//")[1]) as client:
        answer = client.infer("say", [given], parameters=GIVEN).get_response()
    if front == "http":
        assert same(answer["parameters"], {**GIVEN, "x": 1.0})
        return
    found = {name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in answer.parameters.items()}
    assert same(found, {**GIVEN, "x": 1.0})
    assert answer.parameters["whole"].WhichOneof("parameter_choice") == "int64_param"


def test_generate_and_its_stream_give_them(broker):
    def ask(model: str, verb: str) -> str:
        body = json.dumps({"X": 1.0, "text": "välue", "yes": True}).encode()
        with urllib.request.urlopen(f"{url_of(broker, 'http')}/v2/models/{model}/{verb}", body) as answer:
            return answer.read().decode()

    assert json.loads(ask("say_open", "generate")).items() >= {"text": "välue", "yes": True, "Y": 1.0}.items()
    events = [
        json.loads(event[len("data: ") :]) for event in ask("say_stream", "generate_stream").split("\n\n") if event
    ]
    assert [(event["text"], event["yes"], event["part"]) for event in events] == [("välue", True, n) for n in range(3)]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("count", "a response has at most 16 parameters, the model gave 17"),
        (
            "size",
            "the parameters of a response have 385 bytes, at most 384 are possible: give large values as an output",
        ),
        ("type", "parameter 'list' must be a bool, an int, a float or a string, got list"),
        ("int", "parameter 'whole' of a response does not fit a signed 64-bit int"),
        ("name", "parameter 'triton_final_response' of a response has a meaning of its own in Triton's protocols"),
    ],
)
def test_what_no_response_can_have(client, wrong, text):
    for model, x in (
        ("say", np.ones((1, 1), np.float32)),
        ("say_open", X),
        ("say_cached", np.ones((1, 1), np.float32)),
    ):
        with pytest.raises(InferError) as caught:
            client.infer(model, {"X": x}, parameters={"wrong": wrong})
        assert (caught.value.code, caught.value.message) == ("INTERNAL", f"model '{model}': {text}")
        assert client.infer(model, {"X": x}, parameters={"a": 1}).parameters["a"] == 1  # the next one is served


def test_what_no_run_can_give(broker):
    with clientlib.connect(broker.directory) as client:
        for wrong, got in (("mapping", "int"), ("rows", "9 values")):
            with pytest.raises(InferError) as caught:
                client.infer("say", {"X": np.ones((1, 1), np.float32)}, parameters={"wrong": wrong})
            assert caught.value.message == (
                "'response_parameters' of model 'say' must return a mapping, or a list of one for each row of the "
                f"batch (1), it returned {got}"
            )
        with pytest.raises(InferError, match="model 'say_stream': a response has at most 16 parameters"):
            list(client.stream("say_stream", {"X": X}, parameters={"wrong": "count"}))
