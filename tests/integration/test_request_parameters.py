"""Request parameters reach models with code of their own, over every way in, and never those of another request."""

from __future__ import annotations

import asyncio
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
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway, url_of

TELLS = """
import numpy as np

def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs, parameters):
        return Run(inputs, outputs, parameters)

    def execute(self, streams):
        for stream in streams:
            stream.send(made(("key", "value"), stream.parameters), final=True)

    def close(self): pass

class Run:
    def __init__(self, inputs, outputs, parameters):
        self.names, self.parameters = [each.name for each in outputs], parameters

    def run(self): pass

    def results(self):
        return list(made(self.names, self.parameters).values())

def made(names, parameters):
    texts = {"key": list(parameters), "value": [f"{type(each).__name__} {each}" for each in parameters.values()]}
    return {name: np.array([text.encode() for text in texts[name]], object) for name in names}
"""
TELL = """
backend: "tells"
max_batch_size: 0
%s
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output [ { name: "key" data_type: TYPE_STRING dims: [ -1 ] }, { name: "value" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
SCALES = """
import numpy as np

def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs, parameters):
        (x,) = inputs
        return Run(x.memory.view(np.float32), outputs, parameters.get("factor", 1))

    def close(self): pass

class Run:
    def __init__(self, x, outputs, factor):
        self.x, self.outputs, self.factor = x, outputs, factor

    def run(self):
        made = {"Y": self.x * np.float32(self.factor), "Z": np.full_like(self.x, len(self.x))}
        self.made = [made[each.name].reshape(each.shape) for each in self.outputs if each.memory is None]
        for each in self.outputs:
            if each.memory is not None:
                each.memory[:] = made[each.name].view(np.uint8)

    def results(self):
        return self.made
"""
SCALE = """
backend: "scales"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 20000 }
%s
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "Z" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output [ { name: "key" data_type: TYPE_STRING dims: [ -1 ] }, { name: "value" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "identity" model_version: -1
    input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "between" } },
  { model_name: "tell" model_version: -1 input_map { key: "INPUT0" value: "between" }
    output_map { key: "key" value: "key" } output_map { key: "value" value: "value" } }
] }
"""
IDENTITY = """
backend: "identity"
max_batch_size: 0
parameters { key: "worker_group" value { string_value: "tells" } }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
"""
X = np.ones(1, np.float32)
GIVEN = {"text": "välue", "whole": 7, "large": 2**62 + 1, "real": 0.5, "yes": True}
TOLD = {"text": "str välue", "whole": "int 7", "large": f"int {2**62 + 1}", "real": "float 0.5", "yes": "bool True"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = models.write_repository(tmp_path_factory.mktemp("repository"), {"add1": models.add1()})
    cached = "response_cache { enable: true }"
    for name, config, code in (
        ("tell", TELL % "", TELLS),
        ("stream", TELL % "model_transaction_policy { decoupled: true }", TELLS),
        ("scale", SCALE % "", SCALES),
        ("cached", SCALE % cached, SCALES),
        ("identity", IDENTITY, ""),
        ("ensemble", ENSEMBLE, ""),
    ):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        if code:
            (root / name / "backend.py").write_text(code)
    with Gateway(root, tmp_path_factory.mktemp("run"), "--cache-config=local,size=1048576") as broker:
        yield broker.ready()


def told(result: Any) -> dict[str, str]:
    keys, values = (
        (result[name] for name in ("key", "value"))
        if isinstance(result, clientlib.InferResult)
        else (result.as_numpy(name) for name in ("key", "value"))
    )
    return {key.decode(): value.decode() for key, value in zip(keys.tolist(), values.tolist(), strict=True)}


@pytest.fixture(params=["native", "http", "grpc", "zmq"])
def client(broker: Gateway, request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "native":
        opened = clientlib.connect(broker.directory)
    elif request.param == "zmq":
        opened = clientlib.connect(f"zmq+ipc://{broker.directory}")
    else:
        opened = clientlib.connect(url_of(broker, request.param))
    with opened as client:
        yield client


@pytest.mark.parametrize("model", ["tell", "ensemble"])
def test_our_clients(client, model):
    for _ in range(2):
        assert told(client.infer(model, {"INPUT0": X}, parameters=GIVEN)) == TOLD
        assert told(client.infer(model, {"INPUT0": X})) == {}
        assert told(client.infer(model, {"INPUT0": X}, parameters={"yes": 1})) == {"yes": "int 1"}
        assert told(client.infer(model, {"INPUT0": X}, parameters={"yes": True})) == {"yes": "bool True"}
    ignored = client.infer("add1", {"x": np.ones((1, 4), np.float32)}, parameters=GIVEN)
    assert np.array_equal(ignored["y"], np.full((1, 4), 2))


def test_plans_carry_them(client):
    region = client.create_region(f"r{id(client)}", 4096)
    region.array((1,), np.float32)[:] = 1
    plan = client.prepare("tell", {"INPUT0": region.tensor((1,), "FP32")}, parameters={"a": 1})
    other = client.prepare("tell", {"INPUT0": region.tensor((1,), "FP32")}, parameters={"a": 2})
    for _ in range(3):
        assert told(plan.infer()) == {"a": "int 1"}
        assert told(other.infer()) == {"a": "int 2"}


def test_the_client_on_a_loop(broker):
    async def test() -> None:
        async with await clientlib.connect_async(broker.directory) as client:
            assert told(await client.infer("tell", {"INPUT0": X}, parameters=GIVEN)) == TOLD
            results = [r async for r in await client.stream("stream", {"INPUT0": X}, parameters=GIVEN)]
            assert [told(result) for result in results] == [TOLD]

    asyncio.run(test())


@pytest.mark.parametrize(("module", "front"), [(triton_http, "http"), (triton_grpc, "grpc")])
@pytest.mark.parametrize("model", ["tell", "ensemble"])
def test_tritonclient(broker, module, front, model):
    given = module.InferInput("INPUT0", [1], "FP32")
    given.set_data_from_numpy(X)
    with module.InferenceServerClient(url_of(broker, front).split("//")[1]) as client:
        for parameters in ({"key1": "value1", "key2": 2}, {"key1": 123.125}, {"key1": True}, {}):
            result = client.infer(model, [given], parameters=parameters, priority=1)
            assert told(result) == {name: f"{type(value).__name__} {value}" for name, value in parameters.items()}


def test_a_version_may_be_written_with_zeros(broker):
    body = {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "FP32", "data": [1]}], "parameters": {"a": 2}}
    with urllib.request.urlopen(
        f"{url_of(broker, 'http')}/v2/models/tell/versions/01/infer", json.dumps(body).encode()
    ) as answer:
        outputs = {output["name"]: output["data"] for output in json.load(answer)["outputs"]}
    assert outputs == {"key": ["a"], "value": ["int 2"]}


def test_a_grpc_stream_and_generate(broker):
    body = json.dumps({"INPUT0": 1.0, "given": "x", "parameters": {"more": 2}}).encode()
    with urllib.request.urlopen(f"{url_of(broker, 'http')}/v2/models/stream/generate", body) as answer:
        found = json.load(answer)
    assert dict(zip(found["key"], found["value"], strict=True)) == {"given": "str x", "more": "int 2"}


def test_requests_with_different_ones_never_share_a_run(broker):
    """Eight threads, each with a factor of its own: rows of equal factors may meet in a batch, others may not."""

    def ask(factor: int) -> list[float]:
        with clientlib.connect(broker.directory) as client:
            results = []
            for value in range(25):
                x = np.array([[value]], np.float32)
                wanted = ["Y"] if value % 2 else None
                results.append(client.infer("scale", {"X": x}, wanted, parameters={"factor": factor})["Y"][0, 0])
            return results

    with ThreadPoolExecutor(8) as threads:
        factors = [number % 4 for number in range(8)]
        for factor, results in zip(factors, threads.map(ask, factors), strict=True):
            assert results == [value * factor for value in range(25)]
    with clientlib.connect(broker.directory) as client:
        eventually(lambda: client.statistics("scale")[0]["inference_count"] == 200, "all are counted")
        assert 50 <= client.statistics("scale")[0]["execution_count"] < 200


def test_cached_answers_are_of_equal_parameters(client):
    x = np.array([[3]], np.float32)
    for _ in range(2):
        for factor in (2, 5):
            assert client.infer("cached", {"X": x}, parameters={"factor": factor})["Y"][0, 0] == 3 * factor
        assert client.infer("cached", {"X": x})["Y"][0, 0] == 3


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"priority": 1}, "Parameter priority is a reserved parameter and cannot be specified."),
        ({"triton_x": 1}, "Parameter triton_x is a reserved parameter and cannot be specified."),
        ({"a": [1]}, "parameter 'a' must be a bool, an int, a float or a string, got list"),
        ({"a": 2**64}, "parameter 'a' does not fit 64 bits"),
        ({1: 1}, "the name of a parameter must be a string, got 1"),
        ({str(n): n for n in range(65)}, "a request has at most 64 parameters of its own, got 65"),
        ({"a": "x" * 4096}, "the parameters of a request have 4097 bytes, at most 4096 are possible"),
        (["a"], "parameters must map names to values, got ['a'] (list)"),
    ],
)
def test_what_cannot_be_one(client, parameters, text):
    with pytest.raises(InferError) as caught:
        client.infer("tell", {"INPUT0": X}, parameters=parameters)
    assert caught.value.message.startswith(text)


def test_too_many_over_the_wire_are_refused_where_they_matter(broker):
    given = triton_http.InferInput("INPUT0", [1], "FP32")
    given.set_data_from_numpy(X)
    many = {f"p{n}": n for n in range(65)}
    with triton_http.InferenceServerClient(url_of(broker, "http").split("//")[1]) as client:
        with pytest.raises(Exception, match="a request has at most 64 parameters of its own, got 65"):
            client.infer("tell", [given], parameters=many)
        x = triton_http.InferInput("x", [1, 4], "FP32")
        x.set_data_from_numpy(np.ones((1, 4), np.float32))
        assert client.infer("add1", [x], parameters=many).as_numpy("y").tolist() == [[2, 2, 2, 2]]
