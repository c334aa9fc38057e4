"""Every benchmark runs and its tables hold every row. No figure is looked at, except that copies are none."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
PLACES = ("unpinned", "split cores", "same core")
SIZES = ("1 KiB", "1 MiB", "16 MiB", "64 MiB")
TRANSPORTS = (
    "shared words, spin then doorbell",
    "channel with its checks",
    "shared memory + eventfd",
    "pipe",
    "unix SEQPACKET",
)
LATENCY = {
    *(f"{client}, {place}" for client in ("hybrid", "always block") for place in PLACES),
    "asyncio, 1 in flight",
    "1 ms pauses",
    "one busy Python thread",
    "four threads",
    "100 idle clients beside",
    *(f"{model}, {size}" for model in ("constant compute", "identity") for size in SIZES),
}
TINY = {
    f"{mode}, {load}"
    for mode in ("one by one", "batched")
    for load in (
        "1 client process",
        "2 client processes",
        "4 client processes",
        "8 client processes",
        "500 awaited on one event loop",
    )
}
NETWORKS = {
    f"squeezenet, {load}"
    for load in (
        "4 clients, batches ≤ 4, an instance per core",
        "8 clients, batches ≤ 8, an instance per core",
        "4 clients, batches ≤ 4",
        "4 clients, batches ≤ 2",
        "8 clients, batches ≤ 8",
        "8 clients, batches ≤ 4",
        "in-process, spinning threads",
    )
}
HOP = {f"{place}: {name}" for place in (*PLACES, "1 ms pauses") for name in TRANSPORTS}


def run(
    name: str, output: Path, *arguments: str, plots: bool = True
) -> tuple[str, dict[str, dict[str, dict[str, Any]]]]:
    """What it printed, and its tables: title → row → medians."""
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", *arguments, "--quick", "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not plots or (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((output / f"{name}.json").read_text())
    tables = {key: {row["name"]: row["median"] for row in table["rows"]} for key, table in document["tables"].items()}
    for rows in tables.values():
        for row, medians in rows.items():
            assert row in done.stdout
            assert all(math.isfinite(value) for value in medians.values() if value is not None)
    return done.stdout, tables


@pytest.fixture(scope="module")
def latency(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Any]]]:
    return run("latency", tmp_path_factory.mktemp("latency"))[1]


def test_latency_holds_every_row(latency: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert set(latency["latency"]) == LATENCY
    assert list(latency["idle"]) == ["broker and worker, 16 idle clients"]
    for medians in latency["latency"].values():
        assert medians["p50"] > 0
        assert medians["floor p50"] > 0


def test_prepared_plans_copy_nothing(latency: dict[str, dict[str, dict[str, Any]]]) -> None:
    assert {row: medians["copied"] for row, medians in latency["latency"].items()} == dict.fromkeys(LATENCY, 0)


def test_throughput_holds_every_row(tmp_path: Path) -> None:
    _, tables = run("throughput", tmp_path)
    assert set(tables["tiny"]) == TINY
    assert set(tables["networks"]) == NETWORKS
    for medians in (*tables["tiny"].values(), *tables["networks"].values()):
        assert medians["rate"] > 0
        assert medians["floor"] > 0
    assert tables["tiny"]["one by one, 1 client process"]["batch"] == 1
    assert tables["networks"]["squeezenet, 8 clients, batches ≤ 4"]["batch"] > 1


def test_ensembles_hold_every_row_and_copy_nothing(tmp_path: Path) -> None:
    _, tables = run("ensembles", tmp_path)
    rows = tables["ensembles"]
    assert set(rows) == {f"{steps} steps, {place}" for steps in (2, 3) for place in (*PLACES, "1 MiB")}
    assert {row: medians["copied"] for row, medians in rows.items()} == dict.fromkeys(rows, 0)
    for medians in rows.values():
        assert medians["one by one"] > 0
        assert medians["floor p50"] > 0


def test_model_control_fails_no_request(tmp_path: Path) -> None:
    _, tables = run("control", tmp_path)
    assert set(tables) == {"beside", "reloads", "memory", "lone"}
    assert len(tables["beside"]) == 3
    assert all(medians["loads"] > 0 for medians in tables["beside"].values())
    (reloads,) = tables["reloads"].values()
    assert reloads["failed"] == 0
    assert reloads["requests"] > 0


def test_two_states_are_measured_side_by_side(tmp_path: Path) -> None:
    _, tables = run("before", tmp_path, str(ROOT), plots=False)
    assert len(tables["before"]) == 7
    assert all(medians["before"] > 0 and medians["now"] > 0 for medians in tables["before"].values())


def test_hop_holds_every_row(tmp_path: Path) -> None:
    text, tables = run("hop", tmp_path)
    assert set(tables["hop"]) == HOP
    assert "cores of" in text
