"""Loader processes that crash, hang or talk nonsense: one model pays, the others are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.loading import _Loader, results
from broker.repository.config import LoadFailure, ModelConfig
from broker.repository.protocol import LoadRequest, Plan
from shm.errors import InferError
from tests.fakes.processes import children, descriptors, in_loop, subreaper, until

MODULE = "tests.fakes.dying_loader"


@pytest.fixture(autouse=True)
def _no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
    with subreaper():
        yield


async def load(*names: str, progress_s: float = 60.0) -> list[Plan | ModelConfig | LoadFailure]:
    request = LoadRequest(repositories=("/nowhere",), models=names)
    return [result async for result in results(request, module=MODULE, progress_s=progress_s)]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("segv", "was killed by SIGSEGV"),
        ("realtime", "was killed by signal 40"),
        ("exit", "exited with status 3"),
        ("noise", "wrote what cannot be read"),
    ],
)
@in_loop
async def test_the_model_that_ends_the_loader_fails_alone(name: str, how: str) -> None:
    before = descriptors()
    plan, first, failure, last = await load("a", name, "z")
    assert isinstance(plan, Plan)
    assert plan.models == ("a", name, "z")
    assert isinstance(first, ModelConfig)
    assert isinstance(last, ModelConfig)
    assert (first.name, last.name) == ("a", "z")
    assert isinstance(failure, LoadFailure)
    assert failure.name == name
    assert failure.reason.startswith(f"the loader process {how}")
    assert descriptors() <= before


@in_loop
async def test_a_loader_that_makes_no_progress_is_killed() -> None:
    found = await load("hang", "z", progress_s=1.0)
    assert isinstance(found[1], LoadFailure)
    assert found[1].reason.startswith("the loader process made no progress for 1 s")
    assert isinstance(found[2], ModelConfig)


@in_loop
async def test_whoever_stops_waiting_for_a_loader_blocks_nobody() -> None:
    before = descriptors()
    loader = _Loader(LoadRequest(repositories=("/nowhere",), models=("hang",)), MODULE)
    assert await loader.read(60.0)
    ending = asyncio.create_task(loader.ended())
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait([ending])
    assert ending.cancelled()
    await until(lambda: not children())
    await until(lambda: descriptors() <= before)


@in_loop
async def test_every_model_may_end_its_loader() -> None:
    plan, *failures = await load("segv1", "exit2", "segv3")
    assert isinstance(plan, Plan)
    assert [failure.name for failure in failures if isinstance(failure, LoadFailure)] == ["segv1", "exit2", "segv3"]


@in_loop
async def test_without_a_plan_there_is_nothing_to_go_on() -> None:
    with pytest.raises(InferError, match="exited with status 9 before it had listed the models"):
        await load("unplanned")
