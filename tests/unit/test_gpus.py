"""What the broker knows of GPUs, without asking a driver."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker import gpus
from broker.gpus import ABSENT, Gpus, driver_is_there
from broker.repository.protocol import LoadRequest
from shm.cuda.driver import Device, Status
from shm.errors import InferError

REQUEST = LoadRequest(repositories=("/r",))


def device(ordinal: int, capability: tuple[int, int] = (9, 0)) -> Device:
    return Device(ordinal, f"GPU-{ordinal}", "H200", capability, 1 << 37)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Status]:
    """What the driver says, the last one again and again; each look takes one."""
    found: list[Status] = []
    monkeypatch.setattr(gpus, "_ask", lambda: found.pop(0) if len(found) > 1 else found[0])
    monkeypatch.setattr(gpus, "driver_is_there", lambda: bool(found))
    monkeypatch.setattr(gpus, "AGAIN_S", 0.0)
    return found


def test_without_a_driver_nothing_is_started(answers: list[Status]) -> None:
    known = Gpus()
    assert asyncio.run(known.look()) == ABSENT
    request = asyncio.run(known.known_to(REQUEST))
    assert request.gpus == ()
    assert request.no_gpus.startswith("CUDA is not available: NVIDIA's driver library libcuda.so.1 was not found")
    assert known.facts() == {"state": "no driver", "reason": ABSENT.text, "gpus": []}
    assert known.uuids() == ()
    with pytest.raises(InferError, match="there is no GPU 0: CUDA is not available"):
        known.uuid(0)


def test_those_that_are_found_are_the_loaders_and_the_workers(answers: list[Status]) -> None:
    answers.append(Status("ok", "", (device(0), device(1, (5, 2)), device(2))))
    known = Gpus()
    request = asyncio.run(known.known_to(REQUEST))
    assert request.gpus == (0, 2), "a compute capability of 5.2 is too little"
    assert request.no_gpus == "the broker sees 3 (CUDA_VISIBLE_DEVICES)"
    assert (known.uuid(2), known.uuids()) == ("GPU-2", ("GPU-0", "GPU-1", "GPU-2"))
    row = {
        "ordinal": 0,
        "uuid": "GPU-0",
        "name": "H200",
        "compute_capability": "9.0",
        "total_memory": 1 << 37,
    }
    assert known.facts()["gpus"][0] == row


def test_a_driver_that_comes_up_later_is_found_by_a_later_load(
    answers: list[Status], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answers += [Status("no device", "none"), Status("no device", "none"), Status("ok", "", (device(0),))]
    known = Gpus()
    assert [asyncio.run(known.known_to(REQUEST)).gpus for _ in range(4)] == [(), (), (0,), (0,)]
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "CUDA is not available: none",
        f"GPU 0: H200, GPU-0, compute capability 9.0, {1 << 37} bytes",
    ], "what is the same is said once"


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu"])
def test_which_build_of_the_runtime_there_is_decides(
    answers: list[Status], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def distribution(wanted: str) -> None:
        if wanted != name:
            raise gpus.PackageNotFoundError

    monkeypatch.setattr(gpus, "distribution", distribution)
    on_cpu = asyncio.run(Gpus().known_to(REQUEST)).on_cpu
    assert "identity" in on_cpu
    assert ("onnxruntime" in on_cpu) == (name == "onnxruntime")


def test_where_the_library_is_looked_for(tmp_path: Path) -> None:
    assert not driver_is_there({"LD_LIBRARY_PATH": str(tmp_path)}) or driver_is_there({})
    (tmp_path / "libcuda.so.1").touch()
    assert driver_is_there({"LD_LIBRARY_PATH": f":{tmp_path}"})
    assert driver_is_there({"LD_PRELOAD": "/x/libcuda.so.1"})


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (subprocess.TimeoutExpired("python", 30), "did not answer within 30 s"),
        (OSError("no more processes"), "cannot be asked: no more processes"),
        (b"", "ended with -11: it crashed"),
        (b"{}", "ended with -11: it crashed"),
    ],
)
def test_a_driver_that_does_not_answer_is_an_error_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, outcome: Any, text: str
) -> None:
    def run(command: list[str], **_: object) -> Any:
        assert command[0] == sys.executable
        if isinstance(outcome, Exception):
            raise outcome
        return subprocess.CompletedProcess(command, -11, outcome, b"a line\nit crashed\n")

    monkeypatch.setattr(subprocess, "run", run)
    status = gpus._ask()
    assert status.kind == "driver error"
    assert text in status.text


def test_an_answer_comes_back_as_it_was() -> None:
    status = Status("ok", "", (device(0), device(1)))
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
