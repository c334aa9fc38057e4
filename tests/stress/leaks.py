"""Does anything pile up? `python -m tests.stress.leaks`

Churn: one client registers and unregisters 100,000 regions and makes 200,000 requests; then broker, worker and client
must have the descriptors and shared mappings that they had before, and /dev/shm its bytes.
Killed clients: a hundred times a client with 50 regions, 64 channels and requests on all of them is killed; within a
second nothing of it is left in broker and worker.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.stress.broker import Broker, die_with_parent, running
from tests.stress.counters import rows_of
from tests.stress.models import write_repository
from tests.stress.usage import Usage, shm_bytes, usage

MAX_GROWTH_KIB = 10 * 1024
MAX_NEW_MAPS = 16  # of the allocator and of new threads' stacks, not of shared memory
PATIENCE_S = 30.0


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cycles", type=int, default=100_000, help="regions registered and unregistered")
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--victims", type=int, default=100, help="clients to kill")
    parser.add_argument("--gone", type=float, default=1.0, metavar="S", help="how soon nothing of them may be left")
    parser.add_argument("--output", type=Path, default=Path("bench/results/stress_leaks.json"))
    return parser.parse_args(arguments)


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.stress.{module}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )


def _hear(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    assert said == word, f"expected {word!r}, it said {said!r} (exit code {process.poll()})"


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def churn(broker: Broker, cycles: int, requests: int) -> dict[str, Any]:
    """Returns what each process held before and after."""
    worker = broker.worker()
    assert worker is not None
    with _start("churner", broker.directory, str(cycles), str(requests)) as client:
        pids = {"broker": broker.pid, "worker": worker, "client": client.pid}
        _hear(client, "warm")
        before, shm_before = _steady(pids), shm_bytes()
        began = time.monotonic()
        _tell(client)
        _hear(client, "done")
        took = time.monotonic() - began
        after, shm_after = _steady(pids), _shm_at_rest(shm_before)
        _tell(client)
    assert client.returncode == 0
    return {
        "seconds": round(took, 1),
        **{name: {"before": before[name]._asdict(), "after": after[name]._asdict()} for name in pids},
        "shm_bytes": {"before": shm_before, "after": shm_after},
        "bad": [text for name in pids for text in _grown(name, before[name], after[name])]
        + ([f"/dev/shm: {shm_before} → {shm_after} bytes"] if shm_after > shm_before else []),
    }


def _steady(pids: dict[str, int]) -> dict[str, Usage]:
    """What they hold once it stays the same: the last unregister may still be on its way through the worker."""
    end = time.monotonic() + PATIENCE_S
    seen = {name: usage(pid) for name, pid in pids.items()}
    while time.monotonic() < end:
        time.sleep(0.2)
        again = {name: usage(pid) for name, pid in pids.items()}
        if again == seen:
            break
        seen = again
    return seen


def _shm_at_rest(before: int) -> int:
    """Bytes in /dev/shm, which other programs use, too: no more than `before`, or what is left when time is up."""
    end = time.monotonic() + PATIENCE_S
    while (found := shm_bytes()) > before and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _grown(name: str, before: Usage, after: Usage) -> list[str]:
    bad = []
    if after.descriptors > before.descriptors:
        bad.append(f"{name}: {before.descriptors} → {after.descriptors} descriptors")
    if after.shared > before.shared:
        bad.append(f"{name}: {before.shared} → {after.shared} mappings of shared memory")
    if after.maps > before.maps + MAX_NEW_MAPS:
        bad.append(f"{name}: {before.maps} → {after.maps} mappings")
    if after.rss_kib > before.rss_kib + MAX_GROWTH_KIB:
        bad.append(f"{name}: {before.rss_kib} → {after.rss_kib} KiB resident")
    return bad


def killed_clients(broker: Broker, times: int, limit_s: float) -> dict[str, Any]:
    """Returns how long it took until nothing was left, and what was left when it took too long."""
    worker = broker.worker()
    assert worker is not None
    _kill_one(broker, lambda: True)  # what is made once
    pids = {"broker": broker.pid, "worker": worker}
    before = _steady(pids)
    took: list[float] = []
    bad: list[str] = []

    def gone() -> bool:
        return all(_same(before[name], usage(pid)) for name, pid in pids.items())

    for _ in range(times):
        seconds = _kill_one(broker, gone)
        took.append(seconds)
        if seconds > limit_s:
            left = {name: usage(pid) for name, pid in pids.items()}
            status = broker.status()
            bad.append(
                f"{seconds:.2f} s after the kill: {left}, before {before}; "
                f"{len(status['sessions']) - 1} sessions, {len(status['regions'])} regions"
            )
            if len(bad) > 2:
                break
    after = _steady(pids)
    status = broker.status()
    if status["regions"] or status["quotas"]["memory_used"]:
        bad.append(f"{len(status['regions'])} regions and {status['quotas']['memory_used']} bytes of quota are left")
    bad += [text for name in pids for text in _grown(name, before[name], after[name])]
    if broker.worker() != worker:
        bad.append("the worker died")
    ordered = sorted(took)
    return {
        "killed": len(took),
        "gone_after_s": {"p50": round(ordered[len(ordered) // 2], 4), "max": round(ordered[-1], 4)},
        **{name: {"before": before[name]._asdict(), "after": after[name]._asdict()} for name in pids},
        "bad": bad,
    }


def _same(before: Usage, now: Usage) -> bool:
    return now.descriptors <= before.descriptors and now.shared <= before.shared


def _kill_one(broker: Broker, gone: Callable[[], bool]) -> float:
    with _start("victim", broker.directory) as victim:
        _hear(victim, "ready")
        began = time.monotonic()
        victim.kill()
    while not gone():
        if time.monotonic() - began > PATIENCE_S:
            break
        time.sleep(0.002)
    return time.monotonic() - began


def run(wanted: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    with running(write_repository(scratch / "models"), scratch / "run") as broker:
        broker.connect().close()
        results = {
            "churn": churn(broker, wanted.cycles, wanted.requests),
            "killed_clients": killed_clients(broker, wanted.victims, wanted.gone),
        }
        exit_code = broker.stop()
        results["bad"] = [*results["churn"].pop("bad"), *results["killed_clients"].pop("bad")]
        if exit_code != 0:
            results["bad"].append(f"the broker's exit code was {exit_code}")
        if results["bad"]:
            print(broker.log_tail(), file=sys.stderr)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = options(arguments)
    with tempfile.TemporaryDirectory(prefix="tensorbroker-stress-") as scratch:
        results = run(wanted, Path(scratch))
    wanted.output.parent.mkdir(parents=True, exist_ok=True)
    wanted.output.write_text(json.dumps(results, indent=2))
    for part in ("churn", "killed_clients"):
        print(f"{part}:")
        print("\n".join(rows_of(results[part])))
    print(f"written to {wanted.output}")
    print("\n".join(f"BAD: {text}" for text in results["bad"]) or "all hold")
    return 1 if results["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
