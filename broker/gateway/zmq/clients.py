"""The ZeroMQ clients that said hello: who they are, what they have under way, and when they count as gone.

Used by `zmq.server`. No sockets and no clock: times are arguments, in seconds of one monotonic clock.
"""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

from broker.gateway.kserve import Caller
from shm.errors import Code, InferError
from shm.zmq_messages import MAX_MESSAGE, PROTOCOL, Hello, Limits, Prepare

LIMITS: Final = Limits(message_bytes=MAX_MESSAGE, requests=1024, request_bytes=64 << 20, prepared=1024)
MAX_CLIENTS: Final = 512
MISSED: Final = 3  # heartbeats
MAX_BAD: Final = 3  # messages in a row that are not of this protocol
OUTBOX_BYTES: Final = 4 << 20  # replies that wait for a client which does not read
OUTBOX_S: Final = 5.0
REMEMBERED: Final = 4096  # strangers, and sessions that ended


@final
class Client:
    """One session. `requests`: id → what cancels it. `pidfd` -1: its process cannot be watched."""

    __slots__ = (
        "bad",
        "caller",
        "heard",
        "inline",
        "next_number",
        "outbox",
        "outbox_bytes",
        "patience_s",
        "pid",
        "pidfd",
        "prepared",
        "requests",
        "routing",
        "started",
        "stuck",
        "token",
    )

    def __init__(self, routing: bytes, caller: Caller, token: str, pid: int, patience_s: float, now: float) -> None:
        self.routing = routing
        self.caller = caller
        self.token = token
        self.pid = pid
        self.pidfd = -1
        self.started = 0  # as `zmq.journal.started`
        self.patience_s = patience_s
        self.heard = now
        self.bad = 0
        self.requests: dict[int, Callable[[], Any]] = {}
        self.inline = 0  # bytes of tensors inside the requests under way
        self.prepared: dict[int, Prepare] = {}
        self.next_number = 1
        self.outbox: deque[bytes] = deque()
        self.outbox_bytes = 0
        self.stuck = now  # when the outbox last moved

    def begin(self, request: int, inline: int, cancel: Callable[[], Any]) -> None:
        """Count a request that was admitted."""
        self.requests[request] = cancel
        self.inline += inline

    def admit(self, request: int, inline: int) -> None:
        """Raises InferError when the session has too much under way, or this id already."""
        if request in self.requests:
            raise InferError(Code.INVALID_ARG, f"request {request} is still running: every id must be new")
        if len(self.requests) >= LIMITS.requests:
            raise InferError(
                Code.UNAVAILABLE, f"{LIMITS.requests} requests of this session are running: wait for some to end"
            )
        if self.requests and self.inline + inline > LIMITS.request_bytes:
            raise InferError(
                Code.UNAVAILABLE,
                f"requests of this session hold {self.inline} inline bytes, at most {LIMITS.request_bytes} may be: "
                "wait for some to end, or place tensors in a registered region",
            )

    def end(self, request: int, inline: int) -> None:
        """A request has ended."""
        self.requests.pop(request, None)
        self.inline -= inline

    def keep(self, prepared: Prepare) -> int:
        """The number of a prepared request. Raises InferError when there are too many."""
        if len(self.prepared) >= LIMITS.prepared:
            raise InferError(Code.UNAVAILABLE, f"{LIMITS.prepared} requests are prepared: release some")
        number, self.next_number = self.next_number, self.next_number + 1
        self.prepared[number] = prepared
        return number

    def put(self, data: bytes, now: float) -> bool:
        """Keep a reply until the client reads. False when it has too many already."""
        if not self.outbox:
            self.stuck = now
        self.outbox.append(data)
        self.outbox_bytes += len(data)
        return self.outbox_bytes <= OUTBOX_BYTES and len(self.outbox) <= LIMITS.requests

    def gone(self, now: float) -> str:
        """Why this client counts as gone; "" if it does not."""
        if now - self.heard > self.patience_s:
            return f"{MISSED} heartbeats missed"
        if self.outbox and now - self.stuck > OUTBOX_S:
            return "it does not read its replies"
        return ""


@final
class Clients:
    """All of one gateway. `uid`: the only one that may be a client's."""

    def __init__(self) -> None:
        self.known: dict[bytes, Client] = {}  # by routing id
        self._by_token: dict[str, Client] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # tokens of sessions that this gateway ended
        self._strangers: OrderedDict[bytes, int] = OrderedDict()  # routing id → bad messages in a row

    def welcome(
        self, routing: bytes, hello: Hello, identify: Callable[[str], Caller], pid: int, now: float
    ) -> tuple[Client, bool, Client | None]:
        """(the new client, was its session resumed, the one it takes the place of).

        `identify` makes the caller of a token; `pid`: of the peer, 0 if nobody knows. Raises InferError.
        """
        if hello.protocol != PROTOCOL:
            raise InferError(
                Code.UNSUPPORTED, f"protocol {hello.protocol} is not spoken here, only {PROTOCOL}: use a newer client"
            )
        token, resumed = hello.token, True
        if token is None or token in self._ended:
            token, resumed = secrets.token_hex(16), False
        previous = self._by_token.get(token)
        if previous is not None and not (pid and previous.pid == pid):
            raise InferError(
                Code.ALREADY_EXISTS,
                "the session of this token is another process's, and alive: say hello without a token",
            )
        if previous is None and len(self._by_token) >= MAX_CLIENTS:
            raise InferError(Code.UNAVAILABLE, f"{MAX_CLIENTS} ZeroMQ clients are connected, no more are accepted")
        caller = identify(token)
        if caller.principal is None:
            raise InferError(Code.UNAVAILABLE, "this process may not use the broker: it runs as another user")
        if previous is not None:
            self.known.pop(previous.routing, None)
        client = Client(routing, caller, token, pid, MISSED * hello.heartbeat_ms * 1e-3, now)
        self.known[routing] = self._by_token[token] = client
        self._strangers.pop(routing, None)
        return client, resumed, previous

    def adopt(self, token: str, caller: Caller, pid: int, patience_s: float, now: float) -> Client:
        """A session of the last gateway, which its client has yet to resume."""
        client = self._by_token[token] = Client(b"", caller, token, pid, patience_s, now)
        return client

    def sessions(self) -> list[Client]:
        """All, whether connected or not."""
        return list(self._by_token.values())

    def remove(self, client: Client) -> bool:
        """The session is over, and cannot be resumed. False if it was over before."""
        if self._by_token.get(client.token) is not client:
            return False
        del self._by_token[client.token]
        self.known.pop(client.routing, None)
        _remember(self._ended, client.token, None)
        return True

    def gone(self, now: float) -> list[tuple[Client, str]]:
        """Those that count as gone, and why."""
        return [(client, why) for client in self._by_token.values() if (why := client.gone(now))]

    def ignored(self, routing: bytes) -> bool:
        """Is nothing that this connection says looked at any more?"""
        return self._strangers.get(routing, 0) >= MAX_BAD

    def count_bad(self, routing: bytes) -> bool:
        """One more message in a row that is none. Was it one too many?"""
        client = self.known.get(routing)
        count = (client.bad if client else self._strangers.get(routing, 0)) + 1
        if client is not None:
            client.bad = count
        if client is None or count >= MAX_BAD:
            _remember(self._strangers, routing, count)
        return count >= MAX_BAD


def _remember(memory: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)


def watch(pid: int, uid: int) -> int:
    """A pidfd of process `pid`, which must be one of `uid`; -1 where none can be had. Raises ProcessLookupError."""
    if pid <= 0:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1
    try:
        # After pidfd_open: whoever has this number now had it then.
        if _uid(pid) == uid:
            return pidfd
    except (OSError, ValueError):
        pass
    os.close(pidfd)
    raise ProcessLookupError(pid)


def _uid(pid: int) -> int:
    # Not the owner of /proc/<pid>, which is root for a process that must not be dumped.
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    raise ValueError(pid)
