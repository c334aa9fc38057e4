"""Unmodified tritonclient.grpc and tritonclient.grpc.aio against the gRPC front end: unary requests."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from broker.gateway.grpc.codec import decode_request
from broker.gateway.grpc.limits import MAX_RPCS
from broker.gateway.kserve import Caller, InferRequest, InferResponse
from shm.errors import Code, InferError
from tests.fakes.grpc_front import Front, front
from tests.fakes.kserve import FakeService
from tests.fakes.processes import in_loop

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def tensor(array: Any = X, module: Any = triton) -> Any:
    given = module.InferInput("x", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    return given


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture
def server(running: Front) -> Front:
    vars(running.service).clear()  # with what a test replaced
    vars(running.service).update(vars(FakeService()))
    return running


@pytest.fixture
def client(server: Front) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url) as client:
        yield client


def error_of(call: Any, *arguments: Any, **named: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **named)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def test_everything_but_inference(server: Front, client: Any) -> None:
    assert client.is_server_ready()
    assert client.is_model_ready("add1")
    assert not client.is_model_ready("nobody"), "as in Triton, no error"
    assert client.get_server_metadata().extensions == ["classification", "binary_tensor_data"]
    assert client.get_model_metadata("add1", "1").inputs[0].shape == [-1, 4]
    assert client.get_model_config("add1", as_json=True)["config"]["max_batch_size"] == 8
    assert client.get_inference_statistics("add1").model_stats[0].execution_count == 5
    assert [each.name for each in client.get_model_repository_index().models] == ["add1", "never"]
    client.load_model("add1", config="{}", files={"file:1/m": b"\0"})
    client.unload_model("add1", unload_dependents=True)
    assert server.service.loads == [
        ("add1", {"config": "{}", "file:1/m": b"\0"}),
        ("add1", {"unload_dependents": True}),
    ]
    client.register_system_shared_memory("r", "/k", 64)
    assert client.get_system_shared_memory_status().regions["r"].byte_size == 64
    client.unregister_system_shared_memory()
    assert not client.get_system_shared_memory_status().regions
    assert client.update_log_settings({"log_verbose_level": 1}).settings["log_verbose_level"].uint32_param == 1
    assert client.update_trace_settings(settings={"trace_rate": "5"}).settings["trace_rate"].value == ["5"]


def test_inference(server: Front, client: Any) -> None:
    result = client.infer(
        "add1", [tensor()], model_version="1", request_id="7", priority=3, timeout=900, parameters={"mine": 0.5}
    )
    np.testing.assert_array_equal(result.as_numpy("y"), X + 1)
    assert result.get_response().id == "7"
    assert "triton_final_response" not in result.get_response().parameters
    (asked,) = server.service.asked
    assert (asked.version, asked.priority, asked.timeout_us, asked.parameters) == ("1", 3, 900, {"mine": 0.5})


def test_large_tensors(server: Front, client: Any) -> None:
    large = np.random.default_rng(1).random((1 << 19, 4), np.float32)
    np.testing.assert_array_equal(client.infer("add1", [tensor(large)]).as_numpy("y"), large + 1)


def test_tensors_in_regions(server: Front, client: Any) -> None:
    given = triton.InferInput("x", [2, 4], "FP32")
    given.set_shared_memory("in", 32, 8)
    wanted = triton.InferRequestedOutput("y")
    wanted.set_shared_memory("out", 32)
    result = client.infer("add1", [given], outputs=[wanted])
    asked = server.service.asked[0]
    assert (asked.inputs[0].region, asked.inputs[0].offset, asked.inputs[0].byte_size) == ("in", 8, 32)
    assert asked.outputs is not None
    assert (asked.outputs[0].region, asked.outputs[0].byte_size) == ("out", 32)
    assert list(result.get_response().raw_output_contents) == [b""]


def test_typed_contents(server: Front) -> None:
    with grpc.insecure_channel(server.url) as channel:
        request = service_pb2.ModelInferRequest(model_name="add1")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([1, 2, 3, 4])
        response = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [2, 3, 4, 5]


def test_others_are_answered_while_many_typed_elements_are_decoded(server: Front, monkeypatch: Any) -> None:
    decoding, others = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        decoding.set()
        assert others.wait(60), "nobody else was answered"
        return decode_request(*arguments)

    monkeypatch.setattr("broker.gateway.grpc.server.decode_request", slow)
    request = service_pb2.ModelInferRequest(model_name="add1")
    large = np.ones((10_000, 4), np.float32)
    request.inputs.add(name="x", datatype="FP32", shape=large.shape).contents.fp32_contents.extend(large.ravel())
    with grpc.insecure_channel(server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer.future(request, timeout=60)
        assert decoding.wait(60)
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=60).live
        others.set()
        assert (np.frombuffer(answer.result().raw_output_contents[0], np.float32) == 2).all()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client: Any, algorithm: str) -> None:
    large = np.zeros((10_000, 4), np.float32)
    result = client.infer("add1", [tensor(large)], compression_algorithm=algorithm)
    assert (result.as_numpy("y") == 1).all()


def test_a_verbose_log_has_what_is_refused(server: Front, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.service.fails = InferError(Code.NOT_FOUND, "why")
    with caplog.at_level(logging.DEBUG, "broker.gateway"):
        assert error_of(client.infer, "add1", [tensor()]) == ("NOT_FOUND", "why")
    said = [record.getMessage() for record in caplog.records if record.name.startswith("broker.gateway")]
    assert said == ["gRPC request failed: why"]


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_codes(server: Front, client: Any, code: Code) -> None:
    server.service.fails = InferError(code, "says\nwhy: ü")
    status = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}.get(code.name, code.name)
    assert error_of(client.infer, "add1", [tensor()]) == (status, "says\nwhy: ü")
    assert error_of(client.get_model_metadata, "add1") == (status, "says\nwhy: ü")


def test_long_and_strange_texts_arrive(server: Front, client: Any) -> None:
    for text in ("x" * 100_000, "\N{GRINNING FACE}" * 10_000, "a\0b", "\ud800", ""):
        server.service.fails = InferError(Code.NOT_FOUND, text)
        status, message = error_of(client.get_model_metadata, "add1")
        assert status == "NOT_FOUND"
        assert len(message) <= 2048
        if text.startswith(("x", "\N{GRINNING FACE}")):
            assert message
            assert text.startswith(message)


def test_what_nobody_expected_says_nothing(server: Front, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    server.service.fails = RuntimeError("secret")  # type: ignore[assignment]
    assert error_of(client.infer, "add1", [tensor()]) == ("INTERNAL", "internal error")
    assert error_of(client.get_model_metadata, "add1") == ("INTERNAL", "internal error")
    assert len([each for each in caplog.records if each.name == "broker.gateway.grpc.server"]) == 2


def test_exiting(server: Front, client: Any) -> None:
    server.service.exiting = True
    assert error_of(client.infer, "add1", [tensor()]) == (
        "UNAVAILABLE",
        "GRPC server is shutting down and has stopped accepting new requests.",
    )
    for call in (client.is_server_live, client.is_server_ready, client.get_server_metadata):
        assert error_of(call) == ("UNAVAILABLE", "Server exiting")


def test_health(server: Front) -> None:
    with grpc.insecure_channel(server.url) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"") == b"\x08\x01"
        assert check(b"\x0a\x05other") == b"\x08\x01"

        async def not_ready() -> bool:
            return False

        server.service.ready = not_ready  # type: ignore[method-assign]
        assert check(b"") == b"\x08\x02"
        del vars(server.service)["ready"]
        server.service.exiting = True
        with pytest.raises(grpc.RpcError) as caught:
            check(b"")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def _call_of(channel: Any, path: str) -> Any:
    if path.endswith("StreamInfer"):
        stream = channel.stream_stream(path)
        return lambda metadata: list(stream(iter([b""]), metadata=(*metadata, ("triton_grpc_error", "true"))))
    unary = channel.unary_unary(path)
    return lambda metadata: unary(b"", metadata=metadata)


def test_the_policy_is_asked_first(server: Front) -> None:
    asked: list[str] = []

    def check(category: str, caller: Caller) -> None:
        asked.append(category)
        if caller.headers.get("triton-grpc-protocol-key") != "open":
            raise InferError(Code.UNAVAILABLE, "This protocol is restricted, expecting header 'x'")

    server.service.check = check  # type: ignore[method-assign]
    server.service.exiting = True  # is not told to those who may not ask
    names = {each.name for each in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    with grpc.insecure_channel(server.url) as channel:
        for name in [*sorted(names), "/grpc.health.v1.Health/Check"]:
            path = name if name.startswith("/") else f"/inference.GRPCInferenceService/{name}"
            for metadata, text in (((), "expecting header 'x'"), ((("triton-grpc-protocol-key", "open"),), "")):
                call = _call_of(channel, path)
                with pytest.raises(grpc.RpcError) as caught:
                    call(metadata)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, name
                assert text in caught.value.details()
    assert len(asked) == 2 * (len(names) + 1)
    assert set(asked) == {
        "health",
        "metadata",
        "inference",
        "shared-memory",
        "model-config",
        "model-repository",
        "statistics",
        "trace",
        "logging",
    }


def test_metadata_becomes_parameters(tmp_path: Path) -> None:
    with (
        front(tmp_path, grpc_header_forward_pattern="^(X-|pri|triton)") as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        client.infer("add1", [tensor()], headers={"x-one": "1", "other": "2"})
        assert server.service.asked[0].parameters == {"x-one": "1"}
        for reserved in ("priority", "triton_grpc_error"):
            assert error_of(client.infer, "add1", [tensor()], headers={reserved: "1"}) == (
                "INVALID_ARGUMENT",
                f"Header '{reserved}' is reserved for Triton usage and cannot be forwarded.",
            )


def test_cancelled_requests(server: Front, client: Any) -> None:
    server.hold()
    ended: list[Any] = []
    done = threading.Event()

    def callback(result: Any, error: Any) -> None:
        ended.append(error)
        done.set()

    call = client.async_infer("add1", [tensor()], callback)
    server.wait(lambda: len(server.service.asked) == 1)
    call.cancel()
    assert done.wait(30)
    assert ended[0].status() == "StatusCode.CANCELLED"
    server.wait(lambda: server.service.cancelled == 1)
    server.wait(lambda: server.server.budget.used == 0)


def test_deadlines(server: Front, client: Any) -> None:
    assert client.is_server_live()  # it is connected
    server.hold()
    for seconds in (0.5, 4.0, 30.0):  # what is late on a busy machine has not come before its deadline
        assert error_of(client.infer, "add1", [tensor()], client_timeout=seconds)[0] == "DEADLINE_EXCEEDED"
        if server.service.asked:
            break
    server.wait(lambda: server.service.cancelled == len(server.service.asked) > 0)


def test_many_clients_at_once(server: Front, client: Any) -> None:
    results: list[Any] = []
    done = threading.Semaphore(0)

    def callback(result: Any, error: Any) -> None:
        results.append(result if error is None else error)
        done.release()

    for number in range(300):
        client.async_infer("add1", [tensor(X + number)], callback, request_id=str(number))
    for _ in range(300):
        assert done.acquire(timeout=60)
    for result in results:
        np.testing.assert_array_equal(result.as_numpy("y"), X + int(result.get_response().id) + 1)
    assert len(results) == 300 < MAX_RPCS


def test_asyncio_client(server: Front) -> None:
    @in_loop
    async def scenario() -> None:
        async with triton_aio.InferenceServerClient(server.url) as client:
            assert await client.is_server_live()
            given = tensor(module=triton_aio)
            results = await asyncio.gather(*(client.infer("add1", [given], request_id=str(n)) for n in range(50)))
            assert [each.get_response().id for each in results] == [str(n) for n in range(50)]
            with pytest.raises(InferenceServerException, match="is not found"):
                await client.infer("nope", [given])
            task = asyncio.ensure_future(_never(client, given, server))
            await asyncio.to_thread(server.wait, lambda: len(server.service.asked) == 52)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(server.wait, lambda: server.service.cancelled == 1)

    scenario()


async def _never(client: Any, given: Any, server: Front) -> None:
    await asyncio.to_thread(server.hold)
    await client.infer("add1", [given])


def test_responses_that_are_too_large(server: Front, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.gateway.grpc.codec.MAX_MESSAGE", 1000)
    status, message = error_of(client.infer, "add1", [tensor(np.zeros((300, 4), np.float32))])
    assert status == "INVALID_ARGUMENT"
    assert message.startswith("Response has byte size ")


def test_response_parameters(server: Front, client: Any) -> None:
    async def infer(request: InferRequest, caller: Caller) -> InferResponse:
        return InferResponse("add1", "1", "", [], {"mine": "yes", "flag": True})

    server.service.infer = infer  # type: ignore[method-assign]
    parameters = client.infer("add1", [tensor()]).get_response().parameters
    assert (parameters["mine"].string_param, parameters["flag"].bool_param) == ("yes", True)
