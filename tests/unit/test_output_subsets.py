"""Requests of one model that ask for different outputs share batches: each gets what it asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.worker.cache import ResponseCache
from broker.worker.cached import Cached
from broker.worker.plans import Plan
from shm import statistics
from tests.fakes.loaded import Loaded, Memory, spec
from tests.fakes.loading import run

CONFIG = """
backend: "own"
max_batch_size: 16
dynamic_batching {}
input [ { name: "a" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "b" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [
  { name: "sum" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "difference" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "open" data_type: TYPE_FP32 dims: [ -1 ] }
]
"""
BACKEND = """
import numpy as np

def load(context):
    return Model()

class Model:
    def close(self): pass

    def bind(self, inputs, outputs):
        return Run(*(each.memory.view(np.float32).reshape(each.shape) for each in inputs), outputs)

class Run:
    def __init__(self, a, b, outputs):
        self.a, self.b, self.outputs = a, b, outputs

    def run(self):
        made = {"sum": self.a + self.b, "difference": self.a - self.b, "open": np.repeat(self.a, 2, axis=1)}
        self.made = [made[each.name] for each in self.outputs if each.memory is None]
        for each in self.outputs:
            if each.memory is not None:
                each.memory[:] = made[each.name].reshape(-1).view(np.uint8)

    def results(self):
        return self.made
"""
WIDTHS = {"sum": 2, "difference": 2, "open": 4}
POSITIONS, SPACING = 4, 1024


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Loaded]:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "m" / "backend.py").write_text(BACKEND)
    with Loaded(run(tmp_path)) as loaded:
        yield loaded


def expected(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    return {"sum": a + b, "difference": a - b, "open": np.repeat(a, 2, axis=1)}


def plan_of(loaded: Loaded, memory: Memory, at: int, outputs: tuple[str, ...], rows: int) -> Plan:
    """Inputs at `at` and 256 bytes on, outputs from 512 on."""
    where = {name: at + 512 + 256 * number for number, name in enumerate(outputs)}
    return loaded.plan(
        memory,
        [spec("a", (rows, 2), offset=at, stride=0), spec("b", (rows, 2), offset=at + 256, stride=0)],
        [
            spec(name, (rows, -1), offset=place, byte_size=256)
            if name == "open"
            else spec(name, (rows, 2), offset=place)
            for name, place in where.items()
        ],
        rows=rows,
    )


def found(memory: Memory, at: int, outputs: tuple[str, ...], rows: int) -> dict[str, np.ndarray]:
    return {
        name: memory.get(at + 512 + 256 * number, (rows, WIDTHS[name])).copy() for number, name in enumerate(outputs)
    }


ASKED = st.tuples(st.permutations(sorted(WIDTHS)), st.integers(1, 3), st.integers(1, 4)).map(
    lambda drawn: (tuple(drawn[0][: drawn[1]]), drawn[2])
)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(asked=st.lists(ASKED, min_size=2, max_size=4), cached=st.booleans())
def test_each_gets_what_it_asked_for(loaded, asked, cached):
    if cached and loaded.model.cached is None:
        words = memoryview(bytearray(8 * statistics.BLOCK)).cast("Q")
        cache = ResponseCache(1 << 20, words)
        loaded.model.keep_answers(Cached(cache, "m", 1, 1, loaded.model.instances[0].block))
    memory = loaded.memory()
    rng = np.random.default_rng(len(asked))
    requests, wanted, before = [], [], loaded.count(statistics.EXECUTIONS)
    for number, (outputs, rows) in enumerate(asked):
        at = number * 2048
        a, b = rng.random((2, rows, 2), np.float32)
        memory.put(at, a)
        memory.put(at + 256, b)
        requests.append(loaded.request(plan_of(loaded, memory, at, outputs, rows)))
        wanted.append({name: expected(a, b)[name] for name in outputs})
    assert len({request.signature for request in requests}) == 1
    loaded.run(*requests)
    assert loaded.count(statistics.EXECUTIONS) == before + 1
    for number, (request, (outputs, rows)) in enumerate(zip(requests, asked, strict=True)):
        assert not request.code, request.note
        for name, array in found(memory, number * 2048, outputs, rows).items():
            np.testing.assert_array_equal(array, wanted[number][name])
    if loaded.model.cached is not None:
        assert all(loaded.model.cached._key(r.plan, r) in loaded.model.cached._cache._entries for r in requests)


def test_those_that_ask_for_the_same_write_in_place(loaded):
    """The union is for those that do not: for others it would cost a copy of every output that the runtime makes."""
    memory = loaded.memory()
    plans = [plan_of(loaded, memory, at, ("difference", "sum"), 1) for at in (0, 2048)]
    assert plans[0].layout is plans[1].layout
    assert plans[0].layout is not plan_of(loaded, memory, 4096, ("sum",), 1).layout
    for _ in range(3):
        loaded.run(*map(loaded.request, plans))
    (buffers,) = loaded.model.instances[0].buffers.values()
    assert len(buffers.bindings) == 1
    assert all(buffer is not None for buffer in buffers.outputs)
