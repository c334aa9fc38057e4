"""ModelStreamInfer of decoupled models with unmodified clients: final flags, errors among others, order, and ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from broker.gateway.grpc import stream as grpc_stream
from shm.errors import Code, InferError
from tests.fakes.grpc_front import Front, front
from tests.fakes.grpc_streams import Stream, open_stream, request
from tests.fakes.kserve import FakeService

NO = InferError(Code.UNSUPPORTED, "no")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture
def server(running: Front) -> Iterator[Front]:
    """Afterwards: no task and no byte of any stream is left."""
    vars(running.service).clear()
    vars(running.service).update(vars(FakeService()))
    before = running.tasks()
    yield running
    running.at_rest(before)


def script(server: Front, *items: Any, size: int = 1, turns: int | None = None) -> None:
    async def set_up() -> None:
        server.service.script = list(items)
        server.service.size = size
        server.service.turns = None if turns is None else asyncio.Semaphore(turns)

    server.call(set_up())


def go_on(server: Front, count: int = 1) -> None:
    async def release() -> None:
        for _ in range(count):
            server.service.turns.release()  # type: ignore[union-attr]

    server.call(release())


def many(number: int = 0, *, empty_final: bool = False, size: int = 16) -> Any:
    message = request(number, "many", size)
    if empty_final:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def said(message: Any) -> tuple[str, float | str | None, bool]:
    """Id; the value, the error, or None; whether it says that it is final."""
    response = message.infer_response
    value: float | str | None = message.error_message or None
    if response.raw_output_contents:
        value = float(np.frombuffer(response.raw_output_contents[0], np.float32)[0])
    return response.id, value, response.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("opted_in", [False, True])
@pytest.mark.parametrize(
    ("items", "expected", "empty"),
    [
        ((), [], True),
        ((1, 2), [(1, False), (2, False)], True),
        ((1, 2, "end"), [(1, False), (2, True)], False),
        ((NO,), [("no", False)], True),
        ((NO, "end"), [("no", True)], False),
        ((1, NO, 2), [(1, False), ("no", False), (2, False)], True),
    ],
)
def test_final_flags(server: Front, items: Any, expected: Any, empty: bool, opted_in: bool) -> None:
    script(server, *items)
    with grpc.insecure_channel(server.url) as channel:
        got = list(open_stream(channel, iter([many(7, empty_final=opted_in)]), timeout=30))
    end = [("7", None, True)] if empty and opted_in else []
    assert [said(each) for each in got] == [("7", *each) for each in expected] + end
    assert all(each.infer_response.model_name == "many" for each in got)
    if end:
        assert not got[-1].infer_response.outputs


def test_tritonclient(server: Front) -> None:
    script(server, 1, 2)
    x = triton.InferInput("x", [4], "FP32")
    x.set_data_from_numpy(np.zeros(4, np.float32))
    with Stream(server.url) as stream:
        stream.client.async_stream_infer("many", [x], request_id="7", enable_empty_final_response=True)
        results = [stream.next()[0] for _ in range(3)]
    assert [result.as_numpy("y").tolist() for result in results[:2]] == [[1], [2]]
    assert results[2].as_numpy("y") is None
    assert [r.get_response().parameters["triton_final_response"].bool_param for r in results] == [False, False, True]
    with triton.InferenceServerClient(server.url) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("many", [x])
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    assert caught.value.message() == "ModelInfer RPC doesn't support models with decoupled transaction policy"


def test_responses_of_several_requests_come_as_they_are_made(server: Front) -> None:
    """Each waits for a turn of its own, in the order in which they asked for one."""
    script(server, 1, 2, turns=0)
    asked = threading.Event()

    def requests() -> Iterator[Any]:
        yield many(0)
        yield many(1)
        asked.wait(30)

    with grpc.insecure_channel(server.url) as channel:
        responses = open_stream(channel, requests(), timeout=30)
        server.wait(lambda: len(server.service.asked) == 2)
        got = []
        for _ in range(4):
            go_on(server)
            got.append(said(next(responses))[:2])
        asked.set()
        go_on(server, 2)
        assert list(responses) == []
    assert sorted(got) == [("0", 1), ("0", 2), ("1", 1), ("1", 2)]
    assert [id for id, _ in got] in (["0", "1", "0", "1"], ["1", "0", "1", "0"])


def test_they_hold_nobody_up_and_others_keep_their_order(server: Front) -> None:
    script(server, 1, turns=0)
    with grpc.insecure_channel(server.url) as channel:
        sent = threading.Event()

        def requests() -> Iterator[Any]:
            for number in range(6):
                yield many(number) if number % 2 == 0 else request(number)
            sent.wait(30)

        responses = open_stream(channel, requests(), timeout=30)
        assert [next(responses).infer_response.id for _ in range(3)] == ["1", "3", "5"]
        go_on(server, 6)
        sent.set()
        assert sorted(each.infer_response.id for each in responses) == ["0", "2", "4"]


def test_more_than_may_be_outstanding_otherwise(server: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that last are counted apart; the ones beyond that wait, and end all the same."""
    monkeypatch.setattr(grpc_stream, "MAX_OUTSTANDING", 4)
    monkeypatch.setattr(grpc_stream, "MAX_LASTING", 8)
    script(server, 1, turns=0)
    with grpc.insecure_channel(server.url) as channel:
        responses = open_stream(channel, iter([many(number) for number in range(30)]), timeout=30)
        server.wait(lambda: len(server.service.asked) == 12)
        go_on(server, 60)
        assert len(list(responses)) == 30


def ten(forever: threading.Event) -> Iterator[Any]:
    """As many requests, and no end."""
    for number in range(10):
        yield many(number)
    forever.wait(60)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_the_end_of_the_rpc_cancels(server: Front, how: str) -> None:
    script(server, *[1] * 50, turns=10)
    with grpc.insecure_channel(server.url) as channel:
        forever = threading.Event()
        responses = open_stream(channel, ten(forever), timeout=60)
        for _ in range(10):
            next(responses)
        server.wait(lambda: len(server.service.asked) == 10)
        if how == "cancel":
            responses.cancel()
        else:
            channel.close()
        server.wait(lambda: server.service.abandoned == 10)
        forever.set()


def test_the_deadline_of_the_rpc_cancels(server: Front) -> None:
    with grpc.insecure_channel(server.url) as channel:
        forever = threading.Event()
        for seconds in (0.5, 4.0, 30.0):  # on a busy machine the first ones may end before all has come
            script(server, *[1] * 50, turns=10)
            before = len(server.service.asked)
            responses = open_stream(channel, ten(forever), timeout=seconds)
            with pytest.raises(grpc.RpcError) as caught:
                list(responses)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if len(server.service.asked) == before + 10:
                break
        server.wait(lambda: server.service.abandoned == len(server.service.asked) >= 10)
        forever.set()


def test_stop_stream_with_its_requests(server: Front) -> None:
    script(server, 1, 2, turns=1)
    x = triton.InferInput("x", [4], "FP32")
    x.set_data_from_numpy(np.zeros(4, np.float32))
    with Stream(server.url) as stream:
        stream.client.async_stream_infer("many", [x])
        assert stream.next()[1] is None
        stream.client.stop_stream(cancel_requests=True)
        assert stream.next()[1].status() == "StatusCode.CANCELLED"
    server.wait(lambda: server.service.abandoned == 1)


def test_streams_cancelled_at_any_time(server: Front) -> None:
    script(server, 1, 2, 3)
    with grpc.insecure_channel(server.url) as channel:
        for number in range(200):
            responses = open_stream(channel, iter([many(n) for n in range(number % 7)]), timeout=60)
            for _ in range(number % 4 if number % 7 > 1 else 0):
                next(responses)
            responses.cancel()
        assert len(list(open_stream(channel, iter([many(5)])))) == 3
    server.wait(lambda: server.server.budget.used == 0)


def test_who_does_not_read_is_kept_little_and_ended(server: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "WRITE_STALL_S", 1.0)
    script(server, *[1] * 1000, size=1 << 18)
    with grpc.insecure_channel(server.url, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        responses = open_stream(channel, iter([many(number) for number in range(4)]), timeout=60)
        server.wait(lambda: server.service.abandoned == 4)
        assert len(server.service.begun) < 100, "of 1 MiB each"
        with pytest.raises(grpc.RpcError) as caught:
            list(responses)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "has read no response" in caught.value.details()


def test_the_first_error_ends_a_strict_stream(server: Front) -> None:
    script(server, 1, NO, 2)
    with grpc.insecure_channel(server.url) as channel:
        responses = open_stream(channel, iter([many(3)]), timeout=30, metadata=(("triton_grpc_error", "true"),))
        assert said(next(responses)) == ("3", 1, False)
        with pytest.raises(grpc.RpcError) as caught:
            next(responses)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNIMPLEMENTED, "no")
    server.wait(lambda: server.service.abandoned == 1)


def test_what_nobody_expected_ends_the_stream(server: Front, caplog: pytest.LogCaptureFixture) -> None:
    script(server, 1, RuntimeError("secret"))
    with grpc.insecure_channel(server.url) as channel:
        responses = open_stream(channel, iter([many()]), timeout=30)
        next(responses)
        with pytest.raises(grpc.RpcError) as caught:
            next(responses)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert "secret" in caplog.text


def test_the_option_is_a_bool(server: Front) -> None:
    script(server, 1)
    message = many()
    message.parameters["triton_enable_empty_final_response"].int64_param = 1
    with grpc.insecure_channel(server.url) as channel:
        (got,) = open_stream(channel, iter([message]), timeout=30)
    assert isinstance(got, service_pb2.ModelStreamInferResponse)
    assert got.error_message == (
        "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param."
    )
