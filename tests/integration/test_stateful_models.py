"""Models with sequence batching and implicit state in real brokers: native clients and tritonclient's gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

import clientlib
from tests.fakes import models
from tests.fakes.broker import Broker, eventually
from tests.fakes.gateways import Gateway, url_of

INITIAL = 100.0
IDLE_S = 0.3
STRATEGIES = {
    "direct": "direct { }",
    "oldest": "oldest { max_candidate_sequences: 4 max_queue_delay_microseconds: 2000 }",
}
NAMES = list(STRATEGIES)


def accumulate(batch: tuple[str, ...] = ("batch",)) -> onnx.ModelProto:
    """y = x + state, which is the next state; what the controls say comes out as `flags` and `id`."""
    ports: dict[str, int] = {"x": TensorProto.FLOAT, "state": TensorProto.FLOAT, "id": TensorProto.UINT64}
    ports |= dict.fromkeys(("start", "end", "ready"), TensorProto.INT32)
    return models.build(
        [
            helper.make_node("Add", ["x", "state"], ["y"]),
            helper.make_node("Identity", ["y"], ["next"]),
            helper.make_node("Concat", ["start", "end", "ready"], ["flags"], axis=-1),
            helper.make_node("Identity", ["id"], ["seen"]),
        ],
        [models.tensor(name, [*batch, 1], element) for name, element in ports.items()],
        [
            models.tensor("y", [*batch, 1]),
            models.tensor("next", [*batch, 1]),
            models.tensor("flags", [*batch, 3], TensorProto.INT32),
            models.tensor("seen", [*batch, 1], TensorProto.UINT64),
        ],
    )


def configuration(strategy: str, *, batch: int = 4, idle: int = 60_000_000, initial: str = "") -> str:
    controls = "".join(
        f'  {{ name: "{kind.lower()}" control {{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }} }},\n'
        for kind in ("START", "END", "READY")
    )
    return f"""
backend: "onnxruntime"
max_batch_size: {batch}
input {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }}
output [
  {{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }},
  {{ name: "flags" data_type: TYPE_INT32 dims: [ 3 ] }},
  {{ name: "seen" data_type: TYPE_UINT64 dims: [ 1 ] }}
]
sequence_batching {{
  max_sequence_idle_microseconds: {idle}
  {STRATEGIES[strategy]}
  control_input [
{controls}  {{ name: "id" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }} }}
  ]
  state {{ input_name: "state" output_name: "next" data_type: TYPE_FP32 dims: [ 1 ] {initial} }}
}}
"""


FROM_FILE = 'initial_state { name: "first" data_type: TYPE_FP32 dims: [ 1 ] data_file: "hundred" }'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for strategy in STRATEGIES:
        models.write_model(root, strategy, accumulate(), config=configuration(strategy))
        directory = models.write_model(
            root, f"{strategy}_file", accumulate(), config=configuration(strategy, initial=FROM_FILE)
        )
        (directory / "initial_state").mkdir()
        (directory / "initial_state" / "hundred").write_bytes(np.float32(INITIAL).tobytes())
        models.write_model(
            root, f"{strategy}_idle", accumulate(), config=configuration(strategy, idle=int(IDLE_S * 1e6))
        )
    models.write_model(root, "unbatched", accumulate(()), config=configuration("direct", batch=0))
    return root


@pytest.fixture(scope="module")
def broker(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(repository, tmp_path_factory.mktemp("run")) as broker:
        broker.ready()
        yield broker


class Native:
    """One model over a session of its own."""

    def __init__(self, broker: Broker, model: str, batched: bool = True) -> None:
        self._client = clientlib.connect(f"ipc://{broker.directory}")
        region = self._client.create_region("io", 4096)
        self._x = region.array((1,), np.float32)
        self._plan = self._client.prepare(model, {"x": region.tensor((1, 1) if batched else (1,), "FP32")})

    def step(self, number: int, value: float, start: bool = False, end: bool = False) -> dict[str, Any]:
        self._x[0] = value
        pending = self._plan.submit(sequence_id=number, sequence_start=start, sequence_end=end)
        result = pending.result(30)  # no deadline: the broker must see by itself when a time is up
        return {name: result[name].reshape(-1).tolist() for name in ("y", "flags", "seen")}

    def close(self) -> None:
        self._client.close()


class Grpc:
    """The same over tritonclient."""

    def __init__(self, broker: Gateway, model: str) -> None:
        self._client = triton.InferenceServerClient(url_of(broker, "grpc").removeprefix("grpc://"))
        self._model = model

    def step(self, number: int, value: float, start: bool = False, end: bool = False) -> dict[str, Any]:
        given = triton.InferInput("x", [1, 1], "FP32")
        given.set_data_from_numpy(np.float32([[value]]))
        result = self._client.infer(
            self._model, [given], sequence_id=number, sequence_start=start, sequence_end=end, client_timeout=30
        )
        return {name: result.as_numpy(name).reshape(-1).tolist() for name in ("y", "flags", "seen")}

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def connect(broker: Broker) -> Iterator[Any]:
    opened: list[Any] = []

    def make(kind: Any, model: str, *more: Any) -> Any:
        opened.append(kind(broker, model, *more))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def walk(client: Any, number: int, steps: int, first: float = 0.0) -> list[str]:
    """One sequence from its start to its end; what was not as it should be."""
    total, wrong = first, []
    for step in range(steps):
        start, end = step == 0, step == steps - 1
        value = number % 100 + step
        total += value
        answer = client.step(number, value, start, end)
        if answer != {"y": [total], "flags": [int(start), int(end), 1], "seen": [number]}:
            wrong.append(f"sequence {number}, step {step}: {answer}, not {total}")
    return wrong


@pytest.mark.parametrize("model", [*NAMES, *(f"{name}_file" for name in NAMES)])
def test_interleaved_sequences_of_three_clients(connect, model):
    """Sequences of two native clients and of one gRPC client share batches; each sees its own state and controls."""
    first = INITIAL if model.endswith("_file") else 0.0
    clients = [connect(Native, model), connect(Native, model), connect(Grpc, model)]
    wrong: list[str] = []

    def run(index: int) -> None:
        for round_ in range(3):
            wrong.extend(walk(clients[index], 1000 * (index + 1) + round_, 20, first))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("model", NAMES)
def test_sequences_of_one_client_take_turns(connect, model):
    """More sequences than slots would starve each other: as many as there are, step by step in turn."""
    client = connect(Native, model)
    totals = dict.fromkeys((11, 12, 13, 14), 0.0)
    for step in range(5):
        for number in totals:
            totals[number] += number + step
            answer = client.step(number, number + step, step == 0, step == 4)
            assert answer == {"y": [totals[number]], "flags": [step == 0, step == 4, 1], "seen": [number]}


def test_a_model_without_a_batch_dimension(connect):
    assert walk(connect(Native, "unbatched", False), 5, 4) == []


def test_a_start_on_a_live_sequence_begins_it_anew(connect):
    client = connect(Native, "direct_file")
    client.step(5, 1, start=True)
    client.step(5, 1)
    assert client.step(5, 2, start=True)["y"] == [INITIAL + 2]
    assert client.step(5, 2, end=True)["y"] == [INITIAL + 4]


@pytest.mark.parametrize("model", NAMES)
def test_wrong_use(connect, model):
    client, remote = connect(Native, model), connect(Grpc, model)
    start = f"inference request for sequence 77 to model '{model}' must specify the START flag on the first request"
    number = f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
    for call, error, id_, text in (
        (client.step, clientlib.InferError, 77, start),
        (remote.step, InferenceServerException, 77, start),
        (client.step, clientlib.InferError, 0, number),
        (remote.step, InferenceServerException, 0, number),
    ):
        with pytest.raises(error, match=text):
            call(id_, 1.0)
    assert walk(client, 78, 3) == []


def goes_on(client: Grpc, number: int) -> bool:
    """Does a sequence last twice the idle time when steps keep coming? None counts whose steps came too late."""
    until = (last := time.monotonic()) + 3 * IDLE_S
    client.step(number, number, start=True)
    while last < until:
        asked, last = last, time.monotonic()
        try:
            assert client.step(number, 0)["y"] == [number]
        except InferenceServerException:
            if time.monotonic() - asked < IDLE_S:
                raise
            return False
    return True


@pytest.mark.parametrize("model", [f"{name}_idle" for name in NAMES])
def test_idle_sequences_give_their_slots_to_those_that_wait(broker, connect, model):
    """Four slots, whose sequences never end: their client is gone. Those of the next client wait for the time-out."""
    gone = Native(broker, model)
    for number in range(1, 5):
        assert gone.step(number, number, start=True)["y"] == [number]
    gone.close()
    client = connect(Native, model)
    assert client.step(5, 5, start=True)["y"] == [5]

    busy = connect(Grpc, model)  # its sequence goes on, so that it does not end while 5 does
    eventually(lambda: goes_on(busy, 6), "a sequence whose steps come in time goes on")
    with pytest.raises(clientlib.InferError, match="must specify the START flag"):
        client.step(5, 0)


def test_sequences_go_on_while_their_model_is_replaced(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    models.write_model(root, "m", accumulate(), config=configuration("direct"))
    with Broker(root, tmp_path / "run", "--model-control-mode=explicit", "--load-model=m") as broker:
        broker.ready()
        control = clientlib.connect(f"ipc://{broker.directory}")
        old, new = Native(broker, "m"), Native(broker, "m")
        assert old.step(1, 1.0, start=True)["y"] == [1.0]
        control.load("m")
        assert old.step(1, 2.0)["y"] == [3.0], "its state is that of the model it began with"
        assert new.step(1, 5.0, start=True)["y"] == [5.0]
        control.load("m")
        assert new.step(1, 1.0)["y"] == [6.0]
        assert old.step(1, 1.0, end=True)["y"] == [4.0]
        assert old.step(1, 7.0, start=True, end=True)["y"] == [7.0]
        assert new.step(1, 1.0, end=True)["y"] == [7.0]
        control.unload("m")
        eventually(lambda: "successfully unloaded 'm' version 1" in broker.log(), "nothing of it is left")
        for each in (old, new, control):
            each.close()


def test_a_cancelled_step_ends_its_sequence(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    models.write_model(root, "m", accumulate(), config=configuration("oldest").replace("2000", "60000000"))
    with Broker(root, tmp_path / "run") as broker, clientlib.connect(f"ipc://{broker.ready().directory}") as client:
        region = client.create_region("x", 64)
        plan = client.prepare("m", {"x": region.tensor((1, 1), "FP32")})
        first, second, third = (
            plan.submit(sequence_id=1, sequence_start=start, sequence_end=end)
            for start, end in ((True, False), (False, False), (False, True))
        )
        second.cancel()
        for pending in (first, second, third):
            with pytest.raises(clientlib.InferError) as ended:
                pending.result(30)
            assert ended.value.code == "CANCELLED"
        with pytest.raises(clientlib.InferError, match="must specify the START flag"):
            plan.infer(sequence_id=1)
