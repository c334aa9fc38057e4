"""Sequence batching, implicit state, batch helpers and warm-up: read, checked, and compared with the model file."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.fakes import models
from tests.fakes.loading import config_of, reason_of, run

START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 2 ] } }'
CORRID = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }'
STATE = 'state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ 4 ] '


def accumulator() -> onnx.ModelProto:
    """y = t = x + s * START; ID is only there. All FP32 [batch, 4] but START: [batch, 1] and ID: UINT64 [batch, 1]."""
    return models.build(
        [
            helper.make_node("Mul", ["s", "START"], ["kept"]),
            helper.make_node("Add", ["x", "kept"], ["y"]),
            helper.make_node("Identity", ["y"], ["t"]),
            helper.make_node("Identity", ["ID"], ["unused"]),
        ],
        [
            models.tensor("x", ["batch", 4]),
            models.tensor("START", ["batch", 1]),
            models.tensor("ID", ["batch", 1], TensorProto.UINT64),
            models.tensor("s", ["batch", 4]),
        ],
        [models.tensor("y", ["batch", 4]), models.tensor("t", ["batch", 4])],
    )


def sequence(*parts: str, more: str = "") -> str:
    return f"max_batch_size: 4 {more} sequence_batching {{ {' '.join(parts)} }}"


def test_the_first_kind_of_control_is_explained_too(tmp_path):
    start = START.replace("kind: CONTROL_SEQUENCE_START ", "")
    config = config_of(tmp_path, accumulator(), sequence(start, CORRID, STATE + "}"), explain=True)
    assert config.explanation.count("kind: CONTROL_SEQUENCE_START") == 1
    assert config_of(tmp_path, accumulator(), config.explanation).sequence_batching == config.sequence_batching


def test_tensors_that_no_client_sends_are_not_inputs(tmp_path):
    config = config_of(tmp_path, accumulator(), sequence(START, CORRID, STATE + "}"))
    assert [tensor.name for tensor in config.input] == ["x"]
    assert [tensor.name for tensor in config.output] == ["y"]
    assert (config.stateful, config.dynamic_batching) == (True, None)
    batching = config.sequence_batching
    assert batching is not None
    assert (batching.oldest, batching.max_sequence_idle_microseconds) == (False, 1_000_000)
    start, corrid = batching.control_input
    assert (start.name, start.kind, start.datatype, start.off, start.on) == (
        "START",
        "CONTROL_SEQUENCE_START",
        "FP32",
        0.0,
        2.0,
    )
    assert (corrid.kind, corrid.datatype) == ("CONTROL_SEQUENCE_CORRID", "UINT64")
    (state,) = batching.state
    assert (state.input_name, state.output_name, state.dims, state.initial_state) == ("s", "t", (4,), None)


def test_a_state_output_may_also_be_answered(tmp_path):
    text = sequence(START, CORRID, STATE + "}", more='output { name: "t" } output { name: "y" }')
    assert [tensor.name for tensor in config_of(tmp_path, accumulator(), text).output] == ["t", "y"]


def test_oldest(tmp_path):
    text = sequence(START, CORRID, STATE + "}", "oldest { max_candidate_sequences: 9 max_queue_delay_microseconds: 5 }")
    batching = config_of(tmp_path, accumulator(), text).sequence_batching
    assert batching is not None
    assert (batching.oldest, batching.max_candidate_sequences) == (True, 9)
    assert (batching.preferred_batch_size, batching.max_queue_delay_microseconds) == ((4,), 5)


def test_an_initial_state_comes_from_its_file(tmp_path):
    text = sequence(
        START, CORRID, STATE + 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 4 ] data_file: "i.bin" } }'
    )
    models.write_model(tmp_path, "m", accumulator(), config=text)
    assert "initial_state/i.bin: cannot be opened" in run(tmp_path).reason
    (tmp_path / "m" / "initial_state").mkdir()
    (tmp_path / "m" / "initial_state" / "i.bin").write_bytes(b"\1\2\3")
    assert (
        "initial_state setting expects 16 bytes, but the data provided from i.bin only has 3 bytes"
        in run(tmp_path).reason
    )
    data = np.arange(4, dtype=np.float32).tobytes()
    (tmp_path / "m" / "initial_state" / "i.bin").write_bytes(data)
    initial = run(tmp_path).sequence_batching.state[0].initial_state
    assert (initial.name, initial.dims, initial.data) == ("i", (4,), data)
    models.write_model(tmp_path, "m", accumulator(), config=text.replace("i.bin", "../config.pbtxt"))
    assert "must lie in " in run(tmp_path).reason


@pytest.mark.parametrize(
    ("parts", "part"),
    [
        ((START, START), "sequence batching control tensor 'START' is specified for multiple control kinds for m"),
        (
            (START, START.replace('"START"', '"OTHER"')),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            (START.replace("fp32_false_true: [ 0, 2 ]", ""),),
            "must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_SEQUENCE_START",
        ),
        (
            (START.replace("[ 0, 2 ]", "[ 0 ]"),),
            "'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
        ),
        (
            (CORRID.replace("TYPE_UINT64", "TYPE_FP32"),),
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        ),
        (
            ("oldest { preferred_batch_size: 5 }",),
            "sequence batching preferred batch size must be <= max batch size for m: 5 > 4",
        ),
        (
            ("oldest { preferred_batch_size: 0 }",),
            "sequence batching preferred batch size must be positive for m, got 0",
        ),
        (
            ("direct { minimum_slot_utilization: 1.5 }",),
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (("iterative_sequence: true",), "iterative_sequence needs model_transaction_policy { decoupled: true }"),
        ((STATE + "}", STATE + "}"), "state 's' is also an input or a control or another state for m"),
        ((STATE + "initial_state { data_type: TYPE_FP32 dims: 4 } }",), "must specify 'zero_data' or 'data_file'"),
        (
            (STATE + "initial_state { data_type: TYPE_FP32 dims: 5 zero_data: true } }",),
            "has dims [5], which must be fixed and fit the state's [4]",
        ),
        # Against the model file:
        ((START, CORRID), "must be"),
        (
            (START, CORRID, STATE.replace('"t"', '"u"') + "}"),
            "unexpected inference output 'u' of sequence_batching.state, allowed outputs are: ",
        ),
        ((START, CORRID, STATE.replace('"t"', '"tt"') + "}"), '\n    fix: output_name: "t"'),
        (
            (START, CORRID, STATE.replace('"s"', '"ss"') + "}"),
            "unexpected inference input 'ss' of sequence_batching.state, allowed inputs are: ",
        ),
        ((START, CORRID, STATE.replace('"s"', '"ss"') + "}"), '\n    fix: input_name: "s"'),
        (
            (START.replace('"START"', '"STAR"'), CORRID, STATE + "}"),
            '\n    fix: name: "START"',
        ),
        ((START.replace("fp32", "int32"), CORRID, STATE + "}"), "expects datatype TYPE_INT32 for control 'START'"),
        ((START, CORRID, STATE.replace("4", "5") + "}"), "making complete shape [-1,5]"),
    ],
)
def test_what_is_wrong_with_sequences(tmp_path, parts, part):
    if part == "must be":  # without its state the model is one of more inputs, which is right
        assert [tensor.name for tensor in config_of(tmp_path, accumulator(), sequence(*parts)).input] == ["x", "s"]
    else:
        assert part in reason_of(tmp_path, accumulator(), sequence(*parts))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("response_cache { enable: true } sequence_batching { }", "does not currently support model m with sequence"),
        (
            "response_cache { enable: true } model_transaction_policy { decoupled: true }",
            "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable",
        ),
        ("batch_input { kind: BATCH_ELEMENT_COUNT }", "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input"),
        ('batch_input { source_input: "z" data_type: TYPE_INT32 }', "unknown source input name 'z'"),
        ('batch_input { source_input: "x" data_type: TYPE_INT64 }', "batch input data type must be TYPE_INT32 or TYPE"),
        ('batch_output { source_input: "x" target_name: "z" }', "unknown target output name 'z'"),
        (
            'batch_output { source_input: "x" target_name: [ "y", "y" ] }',
            "target output name 'y' can only be specified once",
        ),
        ('metric_tags { key: "a b" value: "c" }', "metric tag 'a b' must have 1 to 64 letters, digits or _ for m"),
        (
            'model_warmup { inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 1048576, 1048576 ] } } }',
            "model_warmup 0 input 'x' has 1099511627776 elements for m",
        ),
        (
            'parameters { key: "drop_oldest" value { string_value: "maybe" } } dynamic_batching { }',
            "must be true or fals",
        ),
        ("instance_group { rate_limiter { resources { name: 'R' } } }", "must have a name and a count of at least 1"),
    ],
)
def test_what_is_wrong_beside_tensors(tmp_path, text, part):
    assert part in reason_of(tmp_path, models.add1(), f"max_batch_size: 4 {text}")


def test_a_full_queue_may_drop_its_oldest(tmp_path):
    text = 'dynamic_batching { } parameters { key: "drop_oldest" value { string_value: "true" } }'
    batching = config_of(tmp_path, models.add1(), f"max_batch_size: 4 {text}").dynamic_batching
    assert batching is not None
    assert batching.default_queue_policy.drop_oldest is True


def test_instances_with_what_the_rate_limiter_needs(tmp_path):
    text = "instance_group { count: 3 rate_limiter { resources { name: 'R' count: 2 global: true } } }"
    (group,) = config_of(tmp_path, models.add1(), text).instance_group
    assert (group.count, group.priority) == (3, 1)
    assert [(item.name, item.count, item.is_global) for item in group.resources] == [("R", 2, True)]


def test_ragged_inputs_and_their_helpers(tmp_path):
    ragged = models.build(
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["n"], ["m"])],
        [models.tensor("x", ["total"]), models.tensor("n", ["rows"])],
        [models.tensor("y", ["total"]), models.tensor("m", ["rows"])],
    )
    text = (
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } '
        'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_FP32 source_input: "x" } '
        'output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } '
        'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" } dynamic_batching { }'
    )
    config = config_of(tmp_path, ragged, text)
    assert [(tensor.name, tensor.allow_ragged_batch) for tensor in config.input] == [("x", True)]
    (helper_input,) = config.batch_input
    assert (helper_input.kind, helper_input.target_name, helper_input.datatype) == (
        "BATCH_ELEMENT_COUNT",
        ("n",),
        "FP32",
    )
    assert config.batch_output[0].source_input == ("x",)


# --- warm-up ------------------------------------------------------------------------------------------------------


def warm_up(text: str) -> str:
    return f'max_batch_size: 4 model_warmup {{ name: "w" batch_size: 2 inputs {{ key: "x" value {{ {text} }} }} }}'


def test_warm_up_requests(tmp_path):
    text = warm_up("data_type: TYPE_FP32 dims: 4 random_data: true").replace("batch_size: 2", "batch_size: 2 count: 3")
    config = config_of(tmp_path, models.matmul(), text)
    (sample,) = config.warm_up
    assert (sample.name, sample.batch_size, sample.count, sample.inputs[0].kind) == ("w", 2, 3, "random")
    skipped = config_of(tmp_path, models.matmul(), text.replace("batch_size: 2", ""))
    assert (skipped.warm_up, skipped.notes) == ((), ("model_warmup 'w' has batch_size 0 and is skipped",))


def test_a_warm_up_file(tmp_path):
    models.write_model(
        tmp_path, "m", models.matmul(), config=warm_up('data_type: TYPE_FP32 dims: 4 input_data_file: "a"')
    )
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "a").write_bytes(b"x" * 15)
    assert "warmup setting expects 16 bytes, but the data provided from a only has 15 bytes" in run(tmp_path).reason
    for more in (b"", b"more"):  # of which nothing is used, as in Triton
        (tmp_path / "m" / "warmup" / "a").write_bytes(b"x" * 16 + more)
        config = run(tmp_path)
        assert config.warm_up[0].inputs[0].data == b"x" * 16
        assert config.for_worker.with_data().warm_up[0].inputs[0].data == b"x" * 16


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "data_type: TYPE_FP32 dims: -1 zero_data: true",
            "warmup setting expects all variable-size dimensions are spe",
        ),
        ("data_type: TYPE_INT32 dims: 4 zero_data: true", "data type is INT32, the model's is FP32"),
        ("data_type: TYPE_FP32 dims: 5 zero_data: true", "dims are [5], the model's are [4]"),
        ("data_type: TYPE_FP32 dims: 4", "must specify 'zero_data', 'random_data' or 'input_data_file'"),
        ('data_type: TYPE_FP32 dims: 4 input_data_file: "../x"', "must lie in "),
    ],
)
def test_what_is_wrong_with_a_warm_up(tmp_path, text, part):
    assert part in reason_of(tmp_path, models.matmul(), warm_up(text))


def test_a_warm_up_of_unknown_inputs_or_too_many_rows(tmp_path):
    text = warm_up("data_type: TYPE_FP32 dims: 4 zero_data: true")
    assert "unexpected inference input 'z'" in reason_of(tmp_path, models.matmul(), text.replace('"x"', '"z"'))
    assert "has batch_size 9, max_batch_size is 4" in reason_of(
        tmp_path, models.matmul(), text.replace("batch_size: 2", "batch_size: 9")
    )


def test_bytes_of_data_files_do_not_travel_to_the_worker_which_reads_them_again(tmp_path):
    text = warm_up('data_type: TYPE_FP32 dims: 4 input_data_file: "a"') + sequence(
        START, CORRID, STATE + 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 4 ] data_file: "i" } }'
    ).removeprefix("max_batch_size: 4")
    models.write_model(tmp_path, "m", accumulator(), config=text)
    for directory, name in (("warmup", "a"), ("initial_state", "i")):
        (tmp_path / "m" / directory).mkdir()
        (tmp_path / "m" / directory / name).write_bytes(name.encode() * 16)
    config = run(tmp_path)
    slim = config.for_worker
    assert (slim.warm_up[0].inputs[0].data, slim.sequence_batching.state[0].initial_state.data) == (b"", b"")
    full = slim.with_data()
    assert (full.warm_up, full.sequence_batching) == (config.warm_up, config.sequence_batching)
    assert full.warm_up[0].inputs[0].data == b"a" * 16
    (tmp_path / "m" / "initial_state" / "i").write_bytes(b"less")
    with pytest.raises(ValueError, match="has changed since the configuration was read: it has 4 bytes now"):
        slim.with_data()
