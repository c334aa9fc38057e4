"""What hostile gRPC clients send, and what it costs: rows M, F and L of the fault catalogue, scaled down."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from broker.gateway.kserve import Caller, InferRequest, InferResponse, OutputTensor
from broker.gateway.memory import private_bytes
from shm.errors import Code, InferError
from tests.fakes.broker import eventually
from tests.fakes.grpc_front import Front, front
from tests.fakes.half_sent import HalfSent
from tests.fakes.kserve import FakeService

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
MIB = 1 << 20


def request(size: int = 16) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="add1", raw_input_contents=[bytes(size)])
    message.inputs.add(name="x", datatype="FP32", shape=[size // 16, 4])
    raw: bytes = message.SerializeToString()
    return raw


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    options = (("grpc.max_receive_message_length", 4 * MIB),)
    with front(tmp_path_factory.mktemp("run"), grpc_channel_options=options) as server:
        yield server


@pytest.fixture
def server(running: Front) -> Iterator[Front]:
    """Afterwards another client is served, and no task is left."""
    vars(running.service).clear()
    vars(running.service).update(vars(FakeService()))
    before = running.tasks()
    yield running
    with channel(running) as other:
        assert other.unary_unary(INFER)(request(), timeout=30)
    running.at_rest(before)


def channel(server: Front, **options: Any) -> Any:
    given = {"use_local_subchannel_pool": 1, "max_send_message_length": -1, **options}
    return grpc.insecure_channel(server.url, [(f"grpc.{name}", value) for name, value in given.items()])


def status_of(call: Any, *arguments: Any, **named: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **{"timeout": 60, **named})
    return caught.value.code().name, caught.value.details()


def test_unknown_services_and_methods(server: Front) -> None:
    with channel(server) as client:
        for path in (
            "/inference.GRPCInferenceService/Nothing",
            "/inference.GRPCInferenceService/",
            "/inference.grpcinferenceservice/ModelInfer",
            "/inference.GRPCInferenceService/ModelInfer/",
            "//inference.GRPCInferenceService/ModelInfer",
            "/inference.GRPCInferenceService/%4dodelInfer",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            "/",
        ):
            assert status_of(client.unary_unary(path), b"")[0] == "UNIMPLEMENTED", path


def test_what_does_not_parse(server: Front) -> None:
    names = {each.name for each in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    with channel(server) as client:
        for name in sorted(names - {"ModelStreamInfer"}):
            call = client.unary_unary(f"/inference.GRPCInferenceService/{name}")
            assert status_of(call, b"\x0a\xff\xff") == (
                "INTERNAL",
                f"failed to parse the request as inference.{name}Request",
            )
        assert status_of(client.unary_unary(INFER), request() + b"\xff")[0] == "INTERNAL"
    assert not server.service.asked


def test_a_wrong_kind_of_rpc(server: Front) -> None:
    with channel(server) as client:
        several = client.stream_unary(INFER)
        assert several(iter([request(), request()]), timeout=30)
        assert status_of(several, iter([]), timeout=0.3)[0] == "DEADLINE_EXCEEDED"  # grpc waits for a message


def test_messages_above_the_limit(server: Front) -> None:
    with channel(server) as client:
        status, details = status_of(client.unary_unary(INFER), request(4 * MIB))
        assert status == "RESOURCE_EXHAUSTED"
        assert "larger than max" in details


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_what_is_large_when_decompressed(server: Front, compression: Any) -> None:
    with channel(server) as client:
        status, details = status_of(client.unary_unary(INFER), request(16 * MIB), compression=compression)
        assert status == "RESOURCE_EXHAUSTED"
        assert "larger than max" in details


def test_much_metadata(server: Front) -> None:
    with channel(server) as client:
        call = client.unary_unary(INFER)
        many = tuple((f"key-{number}", "value") for number in range(10_000))
        assert status_of(call, request(), metadata=many)[0] == "RESOURCE_EXHAUSTED"
        assert status_of(call, request(), metadata=(("key", "v" * MIB),))[0] == "RESOURCE_EXHAUSTED"
        assert call(request(), metadata=(("key-bin", bytes(range(256))), ("key", "v" * 1000)), timeout=30)


def test_requests_for_which_there_is_no_room(tmp_path: Path) -> None:
    with front(tmp_path) as server, channel(server) as client:
        server.server.budget.limit = 3 * MIB
        server.hold()
        call = client.unary_unary(INFER)
        held = [call.future(request(MIB), timeout=60) for _ in range(2)]
        server.wait(lambda: len(server.service.asked) == 2)
        status, details = status_of(call, request(MIB))
        assert status == "RESOURCE_EXHAUSTED"
        assert details.startswith("no room for a request of")
        server.release()
        assert all(each.result(30) for each in held)
        server.wait(lambda: server.server.budget.used == 0)
        assert call(request(MIB), timeout=30)


def test_requests_above_the_limit_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.gateway.grpc.server.MAX_RPCS", 4)
    with front(tmp_path) as server, channel(server) as client:
        server.hold()
        call = client.unary_unary(INFER)
        ended = threading.Semaphore(0)
        waiting = [call.future(request(), timeout=60) for _ in range(20)]
        for each in waiting:
            each.add_done_callback(lambda _: ended.release())
        for _ in range(16):
            assert ended.acquire(timeout=30)
        refused = [each for each in waiting if each.done()]
        assert len(refused) == 16
        assert {each.exception().code() for each in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        server.release()
        assert all(each.result(30) for each in waiting if each not in refused)
    assert len(server.service.asked) == 4


def test_more_requests_than_a_connection_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits by itself: nothing is refused."""
    monkeypatch.setattr("broker.gateway.grpc.limits.MAX_STREAMS", 8)
    with front(tmp_path) as server, channel(server) as client:
        client.unary_unary(INFER)(request(), timeout=30)  # the settings have arrived
        server.hold()
        waiting = [client.unary_unary(INFER).future(request(), timeout=60) for _ in range(20)]
        server.wait(lambda: len(server.service.asked) == 1 + 8)
        server.release()
        assert all(each.result(30) for each in waiting)


def test_a_storm_of_cancelled_requests(server: Front) -> None:
    with channel(server) as client:
        call = client.unary_unary(INFER)
        for _ in range(1000):
            call.future(request(), timeout=60).cancel()
        assert call(request(), timeout=30)
    server.wait(lambda: server.server.budget.used == 0)


def test_responses_that_nobody_reads(server: Front) -> None:
    """A unary response counts until it is sent, or its client is gone."""

    async def infer(request: InferRequest, caller: Caller) -> InferResponse:
        return InferResponse("add1", "1", "", [OutputTensor("y", "INT8", (2 * MIB,), bytes(2 * MIB))])

    server.service.infer = infer  # type: ignore[method-assign]
    with _stalled(server) as client:
        client.sendall(_http2_infer(request()))
        server.wait(lambda: server.server.budget.used > 2 * MIB)
        with channel(server) as other:
            assert other.unary_unary(INFER)(request(), timeout=30)
    server.wait(lambda: server.server.budget.used == 0)


@contextlib.contextmanager
def _stalled(server: Front) -> Iterator[socket.socket]:
    """A connection that speaks HTTP/2 and grants no room for answers."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        no_window = b"\x00\x04\x00\x00\x00\x00"
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, no_window))
        yield client


def _http2_infer(raw: bytes) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": INFER,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())
    return _frame(1, 4, 1, block) + _frame(0, 1, 1, b"\x00" + len(raw).to_bytes(4, "big") + raw)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(value: str) -> bytes:
    return bytes((len(value),)) + value.encode()


def test_a_storm_of_reset_streams(server: Front) -> None:
    """CVE-2023-44487 by hand, scaled down."""
    headers = _http2_infer(b"")[: -(9 + 5)]
    storm = b"".join(
        headers[:5] + stream.to_bytes(4, "big") + headers[9:] + _frame(3, 0, stream, b"\x00\x00\x00\x08")
        for stream in range(1, 20_000, 2)
    )
    with _stalled(server) as client, contextlib.suppress(ConnectionError):
        client.sendall(storm)
        with channel(server) as other:
            assert other.unary_unary(INFER)(request(), timeout=30)


def test_messages_that_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection with most of them is closed before they take all memory; others are served on."""
    with front(tmp_path) as server:
        before = private_bytes()
        monkeypatch.setattr(server.server.arrivals, "_limit", before + (400 << 20))
        with channel(server) as other, HalfSent(server.port, 1, 32 << 20) as slow:
            ask = other.unary_unary(INFER)
            deadline, most = time.monotonic() + 60, 0
            with HalfSent(server.port, 10, 200 << 20) as attacker:
                while not attacker.closed and time.monotonic() < deadline:
                    assert ask(request(1 << 16), timeout=30)
                    most = max(most, private_bytes() - before)
                assert attacker.closed
                assert attacker.sent < 1900 << 20
            assert most < 1200 << 20, "what is half here stays below the bound, but for what comes between two looks"
            assert ask(request(), timeout=30)
            assert not slow.closed, "it has no share in it"


def test_connections_that_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.gateway.grpc.limits.HANDSHAKE_MS", 300)
    with front(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            while silent.recv(4096):  # the server's own settings
                pass


def is_closed(connection: socket.socket) -> bool:
    """By its peer, as far as has come."""
    try:
        while connection.recv(4096, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_more_connections_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 64))  # a quarter is for one port
    monkeypatch.setattr("broker.gateway.grpc.limits.HANDSHAKE_MS", 120_000)  # nobody is closed for saying nothing
    with front(tmp_path) as server, contextlib.ExitStack() as stack:
        first = stack.enter_context(channel(server))
        assert first.unary_unary(INFER)(request(), timeout=30)
        others = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(40)]
        eventually(lambda: sum(map(is_closed, others)) >= 40 - 16, "those beyond the limit are closed")
        assert first.unary_unary(INFER)(request(), timeout=30)


def test_a_failed_request_is_not_kept(server: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc keeps the exception that ends an RPC until Python looks for cycles, which may be very late."""
    monkeypatch.setattr("broker.gateway.grpc.server._log.disabled", True)  # pytest keeps what was logged
    strict = (("triton_grpc_error", "true"),)
    unknown = request(MIB).replace(b"add1", b"add9")
    server.service.script = [7, RuntimeError("a bug"), InferError(Code.INTERNAL, "later")]
    many = request(MIB).replace(b"add1", b"many")
    gc.collect()
    gc.disable()
    try:
        with channel(server) as client:
            for sent in (bytes(MIB), request(MIB)[:-1], request(MIB + 3), unknown):
                assert status_of(client.unary_unary(INFER), sent)[0] in ("INTERNAL", "INVALID_ARGUMENT")
            for sent, metadata in ((unknown, strict), (request(MIB + 3), ()), (many, ())):
                rest = [request(MIB)] * 3  # which are cancelled
                responses = client.stream_stream(STREAM)(iter([sent, *rest]), metadata=metadata, timeout=30)
                with pytest.raises(grpc.RpcError, match=r"internal error|unknown model"):
                    list(responses)
            server.hold()
            waits = client.stream_stream(STREAM)(iter([request(MIB), many]), timeout=30)
            server.wait(lambda: len(server.service.asked) > 1 and server.server.budget.used > MIB)
            waits.cancel()
            server.wait(lambda: server.server.budget.used == 0)
        server.release()
        server.service.asked.clear()

        def kept() -> list[FrameType]:
            frames = [each for each in gc.get_objects() if isinstance(each, FrameType)]
            named = [(frame, frame.f_locals) for frame in frames if "/broker/" in frame.f_code.co_filename]
            return [frame for frame, names in named if len(names.get("raw") or names.get("message") or "") > MIB // 2]

        eventually(lambda: not kept(), "nor by a frame")
    finally:
        gc.enable()
