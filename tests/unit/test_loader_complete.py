"""Auto-completion from the model file, and contradictions between it and the configuration text."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.fakes import models
from tests.fakes.loading import config_of, reason_of


def test_a_batchable_file_without_a_text(tmp_path):
    config = config_of(tmp_path, models.add1())
    assert (config.platform, config.backend, config.default_model_filename) == (
        "onnxruntime_onnx",
        "onnxruntime",
        "model.onnx",
    )
    assert config.versions == {1: str(tmp_path / "m" / "1")}
    assert config.max_batch_size == 4
    assert config.dynamic_batching.preferred_batch_size == (4,)
    (x,), (y,) = config.input, config.output
    assert (x.name, x.datatype, x.dims, x.symbols, x.file_rank) == ("x", "FP32", (-1,), ("n",), 2)
    assert (y.name, y.datatype, y.dims, y.symbols, y.file_rank) == ("y", "FP32", (-1,), ("n",), 2)
    assert [(group.name, group.kind, group.count) for group in config.instance_group] == [("m", "KIND_CPU", 1)]
    assert config.notes == ("max_batch_size is not set and the model can batch: 4 is used",)
    assert config.worker_groups == ("default",)


@pytest.mark.parametrize(
    ("model", "text", "completed"),
    [
        (models.add1(), None, True),
        (models.add1(), "max_batch_size: 4", False),
        (models.add1(), "max_batch_size: 0", False),
        (models.fixed_batch(2), None, False),
    ],
)
def test_it_is_known_who_chose_the_batch_size(tmp_path, model, text, completed):
    assert config_of(tmp_path, model, text).max_batch_size_completed is completed


def test_the_default_batch_size_is_an_option(tmp_path):
    assert config_of(tmp_path, models.add1(), default_max_batch_size=16).max_batch_size == 16


def test_a_default_of_one_adds_no_scheduler(tmp_path):
    assert config_of(tmp_path, models.add1(), default_max_batch_size=1).dynamic_batching is None


def test_a_fixed_batch_is_not_batched(tmp_path):
    config = config_of(tmp_path, models.fixed_batch(2))
    assert config.max_batch_size == 0
    assert config.dynamic_batching is None
    assert config.input[0].dims == (2, 4)
    assert config.input[0].symbols == ("", "")


def test_an_explicit_zero_stays(tmp_path):
    config = config_of(tmp_path, models.add1(), "max_batch_size: 0")
    assert config.max_batch_size == 0
    assert config.input[0].dims == (-1, -1)
    assert config.input[0].symbols == ("batch", "n")


def test_dims_of_full_rank_mean_no_batching(tmp_path):
    config = config_of(tmp_path, models.add1(), 'input { name: "x" dims: [ -1, -1 ] }')
    assert config.max_batch_size == 0
    assert config.output[0].dims == (-1, -1)


def test_absent_fields_of_a_tensor_are_filled_and_present_ones_kept(tmp_path):
    config = config_of(tmp_path, models.add1(), 'input { name: "x" dims: [ 16 ] }')
    assert config.max_batch_size == 4
    assert (config.input[0].datatype, config.input[0].dims, config.input[0].symbols) == ("FP32", (16,), ("",))
    # No input carries `n` any more: the output's size is known after the run.
    assert (config.output[0].dims, config.output[0].symbols) == ((-1,), ("?y:0",))


def test_a_complete_text_gets_no_scheduler(tmp_path):
    text = (
        'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }'
    )
    assert config_of(tmp_path, models.add1(), text).dynamic_batching is None


def test_a_given_scheduler_is_kept(tmp_path):
    config = config_of(
        tmp_path,
        models.add1(),
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 500 "
        "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 2 value: { max_queue_size: 3 } } }",
    )
    batching = config.dynamic_batching
    assert batching.preferred_batch_size == (2, 4)
    assert batching.max_queue_delay_microseconds == 500
    assert batching.priority_queue_policy[2].max_queue_size == 3


@pytest.mark.parametrize(
    ("element", "datatype"),
    [
        (TensorProto.FLOAT16, "FP16"),
        (TensorProto.BFLOAT16, "BF16"),
        (TensorProto.DOUBLE, "FP64"),
        (TensorProto.STRING, "BYTES"),
        (TensorProto.BOOL, "BOOL"),
        (TensorProto.UINT8, "UINT8"),
        (TensorProto.INT64, "INT64"),
    ],
)
def test_datatypes(tmp_path, element, datatype):
    config = config_of(tmp_path, models.identity(element))
    assert config.input[0].datatype == config.output[0].datatype == datatype


def test_data_dependent_outputs_are_unknown(tmp_path):
    config = config_of(tmp_path, models.nonzero(), models.NONZERO_CONFIG)
    assert (config.output[0].dims, config.output[0].symbols) == ((1, -1), ("", "?y:1"))


def test_unnamed_dimensions(tmp_path):
    config = config_of(tmp_path, models.identity(dims=(None, 3, None)))
    assert config.input[0].symbols == ("", "?x:1")
    assert config.output[0].symbols == ("", "?y:1")


def test_the_batch_symbol_in_another_place_is_unknown(tmp_path):
    model = models.build(
        [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["y"])],
        [models.tensor("x", ["batch", 4])],
        [models.tensor("y", ["batch", "batch"])],
    )
    assert config_of(tmp_path, model).output[0].symbols == ("?y:0",)


def test_a_missing_output_shape_is_inferred(tmp_path):
    model = models.build(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [models.tensor("x", ["batch", 4])],
        [models.tensor("y", None)],
        {"w": np.ones((4, 7), np.float32)},
    )
    config = config_of(tmp_path, model)
    assert config.max_batch_size == 4
    assert (config.output[0].dims, config.output[0].file_rank) == ((7,), 2)


def test_an_output_whose_rank_nothing_tells(tmp_path):
    model = models.build(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [models.tensor("x", ["batch", 4]), models.tensor("shape", ["rank"], TensorProto.INT64)],
        [models.tensor("y", None)],
    )
    assert "model output 'y' must specify 'dims' for m: no model file says" in reason_of(tmp_path, model)
    config = config_of(tmp_path, model, 'output { name: "y" dims: [ -1, 2 ] }')
    assert (config.max_batch_size, config.output[0].file_rank) == (0, -1)


def test_inputs_that_are_initializers_are_not_inputs(tmp_path):
    model = models.add1()
    model.graph.input.append(models.tensor("one", [1]))
    assert [tensor.name for tensor in config_of(tmp_path, model).input] == ["x"]


def test_a_default_value_becomes_an_input_when_the_text_names_it(tmp_path):
    model = models.add1()
    model.graph.input.append(models.tensor("one", [1]))
    text = """
        max_batch_size: 0
        input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] },
                { name: "one" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]
    """
    assert [(tensor.name, tensor.optional) for tensor in config_of(tmp_path, model, text).input] == [
        ("x", False),
        ("one", True),
    ]
    model.ir_version = 3  # there an initializer is a constant
    assert "not in the model file: one" in reason_of(tmp_path, model, text)


def test_scalars_have_dims_of_one_and_an_empty_reshape(tmp_path):
    model = models.identity(dims=())
    config = config_of(tmp_path, model)
    for tensor in (*config.input, *config.output):
        assert (tensor.dims, tensor.reshape, tensor.file_rank) == ((1,), (), 0)
    text = (
        'input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 reshape { shape: [ ] } }'
    )
    config = config_of(tmp_path, model, text)
    assert config.input[0].reshape == config.output[0].reshape == ()


def test_one_value_per_row(tmp_path):
    config = config_of(tmp_path, models.identity(dims=("batch",)))
    assert (config.max_batch_size, config.input[0].dims, config.input[0].reshape) == (4, (1,), ())


def test_reshape_maps_variable_dimensions_in_order(tmp_path):
    config = config_of(
        tmp_path,
        models.identity(dims=("batch", 2, "n", 3)),
        'max_batch_size: 2 input { name: "x" dims: [ 2, -1, 1, 3 ] reshape { shape: [ 2, -1, 3 ] } }',
    )
    assert config.input[0].symbols == ("", "n", "", "")
    assert config.input[0].reshape == (2, -1, 3)
    assert config.output[0].symbols == ("", "n", "")


def test_strict_takes_nothing_from_the_file(tmp_path):
    assert "auto-completion is disabled" in reason_of(tmp_path, models.add1(), strict=True)
    assert "must specify one or more 'input's" in reason_of(tmp_path, models.add1(), "max_batch_size: 2", strict=True)
    text = (
        'backend: "onnxruntime" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }'
    )
    config = config_of(tmp_path, models.add1(), text, strict=True)
    assert config.input[0].symbols == ("n",)
    assert "the model expects 2 dimensions" in reason_of(
        tmp_path, models.add1(), text.replace("max_batch_size: 8", ""), strict=True
    )


# --- contradictions -----------------------------------------------------------------------------------------------


def test_batching_that_the_file_cannot_do(tmp_path):
    reason = reason_of(tmp_path, models.fixed_batch(2), "max_batch_size: 8")
    assert reason.startswith(
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified"
    )
    assert "config.pbtxt has max_batch_size: 8" in reason
    assert "'x' has shape [2,4]" in reason
    assert "fix: max_batch_size: 0" in reason


def test_a_fixed_batch_of_one(tmp_path):
    assert "fix: max_batch_size: 1," in reason_of(tmp_path, models.fixed_batch(1), "max_batch_size: 8")
    config = config_of(tmp_path, models.fixed_batch(1), "max_batch_size: 1")
    assert (config.max_batch_size, config.input[0].dims) == (1, (4,))


@pytest.mark.parametrize(
    ("text", "wanted", "fix"),
    [
        (
            'max_batch_size: 8 input { name: "x" dims: [ 5 ] }',
            "the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 2 dimensions (an "
            "initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete "
            "shape [-1,5]): dimension 1 is 4 in the model, 5 in the configuration\n",
            "fix: dims: [ 4 ]",
        ),
        (
            'max_batch_size: 8 input { name: "x" dims: [ -1, 4 ] }',
            "the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies 3 dimensions (",
            "fix: leave the batch dimension out (max_batch_size > 0 adds it): dims: [ 4 ]",
        ),
        (
            'max_batch_size: 0 input { name: "x" dims: [ 4 ] }',
            "specifies 1 dimensions (shape [4])",
            "fix: max_batch_size: 1 or more, or count the first dimension as well: dims: [ -1, 4 ]",
        ),
        (
            'max_batch_size: 8 input { name: "x" dims: [ -1 ] }',
            "making complete shape [-1,-1]): dimension 1 is 4 in the model, -1 in the configuration\n",
            "fix: dims: [ 4 ]",
        ),
    ],
)
def test_shapes_are_shown_side_by_side_with_the_edit_that_fixes_them(tmp_path, text, wanted, fix):
    reason = reason_of(tmp_path, models.matmul(), text)
    assert reason.startswith("model 'm', tensor 'x': ")
    assert wanted in reason
    place, header, *rows, about, _ = reason.splitlines()[1:]
    assert place.strip() == f"{tmp_path}/m/config.pbtxt:1: {text}"
    column = header.index("model file")
    assert about.strip() == f"the model file is {tmp_path}/m/1/model.onnx"
    assert header.split()[0] == "config.pbtxt"
    assert [row.split()[0] for row in rows] == ["max_batch_size", "dims", "shape"]
    assert [row[column:] for row in rows] == ["-", "-", "[batch,4]"]
    assert reason.endswith(fix)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("max_batch_size: 8 {} dims: [ 2, 2 ] reshape {{ shape: [ 4 ] }} }}", "leave 'reshape' out"),
        ("max_batch_size: 8 {} dims: [ 4 ] reshape {{ shape: [ 4, 1 ] }} }}", "reshape { shape: [ 2, 2 ] }"),
        ("max_batch_size: 8 {} dims: [ 6 ] reshape {{ shape: [ 6 ] }} }}", "dims: [ 2, 2 ], and leave 'reshape' out"),
        ("max_batch_size: 0 {} dims: [ -1, 2, 2 ] reshape {{ shape: [ -1, 4 ] }} }}", "leave 'reshape' out"),
        (
            "max_batch_size: 0 {} dims: [ 4 ] reshape {{ shape: [ 2, 2 ] }} }}",
            "max_batch_size: 1 or more, or count the first dimension as well: dims: [ -1, 2, 2 ], and leave 'reshape' "
            "out",
        ),
        (
            "max_batch_size: 8 {} dims: [ -1, 4 ] reshape {{ shape: [ -1, 2, 2 ] }} }}",
            "leave the batch dimension out (max_batch_size > 0 adds it): dims: [ 2, 2 ], and leave 'reshape' out",
        ),
        ("max_batch_size: 8 {} dims: [ 4 ] }}", "dims: [ 2, 2 ]"),
    ],
)
def test_the_edit_of_a_shape_minds_what_the_text_has_for_reshape(tmp_path, text, fix):
    squares = models.identity(dims=("batch", 2, 2))
    for kind, name in (("input", "x"), ("output", "y")):
        reason = reason_of(tmp_path, squares, text.format(f'{kind} {{ name: "{name}"'))
        assert reason.splitlines()[-1].strip() == f"fix: {fix}"


def test_datatype_contradicts_the_file(tmp_path):
    reason = reason_of(tmp_path, models.add1(), 'input { name: "x" data_type: TYPE_INT32 }')
    assert "configuration expects datatype TYPE_INT32 for input 'x', model provides TYPE_FP32" in reason
    assert reason.endswith("fix: data_type: TYPE_FP32")


def test_names_contradict_the_file(tmp_path):
    assert "unexpected inference input 'z', allowed inputs are: a, b" in reason_of(
        tmp_path, models.two_input(), 'input { name: "a" } input { name: "z" data_type: TYPE_FP32 dims: 1 }'
    )
    reason = reason_of(tmp_path, models.two_input(), 'input { name: "a" }')
    assert "configuration expects 1 inputs, model provides 2" in reason
    assert "missing in config.pbtxt: b" in reason
    assert "unexpected inference output 'z', allowed outputs are: y" in reason_of(
        tmp_path, models.add1(), 'output { name: "z" data_type: TYPE_FP32 dims: 1 }'
    )


def test_outputs_may_be_left_out(tmp_path):
    config = config_of(tmp_path, models.two_input(), 'output { name: "difference" }')
    assert [tensor.name for tensor in config.output] == ["difference"]
