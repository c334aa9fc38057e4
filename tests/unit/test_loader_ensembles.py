"""An ensemble by itself: what its own text says about steps and tensors."""

from __future__ import annotations

import json

import pytest

from tests.fakes.loading import config_of, reason_of

IO = 'input { name: "in" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "out" data_type: TYPE_FP32 dims: [ 4 ] } '
FIRST = (
    'step { model_name: "a" model_version: -1 input_map { key: "x" value: "in" } output_map { key: "y" value: "t" } }'
)
SECOND = (
    'step { model_name: "b" model_version: 2 input_map { key: "x" value: "t" } output_map { key: "y" value: "out" } }'
)


def ensemble(*steps: str, more: str = "") -> str:
    return f'platform: "ensemble" {IO} ensemble_scheduling {{ {" ".join(steps)} }} {more}'


@pytest.mark.parametrize("how", ['platform: "ensemble"', 'backend: "ensemble"', ""])
def test_an_ensemble_is_read(tmp_path, how):
    text = ensemble(FIRST, SECOND, more="max_batch_size: 2").replace('platform: "ensemble"', how)
    config = config_of(tmp_path, None, text)
    assert (config.platform, config.backend, config.instance_group) == ("ensemble", "ensemble", ())
    assert config.ensemble is not None
    assert [(step.model_name, step.model_version) for step in config.ensemble.step] == [("a", -1), ("b", 2)]
    assert config.ensemble.step[1].input_map == {"x": "t"}
    tree = json.loads(config.json)
    assert (tree["platform"], tree["backend"], "optimization" in tree) == ("ensemble", "", False)
    assert tree["ensemble_scheduling"]["step"][0]["model_version"] == -1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (f'platform: "ensemble" {IO}', "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
        (
            ensemble(FIRST, SECOND).replace('"ensemble"', '"onnxruntime_onnx"'),
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
        (
            ensemble(FIRST, SECOND, more='backend: "onnxruntime"'),
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        (ensemble(), "must specify 'step' for ensemble 'm'"),
        (ensemble(FIRST.replace('"a"', '""'), SECOND), "must specify 'model_name' in step 0 of ensemble 'm'"),
        (ensemble(FIRST, 'step { model_name: "b" }'), "must specify 'input_map' in step 1 of ensemble 'm'"),
        (
            ensemble('step { model_name: "b" input_map { key: "x" value: "in" } }'),
            "must specify 'output_map' in step 0 of ensemble 'm'",
        ),
        (
            ensemble(FIRST, FIRST, SECOND),
            "ensemble tensor 't' can appear in an output map only once for ensemble 'm' step 1",
        ),
        (
            ensemble(FIRST, SECOND.replace("}", '} input_map { key: "x" value: "in" }', 1)),
            "input 'x' in model 'b' is mapped to multiple ensemble tensors for ensemble 'm' step 1",
        ),
        (
            ensemble(FIRST.replace("{ key", '[ { key: "x" value: "t" }, { key', 1).replace("} output", "} ] output")),
            "input 'x' in model 'a' is mapped to multiple ensemble tensors for ensemble 'm' step 0",
        ),
        (ensemble(SECOND), "ensemble input 'in' for ensemble m' is not used"),
        (ensemble(FIRST), "ensemble output 'out' for ensemble m' is not used"),
        (
            ensemble(FIRST, SECOND.replace('"t"', '"nowhere"')),
            "output 'out' for ensemble 'm' is not written: at least one of its depending tensors, 'nowhere', is not "
            "connected",
        ),
        (
            ensemble(FIRST, SECOND, FIRST.replace('"t"', '"left"')),
            "ensemble tensor 'left' is unused in ensemble 'm'",
        ),
        (ensemble(FIRST, SECOND, more="instance_group { }"), "instance group should not be specified for ensemble 'm'"),
        (ensemble(FIRST, SECOND, more="optimization { }"), "optimization should not be specified for ensemble 'm'"),
        (ensemble(FIRST, SECOND, more="model_warmup { }"), "model_warmup can not be specified for ensemble 'm'"),
        (ensemble(FIRST, SECOND.replace("2", "-7")), "model_version -7 in step 1 of ensemble 'm' must be -1 or > 0"),
    ],
)
def test_what_is_wrong_with_an_ensemble(tmp_path, text, part):
    assert part in reason_of(tmp_path, None, text)
