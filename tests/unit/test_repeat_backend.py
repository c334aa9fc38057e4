"""The backend `repeat` of a model that is not decoupled: one element, one response."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shm.errors import Code
from tests.fakes.loaded import Loaded, spec, text_of
from tests.fakes.loading import run
from tests.fakes.streaming import REPEAT


@pytest.mark.parametrize(
    ("count", "delays", "text"),
    [
        (1, 1, ""),
        (2, 2, "a model that is not decoupled has one response, got IN [2]"),
        (1, 2, "expected IN and DELAY shape to match, got [1] and [2]"),
    ],
)
def test_one_element_one_response(tmp_path: Path, count: int, delays: int, text: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(REPEAT.replace("decoupled: true", "decoupled: false"))
    with Loaded(run(tmp_path)) as loaded:
        memory = loaded.memory()
        memory.put(0, np.full(count, 7, np.int32))
        memory.put(64, np.ones(delays, np.uint32))
        memory.put(128, np.ones(1, np.uint32))
        memory.put(260, np.ones(1, np.uint32))
        plan = loaded.plan(
            memory,
            [
                spec("IN", (count,), "INT32"),
                spec("DELAY", (delays,), "UINT32", offset=64),
                spec("WAIT", (1,), "UINT32", offset=128),
            ],
            [spec("OUT", (1,), "INT32", offset=256), spec("IDX", (1,), "UINT32", offset=260)],
        )
        request = loaded.run(loaded.request(plan))
        assert (request.code, text_of(request)) == (Code.INVALID_ARG if text else Code.OK, text)
        if not text:
            assert memory.get(256, (2,), "INT32").tolist() == [7, 0]
