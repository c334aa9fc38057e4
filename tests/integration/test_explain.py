"""`tensorbroker explain`: what a running broker serves, what came with a load included, or a file would make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import clientlib
from tests.fakes import models
from tests.fakes.broker import Broker, command

pytestmark = pytest.mark.timeout(180)

OVERRIDE = '{"max_batch_size": 8, "dynamic_batching": {"max_queue_delay_microseconds": 7}}'
STEP = """step {{
  model_name: "{}" model_version: -1 input_map {{ key: "x" value: "{}" }} output_map {{ key: "y" value: "{}" }}
}}"""
PAIR = f"""platform: "ensemble"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "y" data_type: TYPE_FP32 dims: -1 }}
ensemble_scheduling {{ {STEP.format("add1", "x", "t")} {STEP.format("add2", "t", "y")} }}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("explained")
    group = 'parameters { key: "worker_group" value { string_value: "own" } }'
    models.write_model(root, "add1", models.add1(), config="max_batch_size: 8")
    models.write_model(root, "add2", models.add1(), config=f"max_batch_size: 8 {group}")
    models.write_model(root, "pair", config=PAIR)
    return root


@pytest.fixture(scope="module")
def serving(repository, tmp_path_factory) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp("run") / "broker"
    with Broker(repository, directory, "--model-control-mode=explicit", "--load-model=pair") as broker:
        broker.ready()
        yield broker


def explained(*arguments: str) -> str:
    answer = command("explain", *arguments)
    assert (answer.returncode, answer.stderr) == (0, "")
    return answer.stdout


def origin_of(line: str, text: str) -> str:
    match = re.search(rf"^ *{re.escape(line)} +# (\w+)$", text, re.MULTILINE)
    assert match, text
    return match[1]


def test_what_came_with_a_load_is_shown_as_such(serving, repository):
    run = ("add1", "--directory", str(serving.directory))
    assert origin_of("max_batch_size: 8", explained(*run)) == "file"
    with clientlib.connect(f"ipc://{serving.directory}") as client:
        client.load("add1", config=OVERRIDE)
        text = explained(*run)
        assert f"# version 1, as the broker in {serving.directory} serves it\n" in text
        assert origin_of("max_batch_size: 8", text) == "override"
        assert origin_of("max_queue_delay_microseconds: 7", text) == "override"
        assert origin_of("dims: [ -1 ]", text) == "model"
        document = json.loads(explained(*run, "--json"))
        assert document["origins"]["dynamic_batching.max_queue_delay_microseconds"] == "override"
        assert document["config"]["dynamic_batching"]["max_queue_delay_microseconds"] == 7
        client.load("add1")
    text = explained(*run)
    assert origin_of("max_batch_size: 8", text) == "file"
    assert "max_queue_delay" not in text


def test_steps_of_an_ensemble_are_where_they_run(serving):
    lines = explained("pair", "--directory", str(serving.directory)).splitlines()
    assert "# step 0, add1: cpu/default" in lines
    assert "# step 1, add2: cpu/own" in lines


def test_what_is_not_served_is_not_explained(serving):
    answer = command("explain", "nope", "--directory", str(serving.directory))
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.startswith("INVALID_ARG: Request for unknown model: 'nope' is not found")


def test_a_file_takes_the_place_of_the_models_own_configuration(repository, tmp_path):
    given = tmp_path / "other.json"
    run = ("add1", "--model-repository", str(repository), "--config", str(given))
    given.write_text(OVERRIDE)
    assert origin_of("max_queue_delay_microseconds: 7", explained(*run)) == "override"
    for text, why in (("", "no JSON object"), ('{"max_batch_size": "x"}', "expected a whole number, got 'x'")):
        given.write_text(text)
        answer = command("explain", *run)
        assert answer.returncode == 1
        assert answer.stderr.startswith("Invalid config override: ")
        assert answer.stderr.rstrip().endswith(why), "and nothing of the file in the repository"


def test_flags_that_do_not_go_together(repository, tmp_path):
    one = ("explain", "add1", "--model-repository", str(repository))
    for arguments, says in (
        ((*one, "--directory", "/x"), "--directory names a running broker"),
        ((*one, "--config", str(tmp_path / "none")), "No such file or directory"),
        (("explain", "add1", "--config", "x"), "--model-repository must be specified with --config"),
        (("explain", "add1", "--model-config-name", "x"), "--model-repository must be specified with --config"),
        (("explain", "add1", "--directory", "/nonexistent/run"), "no broker is running in /nonexistent/run"),
    ):
        answer = command(*arguments)
        assert answer.returncode == 1
        assert says in answer.stderr
