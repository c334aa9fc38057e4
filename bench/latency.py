"""What does a request cost over calling the model in one's own process?

    python -m bench.latency [--quick] [--rounds N] [--output DIR]

A prepared plan, back to back; the floor of every row is the same model on the same memory in the same process, with its
IOBinding prepared, on the same core and beside the same threads, measured just before in the same round.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import clientlib
from bench.in_process import InProcess
from bench.measure import (
    LEAST,
    Row,
    Spread,
    against,
    busy_thread,
    interleave,
    sample,
    sample_threads,
    spread,
)
from bench.models import Model, head, identity
from bench.processes import SAME, SPLIT, UNPINNED, Broker, Placement, cpu_seconds, idle_clients, placed
from bench.report import Column, Goal, Table, machine, plot, publish
from bench.settings import Settings, parse

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"1 KiB": KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "64 MiB": 64 * MIB}
MODELS: dict[str, Callable[[int], Model]] = {"identity": identity, "head": head}
MEASURE_S = 0.5
IDLE_S = 4.0
IDLE_CLIENTS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """`client`: spinning before it sleeps ("hybrid"), never spinning ("block"), or on an event loop ("asyncio")."""

    model: str = "identity"
    byte_size: int = KIB
    placement: Placement = UNPINNED
    client: str = "hybrid"
    threads: int = 1
    pause_s: float = 0.0
    busy: bool = False
    idle_clients: int = 0


CASES = {
    "hybrid, unpinned": Case(),
    "hybrid, split cores": Case(placement=SPLIT),
    "hybrid, same core": Case(placement=SAME),
    "always block, unpinned": Case(client="block"),
    "always block, split cores": Case(client="block", placement=SPLIT),
    "always block, same core": Case(client="block", placement=SAME),
    "asyncio, 1 in flight": Case(client="asyncio"),
    "1 ms pauses": Case(pause_s=1e-3),
    "one busy Python thread": Case(busy=True),
    "four threads": Case(threads=4),
    "100 idle clients beside": Case(idle_clients=100),
    # On split cores: unpinned, what the scheduler does with the pair (12 or 25 µs) hides what the size does.
    **{
        f"constant compute, {text}": Case(model="head", byte_size=size, placement=SPLIT) for text, size in SIZES.items()
    },
    **{f"identity, {text}": Case(byte_size=size) for text, size in SIZES.items()},
}
COLUMNS = (
    Column("p50 µs", "p50"),
    Column("p90", "p90"),
    Column("p99", "p99"),
    Column("req/s", "rate", ",.0f"),
    Column("floor p50", "floor p50"),
    Column("floor p99", "floor p99"),
    Column("ratio", "ratio", ".2f"),
    Column("p50 above", "above", "+.1f"),
    Column("p99 above", "above p99", "+.1f"),
    Column("copied B/request", "copied", ".0f"),
)
IDLE_COLUMNS = (
    Column("% of a core", "percent", ".2f"),
    Column("without clients", "without", ".2f"),
)


class Place(NamedTuple):
    """Input and output of one request in a region: what the plan uses, and the floor as well."""

    region: clientlib.Region
    output_offset: int
    x: np.ndarray
    y: np.ndarray

    def tensors(self) -> tuple[dict[str, clientlib.TensorRef], dict[str, clientlib.TensorRef]]:
        return (
            {"x": self.region.tensor(self.x.shape, "FP32")},
            {"y": self.region.tensor(self.y.shape, "FP32", offset=self.output_offset)},
        )


class Client:
    """A connection with its plans and their memory, made once and kept for all rounds."""

    def __init__(self, url: str, spin_us: float) -> None:
        self.client = clientlib.connect(url, spin_us=spin_us)
        self._places: dict[tuple[str, int, int], Place] = {}
        self._plans: dict[tuple[str, int, int], clientlib.Plan] = {}

    def place(self, case: Case, at: int = 0) -> Place:
        key = (case.model, case.byte_size, at)
        if key not in self._places:
            model = MODELS[case.model](case.byte_size // 4)
            region, offset, x, y = _laid_out(model, lambda size: self.client.create_region(f"bench {key}", size))
            self._places[key] = Place(region, offset, x, y)
        return self._places[key]

    def infer(self, case: Case, at: int = 0) -> Callable[[], object]:
        key = (case.model, case.byte_size, at)
        if key not in self._plans:
            self._plans[key] = self.client.prepare(case.model, *self.place(case, at).tensors())
        return self._plans[key].infer


class Bench:
    """What all rows share."""

    def __init__(self, broker: Broker, settings: Settings) -> None:
        self._broker = broker
        self._settings = settings
        self._worker = broker.worker()
        self._clients = {"hybrid": Client(broker.url, 50), "block": Client(broker.url, 0)}
        self._floors = {name: InProcess(make(KIB // 4)) for name, make in MODELS.items()}
        for model in MODELS:
            if not self._clients["hybrid"].client.model(model).zero_copy:
                raise SystemExit(f"the broker does not read the input of {model} in place: nothing to compare")

    def close(self) -> None:
        for client in self._clients.values():
            client.client.close()

    def measure(self, case: Case, _round: int) -> dict[str, float]:
        seconds = self._settings.seconds(MEASURE_S)
        with contextlib.ExitStack() as stack:
            stack.enter_context(idle_clients(self._broker, case.idle_clients))
            stack.enter_context(placed(case.placement, self._worker))
            stack.enter_context(busy_thread(case.busy))
            floor = self._floor(case, seconds)
            before, requests = self._copied(case.model)
            own = self._own(case, seconds)
            after, ended = self._copied(case.model)
        return {**against(own, floor, paused=bool(case.pause_s)), "copied": (after - before) / max(1, ended - requests)}

    def _floor(self, case: Case, seconds: float) -> Spread:
        client = self._clients["hybrid"]
        places = [client.place(case, at) for at in range(case.threads)]
        return _spread_of([self._floors[case.model].bind(place.x, place.y) for place in places], case, seconds)

    def _own(self, case: Case, seconds: float) -> Spread:
        if case.client == "asyncio":
            return asyncio.run(_awaited(self._broker.url, case, seconds))
        client = self._clients[case.client]
        return _spread_of([client.infer(case, at) for at in range(case.threads)], case, seconds)

    def _copied(self, model: str) -> tuple[int, int]:
        """Tensor bytes copied so far, for whatever reason, and requests ended, from the broker's statistics."""
        (counters,) = self._clients["hybrid"].client.statistics(model)
        return sum(counters["copied_bytes"].values()), counters["inference_stats"]["success"]["count"]

    def idle(self, count: int, _round: int) -> dict[str, float]:
        """CPU time of the broker and all its processes while nothing happens."""
        without = self._idle_percent()
        with idle_clients(self._broker, count):
            return {"percent": self._idle_percent(), "without": without}

    def _idle_percent(self) -> float:
        time.sleep(0.2)  # what connecting set off is over
        pids = self._broker.pids()
        before, began = cpu_seconds(pids), time.monotonic()
        time.sleep(self._settings.seconds(IDLE_S))
        return 100 * (cpu_seconds(pids) - before) / (time.monotonic() - began)


def _laid_out(model: Model, create: Callable[[int], clientlib.Region]) -> Place:
    """Memory for one row of `model` and its output, every page touched."""
    (elements,), (output_elements,) = model.row, model.output_row
    offset = -(-elements * 4 // 4096) * 4096
    region = create(offset + output_elements * 4)
    x = region.array((1, elements), np.float32)
    y = region.array((1, output_elements), np.float32, offset=offset)
    x[:] = 1
    y[:] = 0
    return Place(region, offset, x, y)


def _spread_of(calls: list[Callable[[], object]], case: Case, seconds: float) -> Spread:
    if len(calls) > 1:
        return spread(*sample_threads(calls, seconds))
    return spread(sample(calls[0], seconds, case.pause_s))


async def _awaited(url: str, case: Case, seconds: float) -> Spread:
    """One request at a time on an event loop."""
    client = await clientlib.connect_async(url)
    elements = case.byte_size // 4
    region = await client.create_region("bench", 2 * case.byte_size)
    x = region.tensor((1, elements), "FP32")
    y = region.tensor((1, elements), "FP32", offset=case.byte_size)
    plan = await client.prepare(case.model, {"x": x}, {"y": y})
    for _ in range(100):
        await plan.infer()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < LEAST:
        began = time.perf_counter()
        await plan.infer()
        samples.append(time.perf_counter() - began)
    await client.close()
    return spread(samples)


def goals(rows: list[Row[Case]], idle: list[Row[int]]) -> list[Goal]:
    by_name = {row.name: row for row in [*rows, *idle]}

    def figure(name: str, key: str) -> float | None:
        return by_name[name].median(key)

    def most(limit: float) -> Callable[[float], bool]:
        return lambda value: value <= limit

    small, large = figure("constant compute, 1 KiB", "p50"), figure("constant compute, 64 MiB", "p50")
    growth = large / small if small and large else None
    copied = [figure(f"constant compute, {size}", "copied") or 0.0 for size in SIZES]
    return [
        *(
            Goal(f"{name}: p50 at most {limit} µs above the floor", figure(name, "above"), most(limit))
            for name, limit in (("hybrid, unpinned", 8), ("hybrid, split cores", 8), ("hybrid, same core", 18))
        ),
        *(
            Goal(f"{name}: p99 at most 50 µs above the floor's", figure(name, "above p99"), most(50))
            for name in ("hybrid, unpinned", "hybrid, split cores", "hybrid, same core")
        ),
        Goal("one busy Python thread: p99 at most 250 µs", figure("one busy Python thread", "p99"), most(250)),
        Goal("constant compute: p50 at 64 MiB within 1.3 times that at 1 KiB", growth, most(1.3)),
        Goal("constant compute: bytes copied at any size: 0", sum(copied), most(0)),
        Goal(f"{IDLE_CLIENTS} idle clients: under 1 % of a core", figure(idle[0].name, "percent"), most(1)),
    ]


@contextlib.contextmanager
def _bench(settings: Settings) -> Iterator[Bench]:
    with Broker([make(KIB // 4) for make in MODELS.values()]) as broker:
        bench = Bench(broker, settings)
        try:
            yield bench
        finally:
            bench.close()


def main() -> None:
    settings = parse("Latency of a request, against the model in-process")
    facts = machine()
    print(facts, flush=True)
    rows = [Row(name, case) for name, case in CASES.items()]
    idle = [Row(f"broker and worker, {IDLE_CLIENTS} idle clients", IDLE_CLIENTS)]
    with _bench(settings) as bench:
        interleave(rows, settings.rounds, bench.measure)
        interleave(idle, settings.rounds, bench.idle)
    tables = {
        "latency": Table("Latency of a request, prepared plan, back to back; medians over rounds", rows, COLUMNS),
        "idle": Table("CPU time while nothing happens", idle, IDLE_COLUMNS),
    }
    publish("latency", settings, facts, tables, goals(rows, idle))
    plot(
        "latency",
        settings,
        [(tables["latency"], "p50", {"floor p50": "floor p50", "p99": "p99"})],
        "µs",
    )


if __name__ == "__main__":
    main()
