"""What do loads, reloads and unloads cost those who only ask for inference? And is the memory back?

    python -m bench.control [--quick] [--rounds N] [--output DIR]

Latencies are those of one client of another model in the same worker; their floor is the same client in the same round
while nothing is loaded. Failed requests are counted and must be none.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

import clientlib
from bench.in_process import InProcess
from bench.measure import LEAST, Row, against, interleave, sample, spread
from bench.models import Model, identity, network
from bench.processes import Broker, Companion
from bench.reloader import Order
from bench.report import Column, Goal, Table, machine, plot, publish
from bench.settings import Settings, parse

ROW = 256  # FP32 elements: 1 KiB
LOAD_S = 5.0  # of the load that sleeps; latencies are measured as long
RELOADS, CLIENTS = 100, 4
CYCLES = 10
DELAY_US = 2000
MIB = 1 << 20
QUIET_S = 0.2  # after an unload, before memory is looked at
NETWORK = "resnet50"
THREADS = len(os.sched_getaffinity(0))

ASKED = identity(ROW, "asked")
RELOADED = identity(ROW, "reloaded")
DELAYED = replace(identity(ROW, "delayed", 8), queue_delay_us=DELAY_US)
LARGE = replace(network(NETWORK, 1, 1, 0), group="", threads=THREADS)

BESIDE = (
    Column("p50 µs", "p50"),
    Column("quiet", "floor p50"),
    Column("ratio", "ratio", ".3f"),
    Column("p99", "p99"),
    Column("quiet", "floor p99"),
    Column("ratio", "ratio p99", ".3f"),
    Column("loads", "loads", ".1f"),
)
RELOAD = (
    Column("requests", "requests", ",.0f"),
    Column("failed", "failed", ".0f"),
    Column("reloads", "reloads", ".0f"),
    Column("ms/reload", "ms", ",.1f"),
)
MEMORY = (
    Column("before MiB", "before", ",.1f"),
    Column("loaded", "peak", ",.1f"),
    Column("after", "after", ",.1f"),
    Column("kept", "kept", "+,.1f"),
)
LONE = (Column("p50 µs", "p50"), Column("in-process", "floor p50"), Column("above it and the delay", "late", "+,.1f"))


@dataclass(frozen=True, slots=True)
class Case:
    """`measure` takes the bench and gives the figures of one round."""

    measure: Callable[[Bench], dict[str, float]]


def sleeper(seconds: float) -> Order:
    """To load a model of no use that takes so long."""
    tensors = {"input": "INPUT0", "output": "OUTPUT0"}
    config = {
        "backend": "identity",
        "parameters": {"creation_delay_sec": {"string_value": str(seconds)}},
        **{side: [{"name": name, "data_type": "TYPE_FP32", "dims": [1]}] for side, name in tensors.items()},
    }
    return Order(model="sleeper", configs=(json.dumps(config),), bare=True)


RELOAD_IT = Order(
    model=RELOADED.name,
    configs=tuple(json.dumps({"max_batch_size": 1, "metric_tags": {"number": tag}}) for tag in "01"),
)


class Bench:
    """One client of the model that is asked, and one that loads."""

    def __init__(self, broker: Broker, reloader: Companion, settings: Settings) -> None:
        self._broker, self._reloader, self._settings = broker, reloader, settings
        self._reloader.hear()
        self.control, self._client = clientlib.connect(broker.url), clientlib.connect(broker.url)
        self._asked = prepared(self._client, ASKED)
        self._delayed = prepared(self._client, DELAYED)
        x, y = np.zeros((1, ROW), np.float32), np.zeros((1, ROW), np.float32)
        self._kept = (x, y)
        self._floor = InProcess(DELAYED).bind(x, y)

    def close(self) -> None:
        self._client.close()
        self.control.close()

    def beside(self, order: Order) -> dict[str, float]:
        """What the other model's client sees while there is always a load under way. `order`: see `bench.reloader`."""
        seconds = self._settings.seconds(LOAD_S)
        quiet = spread(sample(self._asked, seconds, least=LEAST))
        self._reloader.tell(msgspec.json.encode(order).decode())
        own = spread(sample(self._asked, seconds, least=LEAST))
        self._reloader.tell("stop")
        loads = int(self._reloader.hear())
        return {**against(own, quiet, paused=True), "ratio p99": own.p99 / quiet.p99, "loads": loads}

    def reloads(self) -> dict[str, float]:
        """Clients of the model that is loaded again and again."""
        asked, failed = [0] * CLIENTS, 0
        stop = threading.Event()

        def ask(number: int) -> None:
            nonlocal failed
            with clientlib.connect(self._broker.url) as client:
                x = np.full((1, ROW), number, np.float32)
                while not stop.is_set():
                    try:
                        failed += not np.array_equal(client.infer(RELOADED.name, {"x": x}, timeout=60)["y"], x)
                    except clientlib.InferError:
                        failed += 1
                    asked[number] += 1

        count = max(3, int(self._settings.seconds(RELOADS)))
        with contextlib.ExitStack() as stack:
            for number in range(CLIENTS):
                stack.enter_context(running(lambda number=number: ask(number), stop))
            while not all(asked):
                time.sleep(0.01)
            began = time.perf_counter()
            for number in range(count):
                RELOAD_IT.load(self.control, number)
            took = time.perf_counter() - began
        return {"requests": sum(asked), "failed": failed, "reloads": count, "ms": 1e3 * took / count}

    def memory(self) -> dict[str, float]:
        """Of the worker: before the network is loaded again, while it is, and after some loads and unloads."""
        pid = self._broker.worker()
        for _ in range(2):  # what the runtime and the allocator keep once is not the model's
            self._load_and_unload(pid)
        before = resident(pid)
        peak = max(self._load_and_unload(pid) for _ in range(max(2, int(self._settings.seconds(CYCLES)))))
        after = resident(pid)
        return {"before": before, "peak": peak, "after": after, "kept": after - before}

    def _load_and_unload(self, pid: int) -> float:
        """Returns what the worker has while the network is loaded."""
        self.control.load(LARGE.name)
        self.control.infer(LARGE.name, {LARGE.input: np.zeros((1, *LARGE.row), np.float32)}, timeout=60)
        loaded = resident(pid)
        self.control.unload(LARGE.name)
        time.sleep(QUIET_S)
        return loaded

    def lone(self) -> dict[str, float]:
        """One request at a time to a model that waits for more."""
        seconds = self._settings.seconds(LOAD_S) / 2
        floor = spread(sample(self._floor, seconds, least=LEAST))
        own = spread(sample(self._delayed, seconds, least=LEAST))
        return {**against(own, floor, paused=True), "late": own.p50 - floor.p50 - DELAY_US}


@contextlib.contextmanager
def running(work: Callable[[], None], stop: threading.Event) -> Iterator[None]:
    """A thread that does `work` until `stop` is set; what it raises is raised at the end."""
    problems: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if problems:
        raise problems[0]


def prepared(client: clientlib.Client, model: Model) -> Callable[[], object]:
    """One request to a model of one row, on memory prepared beforehand."""
    region = client.create_region(model.name, 8 * ROW)
    inputs = {model.input: region.tensor((1, ROW), "FP32")}
    plan = client.prepare(model.name, inputs, {model.output: region.tensor((1, ROW), "FP32", 4 * ROW)})
    return plan.infer


def resident(pid: int) -> float:
    """MiB of private memory in use."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def goals(beside: list[Row[Case]], reloads: Row[Case], memory: Row[Case], lone: Row[Case]) -> list[Goal]:
    sleeping = beside[0]
    kept, peak = memory.median("kept"), memory.median("peak")
    return [
        Goal("0 failed requests in 100 reloads", max(r["failed"] for r in reloads.rounds), lambda value: value == 0),
        Goal(f"{sleeping.name}: p50 at most 1.2 of quiet", sleeping.median("ratio"), lambda value: value <= 1.2),
        Goal(f"{sleeping.name}: p99 at most 2 of quiet", sleeping.median("ratio p99"), lambda value: value <= 2),
        Goal("kept after 10 loads: at most 2 % of what the worker had", (kept or 0) / (peak or 1), lambda v: v <= 0.02),
        Goal("a lone request goes at most 250 µs after the delay", lone.median("late"), lambda v: v <= 250),
    ]


def main() -> None:
    settings = parse("Loads, reloads and unloads beside inference")
    facts = machine()
    print(facts, flush=True)
    beside = [
        Row(f"while {name}", Case(lambda bench, order=order: bench.beside(order)))
        for name, order in (
            (f"a model takes {LOAD_S:g} s to load", sleeper(settings.seconds(LOAD_S))),
            ("a network of 100 MB is loaded and unloaded", Order(model=LARGE.name)),
            ("a tiny model is loaded again and again", RELOAD_IT),
        )
    ]
    reloads = Row(f"{CLIENTS} clients of the reloaded model", Case(Bench.reloads))
    memory = Row("ResNet-50 loaded, run, unloaded", Case(Bench.memory))
    lone = Row("identity, 1 KiB", Case(Bench.lone))
    flags = ("--model-control-mode=explicit", *(f"--load-model={model.name}" for model in (ASKED, RELOADED, DELAYED)))
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(Broker((ASKED, RELOADED, DELAYED, LARGE), flags=flags))
        reloader = stack.enter_context(Companion("bench.reloader", broker.url))
        bench = stack.enter_context(contextlib.closing(Bench(broker, reloader, settings)))
        interleave([*beside, reloads, memory, lone], settings.rounds, lambda case, number: case.measure(bench))
    failed = max(figures["failed"] for figures in reloads.rounds)
    tables = {
        "beside": Table("Requests to another model of the same worker, 1 KiB; medians over rounds", beside, BESIDE),
        "reloads": Table("Reloads under load", [reloads], RELOAD),
        "memory": Table("Memory of the worker", [memory], MEMORY),
        "lone": Table(f"A lone request, max_queue_delay_microseconds: {DELAY_US}", [lone], LONE),
    }
    publish("control", settings, facts, tables, goals(beside, reloads, memory, lone))
    plot("control", settings, [(tables["beside"], "p50", {"quiet": "floor p50", "p99": "p99"})], "µs")
    if failed:
        raise SystemExit(f"{failed:.0f} requests failed")


if __name__ == "__main__":
    main()
