"""Triton's checks of a request, word for word, on metadata alone."""

from __future__ import annotations

import numpy as np
import pytest

from broker.gateway import validation
from broker.gateway.kserve import InferRequest, InputTensor, RequestedOutput
from broker.gateway.placed import Placed, reworded
from shm.errors import Code, InferError
from shm.message_values import ModelMetadata, TensorMetadata

BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def model(*inputs, batch=0, outputs=(("y", "FP32", (-1,)),), name="m"):
    """`inputs` and `outputs` are (name, datatype, shape[, optional])."""

    def tensors(rows):
        return tuple(
            TensorMetadata(name=row[0], datatype=row[1], shape=row[2], optional=len(row) > 3 and row[3]) for row in rows
        )

    return ModelMetadata(name=name, version="1", max_batch_size=batch, inputs=tensors(inputs), outputs=tensors(outputs))


def tensor(name, datatype, shape, size=None):
    each = {"FP32": 4, "INT64": 8, "FP16": 2, "BOOL": 1}.get(datatype, 1)
    size = max(0, each * int(np.prod(shape, dtype=object))) if size is None else size
    return InputTensor(name, datatype, shape, data=bytes(size))


def refusal(metadata, *inputs, outputs=None):
    with pytest.raises(InferError) as caught:
        validation.check(metadata, InferRequest(metadata.name, inputs=list(inputs), outputs=outputs))
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


ONE = model(("x", "FP32", (-1, 4)))
TWO = model(("a", "FP32", (-1, 4)), ("b", "FP32", (-1, 4)), batch=8)


def test_a_request_that_fits_gives_its_outputs():
    many = model(("x", "FP32", (-1,)), outputs=(("p", "FP32", (-1,)), ("q", "FP32", (-1,)), ("r", "FP32", (-1,))))
    request = InferRequest("m", inputs=[tensor("x", "FP32", (3,))])
    assert [output.name for output in validation.check(many, request)] == ["p", "q", "r"]
    request.outputs = []
    assert [output.name for output in validation.check(many, request)] == ["p", "q", "r"]
    request.outputs = [RequestedOutput("r"), RequestedOutput("p", classes=2)]
    assert [output.name for output in validation.check(many, request)] == ["r", "p"], "in the caller's order"


@pytest.mark.parametrize(
    ("metadata", "inputs", "expected"),
    [
        (
            TWO,
            [tensor("a", "FP32", (1, 4))],
            "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['a'], but missing required input(s) "
            "['b']. Please provide all required input(s).",
        ),
        (
            ONE,
            [],
            "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) ['x']. "
            "Please provide all required input(s).",
        ),
        (
            ONE,
            [tensor("x", "FP32", (1, 4)), tensor("z", "FP32", (1, 4))],
            "expected 1 inputs but got 2 inputs for model 'm'. Got input(s) ['x','z'], but missing required input(s) "
            "[]. Please provide all required input(s).",
        ),
        (
            model(("a", "FP32", (4,)), ("b", "FP32", (4,)), ("c", "FP32", (4,), True)),
            [tensor("a", "FP32", (4,))],
            "expected number of inputs between 2 and 3 but got 1 inputs for model 'm'. Got input(s) ['a'], but missing "
            "required input(s) ['b']. Please provide all required input(s).",
        ),
        (
            model(("a", "FP32", (4,)), ("b", "FP32", (4,)), ("c", "FP32", (4,), True)),
            [tensor("a", "FP32", (4,)), tensor("c", "FP32", (4,))],
            "expected number of inputs between 2 and 3 but got 2 inputs for model 'm'. Got input(s) ['a','c'], but "
            "missing required input(s) ['b']. Please provide all required input(s).",
        ),
        (ONE, [tensor("z", "FP32", (1, 4))], "unexpected inference input 'z' for model 'm'"),
        (TWO, [tensor("a", "FP32", (1, 4))] * 2, "input 'a' already exists in request"),
        (
            TWO,
            [tensor("a", "FP32", (9, 4)), tensor("b", "FP32", (9, 4))],
            "inference request batch-size must be <= 8 for 'm'",
        ),
        (
            TWO,
            [tensor("a", "FP32", (2, 4)), tensor("b", "FP32", (3, 4))],
            "input 'b' batch size does not match other inputs for 'm'",
        ),
        (
            TWO,
            [tensor("a", "FP32", ()), tensor("b", "FP32", (3, 4))],
            "input 'a' has no shape but model requires batch dimension for 'm'",
        ),
        (
            ONE,
            [tensor("x", "INT64", (1, 4))],
            "inference input 'x' data-type is 'INT64', but model 'm' expects 'FP32'",
        ),
        (
            ONE,
            [tensor("x", "NONSENSE", (1, 4))],
            "inference input 'x' data-type is 'NONSENSE', but model 'm' expects 'FP32'",
        ),
        (
            ONE,
            [tensor("x", "FP32", (1, 5))],
            "unexpected shape for input 'x' for model 'm'. Expected [-1,4], got [1,5].",
        ),
        (
            ONE,
            [tensor("x", "FP32", (4,))],
            "unexpected shape for input 'x' for model 'm'. Expected [-1,4], got [4].",
        ),
        (
            TWO,
            [tensor("a", "FP32", (1, 5)), tensor("b", "FP32", (1, 4))],
            f"unexpected shape for input 'a' for model 'm'. Expected [-1,4], got [1,5].{BATCH_NOTE}",
        ),
        (
            ONE,
            [tensor("x", "FP32", (-1, 4), 16)],
            "All input dimensions should be specified for input 'x' for model 'm', got [-1,4]",
        ),
        (
            ONE,
            [tensor("x", "FP32", (4, 4), 128)],
            "input byte size mismatch for input 'x' for model 'm'. Expected 64, got 128",
        ),
        (
            ONE,
            [InputTensor("x", "FP32", (4, 4), region="r", byte_size=63)],
            "input byte size mismatch for input 'x' for model 'm'. Expected 64, got 63",
        ),
        (
            ONE,
            [InputTensor("x", "FP32", (4, 4))],
            "unable to find data for input tensor 'x' for model 'm' in request.",
        ),
        (
            ONE,
            [tensor("x", "FP32", (2**62, 4), 0)],
            f"invalid shape for input 'x': shape [{2**62},4] causes total element count to exceed maximum size of "
            f"{2**63 - 1}",
        ),
        (
            ONE,
            [tensor("x", "FP32", (2**60, 4), 0)],
            f"byte size overflow for input 'x': element count ({2**62}) * data type size (4) exceeds maximum allowed "
            f"size ({2**63 - 1})",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_tritons_words(metadata, inputs, expected):
    assert refusal(metadata, *inputs) == expected


def test_very_many_inputs_are_refused_without_comparing_each_with_each():
    compared = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

    inputs = [InputTensor(Name(f"n{index}"), "FP32", (1,), bytes(4)) for index in range(500)]
    text = refusal(model(("x", "FP32", (-1,))), *inputs)
    assert text.startswith("expected 1 inputs but got 500 inputs for model 'm'. Got input(s) ['n0','n1',")
    assert len(compared) < 10 * len(inputs)


def test_an_unknown_output_is_named_before_anything_else():
    wanted = [RequestedOutput("y"), RequestedOutput("nothing")]
    assert refusal(ONE, outputs=wanted) == "unexpected inference output 'nothing' for model 'm'"


def test_an_output_asked_for_twice_is_refused():
    wanted = [RequestedOutput("y"), RequestedOutput("y", classes=1)]
    assert refusal(ONE, outputs=wanted) == "output 'y' already exists in request"


def test_dimensions_that_hide_behind_a_zero_are_refused():
    assert "more elements than any memory holds" in refusal(
        model(("x", "FP32", (-1, -1))), tensor("x", "FP32", (0, 2**50), 0)
    )


def test_optional_inputs_may_be_absent():
    metadata = model(("a", "FP32", (4,)), ("c", "FP32", (4,), True))
    validation.check(metadata, InferRequest("m", inputs=[tensor("a", "FP32", (4,))]))
    validation.check(metadata, InferRequest("m", inputs=[tensor("c", "FP32", (4,)), tensor("a", "FP32", (4,))]))


def test_strings_have_the_size_they_have():
    strings = model(("s", "BYTES", (-1,)))
    validation.check(strings, InferRequest("m", inputs=[tensor("s", "BYTES", (7,), 1)]))


def test_data_of_any_buffer_is_measured_in_bytes():
    words = memoryview(np.zeros(4, np.float32))
    assert validation.given_byte_size(InputTensor("x", "FP32", (4,), data=words), "m") == 16


@pytest.mark.parametrize(
    ("metadata", "inputs", "outputs", "detail"),
    [
        (ONE, [("x", "FP32", (1, 4))], ["w"], "outputs[0].name: expected 'y', got 'w'"),
        (ONE, [("x", "FP32", (1, 4))], ["y", "y"], "outputs[1].name: expected each name once, got 'y' once more"),
        (TWO, [("a", "FP32", (1, 4))] * 2, [], "inputs[1].name: expected each name once, got 'a' once more"),
        (
            TWO,
            [("a", "FP32", (1, 4)), ("c", "FP32", (1, 4))],
            [],
            "inputs[1].name: expected one of 'a', 'b', got 'c'",
        ),
        (TWO, [("a", "FP32", (1, 4))], [], "inputs: expected 'a' (FP32 [-1,4]), 'b' (FP32 [-1,4]), got 'a'"),
        (
            TWO,
            [("a", "FP32", (2, 4)), ("b", "FP32", (3, 4))],
            [],
            "input 'b', inputs[1].shape[0]: expected 2, as in the inputs before, got 3",
        ),
        (
            TWO,
            [("a", "FP32", (9, 4)), ("b", "FP32", (9, 4))],
            [],
            "input 'a', inputs[0].shape[0]: expected at most 8 (max_batch_size), got 9",
        ),
        (
            TWO,
            [("a", "FP32", ()), ("b", "FP32", ())],
            [],
            "input 'a', inputs[0].shape: expected a batch dimension in front, got []",
        ),
        (ONE, [("x", "FP64", (1, 4))], [], "input 'x', inputs[0].datatype: expected FP32, got FP64"),
        (ONE, [("x", "FP32", (1, 5))], [], "input 'x', inputs[0].shape: expected [-1,4], got [1,5]"),
        (ONE, [("x", "FP32", (1, -4))], [], "input 'x', inputs[0].shape: expected [-1,4], got [1,-4]"),
        (
            ONE,
            [("x", "FP32", (1, 4), 15)],
            [],
            "input 'x', inputs[0]: expected 16 bytes, as its datatype and shape say, got 15",
        ),
    ],
)
def test_what_does_not_fit_knows_its_place(metadata, inputs, outputs, detail):
    request = InferRequest("m", inputs=[tensor(*row) for row in inputs], outputs=list(map(RequestedOutput, outputs)))
    with pytest.raises(Placed) as caught:
        validation.check(metadata, request)
    assert caught.value.detail == detail
    told = reworded(caught.value, "other words", "UNAVAILABLE")
    assert isinstance(told, Placed)
    assert (told.code, told.message, told.detail) == ("UNAVAILABLE", "other words", detail)
    assert not isinstance(reworded(InferError(Code.INTERNAL, "a"), "b"), Placed)
