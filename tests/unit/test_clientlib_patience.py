"""What a request with a short deadline needs of the broker is had all the same, by it or by the next one."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import numpy as np
import pytest
from msgspec import structs

import clientlib
from clientlib import patience, sync_session
from clientlib.patience import AGAIN_S, SETUP_S, Patience
from clientlib.session import Call
from clientlib.sync_session import SyncSession
from shm import messages, sockets
from shm.errors import InferError
from tests.fakes.small_broker import connect

X = {"x": np.ones((1, 2), np.float32)}
SETTING_UP = {"GetModel", "Prepare", "OpenChannel", "RegisterPool"}


def test_a_set_up_may_take_a_second_longer_than_a_short_deadline() -> None:
    held = Patience()
    assert held.until(10.001, 10.0) == 10.0 + SETUP_S
    assert held.until(90.0, 10.0) == 90.0


def test_where_that_was_in_vain_deadlines_are_kept_for_a_while() -> None:
    held = Patience()
    held.given_up(10.001, 11.0, 10.5)  # something else was wrong
    held.given_up(11.0, 11.0, 11.0)  # it did not wait beyond the deadline
    assert held.until(11.1, 11.1) == 11.1 + SETUP_S
    held.given_up(10.001, 11.0, 11.0)
    assert held.until(11.1, 11.1) == 11.1
    assert held.until(0.0, 11.0 + AGAIN_S) == 11.0 + AGAIN_S + SETUP_S


def test_the_first_request_of_a_thread_makes_the_next_one_ready(monkeypatch, client, small_broker) -> None:
    """However short its deadline."""
    monkeypatch.setattr(patience, "SETUP_S", 60.0)
    with pytest.raises(InferError, match="timeout expired"):
        client.infer("double", X, timeout=1e-6)
    assert set(small_broker.calls) >= SETTING_UP
    small_broker.calls.clear()
    assert client.infer("double", X)["y"].tolist() == [[2, 2]]
    assert not SETTING_UP & set(small_broker.calls)


def test_it_reaches_a_new_broker_too(monkeypatch, client, small_broker) -> None:
    monkeypatch.setattr(patience, "SETUP_S", 60.0)
    client.infer("double", X)
    small_broker.stop()
    small_broker.start()
    small_broker.calls.clear()
    with pytest.raises(InferError):  # its channel's end, or its own
        client.infer("double", X, timeout=1e-6)
    with pytest.raises(InferError, match="timeout expired"):
        client.infer("double", X, timeout=1e-6)
    assert small_broker.calls.count("Hello") == 1
    assert client.infer("double", X)["y"].tolist() == [[2, 2]]
    assert small_broker.calls.count("Hello") == 1


def test_a_broker_that_does_not_answer_costs_one_wait(monkeypatch, small_broker) -> None:
    monkeypatch.setattr(patience, "SETUP_S", 0.05)
    monkeypatch.setattr(patience, "AGAIN_S", 3600.0)
    small_broker.answers["GetModel"] = lambda asked: None
    with connect(small_broker) as client:
        with pytest.raises(InferError, match="no answer to GetModel"):
            client.infer("double", X, timeout=1e-6)
        now = time.monotonic()
        assert client._patience.until(now, now) == now
        with pytest.raises(InferError, match="no answer to GetModel"):
            client.infer("double", X, timeout=1e-6)


def awaited(small_broker, test) -> None:
    """`await test(client)` on an event loop of its own."""

    async def main() -> None:
        async with asyncio.timeout(60), await clientlib.connect_async(f"ipc://{small_broker.directory}") as client:
            await test(client)

    asyncio.run(main())


def test_on_an_event_loop_the_first_request_makes_the_next_one_ready(monkeypatch, small_broker) -> None:
    monkeypatch.setattr(patience, "SETUP_S", 60.0)

    async def test(client: clientlib.AsyncClient) -> None:
        first, second = (client.infer("double", X, timeout=1e-6) for _ in range(2))
        for error in await asyncio.gather(first, second, return_exceptions=True):
            assert "timeout expired" in str(error)
        assert set(small_broker.calls) >= SETTING_UP
        assert small_broker.calls.count("Prepare") == 1
        small_broker.calls.clear()
        assert (await client.infer("double", X))["y"].tolist() == [[2, 2]]
        assert not SETTING_UP & set(small_broker.calls)

    awaited(small_broker, test)


def test_on_an_event_loop_a_broker_that_does_not_answer_costs_one_wait(monkeypatch, small_broker) -> None:
    monkeypatch.setattr(patience, "SETUP_S", 0.05)
    monkeypatch.setattr(patience, "AGAIN_S", 3600.0)
    small_broker.answers["GetModel"] = lambda asked: None

    async def test(client: clientlib.AsyncClient) -> None:
        for _ in range(2):
            with pytest.raises(InferError, match="no answer to GetModel"):
                await client.infer("double", X, timeout=1e-6)
            now = client.loop.time()
            assert client._reach._patience.until(now, now) == now

    awaited(small_broker, test)


def test_a_channel_that_comes_late_is_the_next_requests(monkeypatch, client, small_broker) -> None:
    region = client.create_region("r", 4096)
    plan = client.prepare("double", {"x": region.tensor((1, 2), "FP32")})
    monkeypatch.setattr(patience, "SETUP_S", 0.0)
    with pytest.raises(InferError):
        plan.infer(timeout=1e-6)
    client.models()  # reads the answers to what came before
    assert plan.infer(timeout=60)["y"].tolist() == [[0, 0]]
    assert small_broker.calls.count("OpenChannel") == 1
    assert not small_broker.closed
    thread = threading.Thread(target=plan.infer)
    thread.start()
    thread.join(60)
    assert small_broker.calls.count("OpenChannel") == 2


def test_threads_leave_the_broker_no_more_questions_than_it_takes(monkeypatch) -> None:
    monkeypatch.setattr(sync_session, "CALLS", 2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    session = SyncSession(ours, "/run")
    asked: list[int] = []

    def ask() -> int:
        """How many have come, when one more was given up."""
        with pytest.raises(InferError, match="no answer to GetModels"):
            session.call(Call(messages.GetModels()), time.monotonic() + 0.01)
        try:
            while (received := sockets.receive(theirs)) is not None:
                asked.append(messages.decode_request(received[0]).id)
        except BlockingIOError:
            pass
        return len(asked)

    assert [ask(), ask(), ask()] == [1, 2, 2]
    sockets.send(theirs, messages.encode(structs.replace(messages.Models(models=()), id=asked[0])))
    assert [ask(), ask()] == [3, 3]
    session.close()
    theirs.close()
