"""Edits that errors name: whoever makes one does not get the next error for it."""

from __future__ import annotations

import re

from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from broker.repository.loader.complete import compare, complete
from broker.repository.loader.failure import ModelError
from broker.repository.loader.onnx_file import FileTensor, Signature
from broker.repository.loader.validate_scheduling import scheduling_rules

NAMES = ("x", "X1", "START", "STARTS", "END", "STATE", "IDX")
TYPES = ("TYPE_FP32", "TYPE_INT32")
KINDS = ("CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_END")
CONTROL = 'control_input { name: "%s" control { kind: %s fp32_false_true: [ 0, 1 ] } }'
STATE = 'state { input_name: "%s" output_name: "%s" data_type: TYPE_FP32 dims: 1 }'
TARGET = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "%s" data_type: TYPE_INT32 source_input: "x" }'
FIX = re.compile(r'fix: (\w+): "(\w+)"$')
WRONG = re.compile(r"unexpected inference \w+ '(\w+)'")

names = st.sampled_from(NAMES)
output_names = st.sampled_from(("OUT", "OUTS", "STATE_OUT"))


@st.composite
def texts(draw: st.DrawFn) -> str:
    """A configuration whose names are partly those of the model file, and never used twice."""
    drawn = iter(draw(st.permutations(NAMES)))
    parts = ["max_batch_size: 4"]
    if draw(st.booleans()):
        parts += [f'input {{ name: "{next(drawn)}" }}' for _ in range(draw(st.integers(1, 2)))]
    if draw(st.integers(0, 3)):
        inner = [CONTROL % (next(drawn), kind) for kind in draw(st.sets(st.sampled_from(KINDS)))]
        inner += [STATE % (next(drawn), draw(output_names))]
        parts.append(f"sequence_batching {{ {' '.join(inner)} }}")
    if draw(st.booleans()):
        parts.append(TARGET % next(drawn))
    return "\n".join(parts)


def _problem(text: str, signature: Signature) -> str:
    """What `load` says of it, without the rules that no name decides."""
    config = text_format.Parse(text, model_config_pb2.ModelConfig(name="m"))
    written = [tensor.name for tensor in config.input]
    try:
        complete(config, signature, True, 4)
        if not config.input:
            return "must specify one or more 'input's"
        if not config.batch_input or any(tensor.name == "x" for tensor in config.input):
            for rule in scheduling_rules(config):
                rule()
        compare(config, signature, "model.onnx", written)
    except ModelError as error:
        return str(error)
    return ""


@settings(max_examples=400)
@given(texts(), st.sets(names, min_size=2), st.sets(output_names, min_size=1), st.data())
def test_a_name_is_proposed_only_if_it_may_be_used(text, inputs, outputs, data):
    kinds = st.sampled_from(TYPES)
    shape = st.sampled_from(((-1, 1), (-1, 2)))
    tensors = [FileTensor(name, data.draw(kinds), data.draw(shape), ()) for name in (*sorted(inputs), *sorted(outputs))]
    signature = Signature(tuple(tensors[: len(inputs)]), tuple(tensors[len(inputs) :]))
    before = _problem(text, signature)
    if not (fix := FIX.search(before)):
        return
    field, name = fix.groups()
    wrong = WRONG.search(before)
    assert wrong is not None
    old, new = f'{field}: "{wrong[1]}"', f'{field}: "{name}"'
    assert old in text
    after = _problem(text.replace(old, new), signature)
    assert f"'{name}'" not in after
    assert "one or more 'input's" not in after
