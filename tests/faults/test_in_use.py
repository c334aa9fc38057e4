"""Rows B-11 … B-13 and F-06: regions that go while requests use them, tensors at any address, tensors of no bytes."""

from __future__ import annotations

import mmap
import threading
import time
from typing import Any

import numpy as np
import pytest

import clientlib
from tests.fakes.broker import HandClient
from tests.faults import child, raw
from tests.faults.lab import Lab, scaled
from tests.faults.repository import SAME

# --- B-11: unregister during inference -----------------------------------------------------------------------------


def _unregister_in_flight(requests: int, kind: str, count: int) -> dict[str, Any]:
    """Both regions are unregistered when `requests` requests have been accepted, the first of which takes a while."""
    with raw.named_memory(1 << 16) as key, clientlib.connect(slots=128) as client:
        make = {
            "pool": lambda name, offset: client.create_region(name, 1 << 15),
            "system": lambda name, offset: client.register_system_shm(name, key, 1 << 15, offset),
        }[kind]
        source, target = make("in", 0), make("out", 1 << 15)
        counts = source.array((2,), "INT64")
        counts[:] = count, 1
        x, y = source.array((4,), "FP32", 64), target.array((requests, 4), "FP32")
        x[:] = 1
        plan = client.prepare(
            "slow",
            inputs={"count": source.tensor((1,), "INT64"), "x": source.tensor((4,), "FP32", 64, stride=0)},
            outputs={"y": target.tensor((4,), "FP32")},
            slots=(2, requests),
        )
        pendings = [plan.submit(input_slot=min(slot, 1), output_slot=slot) for slot in range(requests)]
        client.infer("add1", {"x": np.ones((1, 4), np.float32)}, timeout=40)  # behind them on the same channel
        early = pendings[0].done()
        for name in ("in", "out"):
            client.unregister(name)
        listed = [row.name for row in client.regions() if row.name in ("in", "out") and row.state == "active"]
        outcomes = [child.refusal(pending.result, timeout=60) for pending in pendings]
        return {
            "early": early,
            "outcomes": sorted({f"{code} {text}" for code, text in outcomes}),
            "right": bool((y[0] == count + 1).all() and (y[1:] == 2).all()),
            "listed": listed,
            "later": child.refusal(plan.infer, timeout=5),
        }


@pytest.mark.parametrize("kind", ["pool", "system"])
@pytest.mark.parametrize("requests", [1, 100])
def test_b11_unregister_during_inference(lab: Lab, requests: int, kind: str) -> None:
    """[B-11] what was accepted succeeds on memory that stays mapped for it; what comes later is NOT_FOUND."""
    for count in (500_000, 2_000_000, 8_000_000):  # a busy machine may be slow to unregister
        found = lab.offend(_unregister_in_flight, requests=requests, kind=kind, count=count, timeout_s=90)
        if not found["early"]:
            break
    assert not found["early"], "the slow request was over before its regions went"
    assert found["outcomes"] == ["OK "]
    assert found["right"]
    assert found["listed"] == []
    assert found["later"][0] == "NOT_FOUND"
    assert "'in'" in found["later"][1] or "'out'" in found["later"][1]
    lab.settled()


# --- B-12, B-13: any address, no bytes -----------------------------------------------------------------------------


def _infer_unaligned(datatype: str, offset: int) -> bool:
    model = {"FP32": "add1", "FP16": "identity_fp16", "FP64": "identity_fp64"}[datatype]
    dtype = {"FP32": np.float32, "FP16": np.float16, "FP64": np.float64}[datatype]
    x = np.linspace(-4, 4, 16).astype(dtype).reshape(2, 8)
    with clientlib.connect() as client:
        region = client.create_region("odd", 8192)
        region.array((8192,), "UINT8")[:] = 0xEE
        region.array(x.shape, dtype, offset)[:] = x
        for target in (1024 + offset, 2048):
            plan = client.prepare(
                model,
                inputs={"x": region.tensor(x.shape, datatype, offset)},
                outputs={"y": region.tensor(x.shape, datatype, target)},
            )
            expected = x + 1 if model == "add1" else x
            plan.infer(timeout=40)
            if not np.array_equal(region.array(x.shape, dtype, target), expected):
                return False
            around = region.array((16,), "UINT8", target + x.nbytes)
            if not (around == 0xEE).all() or region.array((1,), "UINT8", target - 1)[0] != 0xEE:
                return False
    return True


@pytest.mark.parametrize("offset", [1, 2, 3, 7])
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "FP64"])
def test_b12_tensors_at_odd_addresses(lab: Lab, datatype: str, offset: int) -> None:
    """[B-12] the result is the same as anywhere else, and lies where it was asked for."""
    assert lab.offend(_infer_unaligned, datatype=datatype, offset=offset) is True
    lab.settled()


def _infer_nothing() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with clientlib.connect() as client:
        region = client.create_region("nothing", 4096)
        memory = region.array((4096,), "UINT8")
        memory[:] = 0xEE
        for shape in ((1, 0), (2, 0)):
            plan = client.prepare(
                "add1",
                inputs={"x": region.tensor(shape, "FP32", 64)},
                outputs={"y": region.tensor(shape, "FP32", 64)},
            )
            found[f"placed {shape}"] = list(plan.infer(timeout=40)["y"].shape)
        found["untouched"] = bool((memory == 0xEE).all())
        found["arrays"] = list(client.infer("add1", {"x": np.empty((3, 0), np.float32)}, timeout=40)["y"].shape)
        found["open"] = list(client.infer("nonzero", {"x": np.zeros(8, np.float32)}, timeout=40)["y"].shape)
        found["strings"] = list(client.infer("identity_string", {"x": np.empty((2, 0), object)}, timeout=40)["y"].shape)
    return found


def test_b13_tensors_without_elements(lab: Lab) -> None:
    """[B-13] nothing in, nothing out, and no byte is touched."""
    assert lab.offend(_infer_nothing) == {
        "placed (1, 0)": [1, 0],
        "placed (2, 0)": [2, 0],
        "untouched": True,
        "arrays": [3, 0],
        "open": [1, 0],
        "strings": [2, 0],
    }
    lab.settled()


def _map_and_unmap(turns: int) -> dict[str, int]:
    """Each request's region goes as soon as it is submitted: it is answered or was too late."""
    counts = {"wrong": 0}
    with clientlib.connect() as client:
        for turn in range(turns):
            region = client.create_region(f"r{turn % 3}", 1 << 14)
            region.array((2, 8), "FP32")[:] = turn
            plan = client.prepare(
                "add1",
                inputs={"x": region.tensor((2, 8), "FP32")},
                outputs={"y": region.tensor((2, 8), "FP32", mmap.PAGESIZE)},
            )
            pending = plan.submit()
            client.unregister(region.name)
            code, _ = child.refusal(pending.result, timeout=40)
            counts[code] = counts.get(code, 0) + 1
            if code == "OK":
                counts["wrong"] += not (pending.result()["y"] == turn + 1).all()
    return counts


def test_f06_register_and_unregister_around_every_request(lab: Lab) -> None:
    """[F-06] descriptor numbers and table indexes are reused all the time: no answer is another region's."""
    turns = scaled(150, 1_000_000)
    counts = lab.offend(_map_and_unmap, turns=turns, timeout_s=3600)
    assert counts["wrong"] == 0
    assert set(counts) <= {"wrong", "OK", "NOT_FOUND"}
    assert counts.get("OK", 0) + counts.get("NOT_FOUND", 0) == turns
    lab.settled()


def _keep_one_running(count: int) -> dict[str, int]:
    observer = raw.session()
    with clientlib.connect() as client:
        arrays = {"count": np.array([count]), "x": np.zeros(4, np.float32)}
        before = _worker_counts(observer)
        enough = threading.Event()

        def keep_one() -> None:
            while not enough.is_set():
                client.infer("slow", arrays, timeout=60)

        thread = threading.Thread(target=keep_one)
        thread.start()
        for _ in range(20):
            client.infer("matmul", {"x": np.ones((1, 4), np.float32)}, timeout=40)
        # The worker writes them when it has nothing better to do: within a moment, not at once.
        ends = time.monotonic() + 40
        while True:
            during = _worker_counts(observer)
            if (during["requests"] >= before["requests"] + 21 and during["in_flight"]) or time.monotonic() > ends:
                break
        enough.set()
        thread.join()
    return {"taken": during["requests"] - before["requests"], "in flight": during["in_flight"]}


def _worker_counts(observer: HandClient) -> dict[str, int]:
    (worker,) = (w for w in observer.ask("GetStatus")["status"]["workers"] if w["key"] == SAME)
    return {name: worker[name] for name in ("requests", "in_flight")}


def test_s5_status_counts_what_the_worker_took(lab: Lab) -> None:
    """[S5] `requests` and `in_flight` of a worker are what it took and what it has not ended."""
    lab.checked = True
    found = lab.offend(_keep_one_running, count=300_000)
    assert found["taken"] >= 21
    assert found["in flight"] >= 1
