"""Batches of decoupled models, requests that run again, and looking at streams while others come and go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from msgspec.structs import replace

from broker.worker import backends
from broker.worker.batch import Batch
from broker.worker.execute import run_batch
from broker.worker.model import LoadedModel
from broker.worker.plans import adopt
from broker.worker.scheduler import Scheduler
from broker.worker.streams import Streams
from broker.worker.turn import Turn
from shm.admission import Request
from shm.errors import Code, InferError
from shm.layout import CODE_MASK, FINAL, SEQUENCE_START
from tests.fakes.broker import eventually
from tests.fakes.channel import Pending, Twin
from tests.fakes.loaded import Loaded, spec
from tests.fakes.loading import run

ONE_EACH = """
import numpy as np

class Binding:
    def __init__(self, inputs):
        self.x = inputs[0]
    def run(self):
        self.values = self.x.memory.view(np.int32).reshape(self.x.shape)
        if (self.values == 666).any():
            raise RuntimeError("beast")
    def results(self):
        return [self.values + 1]
class Model:
    def bind(self, inputs, outputs):
        return Binding(inputs)
    def close(self):
        pass
def load(context):
    return Model()
"""
AGAIN = """
class Model:
    def __init__(self):
        self.streams = []
        self.runs = 0
    def execute(self, streams):
        self.streams += streams
        self.runs -= 1
        if self.runs >= 0:
            for stream in streams:
                stream.reschedule()
    def bind(self, inputs, outputs):
        raise NotImplementedError
    def close(self):
        pass
def load(context):
    return Model()
"""
AHEAD = """
import threading
import numpy as np

class Model:
    def execute(self, streams):
        (stream,) = streams
        self.sent = 0
        threading.Thread(target=self.send, args=(stream,), daemon=True).start()
        while self.sent < 4:
            threading.Event().wait(0.001)
    def send(self, stream):
        for number in range(6):
            stream.send({"y": np.array([[number, 0]], np.int32)})
            self.sent += 1
        stream.send(final=True)
    def bind(self, inputs, outputs):
        raise NotImplementedError
    def close(self):
        pass
def load(context):
    return Model()
"""
CONFIG = """
backend: "own"
max_batch_size: 4
model_transaction_policy { decoupled: true }
input { name: "x" data_type: TYPE_INT32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 2 ] }
"""
ITERATIVE = "sequence_batching { iterative_sequence: true }"


class Lab:
    def __init__(self, root: Path, backend: str, more: str = "dynamic_batching { }") -> None:
        (root / "m" / "1").mkdir(parents=True)
        (root / "m" / "config.pbtxt").write_text(CONFIG + more)
        (root / "m" / "backend.py").write_text(backend)
        config = run(root)
        if "def execute" in backend:
            self.loaded = Loaded(config)
        else:  # as an installed one: a model's own code must have it
            with (
                mock.patch.object(backends, "_own", return_value=False),
                mock.patch.object(backends, "find", return_value=backends._from_file(str(root / "m" / "backend.py"))),
            ):
                self.loaded = Loaded(config)
        self.model = self.loaded.model
        self.memory = self.loaded.memory()
        inputs = [spec("x", (1, 2), "INT32", stride=8)]
        outputs = [spec("y", (-1,), "INT32", offset=4096, byte_size=4 * 64, stride=4 * 64)]
        self.plan = self.loaded.plan(self.memory, inputs, outputs, positions=4, rows=1, responses=4)
        self.twin = Twin(4)
        self.client = self.twin.client()
        self.worker = self.twin.worker({self.plan.key: self.plan})
        self.scheduler = Scheduler(Turn())
        self.scheduler.serve([self.model])

    def ask(self, value: int, position: int = 0, sequence_id: int = 0, flags: int = 0) -> Pending:
        self.memory.put(8 * position, np.array([value, value], np.int32))
        pending = Pending()
        options = {"flags": flags, "sequence_id": sequence_id}
        assert self.client.submit(pending, self.plan.key, position, position, 0, 0, **options)
        taken: list[Any] = []
        assert self.worker.take(10, 1, taken) == []
        assert self.scheduler.add(taken) == []
        return pending

    def run(self) -> Batch:
        batch = self.scheduler.due(10)
        assert batch is not None
        self.worker.start([request for request in batch.requests if not request.attempts])
        run_batch(batch.instance, batch.requests, batch.rows)
        self.scheduler.done(batch)
        return batch

    def close(self) -> None:
        self.twin.close()
        self.loaded.__exit__(None, None, None)


@pytest.fixture
def lab(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab = Lab(tmp_path, *request.param)
    yield lab
    lab.close()


def end(pending: Pending) -> tuple[Code, str]:
    assert pending.finals == 1
    assert pending.entries[-1][2] & FINAL
    code = Code(pending.entries[-1][2] & CODE_MASK)
    return code, pending.notes[-1].rstrip(b"\0").decode() if code else ""


@pytest.mark.parametrize("lab", [(ONE_EACH,)], indirect=True)
def test_of_a_batch_only_the_bad_request_fails(lab):
    asked = [lab.ask(value, position) for position, value in enumerate((1, 666, 3))]
    assert len(lab.run().requests) == 3
    lab.client.reap()
    assert [end(each) for each in asked] == [(Code.OK, ""), (Code.INTERNAL, "RuntimeError: beast"), (Code.OK, "")]


WRONG = {
    "self.values.astype(np.float32)": "output 'y' of model 'm' is INT32, got an array of float32",
    "self.values[0]": "output 'y' of model 'm' has the shape [2], its configuration says [-1,2]",
    "np.zeros((1, 3), np.int32)": "output 'y' of model 'm' has the shape [1,3], its configuration says [-1,2]",
    "RENAMED": "model 'm' has no output 'w'",
    "self.values], [self.values": "model 'm' gave 2 results, 1 outputs wait for one",
}
SENDS = """
    def execute(self, streams):
        for stream in streams:
            self.values = stream.inputs["x"]
            stream.send({"y": RESULT}, final=True)
"""


def sends(wrong: str) -> str:
    return SENDS.replace('"y": RESULT', '"w": self.values') if wrong == "RENAMED" else SENDS.replace("RESULT", wrong)


@pytest.mark.parametrize(
    ("lab", "text"),
    [
        ((ONE_EACH.replace("self.values + 1", wrong.replace("], [", ", ")),), text)
        for wrong, text in WRONG.items()
        if wrong != "RENAMED"
    ]
    + [
        ((ONE_EACH.replace("class Model:", "class Model:" + sends(wrong)),), text)
        for wrong, text in WRONG.items()
        if "], [" not in wrong
    ],
    indirect=["lab"],
)
def test_what_the_configuration_does_not_say_is_an_error_of_the_model(lab, text):
    pending = lab.ask(1)
    lab.run()
    lab.client.reap()
    assert end(pending) == (Code.INTERNAL, text)


def test_own_code_without_execute_is_refused_when_it_is_loaded(tmp_path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "m" / "backend.py").write_text(ONE_EACH)
    with pytest.raises(
        InferError, match=r"its backend\.py returned \(Model\) has no 'execute': write execute"
    ) as caught:
        Loaded(run(tmp_path))
    assert caught.value.code == "INTERNAL"


@pytest.mark.parametrize("lab", [(AGAIN, ITERATIVE)], indirect=True)
def test_a_request_that_runs_again_is_in_flight_once(lab):
    lab.model.instances[0].runtime.runs = 2
    pending = lab.ask(1)
    for _ in range(2):
        lab.run()
        assert lab.scheduler.in_flight() == 1
        assert len(lab.model.queue) == 1
    lab.run()
    assert lab.scheduler.in_flight() == 1
    lab.model.instances[0].runtime.streams[-1].send(final=True)
    assert lab.scheduler.in_flight() == 0
    lab.client.reap()
    assert end(pending) == (Code.OK, "")


@pytest.mark.parametrize("lab", [(AGAIN, ITERATIVE)], indirect=True)
def test_a_request_that_ran_again_after_its_client_left_is_not_in_flight(lab):
    lab.model.instances[0].runtime.runs = 2
    pending = lab.ask(1)
    lab.run()
    (request,) = [each for each in lab.worker.live if each is not None]
    request.ended = Code.CANCELLED
    lab.model.streams.look()
    lab.run()
    assert lab.scheduler.in_flight() == 0
    lab.client.reap()
    assert end(pending) == (Code.CANCELLED, "the request was cancelled")


@pytest.mark.parametrize("lab", [(AHEAD,)], indirect=True)
def test_a_client_that_does_not_read_holds_up_no_instance(lab):
    pending = lab.ask(1)
    lab.run()
    assert lab.model.instances[0].runtime.sent == 4
    assert not pending.entries

    def ended() -> bool:
        lab.client.reap()
        return pending.finals == 1

    eventually(ended)
    assert len(pending.entries) == 7


@pytest.mark.parametrize("lab", [(AGAIN, ITERATIVE)], indirect=True)
def test_it_is_too_late_to_reschedule_when_the_run_is_over(lab):
    pending = lab.ask(1)
    lab.run()
    streams = lab.model.instances[0].runtime.streams
    with pytest.raises(InferError, match="before 'execute' returns"):
        streams[0].reschedule()
    streams.clear()
    gc.collect()
    lab.model.streams.look()
    lab.client.reap()
    assert end(pending) == (Code.INTERNAL, "the model let go of the request without a final response")
    assert not lab.model.streams.again


def test_streams_may_come_and_go_while_they_are_looked_at(tmp_path):
    class Open:
        class request:
            ended = Code.OK

    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "m" / "backend.py").write_text(ONE_EACH)
    streams = Streams(run(tmp_path))
    for _ in range(5000):
        streams._live[object()] = Open()
    before = gc.get_threshold()

    def others(phase: str, info: object) -> None:
        if phase == "start":
            streams._live[object()] = Open()

    gc.callbacks.append(others)
    gc.set_threshold(1)
    try:
        streams.look()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(others)


@pytest.mark.parametrize("lab", [(AGAIN, "sequence_batching { }")], indirect=True)
def test_a_model_of_the_other_kind_is_no_predecessor(lab):
    """A reload to one response: what goes on with a sequence has a plan without places for several."""
    lab.ask(1, sequence_id=7, flags=SEQUENCE_START)
    lab.run()
    changed = LoadedModel(replace(lab.model.config, decoupled=False), 1, 2)
    lab.scheduler.serve([changed])
    lab.scheduler.retire(lab.model, 1)
    plan = lab.loaded.plan(lab.memory, [spec("x", (1, 2), "INT32")], [spec("y", (1, 2), "INT32", offset=4096)], rows=1)
    adopt(plan, changed, {})
    entry = (9, plan.key, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0)
    step = Request(lab.worker, 3, entry, plan, 2)
    ((refused, (code, text)),) = lab.scheduler.add([step])
    assert refused is step
    assert code == Code.INVALID_ARG
    assert "START" in text


@pytest.mark.parametrize("lab", [(AGAIN,)], indirect=True)
def test_what_is_sent_after_the_model_was_closed_counts_nowhere(lab):
    """Its block of the statistics page may be another model's by then."""
    lab.ask(1)
    lab.run()
    stream = lab.model.instances[0].runtime.streams.pop()
    (request,) = [each for each in lab.worker.live if each is not None]
    request.ended = Code.CANCELLED
    lab.model.streams.look()
    lab.scheduler.retire(lab.model)
    lab.scheduler.close_retired()
    block = lab.model.instances[0].block
    before = block.tolist()
    stream.send({"y": np.zeros(2, np.int32)})
    stream.send(final=True)
    assert block.tolist() == before
