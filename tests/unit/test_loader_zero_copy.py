"""The graph policy: which inputs the runtime may read in memory that a client can rewrite meanwhile."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.defs
import pytest
from onnx import TensorProto, helper

from broker.repository.loader.operators import OPERATORS
from broker.repository.loader.zero_copy import policy
from tests.fakes import models
from tests.fakes.loading import config_of
from tests.fakes.models import FP32, build, tensor

INDEX_TYPES = {"tensor(int32)", "tensor(int64)"}


def chain(*operators: str, element: int = FP32, initializers: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """x → the operators, one after the other → y. "Slice x starts ends": further operands follow the name."""
    nodes = []
    current = "x"
    for position, text in enumerate(operators):
        operator, *operands = text.split()
        output = "y" if position == len(operators) - 1 else f"t{position}"
        nodes.append(helper.make_node(operator, [current, *operands], [output]))
        current = output
    return build(nodes, [tensor("x", ["a", "b"], element)], [tensor("y", None)], initializers)


def verdict(model: onnx.ModelProto, name: str = "x"):
    return policy(model)[name]


# --- the list itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_entries_exist_and_admit_no_index_operand(name):
    operator = OPERATORS[name]
    schema = onnx.defs.get_schema(name)
    # The last input of a variadic operator stands for all that follow.
    positions = range(len(schema.inputs)) if operator.data is None else operator.data
    for position in positions:
        assert set(schema.inputs[position].types) - INDEX_TYPES, f"input {position} of {name} is an index or a size"
    for position in operator.constant:
        assert position < len(schema.inputs)
        assert operator.data is None or position not in operator.data
    assert operator.reason


@pytest.mark.parametrize(
    "name",
    ["TopK", "Unique", "NonZero", "Compress", "NonMaxSuppression", "ArgMax", "GatherND", "ScatterND", "Loop", "If"],
)
def test_what_orders_counts_or_addresses_is_not_on_it(name):
    assert name not in OPERATORS


# --- datatypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "element",
    [
        TensorProto.INT16,
        TensorProto.INT32,
        TensorProto.INT64,
        TensorProto.UINT16,
        TensorProto.UINT32,
        TensorProto.UINT64,
        TensorProto.BOOL,
        TensorProto.STRING,
    ],
)
def test_integers_booleans_and_bytes_are_copied(element):
    assert not verdict(chain("Identity", element=element)).allowed


@pytest.mark.parametrize("element", [FP32, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_floats_that_become_the_output_are_not(element):
    assert verdict(chain("Identity", element=element)).allowed


@pytest.mark.parametrize("element", [TensorProto.UINT8, TensorProto.INT8])
def test_pixels(element):
    scale = {"s": np.ones((), np.float32)}
    assert verdict(chain("DequantizeLinear s", "Relu", element=element, initializers=scale)).allowed
    assert not verdict(chain("TopK k", element=element, initializers={"k": np.array([1])})).allowed


def test_an_image_in_bytes_that_is_converted_and_convolved():
    model = build(
        [
            helper.make_node("Cast", ["x"], ["f"], to=FP32),
            helper.make_node("Transpose", ["f"], ["t"], perm=[0, 3, 1, 2]),
            helper.make_node("Mul", ["t", "s"], ["m"]),
            helper.make_node("Conv", ["m", "w"], ["c"]),
            helper.make_node("TopK", ["c", "k"], ["y", "i"]),
        ],
        [tensor("x", ["batch", "h", "w", 3], TensorProto.UINT8)],
        [tensor("y", None)],
        {"s": np.array(1 / 255, np.float32), "w": np.ones((1, 3, 1, 1), np.float32), "k": np.array([1])},
    )
    found = verdict(model)
    assert found.allowed
    assert found.reason.startswith("zero-copy: read by Cast (")
    assert "Conv (multiply-accumulate" in found.reason


def test_bytes_that_are_cast_to_indices():
    model = build(
        [
            helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "i"], ["y"]),
        ],
        [tensor("x", ["n"], TensorProto.UINT8)],
        [tensor("y", None)],
        {"table": np.zeros((256, 2), np.float32)},
    )
    assert verdict(model).reason == "copied: input 1 of Gather is not plain data (an index, a shape or a parameter)"


# --- following ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["TopK k", "Unique", "NonZero", "Hardmax", "ArgMax", "Einsum"])
@pytest.mark.parametrize(
    "before",
    [
        (),
        ("Identity",),
        ("Reshape shape",),
        ("Flatten", "Unsqueeze axes", "Squeeze axes", "Dropout"),
        ("Add zero",),  # x + 0, a transpose there and back, a cast there and back: a graph optimiser removes them
        ("Transpose", "Transpose"),
        ("CastLike zero", "CastLike zero"),
        ("Slice zeros ends",),
        ("Concat",),
    ],
    ids=lambda before: "-".join(before) or "directly",
)
def test_what_can_be_the_same_memory_is_followed(before, operator):
    constants = {
        "k": np.array([1]),
        "shape": np.array([-1]),
        "axes": np.array([0]),
        "zero": np.zeros(1, np.float32),
        "zeros": np.array([0]),
        "ends": np.array([2**31 - 1]),
    }
    found = verdict(chain(*before, operator, initializers=constants))
    assert not found.allowed
    assert f"read by {operator.split()[0]}, which is not on the list of single-pass operators" in found.reason


@pytest.mark.parametrize("before", ["Relu", "Gemm w", "MatMul w", "Softmax", "LayerNormalization w", "AveragePool"])
def test_what_computes_a_new_buffer_ends_the_search(before):
    constants = {"k": np.array([1]), "w": np.ones((2, 2), np.float32)}
    assert verdict(chain(before, "TopK k", initializers=constants)).allowed


@pytest.mark.parametrize(
    ("operator", "operand"),
    [("Slice", "Slice i i"), ("Gather", "Gather i"), ("Split", "Split i"), ("Tile", "Tile i"), ("Expand", "Expand i")],
)
def test_moves_need_operands_that_are_fixed_in_the_file(operator, operand):
    fixed = chain(operand, "Relu", initializers={"i": np.array([0])})
    assert verdict(fixed).allowed
    loose = chain(operand, "Relu")
    loose.graph.input.append(tensor("i", ["n"], TensorProto.INT64))
    found = policy(loose)
    assert not found["x"].allowed
    assert "('i') is not fixed in the model file" in found["x"].reason
    assert not found["i"].allowed


def test_an_operand_from_a_constant_node_is_fixed():
    constant = helper.make_node("Constant", [], ["i"], value_ints=[0])
    model = build(
        [constant, helper.make_node("Gather", ["x", "i"], ["y"])], [tensor("x", ["a", "b"])], [tensor("y", None)]
    )
    assert verdict(model).allowed


def test_every_use_counts():
    model = build(
        [
            helper.make_node("Relu", ["x"], ["y"]),
            helper.make_node("TopK", ["x", "k"], ["values", "indices"], name="best"),
        ],
        [tensor("x", ["a", "b"])],
        [tensor("y", None), tensor("values", None)],
        {"k": np.array([1])},
    )
    assert verdict(model).reason == (
        "copied: read by TopK (node 'best'), which is not on the list of single-pass operators"
    )


def test_data_as_a_parameter_is_copied():
    model = build(
        [helper.make_node("Resize", ["x", "", "scales"], ["y"])],
        [tensor("x", ["a", "b"]), tensor("scales", [2])],
        [tensor("y", None)],
    )
    found = policy(model)
    assert found["x"].allowed
    assert found["scales"].reason == "copied: input 2 of Resize is not plain data (an index, a shape or a parameter)"


def test_an_input_that_nothing_reads():
    model = models.add1()
    model.graph.input.append(tensor("unused", [1]))
    assert verdict(model, "unused") == (True, "zero-copy: no operator reads it")


def test_inputs_that_are_initializers_have_no_verdict():
    model = models.add1()
    model.graph.input.append(tensor("one", [1]))
    assert list(policy(model)) == ["x"]


# --- what is not understood ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["FusedMatMul", "Relu"])
def test_other_domains_are_copied(operator):
    node = helper.make_node(operator, ["x"], ["y"], domain="com.microsoft")
    model = build([node], [tensor("x", ["a"])], [tensor("y", None)], domains=["com.microsoft"])
    assert f"read by com.microsoft::{operator}, an operator outside the standard ONNX domain" in verdict(model).reason


def test_a_function_of_the_model_hides_the_operator_of_its_name():
    model = chain("Relu")
    body = [helper.make_node("Unique", ["x"], ["y"])]
    model.functions.append(helper.make_function("", "Relu", ["x"], ["y"], body, [helper.make_opsetid("", 17)]))
    assert verdict(model).reason == "copied: read by Relu, a function defined inside the model"


def conditional(inner: list[onnx.NodeProto], output: str) -> onnx.ModelProto:
    """If(c) then `inner` reads the outer x, else a constant."""
    then_graph = helper.make_graph(inner, "then", [], [tensor(output, None)])
    constant = helper.make_node("Constant", [], ["zero"], value_float=0.0)
    else_graph = helper.make_graph([constant], "else", [], [tensor("zero", None)])
    node = helper.make_node("If", ["c"], ["y"], then_branch=then_graph, else_branch=else_graph)
    return build([node], [tensor("x", ["a", "b"]), tensor("c", [], TensorProto.BOOL)], [tensor("y", None)])


def test_uses_in_subgraphs_count():
    assert verdict(conditional([helper.make_node("Relu", ["x"], ["t"])], "t")).allowed
    assert "read by Unique" in verdict(conditional([helper.make_node("Unique", ["x"], ["t"])], "t")).reason
    views = [helper.make_node("Identity", ["x"], ["v"]), helper.make_node("Unique", ["v"], ["t"])]
    assert "read by Unique" in verdict(conditional(views, "t")).reason


def test_memory_that_leaves_a_subgraph_is_copied():
    found = verdict(conditional([helper.make_node("Identity", ["x"], ["t"])], "t"))
    assert found.reason == "copied: 't' leaves a subgraph, which is not followed"


def test_a_cycle_ends():
    nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Add", ["a", "x"], ["x"])]
    assert verdict(build(nodes, [tensor("x", ["n"])], [tensor("a", None)])).allowed


# --- the configuration's word -------------------------------------------------------------------------------------


def granting(value: str, more: str = "") -> str:
    return f'parameters {{ key: "zero_copy_inputs" value: {{ string_value: "{value}" }} }} {more}'


def test_the_policy_reaches_the_configuration(tmp_path):
    config = config_of(tmp_path, models.topk())
    assert not config.input[0].zero_copy
    assert config.input[0].zero_copy_reason.startswith("copied: read by TopK")
    assert config_of(tmp_path, models.add1()).input[0].zero_copy


@pytest.mark.parametrize("value", ["all", "x", " x , "])
def test_a_grant_overrides_the_policy(tmp_path, value):
    found = config_of(tmp_path, models.topk(), granting(value)).input[0]
    assert found.zero_copy
    assert found.zero_copy_reason == "zero-copy: granted by parameter zero_copy_inputs in config.pbtxt"


def test_a_grant_for_one_input_says_nothing_of_others(tmp_path):
    model = models.gather()
    model.graph.input.append(tensor("other", ["batch"], TensorProto.INT64))
    config = config_of(tmp_path, model, granting("other"))
    assert [found.zero_copy for found in config.input] == [False, True]


def test_bytes_are_never_granted(tmp_path):
    config = config_of(tmp_path, models.identity(TensorProto.STRING), granting("all"))
    assert not config.input[0].zero_copy


def test_shape_tensors_are_copied(tmp_path):
    config = config_of(tmp_path, models.add1(), 'input { name: "x" is_shape_tensor: true }')
    assert config.input[0].zero_copy_reason == "copied: a shape tensor decides how much memory is touched"


def test_a_version_that_refuses_refuses_for_all(tmp_path):
    text = "version_policy { all { } } max_batch_size: 4 "
    orders = build(
        [helper.make_node("TopK", ["x", "k"], ["y", "i"])],
        [tensor("x", ["batch", "n"])],
        [tensor("y", ["batch", "n"])],
        {"k": np.array([1])},
    )
    models.write_model(tmp_path, "m", models.add1(), version=2)
    config = config_of(tmp_path, orders, text)
    assert list(config.versions) == [1, 2]
    assert config.input[0].zero_copy_reason.endswith("single-pass operators (version 1)")
