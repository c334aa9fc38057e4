"""Descriptors whose close waits for a process of their sender's: files of a FUSE mount that is stopped."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.broker import HandClient, descriptor, pool
from tests.faults import child, raw
from tests.faults.fuse import CannotMount, StoppedFile, covered_by_stopped
from tests.faults.lab import Lab
from tests.faults.nursery import eventually

AT_ONCE = 16  # descriptors of one datagram; half as many stuck ones have the porter replaced


def _hand_over(directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        try:
            stopped = StoppedFile(Path(directory))
        except CannotMount as error:
            return {"cannot": str(error)}
        stack.callback(stopped.end)
        fds = [stopped.open() for _ in range(AT_ONCE)]
        clients = [stack.enter_context(contextlib.closing(raw.session())) for _ in range(5)]
        stopped.stop()
        pools, loads, unasked, unread, later = clients
        found["pool"] = raw.outcome(pools.ask("RegisterPool", fds[:1], name="p", byte_size=4096))
        found["load"] = raw.outcome(loads.ask("LoadModel", fds[1:2], model="add1", parameters=True))
        found["unasked"] = raw.outcome(unasked.ask("ListRegions", fds))
        unread.send("ListRegions", fds)
        unread.close()
        found["ends"] = [raw.outcome(client.receive()) for client in (pools, loads, unasked)]
        found["later"] = raw.outcome(later.ask("RegisterPool", fds[:1], name="p", byte_size=4096))
        found["later, then"] = raw.outcome(later.receive())
        with descriptor(pool(4096)) as fd, contextlib.closing(raw.session()) as other:
            found["others"] = raw.outcome(other.ask("RegisterPool", [fd], name="r", byte_size=4096))
        child.say(found)
        child.hear()
    return found


def test_files_that_nobody_can_close(lab: Lab, tmp_path: Path) -> None:
    """They never reach the broker: it serves everybody, ends their sessions, and holds nothing once they can go."""
    offender = lab.start(_hand_over, directory=str(tmp_path), valid=False)
    found = offender.heard()
    if reason := found.get("cannot"):
        lab.settled()
        pytest.skip(f"no FUSE mount can be made here: {reason}")
    for asked in ("pool", "later"):
        assert found[asked][0] == "INVALID_ARG", found[asked]
    assert "explicit" in found["load"][1], found["load"]
    assert found["unasked"] == ["Regions", ""]
    for code, reason in [*found["ends"], found["later, then"]]:
        assert code == "hung up"
        assert "cannot be closed" in reason
    assert found["others"] == ["RegionInfo", ""]
    assert lab.status()["workers"], "the broker answers while they wait"
    eventually(lambda: _held(lab) > 0, "the metric tells")
    offender.tell(0)
    offender.result()
    eventually(lambda: _held(lab) == 0, "all are closed")
    lab.settled()


def _register_what_is_covered() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with raw.named_memory(4096) as key, contextlib.closing(raw.session()) as client:
        try:
            with covered_by_stopped(Path("/dev/shm" + key)):
                found["covered"] = raw.outcome(client.ask("RegisterSystem", name="s", key=key, byte_size=4096))
        except CannotMount as error:
            return {"cannot": str(error)}
        found["bare"] = raw.outcome(client.ask("RegisterSystem", name="s", key=key, byte_size=4096))
    return found


def test_a_mount_over_shared_memory(lab: Lab) -> None:
    """To open it would wait for its owner: who may mount (fusermount lets everybody) could stop the broker so."""
    found = lab.offend(_register_what_is_covered) if lab.private else {"cannot": "not root in the broker's namespace"}
    lab.settled()
    if reason := found.get("cannot"):
        pytest.skip(f"no FUSE mount can be made here: {reason}")
    assert found["covered"][0] == "INVALID_ARG"
    assert "another file system is mounted there" in found["covered"][1]
    assert found["bare"] == ["RegionInfo", ""]


def _held(lab: Lab) -> int:
    client = HandClient(lab.broker.path)
    with contextlib.closing(client):
        assert client.ask("Hello", protocol=1)["type"] == "Welcome"
        held: int = client.ask("GetMetrics")["metrics"]["descriptors_held"]
        return held
