"""What clients are told of loads that failed: paths below the repository, and not where that lies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker import version_life
from broker.load_failures import for_clients, roots_of, versions_failed
from broker.load_watch import LoadWatch
from broker.version_life import VersionLife
from shm.errors import Code, InferError


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("/srv/models/yolo/1/model.onnx: is not an ONNX model", "yolo/1/model.onnx: is not an ONNX model"),
        ("unable to find '/srv/models/yolo/1/model.onnx'", "unable to find 'yolo/1/model.onnx'"),
        ("x\n    in /srv/models//yolo/config.pbtxt:3: dims", "x\n    in yolo/config.pbtxt:3: dims"),
        ("a link out of the model repository /srv/models", "a link out of the model repository models"),
        ("it is in /srv/models and in /srv/models2", "it is in models and in /srv/models2"),
        ("/data/srv/models/yolo and /srv/models.old/yolo", "/data/srv/models/yolo and /srv/models.old/yolo"),
        ("no path at all", "no path at all"),
        ("/srv/models/m/1 is a link to ../a, which x", "m/1 is a link to ../a, which x"),
        ("/srv/models/m/1 is a link to /srv/models/a, which x", "m/1 is a link to a, which x"),
        ("/srv/models/m is a link to /home/b, c, which x", "m is a link out of the model repository, which x"),
    ],
)
def test_where_the_repository_lies_is_not_said(reason: str, shown: str) -> None:
    assert for_clients(reason, roots_of(("/srv/models/",))) == shown


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    roots = roots_of((str(tmp_path / "link"), "/", ""))
    assert roots == (str(tmp_path / "link"), str(tmp_path / "real"))
    assert for_clients(f"{tmp_path}/real/m and {tmp_path}/link/m", roots) == "m and m"


def test_the_semicolon_of_triton_stands_behind_the_reason_and_not_behind_the_fix() -> None:
    told = versions_failed("m", {1: "no such file", 2: "dims do not fit\n    fix: dims: [ 4 ]"}).message
    assert told == (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: no such file;\n"
        "version 2 is at UNAVAILABLE state: dims do not fit;\n    fix: dims: [ 4 ]\n"
    )


def test_a_root_may_have_any_name() -> None:
    """What its name has of backslashes is no reference to a group."""
    assert for_clients("cannot read /srv/a\\1 or /srv/a\\1/m", (r"/srv/a\1",)) == r"cannot read a\1 or m"
    assert for_clients("/x: no such file", ("",)) == "/x: no such file"


def test_where_any_repository_lies_is_not_said_of_a_worker_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that another model is in, and of the files that came with the load."""
    config: Any = SimpleNamespace(name="m", notes=(), versions={1: ""}, instance_group=(), directory="/run/with.1/m")
    monkeypatch.setattr(version_life, "placed", lambda _: {"cpu/a": config})

    async def nothing(*_: Any) -> str:
        return ""

    async def fail(*_: Any) -> None:
        raise InferError(Code.INTERNAL, "/run/with.1/m/1/x wants /srv/one/n/1/y, not /srv/three")

    worker: Any = SimpleNamespace(key="cpu/a", pid=1, until_up=nothing, load=fail)
    blocks: Any = SimpleNamespace(busy=lambda *_: False, take=lambda *_: (1,), unmeasured=len, has_room=lambda *_: True)
    workers: Any = SimpleNamespace(start=lambda key: worker, blocks=blocks, loads=LoadWatch(1))
    catalogue: Any = SimpleNamespace(known={"m": SimpleNamespace(versions={})}, versions=list)
    sizes = SimpleNamespace(begin=lambda *_: None, end=lambda *_: None)
    memory: Any = SimpleNamespace(make_room=nothing, loaded=nothing, sizes=sizes)
    overrides: Any = SimpleNamespace(discard=lambda _: None)
    life = VersionLife(workers, catalogue, overrides, memory, ("/srv/one", "/srv/two"))
    assert asyncio.run(life.serve(config)) == {1: "m/1/x wants n/1/y, not /srv/three"}
