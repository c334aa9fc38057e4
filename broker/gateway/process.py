"""The life of a gateway process: from its options to its listeners, and to the end of its session with the broker.

    options from stdin → session (the inherited socket), imports meanwhile → Welcome → front ends listen → Serving
    Exiting → new requests are refused → what runs ends → front ends stop → exit 0
    session ended → exit

Started by `broker.gateways`. The broker alone ends it: one that died by the terminal's or the init system's signal
would take its clients' requests along.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, final

import msgspec

from broker import logs
from broker.gateway.access import Access
from broker.gateway.memory import keep_trimmed
from broker.gateway.options import GatewayOptions, LogOptions, TraceSetting
from broker.gateway.peers import Peers, grpc_listeners
from broker.gateway.service import GatewayService
from clientlib.async_client import AsyncClient
from shm.errors import ConnectionLost, InferError
from shm.gateway_counters import BEAT_S, GatewayCounters
from shm.gateway_messages import Exiting, Serving, Settings, Tracing
from shm.messages import Goodbye, Message
from shm.prctl import PR_SET_NAME, PR_SET_PDEATHSIG, prctl, undumpable

SLOTS = 1024  # requests of this gateway in flight on one worker; more wait
WELCOME_S = 7 * 86400.0  # a start-up load takes what it takes; the broker's end ends the wait
STOP_S = 2.0  # for front ends to pass on the last answers
MAX_TEXT = 4096  # characters of a `Serving`'s texts

_log = logging.getLogger(__name__)


class FrontEnd(Protocol):
    """One network protocol."""

    async def start(self) -> list[str]:
        """Listen. Returns a line for the log per address; raises InferError, OSError when one cannot be had."""

    async def stop(self, grace_s: float) -> None:
        """Listen no more, and end what is left after `grace_s` seconds."""


class CannotServe(Exception):
    """What this gateway is there for cannot be done; the text is for the operator."""


Make = Callable[[GatewayService, Peers], FrontEnd]


def load(options: GatewayOptions) -> list[Make]:
    """Import the front ends that `options` ask for, in the order in which Triton starts them. Raises CannotServe.

    The first gateway alone has metrics and ZeroMQ, whose addresses cannot be shared.
    """
    make: list[Make] = []
    try:
        if options.grpc_port:
            from broker.gateway.grpc.server import GrpcServer

            for address in (listeners := grpc_listeners(options.grpc_address)):
                make.append(_grpc(GrpcServer, options, address, alone=len(listeners) == 1))
        if options.http_port:
            from broker.gateway.http.server import HttpServer

            make.append(lambda service, peers: HttpServer(service, options, peers.http_caller))
        if options.metrics_port and not options.index:
            from broker.gateway.metrics import MetricsServer

            make.append(lambda service, peers: MetricsServer(service, options))
        if options.zmq and not options.index:
            from broker.gateway.zmq.server import ZmqServer

            make.append(lambda service, peers: ZmqServer(service, options, peers.zmq_caller))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "broker", "clientlib", "shm"):
            raise
        raise CannotServe(
            f"the gateway needs the package '{package}', which is not installed: pip install 'tensorbroker[gateway]', "
            "or start without a gateway, for clientlib on this host alone: --gateways=0"
        ) from None
    return make


def _grpc(server: Callable[..., FrontEnd], options: GatewayOptions, address: str, *, alone: bool) -> Make:
    """One of --grpc-address's servers (`peers.grpc_listeners`); the first of them has the Unix socket, too."""
    of_address = msgspec.structs.replace(
        options,
        grpc_address=address,
        grpc_reuse_port=options.grpc_reuse_port or not alone,
        directory=options.directory if address == options.grpc_address else "",
    )
    return lambda service, peers: server(service, of_address, peers.grpc_callers(address, options.grpc_port))


def main(fd: int, counters: int) -> int:
    """A gateway on the session socket `fd`, with the memory behind `counters`. Returns the exit status."""
    options = msgspec.json.decode(sys.stdin.buffer.read(), type=GatewayOptions)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a broker that died before this line shows as end of file
    prctl(PR_SET_NAME, b"tb-gateway")
    undumpable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logs.set_up(options.log)
    runner = asyncio.Runner()
    try:
        return runner.run(Gateway(options, GatewayCounters(counters)).run(socket.socket(fileno=fd)))
    finally:
        with contextlib.suppress(RuntimeError):  # the threads of its executor are ended by one that may not start
            runner.close()


@final
class Gateway:
    """One gateway. Make it inside a running loop."""

    def __init__(self, options: GatewayOptions, counters: GatewayCounters) -> None:
        self._options = options
        self._counters = counters
        self._exiting = asyncio.Event()
        self._service: GatewayService | None = None
        self._traced: dict[str, TraceSetting] | None = None  # what was changed while there was none
        self._front_ends: list[FrontEnd] = []

    async def run(self, sock: socket.socket) -> int:
        """Serve until the broker has had enough. Returns the exit status."""
        loop = asyncio.get_running_loop()
        importing = loop.run_in_executor(None, load, self._options)  # a second of it, while the broker loads models
        alone = self._options.gateways == 1
        adopting = loop.create_task(
            AsyncClient.adopt(sock, slots=SLOTS, timeout=WELCOME_S, alone=alone, on_notice=self._notice), name="adopt"
        )
        await _first(asyncio.wait((adopting,)), self._exiting.wait())
        if not adopting.done() or isinstance(adopting.exception(), InferError):
            os._exit(0)  # the broker ends before it began; imports cannot be interrupted
        client = adopting.result()
        try:
            makers = await importing
            service = self._service = self._make_service(client)
            lines = await self._listen(service, makers)
        except CannotServe as error:
            await self._stop()
            return await self._say(client, Serving(error=str(error)[:MAX_TEXT])) or 1
        if await self._say(client, Serving(lines=tuple(line[:MAX_TEXT] for line in lines))):
            return 1
        await _first(self._exiting.wait(), client.lost.wait(), keep_trimmed(), self._keep_beating())
        if not client.lost.is_set():
            await self._drain(service, client)
        await client.close()
        await asyncio.to_thread(service.traces.close)
        return 0

    async def _keep_beating(self) -> None:
        """For ever: show the broker that the event loop goes round."""
        while True:
            self._counters.beat()
            await asyncio.sleep(BEAT_S)

    def _make_service(self, client: AsyncClient) -> GatewayService:
        access = Access(self._options.http_restricted, self._options.grpc_restricted)
        service = GatewayService(client, self._options, access)
        service.on_ended = self._counters.count
        service.on_copied = self._counters.copied
        if self._traced is not None:
            service.traces.apply("", self._traced)
        return service

    async def _listen(self, service: GatewayService, makers: Sequence[Make]) -> list[str]:
        options = self._options
        peers = Peers(options.broker_uid)
        lines: list[str] = []
        try:
            for make in makers:
                front_end = make(service, peers)
                self._front_ends.append(front_end)
                lines += await front_end.start()
        except InferError as error:
            raise CannotServe(error.message) from None
        except Exception as error:
            _log.exception("a front end cannot be started")
            raise CannotServe(f"a front end cannot be started: {error}") from None
        return lines

    async def _stop(self) -> None:
        """Every front end, whether or not it was started."""
        stops = (front_end.stop(STOP_S) for front_end in self._front_ends)
        for error in await asyncio.gather(*stops, return_exceptions=True):
            if error is not None:
                _log.error("a front end could not be stopped: %r", error)

    async def _drain(self, service: GatewayService, client: AsyncClient) -> None:
        """Wait for what runs (as long as the broker does), then stop listening. New requests are refused meanwhile."""
        await _first(service.idle(), client.lost.wait())
        await self._stop()

    async def _say(self, client: AsyncClient, message: Serving) -> int:
        try:
            await client.call(message)
        except ConnectionLost:
            return 1
        return 0

    def _notice(self, message: Message) -> None:
        """What the broker says unasked."""
        match message:
            case Exiting():
                self._exiting.set()
                if self._service is not None:
                    self._service.exiting = True
            case Goodbye(reason=reason) if not self._exiting.is_set():
                _log.warning("the broker hung up: %s", reason)
            case Tracing(model=model, settings=traced):
                self._traced = traced
                if self._service is not None:
                    self._service.traces.apply(model, traced)
            case Settings(settings=settings):
                logs.set_up(msgspec.convert(settings, LogOptions))


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of them has ended; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
