"""Gateway processes: started, watched, replaced; and what they say of their start.

Made by `broker.server`. A gateway is `python -m broker.gateway SESSION COUNTERS`, a child that inherits both: a session
over a socket pair, so that only what the broker itself has started can act for principals, and memory for what it
counts, which outlives it. A gateway's death costs the requests in it and nothing else. At start-up the first gateway
decides: what it cannot do (a port that is in use) ends the broker; later nothing that happens to a gateway does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Protocol, final

import msgspec

from broker.gateway.options import SOCKETS, GatewayOptions, LogOptions, TraceSetting
from broker.gateway_flags import listeners
from broker.records import Peer
from broker.supervision import BackOff, Pulse
from broker.worker_process import describe_exit
from shm.gateway_counters import GatewayCounters
from shm.gateway_messages import Exiting, Serving, Settings, Tracing
from shm.memory import written_memfd
from shm.messages import Message
from shm.sockets import close_all

ENTRY = "broker.gateway"
START_S = 60.0  # from Welcome to Serving; imports on a cold disk are slow
TRIES = 3  # starts of the first gateway before the broker gives up
LOOK_S = 1.0  # between two looks at a gateway that serves; it gives a sign of life every BEAT_S
SILENT_S = 30.0  # without one; then it is killed
LINGER_S = 2.0  # between hanging up and SIGKILL
# What gateways put into the run directory. The last two are of ZeroMQ: its socket while it is hidden, its sessions.
FILES = (*SOCKETS, "zmq.sock.hidden", "zmq.sessions")

_log = logging.getLogger(__name__)


class Session(Protocol):
    """What is used of a gateway's session."""

    peer: Peer

    def send(self, message: Message) -> None:
        """Without waiting."""

    def hang_up(self, reason: str) -> None:
        """Say Goodbye and end."""


class Sessions(Protocol):
    """Who makes the session of a child."""

    def adopt(self, connection: socket.socket, pid: int, pidfd: int, role: str) -> Session:
        """A session over the broker's end of a socket pair. Takes over `connection` and `pidfd`."""


class CannotServe(Exception):
    """The first gateway cannot do what it is there for; the text is for the log."""


def check_ports(options: GatewayOptions) -> None:
    """Are the ports free? Raises CannotServe.

    Asked without SO_REUSEPORT, with which a second broker's gateways would silently get a share of the first one's
    connections.
    """
    for service, address, port, shared in listeners(options):
        if shared and options.gateways == 1:  # --reuse-…-port
            continue
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            reason = (
                f"Socket '{address}:{port}' already in use (another by --{service.lower()}-port)"
                if error.errno == errno.EADDRINUSE
                else f"cannot listen on {address}:{port}: {error.strerror}"
            )
            raise CannotServe(f"failed to start {service} service: Unavailable - {reason}") from None


@final
class Gateways:
    """As many as `options.gateways`. `options`: what all of them are told."""

    def __init__(self, options: GatewayOptions, sessions: Sessions, *, entry: str = ENTRY) -> None:
        self._gateways = [
            _Gateway(msgspec.structs.replace(options, index=index), sessions, entry)
            for index in range(options.gateways)
        ]
        self._directory = options.directory
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all. They import what they need meanwhile, and listen when their sessions are welcome."""
        self._tasks = [
            asyncio.create_task(gateway.keep(), name=f"gateway {gateway.options.index}") for gateway in self._gateways
        ]

    @property
    def counters(self) -> list[GatewayCounters]:
        """What each gateway has counted, over all its processes; none before the start and after the end."""
        return [gateway.counters for gateway in self._gateways if gateway.counters is not None]

    async def serving(self) -> tuple[str, ...]:
        """What the first gateway says when it listens: lines for the log. Raises CannotServe."""
        if not self._gateways:
            return ()
        return await self._gateways[0].first

    def welcome(self) -> None:
        """The start-up load has ended: from now on they have `START_S` to listen."""
        for gateway in self._gateways:
            gateway.welcome()

    def on_serving(self, peer: Peer, message: Serving) -> None:
        """A gateway listens, or says why it cannot."""
        for gateway in self._gateways:
            if gateway.pid == peer.pid:
                gateway.told(message)

    def log(self, options: LogOptions) -> None:
        """What they log from now on."""
        for gateway in self._gateways:
            gateway.log(options)

    def trace(self, model: str, settings: dict[str, TraceSetting]) -> None:
        """What they trace from now on, after the settings of `model` ("": the global ones) were changed."""
        for gateway in self._gateways:
            gateway.trace(model, settings)

    def rows(self) -> list[dict[str, object]]:
        """For the status document."""
        return [gateway.row() for gateway in self._gateways]

    def exiting(self) -> None:
        """No new requests from now on; what runs ends. Each gateway ends when it has nothing left to do."""
        for gateway in self._gateways:
            gateway.exiting()

    async def ended(self, timeout: float) -> bool:  # noqa: ASYNC109  one deadline for all
        """Wait until all have ended, for at most `timeout` seconds. Did they?"""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(0.0, timeout))
        return all(task.done() for task in self._tasks)

    async def end(self) -> None:
        """Hang up; kill what does not end at once."""
        for gateway in self._gateways:
            gateway.hang_up()
        if not await self.ended(LINGER_S):
            for gateway in self._gateways:
                gateway.kill("did not end with its session")
            await self.ended(LINGER_S)
        for name in FILES if self._gateways else ():
            with contextlib.suppress(FileNotFoundError):  # a gateway that was killed leaves them
                os.unlink(os.path.join(self._directory, name))
        for gateway in self._gateways:
            gateway.close()


@final
class _Gateway:
    """One gateway, whatever happens to its processes."""

    __slots__ = (
        "_beats",
        "_entry",
        "_exiting",
        "_kill_reason",
        "_patience",
        "_process",
        "_pulse",
        "_served",
        "_session",
        "_sessions",
        "_starts",
        "_welcome",
        "counters",
        "first",
        "hangs",
        "options",
        "restarts",
    )

    def __init__(self, options: GatewayOptions, sessions: Sessions, entry: str) -> None:
        self.options = options
        self.restarts = self.hangs = 0
        self.counters: GatewayCounters | None = None
        self.first: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        self.first.add_done_callback(lambda future: future.cancelled() or future.exception())  # may not be awaited
        self._sessions = sessions
        self._entry = entry
        self._process: subprocess.Popen[bytes] | None = None
        self._session: Session | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._served = self._welcome = False
        self._exiting = asyncio.Event()
        self._kill_reason = ""
        self._starts = self._beats = 0
        self._pulse = Pulse(SILENT_S, SILENT_S, 0)

    @property
    def pid(self) -> int | None:
        """Of the process that runs."""
        return self._process.pid if self._process is not None else None

    def row(self) -> dict[str, object]:
        """For the status document."""
        state = "serving" if self._served else "starting" if self._process is not None else "waiting"
        counts = {"restarts": self.restarts, "hangs": self.hangs}
        return {"index": self.options.index, "pid": self.pid, "state": state, **counts}

    # --- life ------------------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Start it, and again after every death, until the broker exits."""
        back_off = BackOff()
        while not self._exiting.is_set():
            self._served = False
            began = time.monotonic()
            ended = await self._run()
            if self._exiting.is_set():
                break
            delay = back_off.after_death(self._served)
            if not self._served and self._starts >= TRIES:
                self._fail(f"the gateway ended {TRIES} times before it served, at last with {ended}")
            reason = f": {self._kill_reason}" if self._kill_reason else ""
            _log.error(
                "gateway %d ended after %.1f s (%s%s); the next one starts in %.1f s",
                self.options.index,
                time.monotonic() - began,
                ended,
                reason,
                delay,
            )
            self.restarts += 1
            if delay:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._exiting.wait(), delay)
        self._fail("the broker exits")

    async def _run(self) -> str:
        """One process from its start to its end. Returns how it ended."""
        self._kill_reason = ""
        self._starts += 1
        try:
            process, pidfd = self._spawn()
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, ended.set)
        self._process = process
        if self._welcome:
            self._be_patient()
        try:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), LOOK_S)
                self._look(time.monotonic_ns())
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            if not ended.is_set():
                process.kill()
            process.wait()  # it has ended: this does not block
            self._process = self._session = None
            self._stop_patience()
        return describe_exit(process.returncode).text

    def _look(self, now_ns: int) -> None:
        """Kill one that serves and whose event loop has stood still for too long: it is stopped, or stuck."""
        if not self._served or self._exiting.is_set() or self._kill_reason or self.counters is None:
            return
        beats, self._beats = self._beats, self.counters.beats
        if self._pulse.is_gone(beats != self._beats, False, now_ns):
            self.hangs += 1
            self.kill(f"gave no sign of life for {SILENT_S:g} s: stopped, or stuck")

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        # No pipe, whose writer may wait for a reader.
        options = written_memfd("tensorbroker-options", msgspec.json.encode(self.options))
        counters = self._counted()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._entry, str(theirs.fileno()), str(counters)],
                stdin=options,
                pass_fds=(theirs.fileno(), counters),
                start_new_session=True,  # Ctrl-C reaches the broker alone
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(options)
        pidfds: list[int] = []
        try:
            pidfds.append(os.pidfd_open(process.pid))
            pidfds.append(os.pidfd_open(process.pid))
            self._session = self._sessions.adopt(ours, process.pid, pidfds[1], "gateway")
        except BaseException:
            close_all(pidfds)
            ours.close()
            process.kill()
            process.wait()
            raise
        return process, pidfds[0]

    # --- what it says, and what it is told --------------------------------------------------------------------------

    def welcome(self) -> None:
        """The start-up load has ended."""
        self._welcome = True
        if self._process is not None:
            self._be_patient()

    def told(self, message: Serving) -> None:
        """It listens, or says why it cannot."""
        self._stop_patience()
        if message.error:
            if self.first.done() or self.options.index:  # else it is the broker's own error
                _log.error("gateway %d: %s", self.options.index, message.error)
            self._fail(message.error)
            return
        self._served = True
        self._pulse = Pulse(SILENT_S, SILENT_S, time.monotonic_ns())
        if self.first.done():
            _log.info("gateway %d serves again", self.options.index)
        else:
            self.first.set_result(message.lines)

    def log(self, options: LogOptions) -> None:
        """What it logs from now on, and its successors."""
        self.options = msgspec.structs.replace(self.options, log=options)
        if self._session is not None:
            self._session.send(Settings(settings=msgspec.to_builtins(options)))

    def trace(self, model: str, settings: dict[str, TraceSetting]) -> None:
        """What it traces from now on, and its successors."""
        table = msgspec.structs.replace(self.options.trace, settings=settings)
        self.options = msgspec.structs.replace(self.options, trace=table)
        if self._session is not None:
            self._session.send(Tracing(model=model, settings=settings))

    def exiting(self) -> None:
        """It is not replaced any more."""
        self._exiting.set()
        if self._session is not None:
            self._session.send(Exiting())

    def hang_up(self) -> None:
        """End the session, and with it the process."""
        if self._session is not None and self._process is not None:
            self._session.hang_up("the broker is shutting down")

    def kill(self, reason: str) -> None:
        """SIGKILL; a process that was not reaped yet keeps its pid."""
        if self._process is not None:
            self._kill_reason = reason
            self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Give back what outlives processes: there is none any more, and there will be none."""
        if self.counters is not None:
            self.counters.close()
            self.counters = None

    def _counted(self) -> int:
        if self.counters is None:
            self.counters = GatewayCounters.create()
        return self.counters.fd

    def _fail(self, reason: str) -> None:
        if not self.first.done():
            self.first.set_exception(CannotServe(reason))

    def _be_patient(self) -> None:
        self._stop_patience()
        late = f"did not serve within {START_S:.0f} s"
        self._patience = asyncio.get_running_loop().call_later(START_S, self.kill, late)

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
