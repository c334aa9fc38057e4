"""The kill test: does anything get lost, doubled, mixed up or late when workers die under load?

`python -m tests.stress.kill --kills 5000 --hostile` starts a broker with three real models, honest clients of four
kinds that check every answer, and a hostile one on the same worker; then it kills the worker, its replacements while
they start, the zygote, and now and then a client. It prints one table, writes it as JSON, and exits with 1 when
something happened that must not.

What is counted: lost (no ending within 60 s) · duplicated (a completion that names no pending request) · wrong (another
answer than that to the input, or an error that has no reason) · late writes (to an output after its request ended, seen
when its position is used again, when a kept array is looked at again, and at the end) · reordered (of the requests of
one channel for the model with one instance, without deadline or cancel, one was answered after a later one; retries
included) · lost wake-ups (somebody slept for 50 ms although there was something to do).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from tests.stress.broker import Broker, descriptors, die_with_parent, running
from tests.stress.counters import MUST_BE_ZERO, Counters, rows_of
from tests.stress.killer import Killer, NotServing
from tests.stress.models import write_repository

HONEST = ("spinning", "blocking", "threads", "loop")
SERVING_P99_S = 1.0
DRAIN_S = 90.0
SETTLE_S = 30.0


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=1000, help="how many worker processes to kill")
    parser.add_argument("--seconds", type=float, default=3600, help="stop then, even with fewer kills")
    parser.add_argument("--hostile", action="store_true", help="a hostile client on the same worker")
    parser.add_argument(
        "--client-kills", type=float, default=5.0, metavar="S", help="kill a client every S s; 0: never"
    )
    parser.add_argument(
        "--zygote-kills", type=int, default=500, metavar="N", help="kill the zygote every N kills; 0: never"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFF)
    parser.add_argument("--output", type=Path, default=Path("bench/results/stress_kill.json"))
    return parser.parse_args(arguments)


@final
class Crowd:
    """The client processes of a run."""

    def __init__(self, broker: Broker, counters: Counters, seed: int, log: Path) -> None:
        self._broker = broker
        self._counters = counters
        self._random = random.Random(seed)
        self._log = log.open("ab")
        self._running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
        self.killed = 0
        self.failures: list[str] = []

    def start(self, kind: str) -> int:
        """Returns its block of the counters."""
        block = self._counters.next_block()
        command = [sys.executable, "-m", "tests.stress.clients", kind, self._broker.directory, str(self._counters.fd)]
        command += [str(block), str(self._random.randrange(1 << 16))]
        process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(self._counters.fd,),
            preexec_fn=die_with_parent,
        )
        self._running[block] = (kind, process)
        return block

    def wait_until_served(self, blocks: Sequence[int], limit_s: float = 30) -> None:
        end = time.monotonic() + limit_s
        while not all(self._counters.tally(block)["answered"] for block in blocks):
            if time.monotonic() > end:
                raise NotServing("some client got no answer before the first kill")
            time.sleep(0.05)

    def kill_one(self) -> None:
        """An honest client, with everything it has in flight; another takes its place."""
        block = self._random.choice([block for block, (kind, _) in self._running.items() if kind != "hostile"])
        kind, process = self._running.pop(block)
        process.kill()
        process.wait()
        self.killed += 1
        self.start(kind)

    def check(self) -> None:
        """Clients leave only when told to."""
        for block, (kind, process) in list(self._running.items()):
            if process.poll() is not None:
                del self._running[block]
                self.failures.append(f"a {kind} client ended with exit code {process.returncode}")

    def stop(self) -> None:
        """Tell them to stop; those that do not end by themselves wait for something that does not come."""
        self.check()
        self._counters.stop()
        end = time.monotonic() + DRAIN_S
        for kind, process in self._running.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self.failures.append(f"a {kind} client did not stop")
            else:
                if process.returncode:
                    self.failures.append(f"a {kind} client ended with exit code {process.returncode}")
        self._running.clear()
        self._log.close()

    def abandon(self) -> None:
        for _, process in self._running.values():
            process.kill()
            process.wait()


def run(wanted: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The whole test; returns what it found."""
    counters = Counters()
    models, log = write_repository(scratch / "models"), scratch / "clients.log"
    flags = ("--model-load-deaths", "1000000")
    with running(models, scratch / "run", *flags) as broker, contextlib.ExitStack() as cleanup:
        broker.connect().close()
        before = _left(broker)
        crowd = Crowd(broker, counters, wanted.seed, log)
        cleanup.callback(crowd.abandon)
        killer = Killer(broker, counters, wanted.seed)
        began = time.monotonic()
        problem = _rampage(wanted, crowd, killer)
        took = time.monotonic() - began
        if problem:
            print(f"{problem}\n{broker.log_tail()}", file=sys.stderr)
        crowd.stop()
        killer.close()
        status = broker.status()
        after = _settled(broker, before)
        exit_code = broker.stop()
    results = _results(wanted, counters, crowd, killer, status)
    results["seconds"] = round(took, 1)
    results["left_behind"] = "; ".join(
        f"{name}: {before[name]} → {after[name]}" for name in before if before[name] != after[name]
    )
    results["failures"] = [*([problem] if problem else []), *crowd.failures]
    if exit_code != 0:
        results["failures"].append(f"the broker's exit code was {exit_code}")
    results["deaths_nobody_caused"] = len(
        re.findall(r"worker '.*?\): (?!killed by SIGKILL).*; next", broker.log.read_text())
    )
    results["notes"] = (_unusual(broker.log) + log.read_text(errors="replace"))[:6000]
    counters.close()
    return results


def _rampage(wanted: argparse.Namespace, crowd: Crowd, killer: Killer) -> str:
    """Kill until it is enough. Returns what went wrong, if something did."""
    end = time.monotonic() + wanted.seconds
    next_client = time.monotonic() + wanted.client_kills
    try:
        crowd.wait_until_served([crowd.start(kind) for kind in HONEST])
        if wanted.hostile:
            crowd.start("hostile")
        while killer.workers < wanted.kills and time.monotonic() < end and not crowd.failures:
            if wanted.zygote_kills and killer.workers // wanted.zygote_kills > killer.zygotes:
                killer.round_of_zygote()
            killer.round()
            crowd.check()
            if wanted.client_kills and time.monotonic() > next_client:
                next_client = time.monotonic() + wanted.client_kills
                crowd.kill_one()
    except NotServing as error:
        return f"not serving after {killer.workers} kills: {error}"
    return ""


def _unusual(log: Path) -> str:
    """What the broker and its workers said, but for the deaths that were asked for."""
    usual = (
        "tensorbroker is ready",
        "killed by SIGKILL",
        "the zygote ended",
        "zygote: killed",
        "does not answer (",
        "refused for 60 s",
    )
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    return "".join(line for line in lines if line[:1] not in "I+|" and not any(text in line for text in usual))


def _left(broker: Broker) -> dict[str, int]:
    status = broker.status()
    return {
        "descriptors of the broker": _at_rest(broker.pid),
        "sessions": len(status["sessions"]),
        "regions": len(status["regions"]),
        "quota in bytes": status["quotas"]["memory_used"],
    }


def _at_rest(pid: int) -> int:
    """Its descriptors without those of the session that has just asked for the status and is about to end."""
    least = descriptors(pid)
    for _ in range(10):
        time.sleep(0.02)
        least = min(least, descriptors(pid))
    return least


def _settled(broker: Broker, before: dict[str, int]) -> dict[str, int]:
    """What is there once all clients have gone."""
    end = time.monotonic() + SETTLE_S
    while (after := _left(broker)) != before and time.monotonic() < end:
        time.sleep(0.1)
    return after


def _results(
    wanted: argparse.Namespace, counters: Counters, crowd: Crowd, killer: Killer, status: dict[str, Any]
) -> dict[str, Any]:
    totals = counters.totals()
    (worker,) = status["workers"]
    totals["lost_wakeups_of_worker"] = worker["lost_wakeups"]
    return {
        "seed": wanted.seed,
        "kills": killer.workers,
        "zygote_kills": killer.zygotes,
        "client_kills": crowd.killed,
        **totals,
        "recovered": worker["recovered"],
        "retried": sum(model["retried"] for model in status["models"]),
        "serving_again_s": _quantiles(killer.serving_s),
        "serving_again_cold_s": _quantiles(killer.cold_s),
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    at = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * part))] for name, part in (("p50", 0.5), ("p99", 0.99))
    }
    return {name: round(value, 4) for name, value in {**at, "max": ordered[-1]}.items()}


def verdict(results: dict[str, Any], *, timed: bool = True) -> list[str]:
    """Everything that must not be so. `timed`: how long it took included."""
    bad = [f"{name}: {results[name]}" for name in MUST_BE_ZERO if results[name]]
    bad += results["failures"]
    if results["deaths_nobody_caused"] > 0:
        bad.append(f"workers died {results['deaths_nobody_caused']} times by themselves")
    if results["left_behind"]:
        bad.append(f"left behind: {results['left_behind']}")
    if timed and results["serving_again_s"]["p99"] > SERVING_P99_S:
        bad.append(f"serving again took {results['serving_again_s']['p99']} s (p99), {SERVING_P99_S:g} s are allowed")
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = options(arguments)
    with tempfile.TemporaryDirectory(prefix="tensorbroker-stress-") as scratch:
        results = run(wanted, Path(scratch))
    bad = verdict(results)
    wanted.output.parent.mkdir(parents=True, exist_ok=True)
    wanted.output.write_text(json.dumps({**results, "bad": bad}, indent=2))
    print("\n".join(rows_of({name: value for name, value in results.items() if value not in ("", [])})))
    print(f"written to {wanted.output}")
    print("\n".join(f"BAD: {text}" for text in bad) or "all hold")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
