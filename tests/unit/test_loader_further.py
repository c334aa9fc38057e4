"""All that is wrong with a model at once, as `tensorbroker check` shows it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.commands import check_repositories
from broker.repository.config import LoadFailure
from broker.repository.loader.failure import ModelError
from broker.repository.loader.further import further
from broker.repository.loader.pbtxt import parse
from broker.repository.loader.repair import parse_all
from broker.repository.protocol import LoadRequest
from broker.repository.scan import scan
from tests.fakes import models
from tests.fakes.loading import run

IO = 'input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }'
GOOD = """max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output { name: "y" data_type: TYPE_FP32 dims: -1 }
instance_group [ { kind: KIND_CPU count: 1 } ]
dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 100 }
"""
TYPOS = {
    "max_batch_size": "max_batchsize",
    "TYPE_FP32": "TYPE_FLOAT32",
    "instance_group": "instance_grup",
    "kind:": "knd:",
    "KIND_CPU": "CPU",
    "preferred_batch_size": "prefered_batch_size",
    "max_queue_delay_microseconds": "max_queue_delay_us",
}


def reasons(root, text: str) -> list[str]:
    models.write_model(root, "m", models.add1(), config=text)
    failure = run(root)
    assert isinstance(failure, LoadFailure)
    request = LoadRequest(repositories=(str(root),), every=True)
    return [failure.reason, *further(scan([str(root)]).models["m"], request, failure)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"max_batch_size: 4 {IO}\nfoo {{ a: 1 }}\nbar: [ 1, 2 ]", ['"foo"', '"bar"']),
        (
            f"max_batch_size: 4 {IO.replace('x', 'z').replace('FP32 dims: -1 }}', 'X')}\ndynamic_baching {{ }}",
            ["dynamic_batching", "unexpected inference input 'z'"],
        ),
        (
            f"max_batch_size: 4 {IO.replace('FP32', 'INT8')}",
            ["TYPE_INT8 for input 'x'", "TYPE_INT8 for output 'y'"],
        ),
        (
            f"max_batch_size: 4 {IO} dynamic_batching {{ preferred_batch_size: 9 }} instance_group {{ count: -1 }}",
            ["9 > 4", "has count -1"],
        ),
        (
            f"max_batch_size: 4 {IO} dynamic_batching {{ preferred_batch_size: [ 9, -1 ] priority_levels: 2 "
            "default_priority_level: 5 preserve_ordering: true priority_queue_policy { key: 7 value { } } }",
            ["9 > 4", "got -1", "got 5", "queue policy must have priority level", "Only one priority level"],
        ),
        (
            f"max_batch_size: 4 {IO} dynamic_batching {{ {'preferred_batch_size: -1 ' * 20} priority_levels: 2 "
            "default_priority_level: 1 preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
            ["got -1", "Only one priority level", "can not have DELAY"],
        ),
        (
            f"max_batch_size: 4 {IO} sequence_batching {{ control_input {{ name: 'a' control {{ kind: "
            "CONTROL_SEQUENCE_START } } control_input { name: 'b' control { kind: CONTROL_SEQUENCE_CORRID data_type: "
            "TYPE_FP32 } } control_input { name: 'b' } direct { minimum_slot_utilization: 2 } iterative_sequence: true "
            "state { input_name: 'x' output_name: 's' data_type: TYPE_FP32 dims: 1 } state { input_name: 't' } }",
            [
                "bool_false_true' for CONTROL_SEQUENCE_START",
                "unexpected data type for control",
                "'b' is specified for multiple",
                "minimum slot utilization",
                "iterative_sequence needs",
                "'x' is also an input",
                "must specify 'input_name' and 'output_name'",
            ],
        ),
        (
            f'name: "n" max_batch_size: 4 {IO} parameters {{ key: "retry" value {{ string_value: "x" }} }} '
            'parameters { key: "allow_spinning" value { string_value: "y" } }',
            ["allow_spinning", "retry", "unexpected directory name"],
        ),
        (
            f'max_batch_size: 4 {IO} model_warmup {{ name: "w" batch_size: 9 inputs {{ key: "q" value {{ data_type: '
            'TYPE_FP32 dims: 1 zero_data: true } } inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 } } }',
            ["batch_size 9", "input 'q'", "input 'x': must specify"],
        ),
    ],
)
def test_what_is_independent_is_told_at_once(tmp_path, text, parts):
    found = reasons(tmp_path, text)
    assert len(found) == len(parts), found
    for part in parts:
        assert any(part in reason for reason in found), (part, found)


@pytest.mark.parametrize(
    "text",
    [
        f"max_batch_size: -1 {IO} dynamic_batching {{ preferred_batch_size: 2 }}",
        f'max_batch_size: 4 {IO} batch_input {{ target_name: "x" data_type: TYPE_FP32 source_input: "x" }}',
        f"max_batch_size: 4 {IO} foo: {{ a: \n",
        "{",
        "\xff",
    ],
)
def test_one_error_is_one(tmp_path, text):
    assert len(reasons(tmp_path, text)) == 1


@given(st.sets(st.sampled_from(sorted(TYPOS)), min_size=1))
def test_every_misspelt_word_is_found_with_its_line(words):
    text = GOOD
    for word in words:
        text = re.sub(rf"(?<![\w]){word}", TYPOS[word], text)
    parsed, errors = parse_all(text.encode(), "p")
    lines = [str(error).split(":")[1] for error in errors]
    for error in errors:
        assert str(error).split("\n")[1].strip() in map(str.strip, text.split("\n"))  # the line as it is written
    # What stands in a field that is unknown is looked at once its name is right.
    hidden = {"kind:", "KIND_CPU"} if "instance_group" in words else {"KIND_CPU"} if "kind:" in words else set()
    shown = words - hidden
    assert len(errors) == len(shown) + ("TYPE_FP32" in words), errors
    assert lines == sorted(lines)
    if not words & hidden:
        assert parsed is not None
        assert parsed.config == parse(GOOD.encode(), "p").config


@given(st.text(alphabet="ab:{}[]<>,\"'#\n 1_"))
def test_any_text_ends_with_its_first_error_first(text):
    parsed, errors = parse_all(text.encode(), "p")
    if errors:
        with pytest.raises(ModelError) as caught:
            parse(text.encode(), "p")
        assert str(errors[0]) == str(caught.value)
    else:
        assert parsed is not None
        assert parsed.config == parse(text.encode(), "p").config


def test_check_shows_all_and_the_loader_says_one_unasked(tmp_path, capsys):
    models.write_model(tmp_path, "m", models.add1(), config=f"max_batch_size: 4 {IO}\nfoo: 1\nbar: 2")
    failure = run(tmp_path)
    assert isinstance(failure, LoadFailure)
    assert failure.further == ()
    assert '"bar"' not in failure.reason
    assert check_repositories([str(tmp_path)], strict=False) == 1
    out = capsys.readouterr().out
    assert '"foo"' in out
    assert "| also: " in out
    assert '"bar"' in out
