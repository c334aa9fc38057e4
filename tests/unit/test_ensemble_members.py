"""Ensembles among models that are known: order, users, what keeps one from serving; `tensorbroker check` of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.catalogue import READY, UNAVAILABLE, Catalogue, Model, Version
from broker.commands import check_repositories
from broker.ensemble_members import as_members_are, ensembles_of, members_first, misfit, retryable
from broker.explanation import explain
from broker.repository.config import ModelConfig
from broker.statistics_blocks import StatisticsBlocks
from shm.statistics import StatisticsPage
from tests.fakes import models
from tests.fakes.loading import run

TENSORS = """
input {{ name: "x" data_type: TYPE_FP32 dims: -1 }} output {{ name: "y" data_type: TYPE_{} dims: -1 }}
"""


def write_ensemble(root: Path, name: str, *steps: str, datatype: str = "FP32") -> None:
    """x → the first step → … → y."""
    texts = []
    for at, step in enumerate(steps):
        given, made = "x" if not at else f"t{at}", "y" if at == len(steps) - 1 else f"t{at + 1}"
        texts.append(
            f'{{ model_name: "{step}" model_version: -1 input_map {{ key: "x" value: "{given}" }} '
            f'output_map {{ key: "y" value: "{made}" }} }}'
        )
    config = f'platform: "ensemble" max_batch_size: 4 {TENSORS.format(datatype)} '
    models.write_model(root, name, config=f"{config} ensemble_scheduling {{ step [ {', '.join(texts)} ] }}")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.write_repository(tmp_path, {"a": models.add1(), "b": models.add1()})
    write_ensemble(tmp_path, "pair", "a", "b")
    write_ensemble(tmp_path, "above", "pair", "a")
    return tmp_path


def config(root: Path, name: str) -> ModelConfig:
    found = run(root, name)
    assert isinstance(found, ModelConfig), found.reason
    return found


@pytest.fixture
def catalogue(repository: Path) -> Catalogue:
    catalogue = Catalogue(StatisticsBlocks(StatisticsPage.create()))
    for name in ("a", "b", "pair", "above"):
        version = Version(state=READY, generation=1, config=config(repository, name))
        catalogue.known[name] = Model(versions={1: version})
    return catalogue


def test_order_and_users(catalogue, repository):
    configs = {name: config(repository, name) for name in ("above", "pair", "a")}
    assert [found.name for found in members_first(configs)] == ["pair", "above"]
    assert sorted(ensembles_of(catalogue, "a")) == ["above", "pair"]
    assert ensembles_of(catalogue, "pair") == ["above"]
    assert ensembles_of(catalogue, "above") == []


def test_what_keeps_an_ensemble_from_serving(catalogue, repository):
    pair = config(repository, "pair")
    assert misfit(catalogue, pair) == ""
    version = catalogue.known["b"].versions[1]
    version.state, version.reason, version.generation = UNAVAILABLE, "no memory", 0
    depends = "ensemble 'pair' depends on 'b' which has no loaded version."
    assert misfit(catalogue, pair) == f"{depends} Model 'b' loading failed with error: no memory"
    del catalogue.known["b"]
    assert misfit(catalogue, pair) == "ensemble pair contains models that are not available or ambiguous: b"
    write_ensemble(repository, "pair", "above", "a")
    problem = misfit(catalogue, config(repository, "pair"))
    assert problem.startswith("circular dependency between ensembles: ")
    for name in ("pair", "above"):
        catalogue.known.pop(name, None)
    circle = {name: config(repository, name) for name in ("pair", "above")}  # loaded together, neither serves
    said = "circular dependency between ensembles: above -> ... -> pair -> above"
    assert misfit(catalogue, circle["above"], circle) == said


def test_check_compares_ensembles_with_their_members(repository, capsys):
    assert check_repositories([str(repository)], strict=False) == 0
    write_ensemble(repository, "wrong", "a", datatype="INT32")
    write_ensemble(repository, "lonely", "nobody")
    assert check_repositories([str(repository)], strict=False) == 1
    text = capsys.readouterr().out
    assert "inconsistent data type" in text
    assert "ensemble lonely contains models that are not available or ambiguous: nobody" in text


def test_that_no_member_is_decoupled_is_said(catalogue, repository, capsys):
    file = repository / "pair" / "config.pbtxt"
    file.write_text(file.read_text() + "model_transaction_policy { decoupled: true }")
    note = "model_transaction_policy is ignored: none of the ensemble's members is decoupled"
    assert check_repositories([str(repository)], strict=False) == 0
    assert f"pair: {note}" in capsys.readouterr().out.splitlines()
    assert explain([str(repository)], "pair") == 0
    assert f"# note: {note}" in capsys.readouterr().out.splitlines()
    served = as_members_are(catalogue, config(repository, "pair"))
    assert (served.decoupled, served.notes) == (False, (note,))
    assert json.loads(served.json)["model_transaction_policy"] == {"decoupled": False}


def test_explain_says_which_worker_runs_each_step(repository, capsys):
    group = 'parameters { key: "worker_group" value { string_value: "left" } }'
    models.write_model(repository, "b", models.add1(), config=f"max_batch_size: 4 {group}")
    write_ensemble(repository, "three", "b", "pair", "b")
    assert explain([str(repository)], "three") == 0
    said = [line for line in capsys.readouterr().out.splitlines()[2:] if not line.startswith("# versions")]
    assert said[:6] == [
        "# worker: cpu/left, that of most of its steps' models; it sends the others their steps",
        "# step 0, b: cpu/left",
        "# step 1, pair: cpu/default",
        "# step 2, b: cpu/left",
        "# retried after a worker's death: yes",
        "# input x: read by its steps, by each as that model reads it",
    ]
    assert explain([str(repository)], "three", as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["worker"] == "cpu/left"
    assert [(step["model"], step["workers"]) for step in document["steps"]] == [
        ("b", ["cpu/left"]),
        ("pair", ["cpu/default"]),
        ("b", ["cpu/left"]),
    ]


def test_explain_says_why_an_ensemble_cannot_be_served(repository, capsys):
    write_ensemble(repository, "lonely", "nobody", "a")
    write_ensemble(repository, "pair", "above", "a")
    said = "ensemble lonely contains models that are not available or ambiguous: nobody"  # as check says it
    for name, why in (("lonely", said), ("above", "circular dependency")):
        assert explain([str(repository)], name) == 1
        text = capsys.readouterr().out
        assert "# cannot be served: " in text
        assert why in text
        assert "# worker" not in text


def test_a_retry_is_for_ensembles_all_of_whose_members_allow_it(catalogue, repository):
    above = config(repository, "above")
    assert retryable(catalogue, above)
    version = catalogue.known["b"].versions[1]
    version.config = replace(version.config, stateful=True)  # a member of a member
    assert not retryable(catalogue, above)
    assert retryable(catalogue, config(repository, "a"))
    del catalogue.known["b"]
    assert not retryable(catalogue, above)
