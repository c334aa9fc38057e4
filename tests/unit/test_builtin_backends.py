"""The built-in backends' contracts, on arrays."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from broker.repository.config import InstanceGroup, ModelConfig, TensorConfig
from broker.repository.scheduling import Control, SequenceBatching, State
from broker.worker.backends import Context, Operand, dyna_sequence, identity, implicit_state, sequence
from shm import datatypes
from shm.errors import InferError

CONTROLS = tuple(Control(name=name, kind="", datatype="INT32") for name in ("START", "END", "READY", "CORRID"))


def context(kind: str = "KIND_CPU", state: tuple[State, ...] = (), name: str = "m_0", **parameters: str) -> Context:
    group = InstanceGroup(name="m", kind=kind)
    config = ModelConfig(
        name="m", platform="", backend="b", directory="/", versions={}, default_model_filename="", max_batch_size=4,
        input=(), output=(), instance_group=(group,), parameters=parameters,
        sequence_batching=SequenceBatching(control_input=CONTROLS, state=state),
    )  # fmt: skip
    return Context(config, 1, "/", group, name)


def operand(name: str, value: object, datatype: str = "INT32") -> Operand:
    array = np.asarray(value, datatypes.numpy_dtype(datatype))
    raw = datatypes.encode_bytes(array) if datatype == "BYTES" else array.tobytes()
    return Operand(name, datatype, array.shape, np.frombuffer(raw, np.uint8))


def answers(model, inputs: list[Operand], *outputs: Operand) -> list[list]:
    binding = model.bind(inputs, list(outputs))
    binding.run()
    return [array.tolist() for array in binding.results()]


def opened(name: str = "OUTPUT", datatype: str = "INT32") -> Operand:
    return Operand(name, datatype, (-1, -1), None)


def test_identity_in_place_open_and_without_input():
    model = identity.load(context())
    place = np.zeros(8, np.uint8)
    given = operand("INPUT0", [[1, 2]])
    text = operand("INPUT1", np.array([[b"a", b""]], object), "BYTES")
    outputs = [
        Operand("OUTPUT0", "INT32", (1, 2), place),
        opened("OUTPUT1", "BYTES"),
        Operand("OUTPUT2", "FP32", (1, -1), None),
    ]
    assert answers(model, [given, text], *outputs) == [[[b"a", b""]], [[]]]
    assert place.view("<i4").tolist() == [1, 2]


def test_a_binding_gives_its_results_away():
    """A client may have thousands of them."""
    binding = identity.load(context()).bind([operand("INPUT0", [[1, 2]])], [opened("OUTPUT0")])
    binding.run()
    assert len(binding.results()) == 1
    assert binding.results() == []


def step(model, values, start, ready, end=0, corrid=0):
    rows = len(values)
    flags = {"START": start, "READY": ready, "END": end or [0] * rows, "CORRID": corrid or [0] * rows}
    inputs = [operand("INPUT", values), *(operand(name, np.reshape(flags[name], (-1, 1))) for name in flags)]
    return answers(model, inputs, opened())[0]


def test_sequence_adds_up_by_slot():
    model = sequence.load(context())
    assert step(model, [[1, 2], [5, 5]], [1, 1], [1, 1]) == [[3, 3], [10, 10]]
    assert step(model, [[9, 9], [1, 0]], [1, 0], [0, 1]) == [[0, 0], [11, 11]]
    assert step(model, [[1, 0]], [0], [1]) == [[4, 4]]


def test_dyna_sequence_adds_up_by_correlation_id():
    model = dyna_sequence.load(context())
    assert step(model, [[1], [2]], [1, 1], [1, 1], corrid=[7, 8]) == [[1], [2]]
    assert step(model, [[3], [4]], [0, 0], [1, 1], [0, 1], [8, 7]) == [[5], [12]]
    assert step(model, [[1]], [0], [1], corrid=[7]) == [[1]], "it has ended"


def state_step(model, case: int, value: int, state: int):
    inputs = [operand("TEST_CASE", [case]), operand("INPUT", [value]), operand("INPUT_STATE", [state])]
    return answers(model, inputs, opened(), opened("OUTPUT_STATE"))


def test_implicit_state_cases():
    state = State(input_name="INPUT_STATE", output_name="OUTPUT_STATE", datatype="INT32", dims=(1,))
    model = implicit_state.load(context(state=(state,)))
    assert state_step(model, 1, 1, 0) == [[1], [0]]
    assert state_step(model, 2, 1, 3) == [[4], [4]]
    with pytest.raises(InferError, match="state 'undefined_state' is not a valid state name"):
        state_step(model, 0, 1, 0)
    with pytest.raises(InferError, match="state configuration is missing for model 'm'"):
        state_step(implicit_state.load(context()), 0, 1, 0)


@pytest.mark.parametrize("backend", [identity, sequence, dyna_sequence, implicit_state])
def test_cpu_only(backend):
    with pytest.raises(InferError, match="backend only supports CPU instances"):
        backend.load(context("KIND_GPU"))


def test_parameters_are_numbers():
    with pytest.raises(InferError, match="'execute_delay_ms' must be a number of 0 or more, got 'soon'"):
        identity.load(context(execute_delay_ms="soon"))


@pytest.mark.parametrize(
    ("datatype", "dims", "text"),
    [
        ("INT32", (2,), "expected input and output datatype to match, got TYPE_FP32 and TYPE_INT32"),
        ("FP32", (3,), "expected input and output shape to match, got [2] and [3]"),
        ("FP32", (2, 1), "expected input and output shape to match, got [2] and [2,1]"),
        ("FP32", (-1,), ""),
    ],
)
def test_identity_gives_what_it_is_given(datatype, dims, text):
    given = TensorConfig(name="INPUT0", datatype="FP32", dims=(2,))
    output = TensorConfig(name="OUTPUT0", datatype=datatype, dims=dims)
    asked = context()
    asked = asked._replace(config=replace(asked.config, input=(given,), output=(output,)))
    if not text:
        identity.load(asked)
        return
    with pytest.raises(InferError) as caught:
        identity.load(asked)
    assert caught.value.message == text
