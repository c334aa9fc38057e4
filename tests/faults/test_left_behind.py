"""W-14: processes that a model has started end with its worker, wherever they went. Nobody else's do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clientlib
from tests.faults import unruly
from tests.faults.lab import SAME, Lab, eventually

TAG, KINDS = 14, 5  # processes: two sleeps, two more and a shell that waits for one of these


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), models=unruly.write) as lab:
        yield lab


def helpers() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{1_000_000 + TAG}" in path.read_text():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def start_helpers() -> list[Any]:
    with clientlib.connect() as client:
        asked = unruly.inputs("helpers", 1, TAG)
        y = client.infer("unruly", asked, timeout=30)["y"]
        told = [bool(np.array_equal(y, asked["x"] + 1))]
        told.append(bool((client.infer("other", {"x": np.ones((1, 4), np.float32)}, timeout=30)["y"] == 2).all()))
        return told


def test_w14_helpers_of_a_model_end_with_its_worker(lab: Lab) -> None:
    before = helpers()
    assert lab.offend(start_helpers) == [True, True]
    started = eventually(lambda: new if len(new := helpers() - before) >= KINDS else None, "helpers")
    sessions = {os.getsid(pid) for pid in started}
    assert len(sessions) > 2, "some have left the worker's session"
    os.kill(lab.worker_pid("cpu/other"), signal.SIGKILL)
    eventually(lambda: lab._is_ready("cpu/other"), "the other worker is back")
    assert helpers() - before == started, "another worker's death is none of theirs"
    lab.remember()
    os.kill(lab.worker_pid(), signal.SIGKILL)
    eventually(lambda: not helpers() - before, "all have ended")
    lab.settled(replaced=SAME)
