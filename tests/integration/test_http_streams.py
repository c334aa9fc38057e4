"""generate_stream over sockets: events leave as they are made, and what becomes of a stream whose reader is gone."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shm.errors import Code, InferError
from tests.fakes.http_server import Peer, Running, running

PATH = "/v2/models/many/generate_stream"
ASKED = b'{"x": [1, 2, 3]}'


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def script(server: Running, *items: Any, turns: int | None = None, size: int = 1) -> None:
    """What `many` answers; `turns`: how much of that it may at once."""

    def set_up() -> None:
        server.service.script = list(items)
        server.service.size = size
        server.service.turns = None if turns is None else asyncio.Semaphore(turns)

    server.call(set_up)


def go_on(server: Running) -> None:
    server.call(lambda: server.service.turns.release())  # type: ignore[union-attr]


def wait(server: Running, condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    ends = time.monotonic() + limit_s
    while not server.call(condition):
        assert time.monotonic() < ends, "in time"
        time.sleep(0.005)


def event(peer: Peer) -> Any:
    data = peer.chunk()
    assert (data[:6], data[-2:]) == (b"data: ", b"\n\n")
    return json.loads(data[6:])


def answer(value: float) -> dict[str, Any]:
    return {"model_name": "many", "model_version": "1", "y": value}


def test_events_leave_as_they_are_made(server: Running) -> None:
    script(server, 1, 2, 3, turns=1)
    with server.connect() as peer:
        status, headers = peer.request("POST", PATH, ASKED).head()
        assert status == 200
        assert headers == {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
        for value in (1, 2, 3):
            assert event(peer) == answer(value)
            go_on(server)
        assert peer.chunk() == b""
        script(server, 4)
        assert peer.request("POST", PATH, ASKED).head()[0] == 200, "the connection is kept"
        assert (event(peer), peer.chunk()) == (answer(4), b"")
    assert server.call(lambda: server.service.abandoned) == 0


def test_a_request_that_waits_behind_a_stream(server: Running) -> None:
    script(server, 1, 2, turns=1)
    with server.connect() as peer:
        peer.request("POST", PATH, ASKED).request("GET", "/v2/models/many/ready")
        peer.head()
        assert event(peer) == answer(1)
        go_on(server)
        assert (event(peer), go_on(server), peer.chunk()) == (answer(2), None, b"")
        assert peer.reply()[0] == 200


def test_the_first_response_decides_the_status(server: Running) -> None:
    script(server, InferError(Code.UNSUPPORTED, "no"), 1)
    with server.connect() as peer:
        status, headers = peer.request("POST", PATH, ASKED).head()
        assert (status, headers["content-type"]) == (501, "text/event-stream; charset=utf-8")
        assert (event(peer), event(peer), peer.chunk()) == ({"error": "no"}, answer(1), b"")
        script(server, 1, InferError(Code.UNSUPPORTED, "no"), "end")
        assert peer.request("POST", PATH, ASKED).head()[0] == 200
        assert (event(peer), event(peer), peer.chunk()) == (answer(1), {"error": "no"}, b"")


def test_no_response_at_all(server: Running) -> None:
    script(server)
    with server.connect() as peer:
        assert peer.request("POST", PATH, ASKED).head()[0] == 200
        assert peer.chunk() == b""


def test_what_is_wrong_before_it_runs_is_no_event(server: Running) -> None:
    with server.connect() as peer:
        status, headers, body = peer.request("POST", PATH, b'{"x": "a"}').reply()
        assert (status, headers["content-type"]) == (500, "application/json")
        assert "non-double" in json.loads(body)["error"]


def test_http_1_0_has_the_end_of_the_connection(server: Running) -> None:
    script(server, 1, 2)
    with server.connect() as peer:
        peer.send(
            b"POST %s HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(ASKED))
        )
        peer.send(ASKED)
        _, headers = peer.head()
        assert headers == {"content-type": "text/event-stream; charset=utf-8", "connection": "close"}
        text = b"".join(iter(lambda: peer.sock.recv(65536), b""))
        assert (peer._buffer + text).count(b"data: ") == 2


def test_large_events_arrive_whole(server: Running) -> None:
    script(server, 1, 2, size=300_000)
    with server.connect() as peer:
        peer.request("POST", PATH, ASKED).head()
        assert event(peer)["y"] == [1] * 300_000
        assert event(peer)["y"] == [2] * 300_000
        assert peer.chunk() == b""


@pytest.mark.parametrize("begun", [False, True])
def test_who_hangs_up_cancels(server: Running, begun: bool) -> None:
    script(server, 1, 2, turns=int(begun))
    with server.connect() as peer:
        peer.request("POST", PATH, ASKED)
        if begun:
            peer.head()
            event(peer)
        else:
            wait(server, lambda: len(server.service.asked) == 1)
    wait(server, lambda: server.service.abandoned == 1)
    wait(server, lambda: not server.server._connections)


def test_who_does_not_read_is_cancelled(server: Running) -> None:
    """Beside others, who go on; what was made for it is bounded by what the sockets hold."""
    script(server, *[1] * 100_000, size=20_000)
    with server.connect() as peer:
        peer.request("POST", PATH, ASKED).head()
        ends = time.monotonic() + 60
        while not server.call(lambda: server.service.abandoned):
            server.advance(70)  # more than its patience; while the kernel takes something there is more time
            assert time.monotonic() < ends, "in time"
        made = server.call(lambda: len(server.service.begun))
        assert made < 1000, "of 80 kB each"
        with server.connect() as other:
            assert other.request("GET", "/v2/models/many/ready").reply()[0] == 200


def test_who_reads_slowly_gets_everything(server: Running) -> None:
    script(server, *range(12), size=200_000)
    with server.connect(receive_buffer=256 << 10) as peer:
        peer.request("POST", PATH, ASKED).head()
        for value in range(12):
            if value % 2 == 0:
                server.advance(25)  # within its patience of 60 s, and well beyond it in all
            assert event(peer)["y"][0] == value
        assert peer.chunk() == b""


def test_stopping_ends_streams() -> None:
    with running() as server:
        script(server, 1, 2, turns=1)
        with server.connect() as peer:
            peer.request("POST", PATH, ASKED).head()
            event(peer)
            stopping = threading.Thread(target=lambda: server.call(lambda: server.server.stop(30)))
            stopping.start()
            go_on(server)
            assert event(peer) == answer(2)
            go_on(server)
            assert peer.chunk() == b""
            assert peer.closed()
        stopping.join(30)
        assert not stopping.is_alive()


def test_what_nobody_expected_breaks_the_connection(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    script(server, 1, RuntimeError("secret"))
    with server.connect() as peer:
        peer.request("POST", PATH, ASKED).head()
        event(peer)
        with pytest.raises(ConnectionError):
            peer.chunk()
    assert "could not be sent to its end" in caplog.text


def test_generate_wants_one(server: Running) -> None:
    path = PATH.removesuffix("_stream")
    with server.connect() as peer:
        for items in ([1], [1, "end"]):
            script(server, *items)
            status, headers, body = peer.request("POST", path, ASKED).reply()
            assert (status, headers["content-type"], json.loads(body)) == (200, "application/json", answer(1))
        for items in ([], [1, 2], [1, 2, 3], [1, InferError(Code.INTERNAL, "no"), "end"]):
            script(server, *items)
            status, error = peer.request("POST", path, ASKED).error()
            assert status == 500
            assert error == (
                "generate expects model to produce exactly 1 response, use generate stream for model that generates "
                "various number of responses"
            )
        script(server, InferError(Code.UNSUPPORTED, "no"))
        assert peer.request("POST", path, ASKED).error() == (501, "no")
    assert server.call(lambda: server.service.abandoned) == 2, "those whose second might not be the last"


def test_infer_refuses_before_it_looks_at_the_request(server: Running) -> None:
    expected = (501, "HTTP end point doesn't support models with decoupled transaction policy")
    good = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}'
    with server.connect() as peer:
        for body, headers in ((good, ()), (b"{", ()), (b"{", ("Content-Encoding: br",))):
            assert peer.request("POST", "/v2/models/many/infer", body, *headers).error() == expected
