"""Which versions of a model are served, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.load_failures import refusal
from broker.repository.loader.further import further
from broker.repository.protocol import LoadRequest
from broker.repository.scan import scan
from tests.fakes import models
from tests.fakes.loading import run


def write_versions(root: Path, policy: str, models_by_version: dict[int, object]) -> None:
    for version, model in models_by_version.items():
        models.write_model(root, "m", model, version=version, config=policy)


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", [10]),
        ("version_policy { latest { num_versions: 2 } }", [2, 10]),
        ("version_policy { latest { num_versions: 9 } }", [1, 2, 10]),
        ("version_policy { all { } }", [1, 2, 10]),
        ("version_policy { specific { versions: [ 2, 1 ] } }", [1, 2]),
    ],
)
def test_version_policy(tmp_path, policy, served):
    write_versions(tmp_path, policy, {1: models.add1(), 2: models.add1(), 10: models.add1()})
    assert list(run(tmp_path).versions) == served


def test_a_missing_version_is_noted(tmp_path):
    write_versions(tmp_path, "version_policy { specific { versions: [ 1, 7 ] } }", {1: models.add1()})
    config = run(tmp_path)
    assert list(config.versions) == [1]
    assert "version 7 is specified for model 'm', but the version directory is not present" in config.notes


@pytest.mark.parametrize("settings", ["", 'backend: "onnxruntime" ', "max_batch_size: 4 "])
@pytest.mark.parametrize(
    ("policy", "asks", "fix"),
    [
        ("[ 7 ]", "version 7, which is not there; {0} has version 2, 1", ", or put the model's files into {0}/7"),
        ("[ 7, 9 ]", "version 9, 7, which is not there; {0} has version 2, 1", ""),
        ("[ ]", "no version; {0} has version 2, 1", ""),
    ],
)
def test_a_policy_that_chooses_nothing_is_named_once(tmp_path, settings, policy, asks, fix):
    text = f"{settings}version_policy {{ specific {{ versions: {policy} }} }}"
    write_versions(tmp_path, text, {1: models.add1(), 2: models.add1()})
    found, directory = run(tmp_path), tmp_path / "m"
    assert found.reason == (
        f"failed to load 'm', no version is available: version_policy asks for {asks.format(directory)}\n"
        f"    {directory}/config.pbtxt:1: {text}\n"
        f"    fix: version_policy {{ specific {{ versions: [ 2 ] }} }}{fix.format(directory)}"
    )
    request = LoadRequest(repositories=(str(tmp_path),))
    assert further(scan([str(tmp_path)]).models["m"], request, found) == ()


def test_of_many_versions_the_newest_are_named(tmp_path):
    write_versions(tmp_path, "version_policy { specific { versions: 50 } }", dict.fromkeys(range(1, 13), b""))
    assert "has version 12, 11, 10, 9, 8, 7, 6, 5 and 4 more\n" in run(tmp_path).reason


def test_no_version(tmp_path):
    models.write_model(tmp_path, "m", version="01")
    assert "failed to load 'm', no version is available" in run(tmp_path).reason


def test_an_older_version_that_does_not_fit_is_left_out(tmp_path):
    write_versions(tmp_path, "version_policy { all { } }", {1: b"broken", 2: models.matmul(), 3: models.add1()})
    config = run(tmp_path)
    assert list(config.versions) == [3]
    assert sum("is not served" in note for note in config.notes) == 2


def test_the_newest_version_takes_the_others_along_and_they_say_so(tmp_path):
    write_versions(tmp_path, "version_policy { all { } }", {1: models.add1(), 2: b"broken", 3: b""})
    failure = run(tmp_path)
    assert (failure.versions, failure.cause) == ((1, 2, 3), 3)
    empty = f"{tmp_path}/m/3/model.onnx: is empty (0 bytes)"
    others = f"because version 3 failed: {empty}"
    assert failure.by_version() == {1: others, 2: others, 3: failure.reason}
    assert failure.reason.startswith(empty)
    assert "version 1 " not in refusal(failure).message
    (tmp_path / "m" / "backend.py").write_text("")  # of all versions
    failure = run(tmp_path)
    assert failure.by_version() == dict.fromkeys((1, 2, 3), failure.reason)


def test_versions_that_name_dimensions_differently_promise_nothing(tmp_path):
    other = models.identity(dims=("batch", "other"))
    write_versions(tmp_path, "version_policy { all { } }", {1: other, 2: models.add1()})
    config = run(tmp_path)
    assert list(config.versions) == [1, 2]
    assert (config.input[0].symbols, config.output[0].symbols) == (("?x:0",), ("?y:0",))
