"""Backends, Triton's validation rules with Triton's words, and the JSON form."""

from __future__ import annotations

import json

import pytest

from broker.repository.loader.convert import MAX_LABELS
from tests.fakes import models
from tests.fakes.loading import config_of, reason_of, run

# --- backends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('platform: "caffe"', "unexpected 'platform' and 'backend' pair, got:caffe, onnxruntime"),
        ('platform: "caffe" default_model_filename: "x"', "unexpected 'platform' and 'backend' pair, got:caffe, onnx"),
        (
            'platform: "onnxruntime_onnx" backend: "python"',
            "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, python",
        ),
        ('backend: "no_such_backend"', "needs backend 'no_such_backend', which is not installed; installed are: "),
        ('backend: "; rm"', "invalid backend name '; rm'"),
        ('name: "other"', "unexpected directory name 'm' for model 'other', directory name must equal model name"),
        ('default_model_filename: "../../x.onnx" backend: "onnxruntime"', "must stay within the version directory"),
        ('default_model_filename: "x.onnx" backend: "onnxruntime"', "unable to find '"),
        ('parameters { key: "worker_group" value: { string_value: "../x" } }', "parameter worker_group '../x'"),
    ],
)
def test_backend_and_names(tmp_path, text, part):
    assert part in reason_of(tmp_path, models.add1(), text)


def test_nothing_says_which_backend(tmp_path):
    reason = reason_of(tmp_path, None)
    assert reason.startswith("Invalid model name: Could not determine backend for model 'm' with no backend in model")


def test_the_backend_follows_from_the_ending_of_the_file_that_the_text_names(tmp_path):
    models.write_model(tmp_path, "m", models.add1(), config='default_model_filename: "net.onnx"', filename="net.onnx")
    config = run(tmp_path)
    assert (config.backend, config.default_model_filename) == ("onnxruntime", "net.onnx")


def test_the_files_that_say_nothing_are_named(tmp_path):
    models.write_model(tmp_path, "m", models.add1(), filename="net.onnx")
    reason = run(tmp_path).reason
    assert f"{tmp_path / 'm' / '1'} has 'net.onnx'. " in reason
    assert "'default_model_filename'" in reason
    (tmp_path / "empty" / "1").mkdir(parents=True)
    assert f"{tmp_path / 'empty' / '1'} is empty" in run(tmp_path, "empty").reason


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ((), "1 is empty"),
        (("net.onnx",), "1 has 'net.onnx'\n    fix: default_model_filename: \"net.onnx\""),
        (("a.onnx", "b.onnx"), "1 has 'a.onnx', 'b.onnx'"),
        ((".model.onnx.Xy12",), "1 has '.model.onnx.Xy12'"),
        ((".model.onnx",), "1 has '.model.onnx'"),
    ],
)
def test_what_is_there_in_place_of_the_model_file_is_named(tmp_path, names, told):
    directory = models.write_model(tmp_path, "m", config='platform: "onnxruntime_onnx"') / "1"
    for name in names:
        (directory / name).write_bytes(b"")
    reason = run(tmp_path).reason
    assert reason.startswith(f"unable to find '{directory}/model.onnx' for model 'm'\n")
    assert reason.replace(f"    in {tmp_path}/m/config.pbtxt\n", "").endswith(f"\n    {tmp_path}/m/{told}")


def test_a_backend_of_the_model_itself(tmp_path):
    text = (
        'backend: "mine" max_batch_size: 2 input { name: "x" data_type: TYPE_STRING dims: [ -1 ] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] }'
    )
    models.write_model(tmp_path, "m", config=text)
    (tmp_path / "m" / "backend.py").write_text("def load(context): ...\n")
    config = run(tmp_path)
    assert (config.backend, config.worker_groups, config.platform) == ("mine", ("mine",), "")
    assert (config.input[0].datatype, config.input[0].symbols, config.input[0].zero_copy) == ("BYTES", ("?x:0",), False)
    assert config.output[0].symbols == ("?y:0", "")


# --- Triton's rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
        ("max_batch_size: 70000", "'max_batch_size' must be at most 65534 for m"),
        ("input { dims: 1 }", "model input must specify 'name' for m"),
        (
            'input { name: "x" dims: [ 0 ] }',
            "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension",
        ),
        ('input { name: "x" dims: [ -2 ] }', "model input 'x' dimension must be integer >= 1, or -1"),
        (f'input {{ name: "x" dims: [ {", ".join(["1"] * 64)} ] }}', "has more than 63 dimensions"),
        ('input { name: "x" } input { name: "x" }', "model input 'x' is specified more than once"),
        (
            'max_batch_size: 2 input { name: "x" dims: [ -1 ] reshape { shape: [ 0 ] } }',
            "model input 'x' reshape dimensions must be integer >= 1, or -1",
        ),
        (
            'max_batch_size: 2 input { name: "x" dims: [ 4 ] reshape { shape: [ 5 ] } }',
            "model input 'x' has different size for dims and reshape",
        ),
        (
            'max_batch_size: 2 input { name: "x" dims: [ 2, -1, 3 ] reshape { shape: [ -1, 6 ] } }',
            "model input 'x' has different size for dims and reshape",
        ),
        (
            'max_batch_size: 2 output { name: "y" dims: [ -1 ] reshape { shape: [ 5 ] } }',
            "model output 'y' has different size for dims and reshape for m",
        ),
        (
            'max_batch_size: 2 output { name: "y" dims: [ -1, -1 ] reshape { shape: [ -1 ] } }',
            "model output 'y' has different number of variable-size dimensions for dims and reshape for m",
        ),
        (
            'max_batch_size: 0 input { name: "x" dims: [ 1 ] reshape { shape: [ ] } }',
            "cannot have empty reshape for non-batching model as scalar tensors are not supported",
        ),
        ('input { name: "x" dims: [ 3 ] format: FORMAT_NHWC }', "model input NHWC/NCHW require 3 dims"),
        ('output { name: "y" label_filename: "../../secret" }', "label_filename '../../secret', which is no file in"),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }",
            "dynamic batching preferred size must be positive for m, got 0",
        ),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 5 }",
            "dynamic batching preferred size must be <= max batch size for m: 5 > 4",
        ),
        (
            "max_batch_size: 4 dynamic_batching { priority_levels: 2 }",
            "default priority level must be in range [1, 2] for m, got 0",
        ),
        (
            "max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 1 "
            "priority_queue_policy { key: 3 value: { } } }",
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            "max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 1 "
            "preserve_ordering: true }",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "max_batch_size: 4 dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY "
            "} }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 9223372036854775808 }",
            "'max_queue_delay_microseconds' must be at most",
        ),
        (
            "max_batch_size: 4 dynamic_batching { default_queue_policy { timeout_action: 7 } }",
            "queue policy must have timeout_action REJECT or DELAY for m",
        ),
        ("instance_group { count: -1 }", "instance group m_0 of model m has count -1, it must be positive"),
        ("instance_group { count: 1000000 }", "ask for 1000000 instances, the limit is 1024"),
        (
            "instance_group { kind: KIND_GPU }",
            "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
        ),
        (
            "instance_group { kind: KIND_CPU gpus: 0 }",
            "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        (
            'instance_group { profile: "1" }',
            "instance group m_0 of model m and platform onnxruntime_onnxspecifies profile field which is only "
            "supported for TensorRT models",
        ),
        (
            'parameters { key: "zero_copy_inputs" value: { string_value: "z" } }',
            "zero_copy_inputs of model 'm' names 'z'",
        ),
    ],
)
def test_rules(tmp_path, text, part):
    assert part in reason_of(tmp_path, models.add1(), text)


def test_label_files_stay_in_the_model_directory(tmp_path):
    models.write_model(tmp_path, "m", models.add1(), config='output { name: "y" label_filename: "labels.txt" }')
    (tmp_path / "m" / "labels.txt").write_text("cat\n")
    assert run(tmp_path).output[0].label_filename == "labels.txt"
    assert run(tmp_path).output[0].labels == b"cat\n"


def test_label_files_are_bounded(tmp_path):
    models.write_model(tmp_path, "m", models.add1(), config='output { name: "y" label_filename: "labels.txt" }')
    (tmp_path / "m" / "labels.txt").write_bytes(bytes(MAX_LABELS + 1))
    assert "labels.txt: has 1048577 bytes, the limit is 1 MiB" in run(tmp_path).reason


def test_instance_groups(tmp_path):
    config = config_of(
        tmp_path,
        models.add1(),
        "instance_group [ { count: 2 }, { kind: KIND_GPU }, { kind: KIND_GPU gpus: 1 count: 3 }, { kind: KIND_CPU } ]",
        gpus=(0, 1),
    )
    assert [(group.name, group.kind, group.count, group.gpus) for group in config.instance_group] == [
        ("m_0", "KIND_GPU", 2, (0, 1)),
        ("m_1", "KIND_GPU", 1, (0, 1)),
        ("m_2", "KIND_GPU", 3, (1,)),
        ("m_3", "KIND_CPU", 1, ()),
    ]


# --- the JSON form ------------------------------------------------------------------------------------------------


def test_json_has_numbers_defaults_and_field_names(tmp_path):
    text = (
        'max_batch_size: 8 input { name: "x" dims: [ -1 ] } dynamic_batching { max_queue_delay_microseconds: 500 '
        "priority_levels: 1 default_priority_level: 1 priority_queue_policy { key: 1 value: { "
        'default_timeout_microseconds: 7 } } } version_policy { specific { versions: [ 1 ] } } parameters { key: "a" '
        'value: { string_value: "12" } } metric_tags { key: "k" value: "34" }'
    )
    tree = json.loads(config_of(tmp_path, models.add1(), text).json)
    assert tree["input"][0]["dims"] == [-1]
    assert tree["input"][0]["data_type"] == "TYPE_FP32"
    assert tree["input"][0]["optional"] is False
    batching = tree["dynamic_batching"]
    assert batching["max_queue_delay_microseconds"] == 500
    assert batching["priority_levels"] == 1
    assert batching["preserve_ordering"] is False
    assert batching["priority_queue_policy"]["1"]["default_timeout_microseconds"] == 7
    assert tree["version_policy"] == {"specific": {"versions": [1]}}
    assert tree["parameters"] == {"a": {"string_value": "12"}}
    assert tree["metric_tags"] == {"k": "34"}
    assert tree["optimization"]["input_pinned_memory"] == {"enable": True}
    assert tree["instance_group"][0]["kind"] == "KIND_CPU"


def test_what_is_ignored_is_noted(tmp_path):
    config = config_of(tmp_path, models.add1(), 'cc_model_filenames { key: "8.0" value: "x" }')
    assert "cc_model_filenames is ignored: one model file serves every device" in config.notes


def test_kinds_of_instances_follow_from_the_gpus_there_are(tmp_path):
    auto = "instance_group [ { }, { gpus: 1 }, { kind: KIND_GPU gpus: 0 } ]"
    models.write_model(tmp_path, "m", models.add1(), config=auto)
    groups = run(tmp_path, gpus=(0, 1)).instance_group
    assert [(group.kind, group.gpus) for group in groups] == [
        ("KIND_GPU", (0, 1)),
        ("KIND_GPU", (1,)),
        ("KIND_GPU", (0,)),
    ]
    config = run(tmp_path, gpus=(0, 1), on_cpu=("onnxruntime",))
    assert [(group.kind, group.gpus) for group in config.instance_group] == [
        ("KIND_CPU", ()),
        ("KIND_CPU", ()),
        ("KIND_GPU", (0,)),
    ]
    assert "its instances are on the CPU: the onnxruntime that is installed uses no GPU" in config.notes
    assert "has kind KIND_CPU but specifies one or more GPUs" in reason_of(
        tmp_path, models.add1(), "instance_group { gpus: 3 }"
    )


PLAN = """platform: "tensorrt_plan" input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 } instance_group { kind: KIND_GPU profile: [ %s ] }"""


def test_an_instance_group_names_optimization_profiles(tmp_path):
    models.write_model(tmp_path, "m", config=PLAN % '"2", "0", "2"')
    (tmp_path / "m" / "backend.py").write_text("def load(context): ...")
    assert [group.profiles for group in run(tmp_path, gpus=(0,)).instance_group] == [(2, 0)]


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        ('""', "profile name must not be empty"),
        ('"x"', "unable to parse 'x': stoi"),
        (
            '"1", "-2"',
            "instance group m_0 of model m and platform tensorrt_plan specifies invalid profile -2. The field should "
            "contain the string representation of a non-negative integer.",
        ),
    ],
)
def test_what_is_no_optimization_profile_is_refused(tmp_path, profile, text):
    models.write_model(tmp_path, "m", config=PLAN % profile)
    (tmp_path / "m" / "backend.py").write_text("def load(context): ...")
    assert text in run(tmp_path, gpus=(0,)).reason


def test_why_there_is_no_gpu_is_said(tmp_path):
    models.write_model(tmp_path, "m", models.add1(), config="instance_group { kind: KIND_GPU gpus: 5 }")
    why = "CUDA is not available: no driver"
    assert f"has kind KIND_GPU but no GPUs are available: {why}" in run(tmp_path, no_gpus=why).reason
    assert "compatibility of 6.000000 are: 0, 1: the broker sees 2" in (
        run(tmp_path, gpus=(0, 1), no_gpus="the broker sees 2").reason
    )


def test_worker_groups_are_one_for_each_instance_group(tmp_path):
    group = 'parameters { key: "worker_group" value { string_value: "%s" } }'
    models.write_model(tmp_path, "m", models.add1(), config=f"instance_group [ {{ }}, {{ }} ] {group % 'a,b'}")
    assert run(tmp_path).worker_groups == ("a", "b")
    assert "names 2 groups, one for each instance_group, of which there are 1" in reason_of(
        tmp_path, models.add1(), group % "a,b"
    )
    assert "in every name" in reason_of(tmp_path, models.add1(), group % "a,,b")
