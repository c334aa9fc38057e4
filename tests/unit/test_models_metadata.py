from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from broker.catalogue import tensor_metadata
from broker.repository.config import TensorConfig
from broker.worker_process import WorkerProcess, describe_exit


def test_the_batch_dimension_has_one_symbol_for_all():
    x = tensor_metadata(TensorConfig(name="x", datatype="FP32", dims=(3, -1), symbols=("", "n")), True)
    assert (x.shape, x.symbols) == ((-1, 3, -1), ("*batch", "", "n"))


def test_without_batching_shape_and_symbols_are_the_configured_ones():
    x = tensor_metadata(TensorConfig(name="x", datatype="FP32", dims=(3, -1), symbols=("", "n")), False)
    assert (x.shape, x.symbols) == ((3, -1), ("", "n"))


def test_sizes_without_a_name_are_unknown_until_the_model_has_run():
    y = tensor_metadata(TensorConfig(name="y", datatype="INT64", dims=(1, -1)), False)
    assert y.symbols == ("", "?y:1")


def test_what_clients_may_know_is_carried_over():
    config = TensorConfig(
        name="x", datatype="BYTES", dims=(), optional=True, zero_copy=True, zero_copy_reason="because"
    )
    x = tensor_metadata(config, False)
    assert (x.name, x.datatype, x.optional, x.zero_copy, x.zero_copy_reason) == ("x", "BYTES", True, True, "because")


@pytest.mark.parametrize(
    ("code", "text", "signal"),
    [
        (0, "exit code 0", 0),
        (3, "exit code 3", 0),
        (-11, "killed by SIGSEGV", 11),
        (-7, "killed by SIGBUS", 7),
        (-40, "killed by signal 40", 40),
        (None, "ended, nobody knows how", 0),
    ],
)
def test_how_a_process_ended(code, text, signal):
    assert describe_exit(code)[:2] == (text, signal)


@pytest.mark.parametrize(
    ("reason", "told", "heard"),
    [
        ("", "", "killed by SIGKILL"),
        ("cannot take up its work: no memory for model 'other'", "", "killed by SIGKILL"),
        ("hung: model 'm' had run for 9.0 s", "model 'm' hung", "model 'm' hung"),
    ],
)
def test_why_the_broker_killed_a_worker_is_for_clients_only_where_it_says_so(reason, told, heard):
    killed: Any = SimpleNamespace(kill_reason=reason, kill_told=told)
    assert WorkerProcess.exit(killed, -9) == (reason or "killed by SIGKILL", 9, heard, False)


@pytest.mark.parametrize("late", [False, True])
def test_requests_have_their_endings_also_when_nobody_can_say_how_their_worker_ended(late, monkeypatch):
    dead = object.__new__(WorkerProcess)
    dead.pid, dead.kill_reason, dead.kill_told = 1, "", ""
    heard: list[str] = []

    async def end() -> str:
        buried = asyncio.Event()

        def bury(process: WorkerProcess, told: str, now_ns: int) -> None:
            heard.append(told)
            buried.set()

        async def fails() -> int | None:
            if late:
                await buried.wait()
            raise KeyError(5)

        return (await dead.ended(fails(), bury)).text

    if late:
        monkeypatch.setattr("broker.worker_process.TOLD_S", 0.0)
    assert asyncio.run(end()) == "ended, nobody knows how"
    assert heard == ["ended, nobody knows how"]
