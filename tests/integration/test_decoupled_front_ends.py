"""Decoupled models through a broker's front ends, with unmodified clients: the built-in backends repeat and square."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import clientlib
from tests.fakes.broker import eventually, steady
from tests.fakes.gateways import Gateway, url_of

REPEAT = """
backend: "repeat"
max_batch_size: 0
model_transaction_policy { decoupled: True }
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
input { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] }
input { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] }
"""
SQUARE = """
backend: "square"
max_batch_size: 0
model_transaction_policy { decoupled: True }
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
parameters { key: "CUSTOM_FAIL_COUNT" value { string_value: "1" } }
"""
FOREVER_MS = 100_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = tmp_path_factory.mktemp("repository")
    for name, text in (("repeat_int32", REPEAT), ("square_int32", SQUARE)):
        (root / name / "1").mkdir(parents=True)
        Path(root / name / "config.pbtxt").write_text(text)
    with Gateway(root, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


def cancelled(broker: Gateway) -> int:
    """Requests of `repeat_int32` that were cancelled so far."""
    (found,) = json.loads(broker.get("/v2/models/repeat_int32/stats")[1])["model_stats"]
    return int(found["cancelled"])


def cancelled_before(broker: Gateway) -> int:
    """The same once no request of an earlier test is left that could still be counted."""

    def pending() -> int:
        (found,) = broker.client().ask("GetStatistics", model="repeat_int32")["model_stats"]
        return int(found["pending"])

    eventually(lambda: pending() == 0, "what earlier tests have asked for is over")
    return steady(lambda: cancelled(broker))


class Grpc:
    """A stream of tritonclient; what it calls back with comes from `next`."""

    def __init__(self, broker: Gateway) -> None:
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = triton_grpc.InferenceServerClient(url_of(broker, "grpc").split("//")[1])
        self.client.start_stream(lambda result, error: self._results.put((result, error)))

    def __enter__(self) -> Grpc:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def send(self, model: str, values: Sequence[int], delay_ms: int = 0, **named: Any) -> None:
        self.client.async_stream_infer(model, inputs(triton_grpc, model, values, delay_ms), **named)

    def next(self) -> Any:
        result, error = self._results.get(timeout=30)
        if error is not None:
            raise error
        return result


def inputs(module: Any, model: str, values: Sequence[int], delay_ms: int = 0) -> list[Any]:
    arrays = {"IN": np.array(values, np.int32)}
    if model == "repeat_int32":
        arrays |= {"DELAY": np.full(len(values), delay_ms, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    given = []
    for name, array in arrays.items():
        given.append(module.InferInput(name, array.shape, "INT32" if name == "IN" else "UINT32"))
        given[-1].set_data_from_numpy(array)
    return given


def lasting(number: int) -> list[Any]:
    """For repeat_int32: one response at once, another when nobody waits any more."""
    given = inputs(triton_grpc, "repeat_int32", [number, 1])
    given[1].set_data_from_numpy(np.array([0, FOREVER_MS], np.uint32))
    return given


def body(values: Sequence[int], delay_ms: int = 0, **others: Any) -> bytes:
    return json.dumps({"IN": list(values), "DELAY": [delay_ms] * len(values), "WAIT": 0, **others}).encode()


def post(broker: Gateway, path: str, data: bytes) -> http.client.HTTPResponse:
    """The reply's head has come; its connection is closed with it."""
    connection = http.client.HTTPConnection("127.0.0.1", broker.ports["http"], timeout=30)
    connection.request("POST", path, data, {"Connection": "close"})
    return connection.getresponse()


def events(reply: http.client.HTTPResponse) -> Iterator[Any]:
    for line in reply:
        if line != b"\n":
            assert line.startswith(b"data: ")
            yield json.loads(line[6:])


def test_grpc_streams(broker: Gateway) -> None:
    with Grpc(broker) as stream:
        stream.send("repeat_int32", [10, 11, 12], request_id="7", enable_empty_final_response=True)
        results = [stream.next() for _ in range(4)]
        assert [int(r.as_numpy("OUT")[0]) for r in results[:3]] == [10, 11, 12]
        assert [int(r.as_numpy("IDX")[0]) for r in results[:3]] == [0, 1, 2]
        responses = [r.get_response() for r in results]
        assert [r.parameters["triton_final_response"].bool_param for r in responses] == [False] * 3 + [True]
        assert {(r.id, r.model_name) for r in responses} == {("7", "repeat_int32")}
        assert not responses[3].outputs
        stream.send("repeat_int32", [5], outputs=[triton_grpc.InferRequestedOutput("IDX")])
        (output,) = stream.next().get_response().outputs
        assert output.name == "IDX"


def test_requests_of_a_stream_do_not_wait_for_each_other(broker: Gateway) -> None:
    before = cancelled_before(broker)
    with Grpc(broker) as stream:
        stream.send("repeat_int32", [1, 2], FOREVER_MS, request_id="slow")
        stream.send("repeat_int32", range(50), request_id="fast")
        got = [stream.next() for _ in range(50)]
        assert {each.get_response().id for each in got} == {"fast"}
        assert [int(each.as_numpy("OUT")[0]) for each in got] == list(range(50))
        assert cancelled(broker) == before
    eventually(lambda: cancelled(broker) == before + 1)


def test_errors_among_responses(broker: Gateway) -> None:
    with Grpc(broker) as stream:
        stream.send("square_int32", [2], request_id="7", enable_empty_final_response=True)
        assert int(stream.next().as_numpy("OUT")[0]) == 2
        with pytest.raises(InferenceServerException, match=r"^square backend's intentional error"):
            stream.next()
        assert stream.next().get_response().parameters["triton_final_response"].bool_param
        given = inputs(triton_grpc, "repeat_int32", [1])
        given[1] = inputs(triton_grpc, "repeat_int32", [1, 2])[1]
        stream.client.async_stream_infer("repeat_int32", given)
        with pytest.raises(InferenceServerException, match=r"expected IN and DELAY shape to match, got .1. and .2."):
            stream.next()
        stream.send("nobody", [1], request_id="8")
        with pytest.raises(InferenceServerException, match="unknown model: 'nobody'"):
            stream.next()
        stream.send("square_int32", [1, 2])
        with pytest.raises(InferenceServerException, match="unexpected shape for input 'IN'"):
            stream.next()


def test_one_response_to_a_request_is_refused(broker: Gateway) -> None:
    expected = "doesn't support models with decoupled transaction policy"
    http_client = triton_http.InferenceServerClient(url_of(broker, "http").split("//")[1])
    with http_client as client, pytest.raises(InferenceServerException) as caught:
        client.infer("repeat_int32", inputs(triton_http, "repeat_int32", [1]))
    assert (caught.value.status(), caught.value.message()) == ("501", f"HTTP end point {expected}")
    grpc_client = triton_grpc.InferenceServerClient(url_of(broker, "grpc").split("//")[1])
    with grpc_client as client, pytest.raises(InferenceServerException) as caught:
        client.infer("repeat_int32", inputs(triton_grpc, "repeat_int32", [1]))
    assert (caught.value.status(), caught.value.message()) == (
        "StatusCode.UNIMPLEMENTED",
        f"ModelInfer RPC {expected}",
    )


def test_that_a_model_is_decoupled_is_told_before_what_else_is_wrong(broker: Gateway) -> None:
    refusal = "doesn't support models with decoupled transaction policy"
    wrong = [
        {"name": "nothing", "datatype": "INT32", "shape": [1], "data": [1]},
        {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]},
        {"name": "IN", "datatype": "INT32", "shape": [1], "parameters": {"shared_memory_region": "none"}},
        {"name": "IN", "datatype": "INT32", "shape": [-1], "data": [1]},
        {"name": "IN", "datatype": "nonsense", "shape": [1], "data": [1]},
    ]
    for given in ([], *([each] for each in wrong)):
        reply = post(broker, "/v2/models/repeat_int32/infer", json.dumps({"inputs": given}).encode())
        assert (reply.status, json.load(reply)) == (501, {"error": f"HTTP end point {refusal}"}), given
    message = service_pb2.ModelInferRequest
    tensor = message.InferInputTensor
    asked = [
        message(model_name="repeat_int32"),
        message(model_name="repeat_int32", inputs=[tensor(name="IN", datatype="INT32", shape=[1])]),
        message(model_name="repeat_int32", inputs=[tensor(name="IN", datatype="FP32", shape=[1])], id="7"),
        message(model_name="repeat_int32", model_version="1", raw_input_contents=[b"1234"]),
    ]
    asked[2].inputs[0].parameters["shared_memory_region"].string_param = "none"
    with grpc.insecure_channel(url_of(broker, "grpc").split("//")[1]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for each in asked:
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(each)
            told = caught.value.code(), caught.value.details()
            assert told == (grpc.StatusCode.UNIMPLEMENTED, f"ModelInfer RPC {refusal}"), each


def test_generate_stream(broker: Gateway) -> None:
    path = "/v2/models/repeat_int32/versions/1/generate_stream"
    reply = post(broker, path, body([10, 11], id="7"))
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    same = {"id": "7", "model_name": "repeat_int32", "model_version": "1"}
    assert list(events(reply)) == [{**same, "OUT": 10, "IDX": 0}, {**same, "OUT": 11, "IDX": 1}]
    reply = post(broker, "/v2/models/square_int32/generate_stream", b'{"IN": 2}')
    value, error = events(reply)
    assert (reply.status, value["OUT"]) == (200, 2)
    assert error["error"].startswith("square backend's intentional error")
    reply = post(broker, "/v2/models/square_int32/generate_stream", b'{"IN": 1}')
    assert (reply.status, len(list(events(reply)))) == (500, 1)
    reply = post(broker, "/v2/models/square_int32/generate_stream", b'{"IN": 0}')
    assert (reply.status, reply.read()) == (200, b"")


def test_generate(broker: Gateway) -> None:
    path = "/v2/models/repeat_int32/generate"
    reply = post(broker, path, body([10]))
    assert (reply.status, json.loads(reply.read())["OUT"]) == (200, 10)
    reply = post(broker, path, body([10, 11], FOREVER_MS // 1000))
    assert reply.status == 500
    assert json.loads(reply.read())["error"].startswith("generate expects model to produce exactly 1 response")


def test_who_hangs_up_ends_the_request(broker: Gateway) -> None:
    before = cancelled_before(broker)
    data = json.dumps({"IN": [1, 2], "DELAY": [0, FOREVER_MS], "WAIT": 0}).encode()
    reply = post(broker, "/v2/models/repeat_int32/generate_stream", data)
    assert next(events(reply))["OUT"] == 1
    assert cancelled(broker) == before
    reply.close()
    eventually(lambda: cancelled(broker) == before + 1)


def test_hundreds_at_once(broker: Gateway) -> None:
    """None waits for the places of those that last."""
    before = cancelled_before(broker)
    with Grpc(broker) as stream:
        for number in range(100):
            stream.client.async_stream_infer("repeat_int32", lasting(number))
        assert {int(stream.next().as_numpy("OUT")[0]) for _ in range(100)} == set(range(100))

        def ask(number: int) -> list[int]:
            reply = post(broker, "/v2/models/repeat_int32/generate_stream", body([number] * 20))
            return [event["OUT"] for event in events(reply)]

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for number, found in enumerate(pool.map(ask, range(100))):
                assert found == [number] * 20
    eventually(lambda: cancelled(broker) == before + 100)


def test_outputs_in_shared_memory_are_those_of_the_last_response(broker: Gateway) -> None:
    key = f"/tb-decoupled-{os.getpid()}"
    region = shm.create_shared_memory_region("out", key, 64)
    try:
        with Grpc(broker) as stream:
            stream.client.register_system_shared_memory("out", key, 64)
            output = triton_grpc.InferRequestedOutput("OUT")
            output.set_shared_memory("out", 4, 16)
            stream.send("repeat_int32", range(100, 130), outputs=[output], enable_empty_final_response=True)
            for _ in range(30):
                assert stream.next().get_response().raw_output_contents[:] == [b""]
            stream.next()
            assert shm.get_contents_as_numpy(region, np.int32, [1], offset=16)[0] == 129
            output.set_shared_memory("out", 2, 16)
            stream.send("repeat_int32", [1], outputs=[output])
            with pytest.raises(InferenceServerException, match="should be at least 4 bytes to hold the results"):
                stream.next()
            stream.client.unregister_system_shared_memory("out")
    finally:
        shm.destroy_shared_memory_region(region)


def test_what_says_that_a_model_is_decoupled(broker: Gateway) -> None:
    config = json.loads(broker.get("/v2/models/repeat_int32/config")[1])
    assert config["model_transaction_policy"] == {"decoupled": True}
    with triton_grpc.InferenceServerClient(url_of(broker, "grpc").split("//")[1]) as client:
        assert client.get_model_config("repeat_int32").config.model_transaction_policy.decoupled
        (found,) = client.get_inference_statistics("square_int32").model_stats
    assert found.name == "square_int32"


def test_a_worker_that_dies_between_responses(broker: Gateway) -> None:
    data = json.dumps({"IN": [1, 2], "DELAY": [0, FOREVER_MS], "WAIT": 0}).encode()
    reply = post(broker, "/v2/models/repeat_int32/generate_stream", data)
    came = events(reply)
    assert next(came)["OUT"] == 1
    (worker,) = broker.status()["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    assert "after its first response" in next(came)["error"]
    assert list(came) == []
    reply = post(broker, "/v2/models/repeat_int32/generate_stream", body([3]))
    assert [event["OUT"] for event in events(reply)] == [3]


def test_native_client_over_zeromq_is_refused(broker: Gateway) -> None:
    arrays = {"IN": np.ones(1, np.int32), "DELAY": np.zeros(1, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    with clientlib.connect(url_of(broker, "zmq")) as client, pytest.raises(clientlib.InferError) as caught:
        client.infer("repeat_int32", arrays)
    assert "decoupled" in caught.value.message
