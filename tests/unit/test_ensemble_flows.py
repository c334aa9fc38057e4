"""Requests for ensembles with decoupled members, step by step: what a cancel takes back, what members may send."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from broker.repository.scheduling import Step
from broker.worker.decoupled import run_streams, taker_of
from broker.worker.ensembles import flow
from broker.worker.stream import Stream
from broker.worker.streams import Streams
from shm import statistics
from shm.admission import Request
from shm.errors import Code, InferError
from tests.fakes.broker import eventually
from tests.fakes.ensembles import WIDTH, Client, Workbench, ensemble_config, model_config

X = {"x": np.arange(WIDTH, dtype=np.float32)}
STEPS = (
    Step(model_name="many", input_map={"x0": "x"}, output_map={"y0": "mid"}),
    Step(model_name="adds", input_map={"x0": "mid"}, output_map={"y0": "y"}),
)


class Ending:
    """Where the responses to a client's request go. Implements `broker.worker.stream.Taker`."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.responses: list[Any] = []
        self.endings: list[str] = []

    def send(self, outputs: Mapping[str, Any] | None, error: str | InferError, final: bool) -> None:
        if outputs is not None:
            self.responses.append({name: array.tolist() for name, array in outputs.items()})
        if final:
            self.endings.append(str(error))

    def fail(self, error: InferError) -> None:
        self.endings.append(error.message)

    def is_unwanted(self) -> bool:
        return bool(self.request.ended)


class Asker(Client):
    def __init__(self) -> None:
        super().__init__()
        self.takers: dict[Request, Ending] = {}

    def taker(self, request: Request, *_: object) -> Ending:
        return self.takers.setdefault(request, Ending(request))


class Lab:
    """Ensemble E: `many` is decoupled, each of its responses goes through `adds`."""

    def __init__(self) -> None:
        self.bench = Workbench()
        self.bench.client = Asker()
        self.many = self.bench.load(replace(model_config("many", ["x0"], ["y0"], 0, (-1,)), decoupled=True))
        self.many.streams = Streams(self.many.config)
        self.bench.load(model_config("adds", ["x0"], ["y0"], 0, (-1,)))
        config = replace(ensemble_config("E", STEPS, ["x"], ["y"], 0, (WIDTH,)), decoupled=True)
        self.model = self.bench.load(config)
        self.model.streams = Streams(config)
        self.plan = self.bench.plan(self.model, (WIDTH,), ["y"])
        self.plan.responses = 4

    def ask(self) -> tuple[Request, Ending]:
        request = self.bench.ask(self.plan, 0, X)
        return request, self.bench.client.takers[request]

    def member(self) -> Any:
        """Have the decoupled member take its step: where it sends."""
        eventually(lambda: self.bench.queue, "its step waits")
        self.bench.begin(0)
        return taker_of(None, self.many.streams, self.bench.running.pop(), 0)

    def pins(self) -> int:
        return sum(model.pins for model in self.bench.models.values())

    def pending(self) -> int:
        return self.model.instances[0].block[statistics.PENDING]

    def over(self) -> bool:
        return not (self.pins() or self.pending() or self.bench.queue)


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.bench.close()


def y(*values: float) -> dict[str, np.ndarray]:
    return {"y0": np.array(values, np.float32)}


def test_each_response_goes_through_the_steps_behind(lab):
    _, ending = lab.ask()
    member = lab.member()
    for value in (1, 2):
        member.send(y(value, 0, 0), "", False)
    member.send(None, "", True)
    for _ in range(2):
        eventually(lambda: lab.bench.queue, "a step waits")
        lab.bench.begin(0)
        lab.bench.end(0)
    eventually(lambda: ending.endings, "it ends")
    assert ending.responses == [{"y": [2, 1, 1]}, {"y": [3, 1, 1]}]
    assert ending.endings == [""]
    eventually(lab.over)


def test_a_cancel_takes_back_the_member_s_step(lab):
    request, ending = lab.ask()
    eventually(lambda: lab.bench.queue, "its step waits")
    lab.bench.cancel(request)
    assert not lab.bench.queue
    eventually(lambda: ending.endings, "it ends")
    eventually(lab.over, "nothing is held")


def test_a_cancel_takes_back_the_step_behind_a_response(lab):
    request, ending = lab.ask()
    member = lab.member()
    member.send(y(1, 2, 3), "", False)
    eventually(lambda: lab.bench.queue, "the step behind waits")
    lab.bench.cancel(request)
    assert not lab.bench.queue
    assert member.is_unwanted()
    member.send(None, "", True)
    eventually(lambda: ending.endings, "it ends")
    assert ending.responses == []
    eventually(lab.over, "nothing is held")


def test_a_cancel_while_a_step_is_queued_takes_it_back(lab):
    asked = threading.Event()
    request: list[Request] = []

    def cancel() -> None:
        assert asked.wait(30)
        lab.bench.cancel(request[0])

    lab.bench.meanwhile = cancel
    request.append(lab.ask()[0])
    asked.set()
    eventually(lambda: lab.bench.client.takers[request[0]].endings, "it ends")
    eventually(lab.over, "nothing is held")


def test_without_a_thread_it_ends_with_an_error(lab, monkeypatch):
    monkeypatch.setattr(flow.threading, "Thread", no_thread)
    _, ending = lab.ask()
    (text,) = ending.endings
    assert "can't start new thread" in text
    assert lab.over()


def no_thread(*_: object, **__: object) -> Any:
    class Thread:
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    return Thread()


def test_a_step_that_its_member_forgets_ends_without_a_thread(lab, monkeypatch):
    _, ending = lab.ask()
    stream = Stream(lab.member(), {}, (), 0, 0)
    monkeypatch.setattr(flow.threading, "Thread", no_thread)
    del stream
    gc.collect()
    lab.many.streams.look()
    eventually(lambda: ending.endings, "it ends")
    assert "the model let go of the request without a final response" in ending.endings[0]
    eventually(lab.over, "nothing is held")


def test_what_a_member_cannot_send_is_said(lab):
    _, ending = lab.ask()
    member = lab.member()
    with pytest.raises(InferError, match="model 'many' has no output 'z'"):
        member.send({"z": np.zeros(3, np.float32)}, "", False)
    with pytest.raises(InferError, match="output 'y0' of model 'many' is FP32, got an array of int32"):
        member.send({"y0": np.zeros(3, np.int32)}, "", False)
    member.send(None, "", True)
    eventually(lambda: ending.endings, "it ends")
    assert ending.endings == [""]


def test_a_member_that_became_decoupled_meanwhile(lab):
    """The ensemble is loaded anew after its member; until then its requests end with an error."""
    plain = lab.bench.load(ensemble_config("P", STEPS[1:2], ["mid"], ["y"], 0, (WIDTH,)))
    changed = lab.bench.load(replace(model_config("adds", ["x0"], ["y0"], 0, (-1,)), decoupled=True))
    changed.streams = Streams(changed.config)
    plan = lab.bench.plan(plain, (WIDTH,), ["y"])
    request = lab.bench.ask(plan, 0, {"mid": X["x"]})
    lab.bench.begin(0)
    run_streams(None, changed.streams, lab.bench.running, 0)
    assert lab.bench.client.ended == [request]
    assert request.code == Code.UNAVAILABLE
    assert b"decoupled" in request.note


def test_a_member_waits_while_many_bytes_wait(lab, monkeypatch):
    monkeypatch.setattr(flow, "AHEAD_BYTES", 3 * 4 * WIDTH)
    _, ending = lab.ask()
    member = lab.member()
    sent: list[int] = []

    def send() -> None:
        for number in range(8):
            member.send(y(number, 0, 0), "", False)
            sent.append(number)
        member.send(None, "", True)

    sender = threading.Thread(target=send)
    sender.start()
    for number in range(8):
        eventually(lambda: lab.bench.queue, "the step behind waits")
        eventually(lambda number=number: len(sent) == min(number + 4, 8), "three wait, beside the one that is at it")
        lab.bench.begin(0)
        lab.bench.end(0)
    sender.join()
    eventually(lambda: ending.endings, "it ends")
    assert [each["y"][0] for each in ending.responses] == [number + 1 for number in range(8)]
    eventually(lab.over)


def test_a_member_that_waits_goes_on_when_nobody_wants_its_responses(lab, monkeypatch):
    monkeypatch.setattr(flow, "AHEAD_BYTES", 4 * WIDTH)
    request, ending = lab.ask()
    member = lab.member()
    sender = threading.Thread(target=lambda: [member.send(y(1, 2, 3), "", False) for _ in range(5)])
    sender.start()
    eventually(lambda: lab.bench.queue, "the step behind waits")
    lab.bench.cancel(request)
    sender.join(30)
    assert not sender.is_alive()
    member.send(None, "", True)
    eventually(lambda: ending.endings, "it ends")
    eventually(lab.over)


def test_a_member_that_nobody_takes_anything_of_is_told(lab, monkeypatch):
    monkeypatch.setattr(flow, "AHEAD_BYTES", 4 * WIDTH)
    monkeypatch.setattr(flow, "PATIENCE_NS", 1_000_000)
    _, ending = lab.ask()
    member = lab.member()
    for _ in range(3):
        member.send(y(1, 2, 3), "", False)
    while not ending.endings:
        eventually(lambda: lab.bench.queue or ending.endings)
        lab.bench.drain()
    assert "wait for the steps behind it" in ending.endings[0]
    eventually(lab.over)
