"""What `check` and `explain` say of an ensemble that does not fit: the line of its text, both sides, the edit."""

from __future__ import annotations

import json

import pytest

from broker.commands import check_repositories
from broker.explanation import explain
from broker.repository.pbtxt_lines import fields
from tests.fakes import models

IO = (("input", "x"), ("output", "y"))
TEXT = """max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
platform: "ensemble"
ensemble_scheduling {
  step [
    # the first { of two
    { model_name: "first" model_version: -1
      input_map { key: "x" value: "IN" }
      output_map { key: "y" value: "mid" }
    },
    { model_name: "second" model_version: -1
      input_map { key: "x" value: "mid" }
      output_map { key: "y" value: "OUT" }
    }
  ]
}
"""
ADD1 = " ".join(
    ("max_batch_size: 4", *(f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: -1 }}' for kind, name in IO))
)
CASES = [  # what is wrong, the line that is shown, the edit
    ("TYPE_FP32 dims: [ -1 ] } ]\nout", "TYPE_INT8 dims: [ -1 ] } ]\nout", 9, "data_type: TYPE_FP32 for input 'IN'"),
    ("dims: [ -1 ] } ]\nplat", "dims: [ 1, 2 ] } ]\nplat", 14, "dims: [ -1 ] for output 'OUT' of e"),
    ("max_batch_size: 4", "max_batch_size: 16", 1, "max_batch_size: 4, as far as all its members go"),
    ('"second"', '"secnd"', 12, 'model_name: "second"'),
    ('"second" model_version: -1', '"second" model_version: 7', 12, "model_version: -1 (the newest"),
    ('key: "x" value: "mid"', 'key: "X" value: "mid"', 13, 'key: "x"'),
    ('key: "y" value: "OUT"', 'key: "OUT" value: "y"', 14, 'output_map { key: "y" value: "OUT" }'),
    ('key: "x" value: "IN"', 'key: "IN" value: "x"', 9, 'input_map { key: "x" value: "IN" }'),
    ('key: "y" value: "OUT"', 'key: "y" value: "OUTT"', 14, 'value: "OUT"'),
    ('key: "x" value: "mid"', 'key: "x" value: "mdi"', 13, 'value: "mid"'),
]


@pytest.fixture
def repository(tmp_path):
    for name in ("first", "second"):
        models.write_model(tmp_path, name, models.add1(), config=ADD1)
    (tmp_path / "e" / "1").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(("right", "wrong", "line", "fix"), CASES)
def test_line_and_edit(repository, capsys, right, wrong, line, fix):
    assert TEXT.count(right) == 1
    path = repository / "e" / "config.pbtxt"
    path.write_text(TEXT.replace(right, wrong))
    assert explain([str(repository)], "e", as_json=True) == 1
    given = capsys.readouterr()
    why = json.loads(given.out)["cannot_be_served"] if given.out else given.err  # what the text alone tells ends it
    assert f"{path}:{line}: {TEXT.replace(right, wrong).splitlines()[line - 1].strip()}" in why
    assert f"fix: {fix}" in why
    assert check_repositories([str(repository)], strict=False) == 1
    out = capsys.readouterr().out
    assert why.splitlines()[0][:40] in out  # both give one reason


def test_both_sides_and_the_map_between_them(repository, capsys):
    (repository / "e" / "config.pbtxt").write_text(TEXT.replace("[ -1 ]", "[ 1, 2 ]"))
    assert explain([str(repository)], "e", as_json=True) == 1
    lines = json.loads(capsys.readouterr().out)["cannot_be_served"].splitlines()
    assert [" ".join(line.split()) for line in lines[2:6]] == [
        "ensemble e step 0, input_map model first",
        'tensor IN { key: "x" value: "IN" } x',
        "data_type TYPE_FP32 - TYPE_FP32",
        "dims [ 1, 2 ] - [ -1 ]",
    ]
    assert lines[7].startswith("also: in ensemble e, ensemble tensor OUT: inconsistent shape")  # all at once


def test_a_good_ensemble_has_no_advice(repository, capsys):
    (repository / "e" / "config.pbtxt").write_text(TEXT)
    assert explain([str(repository)], "e") == 0
    assert "cannot be served" not in capsys.readouterr().out


def test_fields_of_a_text():
    text = "a: 1 # b: 2\nc { d: \"}\" d: [ 3, 4 ] }\nc [ { d: 'x' },\n{ } ] e <f: -1>"
    assert [(each.path, each.value, each.line) for each in fields(text)] == [
        ("a[0]", "1", 1),
        ("c[0]", "", 2),
        ("c[0].d[0]", "}", 2),
        ("c[0].d[1]", "3", 2),
        ("c[0].d[2]", "4", 2),
        ("c[1]", "", 3),
        ("c[1].d[0]", "x", 3),
        ("c[2]", "", 4),
        ("e[0]", "", 4),
        ("e[0].f[0]", "-1", 4),
    ]
    assert fields("} ] : { a") == [("[0]", "", 1)]
