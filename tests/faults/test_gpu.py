"""G-01 … G-06: GPU memory that is not what its client says, or goes while it is in use, and GPUs that fail; simulated,
see `gpu_lab`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clientlib
from tests.fakes.cuda import CudaEnv
from tests.fakes.processes import kill_new
from tests.faults import child
from tests.faults.gpu_doors import APART, KINDS, OK, REFUSED, SIZE, Memory, door, round_trip
from tests.faults.gpu_lab import GPU, GpuLab, write_adder
from tests.faults.lab import eventually, scaled

pytestmark = pytest.mark.timeout(180)
INVALID = "failed to register shared memory region: invalid args"  # Triton's, over its own protocols
MISSING = ("NOT_FOUND", 404)
NO_WORKER = "GPUs not supported: this broker has no worker on GPU-0"
UNKNOWN = {  # of GPUs, which are refused with another code: natively by UUID, and where Triton's parser does it
    "native, device -1": NO_WORKER,
    "native, device 99": NO_WORKER,
    "http, device -1": "attempt to access JSON non-unsigned-integer as unsigned-integer",
}


@pytest.fixture(scope="module")
def shared_lab(cuda_sim: CudaEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuLab]:
    with GpuLab(tmp_path_factory.mktemp("gpu"), cuda_sim) as lab:
        yield lab


# --- G-01: handles ---------------------------------------------------------------------------------------------------


def _wrong_handles(worker: int, **places: int) -> dict[str, Any]:
    gone = Memory()
    gone.free()
    kept = Memory()
    of_worker = kept.handle[:4] + struct.pack("<i", worker) + kept.handle[8:]  # as if the worker had exported it
    bad: dict[str, bytes | str] = {f"{size} bytes": bytes(size) for size in (0, 1, 63, 65, 10_240)}
    bad |= {"zeros": bytes(64), "ones": b"\xff" * 64, "random": bytes(range(7, 71)), "stale": gone.handle}
    bad |= {"own": of_worker}
    found = {}
    for kind in KINDS:
        with door(kind, **places) as through:
            texts = {"no base64": "!", "half of it": "AAAA="} if kind == "http" else {}
            for what, handle in {**bad, **texts}.items():
                found[f"{kind}, {what}"] = through.register("bad", handle)
            missing = through.infer("copies", "bad")
            assert missing[0] in MISSING or "Unable to find shared memory region: 'bad'" in missing[1], missing
            assert through.register("bad", kept.handle)[0] in OK, "the name is free"
            assert round_trip(through, "add", "bad", kept) == ["OK", "", [2.0] * 4]
            through.unregister("bad")
    return found


def test_g01_handles_of_nothing(lab: GpuLab) -> None:
    """[G-01] refused with Triton's text, whatever they are made of, and nothing stays open."""
    worker = lab.worker_pid(GPU)
    opened, closed = lab.opened()
    found = lab.bring(_wrong_handles, worker=worker)
    assert len(found) == 42
    for what, (code, text) in found.items():
        assert code in REFUSED, (what, code, text)
        kind, _, handle = what.partition(", ")
        if kind in ("http", "grpc") and not handle.endswith("bytes") and "base64" not in text:
            assert text.endswith(INVALID), (what, text)
    eventually(lambda: lab.opened()[1] - closed >= len(KINDS), "what could be opened is closed")
    lab.settled()
    now = lab.opened()
    assert now[1] - closed == len(KINDS), "only what could be opened was closed"
    assert now[0] > opened


# --- G-02: windows ---------------------------------------------------------------------------------------------------


def _wrong_windows(times: int, **places: int) -> dict[str, Any]:
    memory = Memory()
    found: dict[str, Any] = {}
    for kind in KINDS:
        with door(kind, **places) as through:
            for size in (SIZE + 1, 1 << 25, 1 << 50):
                found[f"{kind}, {size} bytes"] = through.register("bad", memory.handle, 0, size)
            for device in (-1, 1, 99):
                found[f"{kind}, device {device}"] = through.register("bad", memory.handle, device)
            for _ in range(times):
                refused = through.register("bad", memory.handle, 0, SIZE + 1)
                assert refused[0] in REFUSED, refused
            assert through.register("good", memory.handle)[0] in OK
            for at, to, count in ((SIZE - 8, APART, 4), (SIZE, APART, 4), (0, SIZE - 8, 4), (0, 1 << 40, 4)):
                found[f"{kind}, {count} at {at} to {to}"] = through.infer("mover", "good", count, at, to)
            assert round_trip(through, "mover", "good", memory) == ["OK", "", [1.0] * 4]
            through.unregister("good")
    with door("native", **places) as through:
        for offset, size, whole in ((SIZE, 16, SIZE), (SIZE - 8, 16, 1 << 20), (1 << 40, 16, 1 << 41), (0, 0, SIZE)):
            window = {"offset": offset, "allocation_size": whole}
            said = through.register("bad", memory.handle, 0, size, **window)
            found[f"native, {size} at {offset} of {whole}"] = said
    return found


def test_g02_more_than_there_is(lab: GpuLab) -> None:
    """[G-02] refused, however often; what was opened to look at it is closed."""
    before = lab.opened()
    found = lab.bring(_wrong_windows, times=scaled(25, 250))
    for what, (code, text) in found.items():
        other = UNKNOWN.get(what, "")
        assert other in text, (what, text)
        assert other or code in (*REFUSED, *MISSING), (what, code, text)
    assert len(found) == 44
    eventually(lambda: lab.opened()[1] - before[1] >= len(KINDS) * scaled(25, 250), "all are closed")
    lab.settled()
    opened, closed = (now - then for now, then in zip(lab.opened(), before, strict=True))
    assert opened >= closed, "calls, some of which opened nothing"


def _odd_windows(**places: int) -> dict[str, Any]:
    memory = Memory()
    found = {}
    for kind in KINDS:
        with door(kind, **places) as through:
            through.register("r", memory.handle)
            for model in ("add", "mover", "copies"):
                for at, to in ((4, APART + 4), (1, APART + 3), (255, APART + 257)):
                    memory.put([0.0] * (SIZE // 4))
                    memory.put([3.0] * 8, at)
                    said = through.infer(model, "r", 4, at, to)
                    memory_now = memory.get(0, SIZE // 4)
                    found[f"{kind}, {model}, {at}"] = [said[0], memory.get(to), sum(map(bool, memory_now))]
            through.unregister("r")
    with door("native", **places) as through:
        for offset in (1, 4, 100, 257):
            size = SIZE - offset
            window = {"offset": offset, "allocation_size": SIZE}
            through.register("r", memory.handle, 0, size, **window)
            memory.put([0.0] * (SIZE // 4))
            memory.put([3.0] * 8, offset)
            said = through.infer("add", "r")
            found[f"window at {offset}"] = [said[0], memory.get(offset + APART), 0]
            through.unregister("r")
    return found


def test_g02_places_that_no_runtime_would_take(lab: GpuLab) -> None:
    """[G-02] copied on the GPU to where runtimes expect them, and right; nothing is written beside the output."""
    found = lab.bring(_odd_windows)
    assert len(found) == 4 * 3 * 3 + 4
    for what, (code, result, changed) in found.items():
        assert code == "OK", (what, code)
        assert result == [6.0 if "add" in what or "window" in what else 3.0] * 4, (what, result)
        assert changed <= 8 + 4 + 2, f"{what}: {changed} elements are not 0"
    lab.settled()


# --- G-06: twice -----------------------------------------------------------------------------------------------------


def _twice(**places: int) -> dict[str, Any]:
    memory = Memory()
    found = {}
    for kind in KINDS:
        with door(kind, **places) as through:
            for name in ("one", "two"):
                assert through.register(name, memory.handle)[0] in OK
            again = through.register("two", memory.handle)
            both = [round_trip(through, "add", name, memory, 1.0)[2] for name in ("one", "two")]
            through.unregister("one")
            left = round_trip(through, "add", "two", memory, 2.0)
            through.unregister("two")
            found[kind] = [again, both, left]
    with door("native", **places) as first, door("http", **places) as second:
        assert first.register("r", memory.handle)[0] in OK
        assert second.register("r", memory.handle)[0] in OK
        first.unregister("r")
        found["by two"] = [round_trip(second, "add", "r", memory, 2.0)]
        second.unregister("r")
    return found


def test_g06_one_handle_under_two_names(lab: GpuLab) -> None:
    """[G-06] works; opened once, closed with the last."""
    before = lab.opened()
    found = lab.bring(_twice)
    for kind in KINDS:
        again, both, left = found[kind]
        assert again[1].endswith("shared memory region 'two' already in manager"), again
        assert both == [[2.0] * 4] * 2
        assert left == ["OK", "", [4.0] * 4]
    assert found["by two"] == [["OK", "", [4.0] * 4]]
    eventually(lambda: lab.opened()[1] - before[1] >= len(KINDS) + 1, "the last is closed")
    lab.settled()
    assert [now - then for now, then in zip(lab.opened(), before, strict=True)] == [len(KINDS) + 1] * 2


# --- G-05: a full GPU ------------------------------------------------------------------------------------------------


def _too_much(**_: int) -> list[Any]:
    count = 12 << 20
    with clientlib.connect(timeout=40) as client:
        region = client.create_region("big", 8 * count)
        inputs = {"INPUT0": region.tensor((count,), "FP32")}
        outputs = {"OUTPUT0": region.tensor((count,), "FP32", offset=4 * count)}
        large = child.refusal(client.prepare("mover", inputs, outputs).infer, timeout=60)
        load = child.refusal(client.load, "large")
        client.unload("large")
        small = client.infer("mover", {"INPUT0": np.ones(4, np.float32)}, timeout=60)["OUTPUT0"].tolist()
    return [large, load, small]


def test_g05_a_gpu_without_memory(lab: GpuLab) -> None:
    """[G-05] that request's error, or that model's; the next one runs."""
    write_adder(lab.repository, "large", "no memory")
    large, load, small = lab.bring(_too_much)
    assert large[0] == "UNAVAILABLE"
    assert "the GPU has no 67108864 bytes left for this request" in large[1]
    assert load[0] != "OK"
    assert "unable to create TensorRT context" in load[1], load
    assert small == [1.0] * 4
    lab.settled()


# --- G-03: memory and workers that go --------------------------------------------------------------------------------

# A request on memory that is gone runs on what is still open, or is told that it is unknown or cannot be opened.
ENDED = ("OK", *MISSING, *REFUSED)


def _freed_while_registered(**places: int) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        with door(kind, **places) as through:
            memory = Memory()
            through.register("r", memory.handle)
            before = round_trip(through, "add", "r", memory)
            memory.free()
            after = [through.infer(model, "r")[0] for model in ("add", "copies")]
            again = Memory()  # where the other one was
            assert again.pointer == memory.pointer
            assert through.register("again", again.handle)[0] in OK, kind
            lost = through.infer("add", "r")
            new = round_trip(through, "add", "again", again, 2.0)
            for name in ("r", "again"):
                through.unregister(name)
            again.free()
            found[kind] = [before, after, lost, new]
    return found


def test_g03_memory_that_is_freed_while_it_is_registered(lab: GpuLab) -> None:
    """[G-03] ended somehow; what is made at its address is other memory, and the old name has none any more."""
    found = lab.bring(_freed_while_registered)
    for kind in KINDS:
        before, after, lost, new = found[kind]
        assert before == ["OK", "", [2.0] * 4]
        assert set(after) <= set(ENDED), (kind, after)
        assert "its GPU memory was freed by its client, or unregistered" in lost[1], (kind, lost)
        assert new == ["OK", "", [4.0] * 4], (kind, new)
    lab.settled()


def _one_at_a_time(kind: str, free: bool, **places: int) -> list[Any]:
    """A request that is held in the middle; then, if told to go on, what became of it."""
    with door(kind, **places) as through:
        memory = Memory()
        assert through.register("r", memory.handle)[0] in OK
        memory.put([-1.0] * 8)
        said: list[Any] = []
        asking = threading.Thread(target=lambda: said.extend(through.infer("mover", "r")))
        asking.start()
        child.hear()
        if free:
            memory.free()
        child.say("freed")
        asking.join()
        through.unregister("r")
        return said


@pytest.mark.parametrize("kind", KINDS)
def test_g03_memory_that_is_freed_while_a_model_runs_on_it(lab: GpuLab, kind: str) -> None:
    """[G-03] the request ends, and the next one is right."""
    offender = lab.start(_one_at_a_time, kind=kind, free=True, http=lab.http, grpc=lab.grpc)
    lab.entered()
    offender.tell("go on")
    assert offender.heard() == "freed"
    lab.let()
    code, text = offender.result()
    assert code in ENDED, (code, text)
    lab.settled()


def _forget(**places: int) -> None:
    """What a killed client registered over HTTP and gRPC stays: it is its user's. Another one unregisters it."""
    with door("http", **places) as through:
        assert through.unregister("r")[0] in OK


@pytest.mark.parametrize("kind", KINDS)
def test_g03_a_client_that_is_killed_while_a_model_runs_on_its_memory(lab: GpuLab, kind: str) -> None:
    """[G-03] nobody else notices, and all of its memory is closed."""
    offender = lab.start(_one_at_a_time, kind=kind, free=False, valid=False, http=lab.http, grpc=lab.grpc)
    lab.entered()
    offender.kill()
    lab.let()
    lab.bring(_forget)
    lab.settled()


def _before_and_after(kind: str, **places: int) -> list[Any]:
    with door(kind, **places) as through:
        memory = Memory()
        through.register("r", memory.handle)
        found = [round_trip(through, "add", "r", memory)]
        child.say("ran")
        child.hear()
        found.append(round_trip(through, "add", "r", memory, 2.0))
        through.unregister("r")
        return found


def test_g03_a_worker_that_is_killed(lab: GpuLab) -> None:
    """[G-03] its replacement opens the same memory, and answers."""
    killed: set[int] = set()
    for kind in KINDS:
        offender = lab.start(_before_and_after, kind=kind, http=lab.http, grpc=lab.grpc)
        assert offender.heard() == "ran"
        kill_new(lambda: lab.worker_pid(GPU), killed)
        offender.tell("again")
        assert offender.result() == [["OK", "", [2.0] * 4], ["OK", "", [4.0] * 4]]
    lab.settled(replaced=GPU)


def test_g03_a_worker_that_is_killed_while_its_model_runs(lab: GpuLab) -> None:
    """[G-03] the request runs once more."""
    offender = lab.start(_one_at_a_time, kind="http", free=False, http=lab.http, grpc=lab.grpc)
    lab.entered()
    kill_new(lambda: lab.worker_pid(GPU), set())
    lab.entered()
    lab.let()
    offender.tell("go on")
    assert offender.heard() == "freed"
    assert offender.result() == ["OK", ""]
    lab.settled(replaced=GPU)


# --- G-04: runs that end their worker --------------------------------------------------------------------------------


def _fatal(model: str, **places: int) -> dict[str, Any]:
    memory = Memory()
    found = {}
    for kind in ("native", "grpc"):
        with door(kind, **places) as through:
            through.register("r", memory.handle)
            found[kind] = [round_trip(through, model, "r", memory)[:2], round_trip(through, "add", "r", memory, 2.0)]
            through.unregister("r")
    return found


@pytest.mark.parametrize("model", ["broken", "stuck"])
def test_g04_a_run_that_loses_the_context_or_never_ends(lab: GpuLab, model: str) -> None:
    """[G-04] UNAVAILABLE for who asked for it, a new worker for everybody else on that GPU, nothing on the other."""
    found = lab.bring(_fatal, model=model, timeout_s=100)
    for kind, (failed, after) in found.items():
        assert failed[0] == "UNAVAILABLE", (kind, failed)
        assert after == ["OK", "", [4.0] * 4], (kind, after)
    lab.settled(replaced=GPU)
