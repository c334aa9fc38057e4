"""A broker with its network front ends on ports of its own, for tests; and the plainest of HTTP clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.broker import Broker

FLAGS = ("http", "grpc", "metrics")


LOWEST_PORT = 10_000


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment, and that the kernel gives to no connection until somebody does.

    A client that tries a port of the kernel's own range again and again may get that very port, and connect to itself.
    """
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    chance = random.SystemRandom()
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = chance.randrange(LOWEST_PORT, kernels) if kernels > 2 * LOWEST_PORT else 0
            with contextlib.suppress(OSError):  # taken
                taken = stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(taken.getsockname()[1])
        return found


class Gateway(Broker):
    """`tensorbroker serve` with a gateway; `ports` by protocol ("http", "grpc", "metrics")."""

    def __init__(
        self,
        repository: Path,
        directory: Path,
        *flags: str,
        before: Callable[[], None] | None = None,
        gateways: int = 1,
        ports: dict[str, int] | None = None,
    ) -> None:
        """`ports`: those of one that has ended."""
        self.ports = ports or dict(zip(FLAGS, free_ports(len(FLAGS)), strict=True))
        listen = tuple(f"--{name}-port={port}" for name, port in self.ports.items())
        super().__init__(repository, directory, f"--gateways={gateways}", *listen, *flags, before=before)

    def get(self, path: str, service: str = "http") -> tuple[int, bytes]:
        """Status and body; status 0 when nobody listens or the connection broke."""
        return self._request("GET", path, None, service)

    def post(self, path: str, document: dict[str, Any]) -> tuple[int, Any]:
        """Status and the JSON that came, likewise."""
        status, body = self._request("POST", path, json.dumps(document).encode(), "http")
        return status, json.loads(body) if body else None

    def _request(self, method: str, path: str, body: bytes | None, service: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[service], timeout=30)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def gateways(self) -> list[dict[str, object]]:
        """What the status document says of gateways."""
        rows: list[dict[str, object]] = self.status()["gateways"]
        return rows


def url_of(broker: Gateway, transport: str) -> str:
    match transport:
        case "native":
            return f"ipc://{broker.directory}"
        case "zmq":
            return f"zmq+ipc://{broker.directory}"
    return f"{transport}://127.0.0.1:{broker.ports[transport]}"
