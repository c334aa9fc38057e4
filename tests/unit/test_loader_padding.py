"""`pad_to` in a configuration: what it makes of a model, and what it refuses."""

from __future__ import annotations

import pytest
from onnx import helper

from broker.repository.scheduling import MadeInput, Padding
from tests.fakes import models
from tests.fakes.loading import config_of, reason_of, run
from tests.unit.test_loader_own import parameter

BASE = """backend: "own"
max_batch_size: 4
input { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }
input { name: "mask" data_type: TYPE_BOOL dims: [ 1, -1 ] }
input { name: "count" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } }
input { name: "scale" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "all" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
output { name: "one" data_type: TYPE_FP32 dims: [ 3 ] }
"""
CODE = "def load(context):\n    pass\n"


def loaded(tmp_path, text: str):
    models.write_model(tmp_path, "m", config=text)
    (tmp_path / "m" / "backend.py").write_text(CODE)
    return run(tmp_path)


def test_what_becomes_of_a_model(tmp_path):
    made = parameter("mask_input", "mask") + parameter("lengths_input", "count") + parameter("pad_value", "-1")
    config = loaded(tmp_path, BASE + parameter("pad_to", "16, 32,64") + made)
    assert config.padding == Padding(
        to=(16, 32, 64),
        value=-1,
        inputs={"ids": 1},
        outputs={"all": (2, 3)},
        mask=MadeInput(name="mask", datatype="BOOL", shape=(1, -1)),
        lengths=MadeInput(name="count", datatype="INT32", shape=()),
    )
    assert [tensor.name for tensor in config.input] == ["ids", "scale"], "nobody sends what the broker makes"


def test_without_it_the_others_have_no_meaning(tmp_path):
    config = loaded(tmp_path, BASE + parameter("mask_input", "mask") + parameter("pad_value", "x"))
    assert config.padding is None
    assert len(config.input) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            parameter("pad_to", "16,8"),
            "parameter pad_to '16,8' must be at most 64 sizes in rising order, 1 to 16777216,",
        ),
        (parameter("pad_to", "16,x"), "parameter pad_to '16,x' must be"),
        (parameter("pad_to", "0"), "parameter pad_to '0' must be"),
        (
            parameter("pad_to", "16") + parameter("mask_input", "mascara"),
            "parameter mask_input of model 'm' names 'mascara'; inputs are: ids, mask, count, scale",
        ),
        (
            parameter("pad_to", "16") + parameter("mask_input", "scale"),
            "input 'scale' of model 'm', which the broker is to make (mask_input), must be of numbers and have one dim"
            " of -1 and others of 1; it has data_type FP32 and dims [2]",
        ),
        (
            parameter("pad_to", "16") + parameter("lengths_input", "ids"),
            "input 'ids' of model 'm', which the broker is to make (lengths_input), must be of numbers and have dims:"
            " [ 1 ]; it has data_type INT64 and dims [-1]",
        ),
        (
            parameter("pad_to", "16") + parameter("pad_value", "none"),
            "parameter pad_value 'none' of model 'm' must be a number",
        ),
        (
            parameter("pad_to", "16") + parameter("mask_input", "mask") + parameter("pad_value", "0.5"),
            "parameter pad_value '0.5' is no value that input 'ids' of model 'm' can have: it is INT64",
        ),
        (
            parameter("pad_to", "16") + "sequence_batching { }",
            "parameter pad_to cannot be combined with sequence_batching for m",
        ),
        (
            parameter("pad_to", "16") + "model_transaction_policy { decoupled: true }",
            "parameter pad_to cannot be combined with model_transaction_policy { decoupled: true } for m",
        ),
        (
            parameter("pad_to", "16") + "response_cache { enable: true }",
            "parameter pad_to cannot be combined with response_cache for m",
        ),
        (
            parameter("pad_to", "16")
            + 'input { name: "r" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }',
            "parameter pad_to cannot be combined with allow_ragged_batch for m",
        ),
        (
            parameter("pad_to", "16") + 'input { name: "image" data_type: TYPE_FP32 dims: [ -1, -1 ] }',
            "parameter pad_to pads one variable dimension, input 'image' of model 'm' has dims [-1, -1]",
        ),
        (
            parameter("pad_to", "16") + 'input { name: "word" data_type: TYPE_STRING dims: [ -1 ] }',
            "parameter pad_to cannot pad input 'word' of model 'm': TYPE_STRING",
        ),
        (
            parameter("pad_to", "16")
            + 'output { name: "r" data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ -1, 2, 1 ] } }',
            "parameter pad_to: output 'r' of model 'm' cannot have a reshape",
        ),
    ],
)
def test_what_cannot_work(tmp_path, text, says):
    failure = loaded(tmp_path, BASE + text)
    assert failure.reason.startswith(says)


def test_models_without_batches_or_without_variable_inputs(tmp_path):
    no_batch = BASE.replace("max_batch_size: 4", "max_batch_size: 0").replace(" reshape { shape: [ ] }", "")
    failure = loaded(tmp_path / "a", no_batch + parameter("pad_to", "8"))
    assert failure.reason.startswith("parameter pad_to needs max_batch_size of at least 1 for m: batches are padded")
    fixed = BASE.replace("dims: [ -1 ]", "dims: [ 5 ]")
    failure = loaded(tmp_path / "b", fixed + parameter("pad_to", "8") + parameter("mask_input", "mask"))
    assert failure.reason.startswith("parameter pad_to has nothing to pad: no input of model 'm' has a dim of -1")


def two_lengths(first: str, second: str):
    """p = a, q = b, each of a length of its own or of the same."""
    return models.build(
        [helper.make_node("Identity", ["a"], ["p"]), helper.make_node("Identity", ["b"], ["q"])],
        [models.tensor("a", ["batch", first]), models.tensor("b", ["batch", second])],
        [models.tensor("p", ["batch", first]), models.tensor("q", ["batch", second])],
    )


def test_a_model_file_says_which_dimensions_are_one(tmp_path):
    text = "max_batch_size: 4\n" + parameter("pad_to", "8")
    config = config_of(tmp_path / "a", two_lengths("n", "n"), text)
    assert (config.padding.inputs, config.padding.outputs) == ({"a": 1, "b": 1}, {"p": (1,), "q": (1,)})
    reason = reason_of(tmp_path / "b", two_lengths("words", "tags"), text)
    assert reason.startswith(
        "parameter pad_to pads one variable dimension, the inputs of model 'm' have several: 'a' has words, 'b' has"
        " tags"
    )


def test_a_mask_that_the_model_file_has_need_not_be_written_down(tmp_path):
    text = "max_batch_size: 4\n" + parameter("pad_to", "8") + parameter("mask_input", "b")
    config = config_of(tmp_path, two_lengths("n", "n"), text)
    assert config.padding.mask == MadeInput(name="b", datatype="FP32", shape=(-1,))
    assert [tensor.name for tensor in config.input] == ["a"]
