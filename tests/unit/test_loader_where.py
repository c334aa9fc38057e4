"""Where in config.pbtxt an error is, and what to change: as the operator of a broken repository reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.repository.config import ModelConfig
from broker.repository.loader.where import located
from broker.repository.scan import scan
from tests.fakes import models
from tests.fakes.loading import config_of, reason_of, run

TENSORS = """name: "m"
max_batch_size: 4
input { name: "%s" data_type: %s dims: [ -1 ] }  # "y"
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""


@pytest.mark.parametrize(
    ("tensors", "line", "fix"),
    [
        (("x", "TYPE_INT32"), 3, "fix: data_type: TYPE_FP32"),
        (("X", "TYPE_FP32"), 3, 'fix: name: "x"'),
        (("image", "TYPE_FP32"), 3, 'fix: name: "x"'),
    ],
)
def test_the_line_is_shown_and_the_edit(tmp_path, tensors, line, fix):
    lines = reason_of(tmp_path, models.add1(), TENSORS % tensors).split("\n")
    text = (TENSORS % tensors).split("\n")[line - 1].partition("#")[0].strip()
    assert lines[1] == f"    {tmp_path}/m/config.pbtxt:{line}: {text}"
    assert lines[-1].strip() == fix


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ('max_batch_size: "4"', "fix: 4, without quotes"),
        ("max_batch_size: {{ batch }}", "unfilled placeholders: {{ batch }}"),
        ("instance_group { kind: CPU }", "did you mean 'KIND_CPU'?"),
        ('input { name: "x" data_type: FP32 dims: 1 }', "did you mean 'TYPE_FP32'?"),
        ('input { name: "x" data_type: FLOAT dims: 1 }', "did you mean 'TYPE_FP32'?"),
        ('input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ]\n', "the '{' of line 1 is not closed"),
        ('backend: "onnx"', "did you mean 'onnxruntime'?"),
        ('platform: "onnxruntime_onnx" backend: "pytorch"', 'goes with backend: "onnxruntime"'),
        ('name: "other"', "fix: leave 'name' out of config.pbtxt, or name: \"m\""),
    ],
)
def test_what_was_meant(tmp_path, config, part):
    reason = reason_of(tmp_path, models.add1(), config)
    assert part in reason
    assert f"{tmp_path}/m/config.pbtxt" in reason


def test_a_model_without_versions_says_what_lies_there_instead(tmp_path):
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "model.onnx").write_bytes(b"x")
    assert run(tmp_path).reason.endswith(f"fix: move model.onnx into {directory}/1")
    (directory / "model.onnx").unlink()
    models.write_model(tmp_path, "m", b"x", version="v1")
    assert run(tmp_path).reason.endswith("fix: give 'v1' a number as its name")
    assert "(present: none; version directories are numbers, unlike 'v1')" in run(tmp_path).reason
    (directory / "v1" / "model.onnx").unlink()
    models.write_model(directory, "inner", models.add1())
    assert f"'inner' is a model itself: give {directory} as a model repository" in run(tmp_path).reason


def test_a_file_that_is_a_page(tmp_path):
    reason = reason_of(tmp_path, b"<html>404 Not Found</html>")
    assert "beginning with '<html>404 Not Found</html>'" in reason


def test_repositories_with_the_same_model_are_named(tmp_path: Path):
    for side in ("a", "b"):
        models.write_model(tmp_path / side, "same", models.add1())
    reason = scan([str(tmp_path / "a"), str(tmp_path / "b")]).failures["same"]
    assert reason.startswith("failed to poll model 'same': not unique across all model repositories")
    assert reason.endswith(f"it is in {tmp_path}/a and in {tmp_path}/b")


def test_what_is_not_in_the_text_is_not_guessed():
    assert (
        located("model 'm' has no 'x'", "config.pbtxt", 'name: "m"', "m") == "model 'm' has no 'x'\n    in config.pbtxt"
    )
    assert located("config.pbtxt:1: no", "config.pbtxt", "", "m") == "config.pbtxt:1: no"


SCHEDULED = """max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
%s
"""


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("instance_group { count: -1 }", "fix: count: 1"),
        ("instance_group { kind: KIND_GPU }", "fix: kind: KIND_CPU"),
        ("instance_group { kind: KIND_GPU gpus: 0 }", "fix: kind: KIND_CPU, without gpus"),
        ("instance_group { kind: KIND_CPU gpus: 0 }", "fix: leave 'gpus' out"),
        ("dynamic_batching { preferred_batch_size: [ 4, 16 ] }", "fix: leave 16 out, or max_batch_size: 16"),
        ("dynamic_batching { preferred_batch_size: -1 }", "fix: leave it out"),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 3 }", "fix: default_priority_level: 2"),
        ("dynamic_batching { priority_levels: 2 }", "fix: default_priority_level: 1"),
        ("dynamic_batching { priority_queue_policy { key: 3 } }", "fix: priority_levels: 3 or more"),
        ("sequence_batching { } response_cache { enable: true }", "fix: remove response_cache"),
        ("sequence_batching { iterative_sequence: true }", "fix: model_transaction_policy { decoupled: true }"),
        (
            'sequence_batching { control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID } } }',
            "fix: data_type, as the model file has it for this input",
        ),
    ],
)
def test_a_setting_is_shown_with_its_line_and_the_edit(tmp_path, setting, fix):
    lines = reason_of(tmp_path, models.add1(), SCHEDULED % setting).split("\n")
    assert lines[1] == f"    {tmp_path}/m/config.pbtxt:4: {setting}"
    assert lines[2:] == [f"    {fix}"]


def test_the_line_of_a_file_that_is_missing(tmp_path):
    sample = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 input_data_file: "raw" } }'
    reason = reason_of(tmp_path, models.add1(), SCHEDULED % f'model_warmup {{\nname: "w" batch_size: 1\n{sample} }}')
    assert f"\n    {tmp_path}/m/config.pbtxt:6: {sample}" in reason


@pytest.mark.parametrize(
    ("group", "gpus", "first", "last"),
    [
        ("", (), "kind KIND_CPU, but 'tensorrt_plan' needs a GPU, there is none here: no driver", "platform: "),
        (
            "instance_group { kind: KIND_GPU }",
            (),
            "no GPUs are available: no driver",
            "needs a GPU, there is none here",
        ),
        ("instance_group { kind: KIND_CPU }", (0,), "but 'tensorrt_plan' needs a GPU", "fix: kind: KIND_GPU"),
    ],
)
def test_a_plan_needs_a_gpu(tmp_path, monkeypatch, group, gpus, first, last):
    monkeypatch.setattr("broker.repository.loader.backend._installed", lambda: ["tensorrt"])
    config = SCHEDULED % f'platform: "tensorrt_plan" {group}'
    models.write_model(tmp_path, "m", None, config=config)
    lines = run(tmp_path, gpus=gpus, no_gpus="no driver").reason.split("\n")
    assert first in lines[0]
    assert last in lines[-1]
    (tmp_path / "m" / "backend.py").write_text("def load(context): ...\n")
    own = run(tmp_path, gpus=gpus)
    assert isinstance(own, ModelConfig) or "needs a GPU" not in own.reason


def test_what_the_text_is_instead(tmp_path):
    for text, advice in (
        (
            '{"name": "m"}',
            "this is JSON: config.pbtxt is written without the outer braces and without quotes around names",
        ),
        ("name: m\ninput:\n  - name: x\n", 'fix: "m", in quotes; a list is [ { … }, { … } ], not YAML\'s -'),
        ("name: m", 'fix: "m", in quotes'),
        ("name: “m”", 'fix: plain quotes, "'),
        ("// a comment", "fix: comments begin with #"),
        ("max_batch_size: 8.0", "fix: 8"),
        ('parameters { key: "k" value: "4" }', 'fix: value { string_value: "4" }'),
        ('platform: "onnx_runtime"', "did you mean 'onnxruntime_onnx'?"),
        ('platform: "libtorch"', "did you mean 'pytorch_libtorch'?"),
        (
            'input { name: "${in}" data_type: TYPE_FP32 dims: -1 }',
            "unfilled placeholders: ${in}: fill in this template first",
        ),
    ):
        lines = reason_of(tmp_path, models.add1(), text).split("\n")
        assert lines[-1] == f"    {advice}"
        assert any(f"{tmp_path}/m/config.pbtxt:1:" in line for line in lines), lines


def test_a_mark_before_the_text_is_nothing(tmp_path):
    assert config_of(tmp_path, models.add1(), "\ufeffmax_batch_size: 3").max_batch_size == 3


def test_backends_of_triton_that_are_not_here(tmp_path):
    reason = reason_of(tmp_path, models.add1(), 'backend: "python"')
    assert "Python models (model.py) are not supported yet: docs/backends.md shows how" in reason
    reason = reason_of(tmp_path, models.add1(), 'backend: "openvino"')
    assert "needs backend 'openvino', which is not there yet; installed are: " in reason
    assert "did you mean" not in reason


def test_code_of_ones_own_says_its_tensors(tmp_path):
    models.write_model(tmp_path, "m")
    (tmp_path / "m" / "backend.py").write_text("def load(context): ...\n")
    assert run(tmp_path).reason.endswith('fix: in config.pbtxt: input { name: "…" data_type: TYPE_FP32 dims: [ -1 ] }')


def test_a_model_given_as_a_repository_has_one_fix(tmp_path):
    models.write_model(tmp_path, "m", models.add1())
    version = run(tmp_path / "m", "1")
    assert version.reason.endswith(f"fix: '1' is a version of a model: give {tmp_path} as a model repository")


@pytest.mark.parametrize(("name", "plain"), [("my model", "my_model"), ("modèle", "modele"), ("+", "model")])
def test_a_name_that_may_be_one(tmp_path, name, plain):
    models.write_model(tmp_path, name, models.add1())
    assert scan([str(tmp_path)]).failures[name].endswith(f"rename the directory, for instance to {plain}")
