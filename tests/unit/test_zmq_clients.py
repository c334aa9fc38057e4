"""Who the ZeroMQ clients are and when they count as gone, by a clock that is an argument."""

from __future__ import annotations

import os

import pytest

from broker.gateway.kserve import Caller
from broker.gateway.zmq import clients as zmq_clients
from broker.gateway.zmq.clients import Client, Clients, watch
from shm.errors import InferError
from shm.message_values import Principal
from shm.zmq_messages import Hello


def identify(token: str) -> Caller:
    return Caller("zmq", Principal(uid=1, scope=f"zmq:{token}"))


def admit(
    clients: Clients, routing: bytes = b"a", token: str | None = None, pid: int = 5, now: float = 0.0, **hello: int
) -> tuple[Client, bool, Client | None]:
    return clients.welcome(routing, Hello(id=1, protocol=1, token=token, **hello), identify, pid, now)


def test_a_new_session_has_a_token_that_nobody_chose() -> None:
    clients = Clients()
    first, resumed, previous = admit(clients)
    second, *_ = admit(clients, b"b")
    assert not resumed
    assert previous is None
    assert len(first.token) == 32
    assert first.token != second.token
    assert first.caller.principal == Principal(uid=1, scope=f"zmq:{first.token}")


def test_another_protocol_is_refused() -> None:
    with pytest.raises(InferError, match="protocol 2 is not spoken here, only 1"):
        Clients().welcome(b"a", Hello(id=1, protocol=2), identify, 5, 0.0)


def test_a_peer_without_a_principal_is_refused() -> None:
    with pytest.raises(InferError, match="another user"):
        Clients().welcome(b"a", Hello(id=1, protocol=1), lambda token: Caller("zmq"), 5, 0.0)


def test_three_missed_heartbeats() -> None:
    clients = Clients()
    client, *_ = admit(clients, heartbeat_ms=1000)
    assert clients.gone(3.0) == []
    client.heard = 1.0
    assert clients.gone(4.0) == []
    assert clients.gone(4.1) == [(client, "3 heartbeats missed")]


def test_a_client_that_does_not_read() -> None:
    client, *_ = admit(Clients(), heartbeat_ms=60_000)
    assert client.put(b"reply", 10.0)
    assert client.gone(15.0) == ""
    assert client.gone(15.1) == "it does not read its replies"
    assert not client.put(bytes(zmq_clients.OUTBOX_BYTES), 15.0)


def test_a_token_of_before_the_gateway_was_restarted_is_resumed() -> None:
    token = "0" * 32
    client, resumed, previous = admit(Clients(), token=token)
    assert (client.token, resumed, previous) == (token, True, None)


def test_a_session_that_ended_is_not_resumed() -> None:
    clients = Clients()
    client, *_ = admit(clients)
    assert clients.remove(client)
    assert not clients.remove(client)
    again, resumed, _ = admit(clients, token=client.token)
    assert not resumed
    assert again.token != client.token


def test_the_same_process_takes_its_session_over() -> None:
    clients = Clients()
    client, *_ = admit(clients, b"a")
    again, resumed, previous = admit(clients, b"b", token=client.token)
    assert resumed
    assert previous is client
    assert list(clients.known) == [b"b"]
    assert not clients.remove(client), "the old one's end is not the session's"
    assert clients.remove(again)


@pytest.mark.parametrize("pid", [6, 0])
def test_nobody_else_takes_a_live_session(pid: int) -> None:
    clients = Clients()
    client, *_ = admit(clients)
    with pytest.raises(InferError, match="another process's, and alive") as caught:
        admit(clients, b"b", token=client.token, pid=pid)
    assert caught.value.code == "ALREADY_EXISTS"
    assert list(clients.known.values()) == [client]


def test_only_so_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_clients, "MAX_CLIENTS", 2)
    clients = Clients()
    first, *_ = admit(clients, b"a")
    admit(clients, b"b")
    with pytest.raises(InferError, match="no more are accepted"):
        admit(clients, b"c")
    admit(clients, b"d", token=first.token)  # one that reconnects is no further one


def test_only_so_much_under_way() -> None:
    client, *_ = admit(Clients())
    client.admit(1, 65 << 20)  # alone, any size
    client.begin(1, 40 << 20, lambda: None)
    with pytest.raises(InferError, match="still running"):
        client.admit(1, 0)
    with pytest.raises(InferError, match="inline bytes"):
        client.admit(2, 30 << 20)
    client.end(1, 40 << 20)
    assert client.inline == 0
    for request in range(1024):
        client.admit(request, 0)
        client.begin(request, 0, lambda: None)
    with pytest.raises(InferError, match="1024 requests") as caught:
        client.admit(1024, 0)
    assert caught.value.code == "UNAVAILABLE"


def test_three_bad_messages_in_a_row() -> None:
    clients = Clients()
    assert [clients.count_bad(b"s") for _ in range(3)] == [False, False, True]
    assert clients.ignored(b"s")
    assert not clients.ignored(b"t")
    client, *_ = admit(clients)
    assert not clients.count_bad(b"a")
    assert not clients.count_bad(b"a")
    client.bad = 0  # a good one came
    assert not clients.count_bad(b"a")
    assert not clients.ignored(b"a")


def test_memory_of_strangers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_clients, "REMEMBERED", 10)
    clients = Clients()
    for number in range(1000):
        clients.count_bad(str(number).encode())
    assert len(clients._strangers) == 10


def test_watching_a_process() -> None:
    with pytest.raises(ProcessLookupError):
        watch(os.getpid(), os.getuid() + 1)
    with pytest.raises(ProcessLookupError):
        watch(2**22 + 1, os.getuid())  # above the kernel's pid_max
    assert watch(0, os.getuid()) == -1
    pidfd = watch(os.getpid(), os.getuid())
    assert pidfd >= 0
    os.close(pidfd)
