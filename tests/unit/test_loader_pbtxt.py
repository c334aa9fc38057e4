"""Configuration texts: what is wrong, where, and what was probably meant."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.repository.loader.failure import ModelError
from broker.repository.loader.pbtxt import parse

GOOD = """# a comment with ${nothing}
name: "m"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] } ]
output { name: "y" data_type: TYPE_STRING dims: 1 reshape { shape: [ ] } }
instance_group [ { kind: KIND_CPU count: 2 } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
parameters { key: "retry" value: { string_value: "true" } }
"""


def error(text: str | bytes) -> str:
    with pytest.raises(ModelError) as caught:
        parse(text.encode() if isinstance(text, str) else text, "m/config.pbtxt")
    return str(caught.value)


def test_a_good_text():
    parsed = parse(GOOD.encode(), "m/config.pbtxt")
    assert parsed.config.max_batch_size == 8
    assert list(parsed.config.input[0].dims) == [3, -1]
    assert parsed.states_max_batch_size
    assert parsed.notes == ()


@pytest.mark.parametrize(("text", "stated"), [("max_batch_size: 0", True), ("", False), ("# max_batch_size: 0", False)])
def test_an_explicit_zero_is_told_from_nothing(text, stated):
    assert parse(text.encode(), "p").states_max_batch_size is stated


def test_position_line_and_nearest_field():
    message = error('name: "m"\ninput {\n  nam: "x"\n}\n')
    assert message.startswith('m/config.pbtxt:3:3: Message type "inference.ModelInput" has no field named "nam".')
    assert '\n      nam: "x"\n      ^' in message
    assert message.endswith("did you mean 'name'?")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("inputs { }", "input"),
        ("max_batchsize: 3", "max_batch_size"),
        ("dynamic_batching { prefered_batch_size: 1 }", "preferred_batch_size"),
        ("instance_group { kind: KIND_CPUS }", "KIND_CPU"),
        ("input { data_type: TYPE_FLOAT32 }", "TYPE_FP32"),
        ("input { data_type: TYPE_BYTES }", "TYPE_STRING"),
        ("dynamic_batching { default_queue_policy { timeout_action: REJEKT } }", "REJECT"),
        ("version_policy { latest { num_version: 1 } }", "num_versions"),
    ],
)
def test_what_was_probably_meant(text, meant):
    assert f"did you mean '{meant}'?" in error(text)


def test_nothing_is_near():
    assert "fields of ModelTensorReshape: shape" in error("input { reshape { xyzzy: 1 } }")


def test_unfilled_placeholders_are_named():
    message = error('# ${comment}\nmax_batch_size: ${max_batch}\nname: "${name}"')
    assert message.startswith("m/config.pbtxt:2:17:")
    assert "unfilled placeholders: ${max_batch}, ${name}: fill in this template first" in message


def test_placeholders_in_strings_are_legal_and_noted():
    text = 'parameters { key: "engine" value: { string_value: "${engine_dir}" } }'
    assert "${engine_dir}" in parse(text.encode(), "p").notes[0]


@pytest.mark.parametrize(
    "text",
    [
        'name: "a" name: "b"',
        "max_batch_size: 99999999999",
        'max_batch_size: "3"',
        "dynamic_batching { default_queue_policy { max_queue_size: 9223372036854775808 } }",
        "{" * 10_000,
        "input { reshape {" * 10_000,
        "optimization {" * 10_000,
        "[foo.bar]: 3",
        "\0",
        'name: "' + "x" * 10_000,
        "max_batch_size: " + "9" * 10_000,
    ],
)
def test_bad_texts_give_short_answers(text):
    message = error(text)
    assert message.startswith("m/config.pbtxt:1:")
    assert len(message) < 1500


def test_not_utf8():
    assert error(b'name: "m"\nname: "\xff"') == "m/config.pbtxt:2: is not UTF-8 text (byte 17): save it as UTF-8"


@settings(deadline=None, max_examples=60)
@given(st.integers(0, len(GOOD)), st.text(max_size=3))
@example(0, "")
def test_a_text_cut_anywhere_parses_or_is_refused(cut, tail):
    text = (GOOD[:cut] + tail).encode()
    try:
        parsed = parse(text, "p")
    except ModelError:
        assert error(text).startswith("m/config.pbtxt")
    else:
        assert parsed.config.name in ("", "m")
