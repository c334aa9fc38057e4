"""What does a request cost here, and on another KServe v2 server, measured by the same clients in one run?

    python -m bench.compare_triton [--peer-http HOST:PORT] [--peer-grpc HOST:PORT] [--peer-pid PID] [--peer-name NAME]
                                   [--quick] [--rounds N] [--output DIR]

The peer is any running server, such as a real Triton, with a model `identity`: FP32 input `x` [-1, -1], output `y` of
the same shape. `--peer-pid` is needed to pin it. The floor of each protocol is a bare echo on the same server library
(`bench.echo`), that of the model is the model in this process. Tables, JSON and plot as from the other benchmarks.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bench.in_process import InProcess
from bench.kserve_client import Order, Outcome
from bench.measure import Row, interleave, sample, spread
from bench.models import identity
from bench.processes import CORES, START_S, Broker, Companion, free_port
from bench.report import Column, Goal, Table, machine, plot, publish
from bench.settings import Settings, parse

SIZES = {"1 KiB": 256, "1 MiB": 256 << 10, "16 MiB": 4 << 20}
MEASURE_S = 0.7
COLUMNS = (
    Column("p50 µs", "p50", ",.0f"),
    Column("p90", "p90", ",.0f"),
    Column("p99", "p99", ",.0f"),
    Column("req/s", "rate", ",.0f"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """`server`: "broker", "peer", "echo" or "in-process"."""

    server: str
    client: str
    size: str = "1 KiB"
    shm: bool = True
    clients: int = 1
    pinned: bool = False

    @property
    def name(self) -> str:
        parts = [self.server, self.client, self.size, "shm" if self.shm else "inline"]
        if self.clients > 1:
            parts.append(f"{self.clients} clients")
        return ", ".join([*parts, "pinned apart"] if self.pinned else parts)


def cases(peer: argparse.Namespace) -> list[Case]:
    found = [Case("in-process", "", size) for size in SIZES]
    for protocol in ("http", "grpc"):
        servers = ["broker"] + (["peer"] if getattr(peer, f"peer_{protocol}") else [])
        found += [Case("echo", protocol), Case("echo", protocol, pinned=True), Case("echo", protocol, clients=4)]
        for size in SIZES:
            found += [Case(server, protocol, size, shm) for shm in (True, False) for server in servers]
        found += [Case(server, protocol, size, clients=4) for size in ("1 KiB", "1 MiB") for server in servers]
        found += [Case(s, protocol, pinned=True) for s in servers if s == "broker" or peer.peer_pid]
    for client in ("native", "zmq"):
        found += [Case("broker", client, size) for size in SIZES]
        found += [Case("broker", client, clients=4), Case("broker", client, pinned=True)]
    return found


class Bench:
    """The servers' addresses and processes, and the client processes."""

    def __init__(
        self, settings: Settings, peer: argparse.Namespace, broker: Broker, stack: contextlib.ExitStack
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._clients = [stack.enter_context(Companion("bench.kserve_client")) for _ in range(4)]
        self._addresses = {
            ("broker", "http"): f"127.0.0.1:{broker.ports['http']}",
            ("broker", "grpc"): f"127.0.0.1:{broker.ports['grpc']}",
            ("broker", "native"): broker.url,
            ("broker", "zmq"): f"zmq+{broker.url}",
            ("peer", "http"): peer.peer_http,
            ("peer", "grpc"): peer.peer_grpc,
        }
        self._pids: dict[tuple[str, str], Callable[[], list[int]]] = {}
        for protocol in ("http", "grpc"):
            port = free_port()
            echo = stack.enter_context(Companion("bench.echo", protocol, str(port)))
            echo.hear()
            self._addresses["echo", protocol] = f"127.0.0.1:{port}"
            self._pids["echo", protocol] = lambda pid=echo.pid: [pid]
            self._pids["broker", protocol] = broker.pids
            self._pids["peer", protocol] = lambda: [peer.peer_pid]
        self._pids["broker", "native"] = self._pids["broker", "zmq"] = broker.pids
        self._model = InProcess(identity(1))

    def measure(self, case: Case, number: int) -> dict[str, float]:
        seconds = self._settings.seconds(MEASURE_S)
        elements = SIZES[case.size]
        if case.server == "in-process":
            memory = mmap.mmap(-1, 8 * elements)  # shared, with pages of the same size as clients' regions have
            x, y = np.frombuffer(memory, np.float32).reshape(2, 1, elements)
            x[...] = y[...] = 0
            return spread(sample(self._model.bind(x, y), seconds))._asdict()
        order = Order(
            client=case.client,
            address=self._addresses[case.server, case.client],
            model="identity",
            elements=elements,
            shm=case.shm,
            seconds=seconds,
            core=CORES[0] if case.pinned else None,
            checked=case.server != "echo",
        )
        with pinned(self._pids[case.server, case.client]() if case.pinned else []):
            outcomes = self._run(order, case.clients)
        worst = {key: float(np.median([getattr(o, key) for o in outcomes])) for key in ("p50", "p90", "p99")}
        return {**worst, "rate": sum(outcome.rate for outcome in outcomes)}

    def _run(self, order: Order, count: int) -> list[Outcome]:
        clients = self._clients[:count]
        for client in clients:
            client.tell(msgspec.json.encode(order).decode())
        for client in clients:
            client.hear()
        for client in clients:
            client.tell("go")
        return [msgspec.json.decode(client.hear(order.seconds + START_S), type=Outcome) for client in clients]


@contextlib.contextmanager
def pinned(pids: list[int]) -> Iterator[None]:
    """Every thread of `pids` on the last core."""
    tasks = [int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    try:
        for task in tasks:
            os.sched_setaffinity(task, {CORES[-1]})
        yield
    finally:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(task, CORES)


def goals(rows: list[Row[Case]]) -> list[Goal]:
    by_case = {row.case: row for row in rows}

    def p50(case: Case, key: str = "p50") -> float | None:
        row = by_case.get(case)
        return row.median(key) if row else None

    def goal(text: str, above: float | None, below: float | None, limit: float, *, least: bool = False) -> Goal:
        value = above / below if above is not None and below else None
        return Goal(text, value, (lambda v: v >= limit) if least else (lambda v: v <= limit))

    broker, peer = "broker", "peer"
    found = [
        goal(f"{c}, 1 KiB shm: at most 1.5 x the peer's p50", p50(Case(broker, c)), p50(Case(peer, c)), 1.5)
        for c in ("http", "grpc")
    ]
    found += [
        goal("http, 1 KiB shm: at most 1.3 x its bare echo", p50(Case(broker, "http")), p50(Case("echo", "http")), 1.3),
        goal("grpc, 1 KiB shm: x its bare echo (no bound)", p50(Case(broker, "grpc")), p50(Case("echo", "grpc")), 1e9),
    ]
    for c, times in (("http", 20), ("grpc", 35)):
        four = (p50(Case(s, c, clients=4), "rate") for s in (broker, peer))
        found.append(goal(f"{c}, 4 clients: at least 0.7 x the peer's requests/s", *four, 0.7, least=True))
        large = p50(Case(broker, c, "16 MiB")), p50(Case("in-process", "", "16 MiB"))
        found.append(goal(f"{c}, 16 MiB shm: at most 1.3 x in-process", *large, 1.3))
        inline = (p50(Case(s, c, "16 MiB", shm=False)) for s in (broker, peer))
        found.append(goal(f"{c}, 16 MiB inline: at most the peer's", *inline, 1.0))
        native = p50(Case(peer, c)), p50(Case(broker, "native"))
        found.append(
            goal(f"native client: at least {times} x lower p50 than {c} at the peer", *native, times, least=True)
        )
        apart = p50(Case(peer, c, pinned=True)), p50(Case(broker, "native", pinned=True))
        found.append(goal(f"the same against {c}, pinned apart: at least 25x", *apart, 25, least=True))
    zmq = p50(Case(broker, "zmq"))
    return [*found, Goal("ZeroMQ client, 1 KiB shm: p50 at most 250 µs", zmq, lambda value: value <= 250)]


def arguments() -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--peer-http", default="")
    parser.add_argument("--peer-grpc", default="")
    parser.add_argument("--peer-pid", type=int, default=0)
    parser.add_argument("--peer-name", default="the peer")
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        raise SystemExit(0)
    peer, rest = parser.parse_known_args()
    return peer, parse("This broker's front ends beside another server's", rest)


def main() -> None:
    peer, settings = arguments()
    facts = machine()
    print(facts, flush=True)
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker([identity(1)], gateway=True))
        bench = Bench(settings, peer, broker, stack)
        rows = [Row(case.name, case) for case in cases(peer)]
        interleave(rows, settings.rounds, bench.measure)
    title = (
        f"Identity FP32, one request at a time per client; peer: {peer.peer_name if peer.peer_http else 'none given'}"
    )
    table = Table(title, rows, COLUMNS)
    publish("compare_triton", settings, facts, {"requests": table}, goals(rows))
    plot("compare_triton", settings, [(table, "p50", {"p99": "p99"})], "µs")


if __name__ == "__main__":
    main()
