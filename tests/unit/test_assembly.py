"""Batches with controls, states and ragged inputs, on a runtime that only remembers what it was given."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from broker.repository.config import InstanceGroup, ModelConfig, TensorConfig
from broker.repository.scheduling import BatchInput, BatchOutput, Control, InitialState, SequenceBatching, State
from broker.worker import backends, undelivered
from broker.worker.assembly import assembly_of, batch_input, scattered
from broker.worker.backends.builtin import array_of
from broker.worker.execute import run_batch
from broker.worker.sequence import Sequence
from shm import datatypes, statistics
from shm.admission import Request
from shm.errors import InferError
from shm.layout import SEQUENCE_END, SEQUENCE_START
from tests.fakes.loaded import Loaded, spec, text_of

CONTROLS = (
    Control(name="START", kind="CONTROL_SEQUENCE_START", datatype="INT32"),
    Control(name="END", kind="CONTROL_SEQUENCE_END", datatype="FP32", off=2, on=5),
    Control(name="READY", kind="CONTROL_SEQUENCE_READY", datatype="BOOL"),
    Control(name="CORRID", kind="CONTROL_SEQUENCE_CORRID", datatype="INT32"),
    Control(name="TEXT", kind="CONTROL_SEQUENCE_CORRID", datatype="BYTES"),
)
STATE = State(
    input_name="S_IN",
    output_name="S_OUT",
    datatype="FP32",
    dims=(2,),
    initial_state=InitialState(name="i", datatype="FP32", dims=(2,), data=np.float32([10, 20]).tobytes()),
)


class Runtime:
    """y = x + state, and the state is y. A negative x fails the run."""

    def __init__(self) -> None:
        self.seen: list[dict[str, np.ndarray]] = []

    def bind(self, inputs, outputs):
        return Step(self, inputs, outputs)

    def close(self) -> None: ...


class Step:
    def __init__(self, runtime, inputs, outputs) -> None:
        self.runtime, self.inputs, self.outputs = runtime, inputs, outputs

    def run(self) -> None:
        seen = {operand.name: array_of(operand).copy() for operand in self.inputs}
        self.runtime.seen.append(seen)
        if (seen["X"] < 0).any():
            raise RuntimeError("negative")
        y = seen["X"] + seen["S_IN"] if "S_IN" in seen else seen["X"] + 1
        self.values = [y for _ in self.outputs]

    def results(self):
        return self.values


def config(**more) -> ModelConfig:
    fields = {
        "name": "m", "platform": "", "backend": "fake", "directory": "/nowhere", "versions": {1: "/nowhere"},
        "default_model_filename": "", "max_batch_size": 4,
        "input": (TensorConfig(name="X", datatype="FP32", dims=(2,)),),
        "output": (TensorConfig(name="Y", datatype="FP32", dims=(2,)),),
        "instance_group": (InstanceGroup(name="m"),),
    }  # fmt: skip
    return ModelConfig(**(fields | more))


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(backends, "find", lambda config: SimpleNamespace(load=lambda context: made))
    return made


def sequence(number: int, text: str = "") -> SimpleNamespace:
    return SimpleNamespace(run_flags=None, id=number, text=text, started=True, states={})


class Sequences:
    """A sequence model with a plan of four positions, X at 64 * k and Y at 1024 + 64 * k."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.memory = loaded.memory()
        self.plan = loaded.plan(
            self.memory,
            [spec("X", (1, 2), offset=0, stride=64)],
            [spec("Y", (1, 2), offset=1024, stride=64)],
            positions=4,
            rows=1,
        )

    def request(self, position: int, record, x, flags: int = 0):
        self.memory.put(64 * position, np.float32(x))
        request = self.loaded.request(self.plan, position)
        request.sequence = record
        request.entry = (*request.entry[:7], record.id, flags, *request.entry[9:])
        return request

    def run(self, *rows):
        run_batch(self.loaded.model.instances[0], [row for row in rows if row is not None], rows)

    def y(self, position: int) -> list[float]:
        return self.memory.get(1024 + 64 * position, (2,)).tolist()


@pytest.fixture
def sequences(runtime):
    with Loaded(config(sequence_batching=SequenceBatching(control_input=CONTROLS, state=(STATE,)))) as loaded:
        yield Sequences(loaded)


def test_rows_are_in_slot_order_and_empty_slots_are_off(runtime, sequences):
    a, b = sequence(7, "seven"), sequence((1 << 32) + 9)
    sequences.run(sequences.request(0, a, [1, 2], SEQUENCE_START), None, sequences.request(1, b, [3, 4], SEQUENCE_END))
    (seen,) = runtime.seen
    assert seen["X"].tolist() == [[1, 2], [0, 0], [3, 4]]
    assert seen["START"].tolist() == [[1], [0], [0]]
    assert seen["END"].tolist() == [[2], [2], [5]]
    assert seen["READY"].tolist() == [[True], [False], [True]]
    assert seen["CORRID"].tolist() == [[7], [0], [9]]
    assert seen["TEXT"].tolist() == [[b"seven"], [b""], [b"4294967305"]]
    assert seen["S_IN"].tolist() == [[10, 20], [0, 0], [10, 20]]
    assert sequences.y(0) == [11, 22]
    assert sequences.y(1) == [13, 24]


def test_state_goes_from_step_to_step_and_starts_anew(sequences):
    a, b = sequence(1), sequence(2)
    sequences.run(sequences.request(0, a, [1, 1], SEQUENCE_START), sequences.request(1, b, [5, 5], SEQUENCE_START))
    sequences.run(sequences.request(1, b, [1, 1]), None, sequences.request(0, a, [2, 2]))
    assert sequences.y(0) == [13, 23]
    assert sequences.y(1) == [16, 26]
    sequences.run(sequences.request(0, a, [0, 0], SEQUENCE_START))
    assert sequences.y(0) == [10, 20]


def test_a_failed_batch_changes_no_state_and_is_not_run_again(runtime, sequences):
    a, b = sequence(1), sequence(2)
    sequences.run(sequences.request(0, a, [1, 1], SEQUENCE_START), sequences.request(1, b, [1, 1], SEQUENCE_START))
    rows = [sequences.request(0, a, [1, 1]), sequences.request(1, b, [-1, 1])]
    sequences.run(*rows)
    assert len(runtime.seen) == 2
    assert [text_of(row) for row in rows] == ["RuntimeError: negative"] * 2
    assert a.states["S_IN"].tolist() == b.states["S_IN"].tolist() == [[11, 21]]
    assert sequences.loaded.count(statistics.FAIL) == 2


def test_a_state_is_kept_only_with_its_answer(runtime, sequences):
    small = sequences.loaded.plan(
        sequences.memory, [spec("X", (1, 2))], [spec("Y", (1, -1), offset=1024, byte_size=4)], rows=1
    )
    a, b = sequence(1), sequence(2)
    lost = sequences.loaded.request(small)
    lost.sequence = a
    sequences.run(lost, sequences.request(1, b, [1, 1]))
    assert "should be at least 8 bytes" in text_of(lost)
    assert a.states == {}
    assert b.states["S_IN"].tolist() == [[11, 21]]


class LacksRoom:
    """A step of `record` has run, its result Y = [11, 21] and its state had no room."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences, self.record = sequences, Sequence(1)
        self.record.started = True
        plan = sequences.loaded.plan(
            sequences.memory, [spec("X", (1, 2))], [spec("Y", (1, -1), offset=1024, byte_size=4)], rows=1
        )
        sequences.memory.put(0, np.float32([1, 1]))
        self.run(plan, self.record)
        self.kept, self.record.kept = self.record.kept, None

    def run(self, plan, sequence) -> Request:
        request = self.sequences.loaded.request(plan)
        request.sequence = sequence
        self.sequences.run(request)
        return request


def test_what_had_no_room_is_handed_over_without_a_run(runtime, sequences):
    lacks = LacksRoom(sequences)
    sequences.memory.put(0, np.float32([5, 5]))
    again = lacks.run(sequences.plan, lacks.kept)
    assert not again.code, text_of(again)
    assert (sequences.y(0), again.copied, len(runtime.seen)) == ([11, 21], 8, 1)
    assert lacks.record.states["S_IN"].tolist() == [[11, 21]]
    assert [sequences.loaded.count(word) for word in (statistics.SUCCESS, statistics.FAIL)] == [1, 1]


def test_it_is_not_written_to_memory_that_is_gone(sequences):
    lacks = LacksRoom(sequences)
    fd = os.memfd_create("test-system", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8192)
    memory = sequences.loaded.memory(8192, fd=fd, kind="system")
    plan = sequences.loaded.plan(memory, [spec("X", (1, 2))], [spec("Y", (1, 2), offset=4096)], rows=1)
    os.ftruncate(fd, 4096)
    os.close(fd)
    assert "changed size: register it again" in text_of(lacks.run(plan, lacks.kept))
    assert lacks.record.states == {}


def test_a_result_that_is_too_large_to_keep_is_not_copied(sequences, monkeypatch):
    monkeypatch.setattr(undelivered, "MAX_BYTES", 15)
    assert LacksRoom(sequences).kept is None


def test_zero_state_and_variable_dims():
    state = State(input_name="i", output_name="o", datatype="INT64", dims=(-1, 3))
    facts = assembly_of(config(sequence_batching=SequenceBatching(state=(state,))))
    assert facts is not None
    assert facts.state_of(state, None).shape == (1, 1, 3)
    assert not facts.state_of(state, None).any()


def test_an_initial_state_of_another_size_is_refused():
    state = State(
        input_name="i", output_name="o", datatype="FP32", dims=(3,),
        initial_state=InitialState(name="z", datatype="FP32", dims=(3,), data=b"1234"),
    )  # fmt: skip
    with pytest.raises(InferError, match="'z' of state 'i' has 4 bytes"):
        assembly_of(config(sequence_batching=SequenceBatching(state=(state,))))


def test_ordinary_models_have_none():
    assert assembly_of(config()) is None


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [6, 4]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 10]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 10]),
        ("BATCH_ITEM_SHAPE", [[3, 1], [3, 1], [2, 2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 1, 3, 1, 2, 2]),
    ],
)
def test_batch_inputs(kind, expected):
    made = batch_input(
        BatchInput(kind=kind, target_name=("t",), datatype="FP32", source_input=("X",)), [(2, 3, 1), (1, 2, 2)], [2, 1]
    )
    assert made.dtype == np.float32
    assert made.tolist() == expected


def test_the_largest_count_is_a_length():
    kind = BatchInput(
        kind="BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", target_name=("t",), datatype="INT32", source_input=("X",)
    )
    assert batch_input(kind, [(1, 2), (1, 4)], [1, 1]).shape == (4,)


def test_scatter_must_use_up_the_output():
    parts = scattered("Y", np.arange(3), (-1, -1), [(1, 2), (1, 1)])
    assert [part.tolist() for part in parts] == [[[0, 1]], [[2]]]
    with pytest.raises(InferError, match="output 'Y' has 4 elements"):
        scattered("Y", np.arange(4), (-1, -1), [(1, 2), (1, 1)])


def ragged(loaded: Loaded, memory, size: int, offset: int):
    return loaded.plan(
        memory,
        [spec("X", (1, size), offset=offset)],
        [spec("Y", (1, size), offset=1024 + offset)],
        rows=1,
    )


def test_ragged_requests_share_a_flat_batch(runtime):
    model = config(
        input=(TensorConfig(name="X", datatype="FP32", dims=(-1,), allow_ragged_batch=True),),
        output=(TensorConfig(name="Y", datatype="FP32", dims=(-1,)),),
        batch_input=(
            BatchInput(kind="BATCH_ELEMENT_COUNT", target_name=("N",), datatype="INT32", source_input=("X",)),
        ),
        batch_output=(BatchOutput(kind="BATCH_SCATTER_WITH_INPUT_SHAPE", target_name=("Y",), source_input=("X",)),),
    )
    with Loaded(model) as loaded:
        memory = loaded.memory()
        plans = [ragged(loaded, memory, size, offset) for size, offset in ((2, 0), (1, 64), (3, 128))]
        assert plans[0].signature is not None
        assert plans[0].signature is plans[1].signature is plans[2].signature
        memory.put(0, np.float32([1, 2]))
        memory.put(64, np.float32([3]))
        memory.put(128, np.float32([4, 5, 6]))
        requests = [loaded.request(plan) for plan in plans]
        loaded.run(*requests)
        assert [request.code for request in requests] == [0, 0, 0]
        (seen,) = runtime.seen
        assert seen["X"].tolist() == [1, 2, 3, 4, 5, 6]
        assert seen["N"].tolist() == [2, 1, 3]
        assert memory.get(1024, (2,)).tolist() == [2, 3]
        assert memory.get(1024 + 128, (3,)).tolist() == [5, 6, 7]
        assert loaded.batches() == {3: 1}
        memory.put(64, np.float32([-3]))  # only the bad one fails, the others run again
        requests = [loaded.request(plan) for plan in plans]
        loaded.run(*requests)
        assert [bool(request.code) for request in requests] == [False, True, False]


def test_bad_strings_fail_their_own_request(runtime):
    model = config(
        input=(TensorConfig(name="X", datatype="FP32", dims=(2,)), TensorConfig(name="B", datatype="BYTES", dims=(1,))),
        sequence_batching=SequenceBatching(),
    )
    with Loaded(model) as loaded:
        memory = loaded.memory()
        for at, raw in ((64, datatypes.encode_bytes(np.array([b"ok"], object))), (192, b"\xff\0\0\0xx")):
            memory.put(at, np.frombuffer(raw, np.uint8))
        plans = [
            loaded.plan(
                memory,
                [spec("X", (1, 2), offset=at), spec("B", (1, 1), "BYTES", offset=at + 64, byte_size=6)],
                [spec("Y", (1, 2), offset=1024 + at)],
                rows=1,
            )
            for at in (0, 128)
        ]
        good, bad = (loaded.request(plan) for plan in plans)
        loaded.run(good, bad)
        assert not good.code
        assert "incomplete string data" in text_of(bad)
        assert runtime.seen[0]["B"].tolist() == [[b"ok"], [b""]]


def test_identity_cuts_its_ragged_outputs_by_its_inputs():
    def tensor(name: str, ragged: bool = False) -> TensorConfig:
        return TensorConfig(name=name, datatype="FP32", dims=(-1,), allow_ragged_batch=ragged)

    tensors = {"input": (tensor("INPUT0", True), tensor("INPUT1")), "output": (tensor("OUTPUT0"), tensor("OUTPUT1"))}
    assert assembly_of(replace(config(), backend="identity", **tensors)).scatter == {"OUTPUT0": ("INPUT0", (-1, -1))}
    assert assembly_of(replace(config(), backend="onnxruntime", **tensors)).scatter == {}
