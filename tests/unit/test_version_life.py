"""A version is loaded on all its workers or on none, also when the load is cancelled half-way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from broker import version_life
from broker.load_watch import LoadWatch
from broker.version_life import VersionLife


class Worker:
    """Loads at once, or never ends."""

    def __init__(self, key: str, endless: bool) -> None:
        self.key, self.pid, self.endless = key, 1, endless
        self.has = False
        self.asked, self.ended = asyncio.Event(), asyncio.Event()

    async def until_up(self) -> None: ...

    async def load(self, *_: Any) -> None:
        self.asked.set()
        if self.endless:
            await asyncio.Event().wait()
        self.has = True
        self.ended.set()

    async def unload(self, *_: Any) -> None:
        self.has = False


def test_a_load_that_is_cancelled_leaves_no_worker_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["cpu/a", "cpu/b", "cpu/c"]
    config: Any = SimpleNamespace(name="m", notes=(), versions={1: ""}, instance_group=())
    monkeypatch.setattr(version_life, "placed", lambda _: dict.fromkeys(keys, config))

    async def nothing(*_: Any) -> str:
        return ""

    async def cancelled_meanwhile() -> tuple[dict[str, Worker], Any]:
        workers = {key: Worker(key, endless=key == "cpu/c") for key in keys}
        blocks = SimpleNamespace(
            busy=lambda *_: False,
            take=lambda *_: (1,),
            unmeasured=lambda _: None,
            has_room=lambda *_: True,
            bound=lambda *_: None,
        )
        known: dict[int, Any] = {}
        sizes = SimpleNamespace(begin=lambda *_: None, end=lambda *_: None, disturb=lambda *_: None)
        life = VersionLife(
            SimpleNamespace(  # type: ignore[arg-type]
                start=workers.__getitem__, blocks=blocks, give_back=lambda _: None, loads=LoadWatch(1)
            ),
            SimpleNamespace(known={"m": SimpleNamespace(versions=known)}, versions=list),  # type: ignore[arg-type]
            SimpleNamespace(discard=lambda _: None),  # type: ignore[arg-type]
            SimpleNamespace(make_room=nothing, measured=nothing, loaded=nothing, sizes=sizes),  # type: ignore[arg-type]
        )
        load = asyncio.create_task(life.serve(config))
        await asyncio.wait_for(workers["cpu/c"].asked.wait(), 10)
        await asyncio.wait_for(workers["cpu/b"].ended.wait(), 10)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        return workers, known[1]

    workers, version = asyncio.run(cancelled_meanwhile())
    assert [key for key in keys if workers[key].has] == []
    assert (version.state, version.workers) == ("UNAVAILABLE", ())
