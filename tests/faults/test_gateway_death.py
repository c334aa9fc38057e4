"""A gateway's death costs the requests in it and nothing else: no region, no answer, no other gateway's request."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.fakes.processes import kill_new
from tests.faults import child, raw, visitor
from tests.faults.lab import eventually, scaled
from tests.faults.visited import VisitedLab

SIZE = 4096
GONE = ("LOST", "503", "UNAVAILABLE")  # of whoever had a request, or a connection, in the one that was killed


def _insist(kind: str, http: int, grpc: int, ask: Any) -> tuple[list[str], int]:
    """What a request ends with, each time on a connection of its own, and how often it was lost before."""
    deadline = time.monotonic() + raw.LIMIT_S
    for lost in itertools.count():
        door = visitor.Door(kind, http, grpc)
        try:
            found = visitor.outcome(ask, door)
        finally:
            door.close()
        if found[0] not in GONE:
            return found, lost
        assert time.monotonic() < deadline, f"no gateway serves: {found}"
        child.hear(0.02)  # both may be gone for the second that a start takes
    raise AssertionError


def _register_infer_unregister(http: int, grpc: int, turns: int) -> dict[str, Any]:
    """Each step asks whichever gateway the kernel picks."""
    lost, wrong, unexpected = 0, [], []
    with raw.named_memory(SIZE) as key:
        memory = os.open(f"/dev/shm{key}", os.O_RDWR)
        for turn in range(turns):
            kind, name = ("http", "grpc")[turn % 2], f"turn-{turn}"
            x = np.arange(4, dtype=np.float32) + turn
            os.pwrite(memory, x.tobytes() + bytes(64), 0)
            steps = (
                lambda door, name=name: door.client.register_system_shared_memory(name, key, SIZE),
                lambda door, name=name: door.infer(name, 0, 64),
                lambda door, name=name: door.client.unregister_system_shared_memory(name),
            )
            for step, ask in enumerate(steps):
                found, times = _insist(kind, http, grpc, ask)
                lost += times
                told_twice = step == 0 and times and "already in manager" in found[1]
                if found[0] != "OK" and not told_twice:
                    unexpected.append([turn, step, found])
            if (y := os.pread(memory, 16, 64)) != (x + 1).tobytes():
                wrong.append([turn, kind, np.frombuffer(y, np.float32).tolist()])
            if turn % 10 == 5:
                child.say(turn)
        os.close(memory)
    return {"lost": lost, "wrong": wrong, "unexpected": unexpected}


def test_gateways_killed_while_others_register_infer_and_unregister(tmp_path: Path) -> None:
    """Two gateways on the same ports, one of which is killed now and then."""
    turns = scaled(40, 1000)
    gone: set[int] = set()
    with VisitedLab(tmp_path, "--gateways=2") as lab:
        eventually(lambda: all(lab.gateway_pids()), "both run")
        offender = lab.start(_register_infer_unregister, http=lab.http, grpc=lab.grpc, turns=turns)
        for kill in range(turns // 10):
            offender.heard()
            if kill % 4 != 3:
                kill_new(lambda: lab.gateway_pids()[kill % 2], gone)  # noqa: B023 (called at once)
        found = offender.result()
        lab.tell_tales(found)
        assert found["wrong"] == []
        assert found["unexpected"] == []
        lab.settled(lost=True)
