"""Configurations that do not come from config.pbtxt: overrides of a load request, --model-config-name; and origins."""

from __future__ import annotations

import json

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from broker.repository.config import LoadFailure, ModelConfig
from tests.fakes import models
from tests.fakes.loading import config_of, reason_of, run


@pytest.mark.parametrize("override", ['{"max_batch_size": "16"}', '{"maxBatchSize": 16}', ' {"max_batch_size": 16}'])
def test_an_override_stands_in_place_of_the_file(tmp_path, override):
    text = 'max_batch_size: 2 parameters { key: "retry" value { string_value: "no" } }'
    config = config_of(tmp_path, models.add1(), text, overrides={"m": override, "other": "{"})
    assert (config.max_batch_size, config.parameters) == (16, {})
    assert config.input[0].name == "x"


def test_a_zero_in_an_override_is_a_statement(tmp_path):
    override = '{"max_batch_size": 0, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, "3"]}]}'
    config = config_of(tmp_path, models.add1(), overrides={"m": override})
    assert (config.max_batch_size, config.input[0].dims) == (0, (-1, 3))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("{", "the config is no JSON: Expecting"),
        ("[]", "the config is no JSON object"),
        ("", "the config is no JSON object"),
        ("nul\0", "the config is no JSON object"),
        ("max_batch_size: 3", 'object, but config.pbtxt text\n    fix: config: {"max_batch_size": 3}'),
        ('{"max_batch_siz": 1}', "did you mean 'max_batch_size'?"),
        ('{"max_batch_size": "many"}', "max_batch_size field: expected a whole number, got 'many'"),
        ('{"input": [{"dims": ["n"]}]}', "dims field: expected a whole number, got 'n'"),
        ('{"input": [{"dims": {}}]}', "dims"),
        ('{"name": 5}', "name field: expected a string"),
        ("max_batch_size: many", "the config is no JSON object"),
        ('{"a":' * 2000, "nested too deeply"),
    ],
)
def test_a_bad_override_is_named(tmp_path, override, part):
    reason = reason_of(tmp_path, models.add1(), overrides={"m": override})
    assert reason.startswith("Invalid config override: ")
    assert part in reason
    assert "Available Fields" not in reason


def test_a_configuration_by_name(tmp_path):
    models.write_model(tmp_path, "m", models.add1(), config="max_batch_size: 2")
    (tmp_path / "m" / "configs").mkdir()
    (tmp_path / "m" / "configs" / "h100.pbtxt").write_text("max_batch_size: 64")
    sizes = {name: run(tmp_path, config_name=name).max_batch_size for name in ("", "h100", "none")}
    assert sizes == {"": 2, "h100": 64, "none": 2}
    refused = run(tmp_path, config_name="../config")
    assert isinstance(refused, LoadFailure)
    assert "--model-config-name '../config' must be a plain name" in refused.reason


def test_every_value_has_its_origin(tmp_path):
    text = 'max_batch_size: 8 input { name: "x" } parameters { key: "k" value { string_value: "v" } }'
    config = config_of(tmp_path, models.add1(), text, explain=True)
    assert config.origins["max_batch_size"] == "file"
    assert config.origins["input[x].name"] == "file"
    assert config.origins["input[x].dims"] == "model"
    assert config.origins["output[y].data_type"] == "model"
    assert config.origins["backend"] == "model"
    assert config.origins["name"] == "default"
    assert config.origins["instance_group[m].count"] == "default"
    assert config.origins["parameters[k].value.string_value"] == "file"
    assert set(config.origins.values()) == {"file", "model", "default"}
    override = config_of(tmp_path, models.add1(), overrides={"m": '{"max_batch_size": 3}'}, explain=True)
    assert override.origins["max_batch_size"] == "override"


def test_a_group_without_a_name_keeps_its_origins(tmp_path):
    text = "instance_group [ { count: 2 kind: KIND_CPU }, { kind: KIND_CPU } ]"
    config = config_of(tmp_path, models.add1(), text, explain=True)
    groups = {path: origin for path, origin in config.origins.items() if path.startswith("instance_group")}
    assert groups == {
        "instance_group[m_0].name": "default",
        "instance_group[m_0].kind": "file",
        "instance_group[m_0].count": "file",
        "instance_group[m_1].name": "default",
        "instance_group[m_1].kind": "file",
        "instance_group[m_1].count": "default",
    }
    (line,) = (line for line in config.explanation.splitlines() if "count: 2" in line)
    assert line.endswith("# file")


@pytest.mark.parametrize("text", ["", "max_batch_size: 0", "max_batch_size: 4 dynamic_batching { }"])
def test_the_explanation_is_a_configuration_that_changes_nothing(tmp_path, text):
    config = config_of(tmp_path, models.add1(), text, explain=True)
    parsed = text_format.Parse(config.explanation, model_config_pb2.ModelConfig())
    assert parsed.max_batch_size == config.max_batch_size
    again = config_of(tmp_path, models.add1(), config.explanation, explain=True)
    assert json.loads(again.json) == json.loads(config.json)
    assert set(again.origins.values()) == {"file"}


def test_nothing_is_explained_unasked(tmp_path):
    config = config_of(tmp_path, models.add1())
    assert isinstance(config, ModelConfig)
    assert (config.origins, config.explanation) == ({}, "")
