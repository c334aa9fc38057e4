"""ModelStreamInfer with unmodified clients: order, errors, cancellation, and what a stream may take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2

from broker.gateway.grpc.stream import MAX_OUTSTANDING
from broker.gateway.kserve import Caller, InferRequest, InferResponse
from shm.errors import Code, InferError
from tests.fakes.grpc_front import Front, front
from tests.fakes.grpc_streams import PATH, Stream, X, open_stream, request, tensor
from tests.fakes.kserve import FakeService
from tests.fakes.processes import in_loop


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture
def server(running: Front) -> Iterator[Front]:
    """Afterwards: no task and no byte of any stream is left."""
    vars(running.service).clear()  # with what a test replaced
    vars(running.service).update(vars(FakeService()))
    before = running.tasks()
    yield running
    running.at_rest(before)


def finishing_in_reverse(count: int) -> Callable[[InferRequest, Caller], Any]:
    """An `infer` whose requests end last first."""
    started: list[asyncio.Event] = []

    async def infer(request: InferRequest, caller: Caller) -> InferResponse:
        mine = asyncio.Event()
        started.append(mine)
        if len(started) == count:
            mine.set()
        await mine.wait()
        position = started.index(mine)
        if position:
            started[position - 1].set()
        return InferResponse("add1", "1", request.id, [])

    return infer


def test_responses_keep_the_order_of_requests_that_run_together(server: Front) -> None:
    server.service.infer = finishing_in_reverse(20)  # type: ignore[method-assign]
    with Stream(server.url) as stream:
        for number in range(20):
            stream.send(number)
        responses = [stream.next()[0].get_response() for _ in range(20)]
    assert [each.id for each in responses] == [str(number) for number in range(20)]
    assert all(each.parameters["triton_final_response"].bool_param for each in responses)


@pytest.mark.parametrize("opted_in", [False, True])
def test_there_is_one_response_per_request(server: Front, opted_in: bool) -> None:
    with Stream(server.url) as stream:
        stream.send(1, enable_empty_final_response=opted_in)
        np.testing.assert_array_equal(stream.next()[0].as_numpy("y"), X + 1)
        stream.client.stop_stream()
        assert stream.results.empty()


def test_errors_are_messages(server: Front) -> None:
    with grpc.insecure_channel(server.url) as channel:
        wrong = request(2)
        wrong.parameters["triton_x"].int64_param = 1
        messages = [request(0), request(1, model="nope"), wrong, request(3)]
        got = list(open_stream(channel, iter(messages), timeout=30))
    assert [each.error_message[:30] for each in got] == [
        "",
        "Request for unknown model: 'no",
        "parameter keys starting with '",
        "",
    ]
    assert [each.infer_response.id for each in got] == ["0", "1", "2", "3"]
    assert got[1].infer_response.model_name == "nope"
    assert all(each.infer_response.parameters["triton_final_response"].bool_param for each in got)


def test_what_does_not_parse_is_a_message(server: Front) -> None:
    with grpc.insecure_channel(server.url) as channel:
        got = list(channel.stream_stream(PATH)(iter([b"\xff" * 10, request().SerializeToString()]), timeout=30))
    first, second = map(service_pb2.ModelStreamInferResponse.FromString, got)
    assert first.error_message == "failed to parse the request as inference.ModelInferRequest"
    assert second.error_message == ""


async def set_event(event: asyncio.Event) -> None:
    event.set()


def test_errors_as_grpc_statuses(server: Front) -> None:
    known = FakeService.infer
    sent = asyncio.Event()

    async def infer(request: InferRequest, caller: Caller) -> InferResponse:
        if request.model == "nope":
            await sent.wait()  # the client refuses to send on a stream that has ended
            await known(server.service, request, caller)
        return InferResponse("add1", "1", request.id, [])

    server.service.infer = infer  # type: ignore[method-assign]
    with Stream(server.url, headers={"triton_grpc_error": "true"}) as stream:
        for number, model in enumerate(["add1", "add1", "nope", "add1"]):
            stream.send(number, model)
        server.call(set_event(sent))
        assert [stream.next()[0].get_response().id for _ in range(2)] == ["0", "1"]
        error = stream.next()[1]
        assert error.status() == "StatusCode.INVALID_ARGUMENT"
        assert error.message() == "Request for unknown model: 'nope' is not found"
        assert stream.results.empty()


def test_exiting_is_told_on_open_streams(server: Front) -> None:
    with Stream(server.url) as stream:
        stream.send(0)
        assert stream.next()[1] is None
        server.service.exiting = True
        stream.send(1)
        assert stream.next()[1].message() == ("GRPC server is shutting down and has stopped accepting new requests.")


def test_what_nobody_expected_ends_the_stream(server: Front, caplog: pytest.LogCaptureFixture) -> None:
    server.service.fails = RuntimeError("secret")  # type: ignore[assignment]
    with Stream(server.url) as stream:
        stream.send(0)
        error = stream.next()[1]
    assert (error.status(), error.message()) == ("StatusCode.INTERNAL", "internal error")
    assert "secret" in caplog.text


def test_asyncio_client(server: Front) -> None:
    @in_loop
    async def scenario() -> None:
        async with triton_aio.InferenceServerClient(server.url) as client:

            async def requests() -> Any:
                for number in range(200):
                    yield {"model_name": "add1", "inputs": [tensor(triton_aio)], "request_id": str(number)}

            ids = [result.get_response().id async for result, error in client.stream_infer(requests())]
            assert ids == [str(number) for number in range(200)]

    scenario()


def test_no_more_is_read_than_may_be_outstanding(server: Front) -> None:
    server.hold()
    taken = threading.Event()

    def requests() -> Iterator[Any]:
        for number in range(5 * MAX_OUTSTANDING):
            yield request(number, size=160_000)  # more than gRPC's own buffers hold
        taken.set()

    with grpc.insecure_channel(server.url) as channel:
        responses = open_stream(channel, requests(), timeout=60)
        server.wait(lambda: len(server.service.asked) == MAX_OUTSTANDING)
        assert not taken.wait(0.2)
        assert len(server.service.asked) == MAX_OUTSTANDING
        assert server.server.budget.used > MAX_OUTSTANDING * 160_000
        server.release()
        assert [each.infer_response.id for each in responses] == [str(n) for n in range(5 * MAX_OUTSTANDING)]


def ten(forever: threading.Event) -> Iterator[Any]:
    """As many requests, and no end."""
    for number in range(10):
        yield request(number)
    forever.wait(60)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_requests_of_a_stream_that_ends_are_cancelled(server: Front, how: str) -> None:
    server.hold()
    with grpc.insecure_channel(server.url) as channel:
        forever = threading.Event()
        responses = open_stream(channel, ten(forever), timeout=60)
        server.wait(lambda: len(server.service.asked) == 10)
        if how == "cancel":
            responses.cancel()
        else:
            channel.close()
        server.wait(lambda: server.service.cancelled == 10)
        forever.set()


def test_requests_of_a_stream_whose_time_is_up_are_cancelled(server: Front) -> None:
    server.hold()
    with grpc.insecure_channel(server.url) as channel:
        forever = threading.Event()
        for seconds in (0.5, 4.0, 30.0):  # on a busy machine the first ones may end before all has come
            before = len(server.service.asked)
            responses = open_stream(channel, ten(forever), timeout=seconds)
            with pytest.raises(grpc.RpcError) as caught:
                next(responses)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if len(server.service.asked) == before + 10:
                break
        server.wait(lambda: server.service.cancelled == len(server.service.asked) >= 10)
        forever.set()


def test_a_stream_that_is_stopped_with_its_requests(server: Front) -> None:
    server.hold()
    with Stream(server.url) as stream:
        for number in range(5):
            stream.send(number)
        server.wait(lambda: len(server.service.asked) == 5)
        stream.client.stop_stream(cancel_requests=True)
        assert stream.next()[1].status() == "StatusCode.CANCELLED"
    server.wait(lambda: server.service.cancelled == 5)


def test_streams_cancelled_at_any_time(server: Front) -> None:
    """C-05 scaled down: before the first response, in between, and after the last."""
    with grpc.insecure_channel(server.url) as channel:
        for number in range(400):
            responses = open_stream(channel, iter([request(n) for n in range(number % 7)]), timeout=60)
            for _ in range(number % 3 if number % 7 > 2 else 0):
                next(responses)
            responses.cancel()
        assert [each.infer_response.id for each in open_stream(channel, iter([request(5)]))] == ["5"]


def test_a_client_that_does_not_read(server: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made for it is let go after a while; others are served meanwhile."""
    budget = server.server.budget
    full = False
    for stall_s in (1.0, 8.0, 40.0):  # on a busy machine the first one may end before all of it has come
        monkeypatch.setattr("broker.gateway.grpc.stream.WRITE_STALL_S", stall_s)
        with grpc.insecure_channel(server.url, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            responses = open_stream(channel, iter([request(n, size=1 << 20) for n in range(40)]), timeout=60)
            server.wait(lambda: budget.used > 16 << 20 or not responses.is_active())  # noqa: B023
            full = responses.is_active()
            with Stream(server.url) as stream:
                stream.send(0)
                assert stream.next()[1] is None
            server.wait(lambda: budget.used == 0, 60)
            with pytest.raises(grpc.RpcError) as caught:
                list(responses)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "has read no response" in caught.value.details()
        if full:
            break
    assert full


def test_one_message_of_a_stream_finds_no_room(tmp_path: Path) -> None:
    with front(tmp_path) as server, grpc.insecure_channel(server.url) as channel:
        server.server.budget.limit = 100_000
        got = list(open_stream(channel, iter([request(0), request(1, size=160_000), request(2)]), timeout=30))
    assert [each.error_message[:11] for each in got] == ["", "no room for", ""]


def test_stopping_ends_streams(tmp_path: Path) -> None:
    with front(tmp_path) as server, Stream(server.url) as stream:
        stream.send(0)
        assert stream.next()[1] is None
        server.call(server.server.stop(0.2))
        assert stream.next()[1].status() in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED")


def test_the_codes_of_errors_are_told_in_strict_streams(server: Front) -> None:
    server.service.fails = InferError(Code.UNSUPPORTED, "no")
    with Stream(server.url, headers={"triton_grpc_error": "true"}) as stream:
        stream.send(0)
        assert stream.next()[1].status() == "StatusCode.UNIMPLEMENTED"
