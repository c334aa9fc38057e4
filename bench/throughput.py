"""How many requests per second, and does dynamic batching keep up with the best batch in-process?

    python -m bench.throughput [--quick] [--rounds N] [--output DIR]

Load comes from processes of their own (`bench.load`). The floor of a tiny model is the same model in this process, a
row at a time or 64 rows at a time. That of a network is the best of all ways to use the same cores: batches no larger
than the requests in flight, by one session with a thread per core or by as many sessions with one thread each; the best
batch of one session has a column of its own. It reads as many different images as there are requests in flight: one
that is in the caches from the run before would be 3 to 5 % faster than any camera's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np

import clientlib
from bench.in_process import InProcess
from bench.load import Order, Outcome
from bench.measure import LEAST, Row, interleave, sample
from bench.models import NETWORKS, Model, identity, network
from bench.processes import START_S, Broker, Companion, cpu_seconds
from bench.report import Column, Goal, Table, machine, plot, publish
from bench.settings import Settings, parse

ROW = 256  # FP32 elements: 1 KiB
BATCHED = 64
IN_FLIGHT = 64
AWAITED = 500
PROCESSES = (1, 2, 4, 8)
BATCHES = (1, 2, 4, 8)
TINY_S, NETWORK_S, BATCH_S = 1.0, 3.0, 1.0
QUEUE_DELAY_US = 2000
THREADS = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Case:
    """`processes` clients with `in_flight` requests each. `processes` 0: in this process, its threads spinning."""

    model: str
    processes: int
    in_flight: int
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """In this process: batches of `batch` out of `rows` different rows, by `sessions` threads with a session each."""

    model: str
    batch: int
    sessions: int
    rows: int
    spin: bool = False


def models_of(sources: Sequence[str]) -> dict[str, Model]:
    """What the broker serves, by name."""
    models = [
        identity(ROW, "one_by_one", 1),
        identity(ROW, "batched", BATCHED),
        *(network(source, THREADS, size, QUEUE_DELAY_US) for source in sources for size in (2, 4, 8)),
        *(network(source, 1, size, 0, THREADS) for source in sources for size in (4, 8)),
    ]
    return {model.name: model for model in models}


def tiny_cases() -> dict[str, Case]:
    cases = {}
    for model, text in (("one_by_one", "one by one"), ("batched", "batched")):
        for count in PROCESSES:
            cases[f"{text}, {count} client process{'es' if count > 1 else ''}"] = Case(model, count, IN_FLIGHT)
        cases[f"{text}, {AWAITED} awaited on one event loop"] = Case(model, 1, AWAITED, awaited=True)
    return cases


def network_cases(sources: Sequence[str]) -> dict[str, Case]:
    cases = {}
    for source in sources:
        for count in (4, 8):
            name = f"{source}, {count} clients, batches ≤ {count}, an instance per core"
            cases[name] = Case(f"{source}_{count}_by_{THREADS}", count, 1)
        for clients, limit in ((4, 4), (4, 2), (8, 8), (8, 4)):
            cases[f"{source}, {clients} clients, batches ≤ {limit}"] = Case(f"{source}_{limit}", clients, 1)
        cases[f"{source}, in-process, spinning threads"] = Case(f"{source}_8", 0, 8)
    return cases


COLUMNS = (
    Column("req/s", "rate", ",.1f"),
    Column("in-process", "floor", ",.1f"),
    Column("its batch", "floor batch", ".0f"),
    Column("ratio", "ratio", ".3f"),
    Column("to one session", "ratio to one", ".3f"),
    Column("µs/request", "cost", ",.1f"),
    Column("above floor", "above", "+,.1f"),
    Column("mean batch", "batch", ".2f"),
    Column("copied B/request", "copied", ",.0f"),
    Column("worker CPU µs", "worker cpu", ",.1f"),
    Column("client CPU µs", "client cpu", ",.1f"),
)


class Bench:
    """What all rows share: a control connection, the client processes, and the sessions of the floor."""

    def __init__(self, broker: Broker, models: dict[str, Model], clients: list[Companion], settings: Settings) -> None:
        self._models = models
        self._clients = clients
        self._settings = settings
        self._workers = {model.name: broker.worker(model.group) for model in models.values()}
        self._control = clientlib.connect(broker.url)
        self._sessions: dict[tuple[str, int, int, bool], InProcess] = {}  # by source, threads, number, spinning
        # By model, largest batch, most sessions, spinning:
        self._ways: dict[tuple[str, int, int, bool], tuple[int, int]] = {}
        self._floors: dict[Way, float] = {}
        self._round = -1

    def close(self) -> None:
        self._control.close()

    def measure(self, case: Case, number: int) -> dict[str, float]:
        if number != self._round:  # floors are measured again in every round
            self._round, self._floors = number, {}
        floor, floor_batch = self._floor(case)
        if case.processes:
            rate, extra = self._load(case)
        else:
            rate, extra = self._best(case.model, case.in_flight, spin=True)[0], {}
        if self._models[case.model].source != "identity":
            extra["ratio to one"] = rate / self._best(case.model, self._limit(case), most=1)[0]
        return {
            "rate": rate,
            "floor": floor,
            "floor batch": floor_batch,
            "ratio": rate / floor,
            "cost": 1e6 / rate,
            "above": 1e6 / rate - 1e6 / floor,
            **extra,
        }

    def _floor(self, case: Case) -> tuple[float, int]:
        model = self._models[case.model]
        if model.source == "identity":
            way = Way(model.name, model.max_batch_size, 1, model.max_batch_size)
            return self._in_process(way), model.max_batch_size
        return self._best(case.model, self._limit(case))

    @staticmethod
    def _limit(case: Case) -> int:
        return max(1, case.processes) * case.in_flight

    def _best(self, model: str, limit: int, *, most: int = THREADS, spin: bool = False) -> tuple[float, int]:
        """The best rate and its batch size, of batches up to `limit` and one session, or `most`."""
        if (model, limit, most, spin) not in self._ways:
            # Found once: the best of several in every round would be the luckiest, not the best.
            sizes = [size for size in BATCHES if size <= limit][-1 if self._settings.quick else 0 :]
            ways = [(size, sessions) for size in sizes for sessions in ([1] if spin else sorted({1, most}))]
            rates = {way: self._in_process(Way(model, *way, limit, spin)) for way in ways}
            self._ways[model, limit, most, spin] = max(rates, key=rates.__getitem__)
            for way in ways:  # this round's is measured like the others'
                self._floors.pop(Way(model, *way, limit, spin), None)
        size, sessions = self._ways[model, limit, most, spin]
        return self._in_process(Way(model, size, sessions, limit, spin)), size

    def _in_process(self, way: Way) -> float:
        """Rows per second in this process, by threads with a session each; once per round."""
        if way not in self._floors:
            calls = [self._call(way, number) for number in range(way.sessions)]
            # The median: threads that happen to start on one core share it for a while. The best would be luck.
            self._floors[way] = statistics.median(self._rate(way.batch, calls) for _ in range(3))
        return self._floors[way]

    def _rate(self, batch: int, calls: list[Callable[[], None]]) -> float:
        seconds, least = self._settings.seconds(BATCH_S) / 2, 1 if self._settings.quick else LEAST // 2
        with ThreadPoolExecutor(len(calls)) as threads:
            all_samples = threads.map(lambda call: sample(call, seconds, least=least), calls)
            return sum(batch * len(samples) / sum(samples) for samples in all_samples)

    def _call(self, way: Way, number: int) -> Callable[[], None]:
        model = self._models[way.model]
        threads = model.threads if model.source == "identity" else THREADS // way.sessions
        key = (model.source, threads, number, way.spin)
        if key not in self._sessions:
            self._sessions[key] = InProcess(dataclasses.replace(model, threads=threads), spin=way.spin)
        kept = [
            [np.ones((way.batch, *row), np.float32) for row in (model.row, model.output_row)]  # zeros have no pages
            for _ in range(max(1, way.rows // (way.batch * way.sessions)))
        ]
        runs = itertools.cycle([self._sessions[key].bind(x, y) for x, y in kept])
        return lambda kept=kept: next(runs)()  # the bindings have only their addresses

    def _load(self, case: Case) -> tuple[float, dict[str, float]]:
        """Requests per second of all clients together, and what the statistics say of them."""
        model = self._models[case.model]
        seconds = self._settings.seconds(TINY_S if model.source == "identity" else NETWORK_S)
        order = Order(
            model=model.name,
            input=model.input,
            output=model.output,
            row=model.row,
            output_row=model.output_row,
            in_flight=case.in_flight,
            seconds=seconds,
            awaited=case.awaited,
        )
        clients = self._clients[: case.processes]
        for client in clients:
            client.tell(msgspec.json.encode(order).decode())
        for client in clients:
            client.hear()
        before = self._counters(model.name)
        processes = [self._workers[model.name]], [client.pid for client in clients]
        spent = [*map(cpu_seconds, processes)]
        for client in clients:
            client.tell("go")
        outcomes = [msgspec.json.decode(client.hear(seconds + START_S), type=Outcome) for client in clients]
        spent = [now - then for now, then in zip(map(cpu_seconds, processes), spent, strict=True)]
        after = self._counters(model.name)
        rows, runs, copied = (now - then for now, then in zip(after, before, strict=True))
        rate = sum(outcome.requests / outcome.seconds for outcome in outcomes)
        worker, own = (1e6 * seconds / sum(outcome.requests for outcome in outcomes) for seconds in spent)
        return rate, {
            "batch": rows / max(1, runs),
            "copied": copied / max(1, rows),
            "worker cpu": worker,
            "client cpu": own,
        }

    def _counters(self, model: str) -> tuple[int, int, int]:
        (counters,) = self._control.statistics(model)
        return counters["inference_count"], counters["execution_count"], sum(counters["copied_bytes"].values())


def goals(tiny: list[Row[Case]], networks: list[Row[Case]]) -> list[Goal]:
    by_name = {row.name: row for row in [*tiny, *networks]}

    def least(limit: float) -> Callable[[float], bool]:
        return lambda value: value >= limit

    rates = (
        ("one by one, 1 client process", 80_000),
        ("batched, 1 client process", 200_000),
        (f"batched, {AWAITED} awaited on one event loop", 100_000),
    )
    networks_of_8 = [name for name in by_name if name.endswith("8 clients, batches ≤ 8, an instance per core")]
    squeezenet = "squeezenet, 4 clients, batches ≤ 4, an instance per core"
    return [
        *(
            Goal(f"{name}: at least {rate:,} requests/s", by_name[name].median("rate"), least(rate))
            for name, rate in rates
        ),
        *(
            Goal(f"{name}: at least 0.95 of {text}", by_name[name].median(key), least(0.95))
            for name in (squeezenet, *networks_of_8)
            for key, text in (("ratio to one", "the best batch of one session"), ("ratio", "the best way in-process"))
        ),
    ]


@contextlib.contextmanager
def _bench(models: dict[str, Model], settings: Settings) -> Iterator[Bench]:
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker(models.values()))
        clients = [stack.enter_context(Companion("bench.load", broker.url)) for _ in range(max(PROCESSES))]
        bench = Bench(broker, models, clients, settings)
        stack.callback(bench.close)
        yield bench


def main() -> None:
    settings = parse("Requests per second, against the model in-process")
    sources = NETWORKS[:1] if settings.quick else NETWORKS  # the others take long, and work the same way
    facts = machine()
    print(facts, flush=True)
    tiny = [Row(name, case) for name, case in tiny_cases().items()]
    networks = [Row(name, case) for name, case in network_cases(sources).items()]
    with _bench(models_of(sources), settings) as bench:
        interleave([*tiny, *networks], settings.rounds, bench.measure)
    tables = {
        "tiny": Table(
            f"Identity, rows of 1 KiB, {IN_FLIGHT} in flight per process; medians over rounds", tiny, COLUMNS
        ),
        "networks": Table(
            f"Networks, one row per request and one request in flight per client, {THREADS} runtime threads",
            networks,
            COLUMNS,
        ),
    }
    publish("throughput", settings, facts, tables, goals(tiny, networks))
    plot("throughput", settings, [(table, "rate", {"in-process": "floor"}) for table in tables.values()], "requests/s")


if __name__ == "__main__":
    main()
