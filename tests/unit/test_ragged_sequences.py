"""Steps of sequences with inputs of different lengths share a batch, empty slots among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.worker.execute import run_batch
from broker.worker.plans import Plan
from broker.worker.sequence import Sequence
from shm import statistics
from shm.admission import Request
from shm.layout import SEQUENCE_END, SEQUENCE_START
from tests.fakes.loaded import Loaded, spec
from tests.fakes.loading import run

CONTROL = '{ name: "%s" control { kind: CONTROL_SEQUENCE_%s int32_false_true: [ 0, 1 ] } }'
ID = '{ name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }'
CONFIG = """
backend: "%s"
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "OUTPUT" data_type: TYPE_INT32 dims: [ -1 ] }
instance_group { kind: KIND_CPU }
sequence_batching { %s control_input [ %s, %s ] }
"""
SLOTS, LONGEST = 4, 5
Step = st.none() | st.lists(st.integers(-1000, 1000), min_size=1, max_size=LONGEST)


def load(root: Path, backend: str) -> Loaded:
    strategy = "direct { }" if backend == "sequence" else "oldest { max_candidate_sequences: 4 }"
    controls = ", ".join(CONTROL % (name, name) for name in ("START", "END", "READY"))
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(CONFIG % (backend, strategy, controls, ID))
    return Loaded(run(root))


@pytest.mark.parametrize("backend", ["sequence", "dyna_sequence"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(batches=st.lists(st.lists(Step, min_size=SLOTS, max_size=SLOTS), min_size=1, max_size=3))
def test_each_row_has_its_own_length(tmp_path_factory, backend, batches):
    with load(tmp_path_factory.mktemp("models"), backend) as loaded:
        memory = loaded.memory()
        sums = dict.fromkeys(range(SLOTS), 0)
        records = {slot: Sequence(slot + 1) for slot in range(SLOTS)}
        started: set[int] = set()
        for batch in batches:
            rows: list[Request | None] = []
            for slot, values in enumerate(batch):
                if values is None:
                    rows.append(None)
                    continue
                memory.put(slot * 64, np.array(values, np.int32))
                shape = (1, len(values))
                plan: Plan = loaded.plan(
                    memory,
                    [spec("INPUT", shape, "INT32", offset=slot * 64)],
                    [spec("OUTPUT", (1, -1), "INT32", offset=1024 + slot * 64, byte_size=64)],
                    rows=1,
                )
                flags = 0 if slot in started else SEQUENCE_START
                started.add(slot)
                request = Request(None, 0, (1, plan.key, 0, 0, 0, 0, 1, slot + 1, flags, 0, 0, 0, 0), plan, 1)
                request.sequence = records[slot]
                sums[slot] += sum(values)
                rows.append(request)
            requests = [row for row in rows if row is not None]
            if not requests:
                continue
            before = loaded.count(statistics.EXECUTIONS)
            run_batch(loaded.model.instances[0], requests, rows if backend == "sequence" else requests)
            assert loaded.count(statistics.EXECUTIONS) == before + 1
            for slot, values in enumerate(batch):
                if values is not None:
                    assert not rows[slot].code, rows[slot].note
                    found = memory.get(1024 + slot * 64, (len(values),), "INT32").tolist()
                    assert found == [sums[slot]] * len(values)


def test_the_end_of_one_adds_its_id(tmp_path):
    with load(tmp_path, "dyna_sequence") as loaded:
        memory = loaded.memory()
        memory.put(0, np.array([1, 2, 3], np.int32))
        plan = loaded.plan(
            memory,
            [spec("INPUT", (1, 3), "INT32")],
            [spec("OUTPUT", (1, -1), "INT32", offset=1024, byte_size=64)],
            rows=1,
        )
        flags = SEQUENCE_START | SEQUENCE_END
        request = Request(None, 0, (1, plan.key, 0, 0, 0, 0, 1, 100, flags, 0, 0, 0, 0), plan, 1)
        request.sequence = Sequence(100)
        run_batch(loaded.model.instances[0], [request], [request])
        assert memory.get(1024, (3,), "INT32").tolist() == [106] * 3
