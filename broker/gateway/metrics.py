"""The metrics service: `GET /metrics` in Prometheus's text, as on Triton's port 8002.

Made by `broker.gateway.process` in the first gateway. Connections and their limits are `http.connection`'s, the text is
`exposition`'s, the numbers are the broker's.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, final

from broker.gateway import exposition
from broker.gateway.http.connection import Connection
from broker.gateway.http.errors import METHOD_NOT_ALLOWED
from broker.gateway.http.incoming import Incoming
from broker.gateway.http.limits import Patience
from broker.gateway.http.message import Reply, text_reply
from broker.gateway.options import GatewayOptions
from shm.errors import Code, InferError

PATHS: Final = ("/metrics", "/metrics/")
TEXT: Final = "text/plain; charset=utf-8"
MAX_CONNECTIONS: Final = 64
SWEEP_S: Final = 0.5


class Service(Protocol):
    """Who has the numbers."""

    async def metrics(self) -> dict[str, Any]:
        """The document of `broker.metrics`. Raises InferError."""


@final
class MetricsServer:
    """One gateway's. Nothing is restricted here, as in Triton: the port is loopback's unless --metrics-address says so.

    Raises InferError INVALID_ARG for a --metrics-config that cannot be followed.
    """

    def __init__(self, service: Service, options: GatewayOptions, *, patience: Patience | None = None) -> None:
        self._service = service
        self._options = options
        try:
            self._config = exposition.Config.parse(options.metrics_config)
        except ValueError as error:
            raise InferError(Code.INVALID_ARG, f"invalid --metrics-config: {error}") from None
        self._host = HostUsage(options.metrics_interval_ms / 1000) if options.cpu_metrics else None
        self._listener: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._none: asyncio.Event | None = None  # when stopping: no connection is left
        self._sweeper: asyncio.TimerHandle | None = None
        self._scrape: asyncio.Task[bytes] | None = None
        self.limit = 0
        self.patience = patience or Patience()

    async def start(self) -> list[str]:
        """Listen. Returns a line for the log; raises InferError when the address cannot be had."""
        self._loop = asyncio.get_running_loop()
        host, port = self._options.metrics_address, self._options.metrics_port
        try:
            self._listener = await self._loop.create_server(
                lambda: Connection(self, self._loop), host, port, backlog=MAX_CONNECTIONS
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InferError(Code.UNAVAILABLE, f"Socket '{host}:{port}' already in use ") from None
            raise InferError(Code.UNAVAILABLE, f"cannot listen on '{host}:{port}': {error}") from None
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        return [f"Started Metrics Service at {host}:{port}"]

    async def stop(self, grace_s: float) -> None:
        """Listen no more; a scrape that is under way has `grace_s` seconds."""
        if self._listener is not None:
            self._listener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._scrape is not None:
            await asyncio.wait([self._scrape], timeout=grace_s)
            self._scrape.cancel()
        for connection in list(self._connections):
            connection.finish()
            connection.abort()
        if self._connections:  # transports say so on the next turn of the loop
            self._none = asyncio.Event()
            await self._none.wait()

    # --- for connections: `http.connection.Owner` ------------------------------------------------------------------

    def admit(self, connection: Connection) -> Reply | None:
        """Count it, or say why not."""
        if len(self._connections) >= MAX_CONNECTIONS:
            return text_reply(503, f"too many connections: this port takes {MAX_CONNECTIONS} at a time")
        self._connections.add(connection)
        return None

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._connections.discard(connection)
        if not self._connections and self._none is not None:
            self._none.set()

    def reserve(self, size: int) -> None:
        """Nobody reads a body here."""

    def release(self, size: int) -> None:
        """Nothing was reserved."""

    async def answer(self, incoming: Incoming) -> Reply:
        """The metrics; 200 and nothing on any other path, as in Triton."""
        if incoming.path not in PATHS:
            return Reply(content_type=TEXT)
        if incoming.message.method not in ("GET", "HEAD"):
            return text_reply(405, METHOD_NOT_ALLOWED)
        return Reply(parts=(await self._exposition(),), content_type=TEXT)

    async def _exposition(self) -> bytes:
        """Whoever asks while it is made gets the same: scrapes cost the broker no more than one at a time."""
        if self._scrape is None or self._scrape.done():
            self._scrape = self._loop.create_task(self._make())
        return await asyncio.shield(self._scrape)

    async def _make(self) -> bytes:
        document = await self._service.metrics()
        if not self._options.gpu_metrics:
            document = {**document, "gpus": {}}
        host = self._host() if self._host is not None else {}
        # Hundreds of models take tens of milliseconds: requests go on meanwhile.
        return await asyncio.to_thread(exposition.text, document, self._config, host)

    def _sweep(self) -> None:
        now = self._loop.time()
        self._sweeper = self._loop.call_at(now + SWEEP_S, self._sweep)
        for connection in [each for each in self._connections if each.deadline <= now]:
            connection.expire()


@final
class HostUsage:
    """Triton's nv_cpu_… gauges. Utilization is that between two looks, at least `interval_s` apart."""

    def __init__(
        self, interval_s: float, *, clock: Callable[[], float] = time.monotonic, proc: Path = Path("/proc")
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._proc = proc
        self._looked = clock()
        self._busy, self._total = self._jiffies()
        self._utilization = 0.0

    def __call__(self) -> Mapping[str, float]:
        """The gauges of this moment, by name."""
        if self._clock() - self._looked >= self._interval_s:
            busy, total = self._jiffies()
            if total > self._total:
                self._utilization = (busy - self._busy) / (total - self._total)
            self._looked, self._busy, self._total = self._clock(), busy, total
        memory = self._memory()
        return {
            "nv_cpu_utilization": self._utilization,
            "nv_cpu_memory_total_bytes": memory["MemTotal"],
            "nv_cpu_memory_used_bytes": memory["MemTotal"] - memory["MemAvailable"],
        }

    def _jiffies(self) -> tuple[int, int]:
        """Busy and all, of all processors, since the start of the host: proc(5)."""
        user, nice, system, idle, wait, *rest = map(int, self._read("stat").partition("\n")[0].split()[1:9])
        busy = user + nice + system + sum(rest)
        return busy, busy + idle + wait

    def _memory(self) -> dict[str, int]:
        lines = (line.split() for line in self._read("meminfo").splitlines())
        return {name.rstrip(":"): int(number) * 1024 for name, number, *_ in lines}

    def _read(self, name: str) -> str:
        return (self._proc / name).read_text(encoding="ascii")
