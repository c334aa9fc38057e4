"""What counts as a model and a version directory, and that no name leads out of the repository."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.repository.scan import ModelDirectory, check_model_name, list_versions, misplaced, scan, unreadable
from shm.errors import InferError


def refusal(name: str) -> str:
    with pytest.raises(InferError) as caught:
        check_model_name(name)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


@pytest.mark.parametrize("name", ["simple", "yolo-v8.1", "a", "_x", "model.identity", "m" * 255, "c++", "a..b"])
def test_ordinary_names_are_accepted(name):
    check_model_name(name)


@pytest.mark.parametrize("name", ["", " ", "\t\n"])
def test_empty_names(name):
    assert refusal(name) == "Model name cannot be empty. Please enter a valid name to deploy."


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "/etc", " ..", ".. ", "a/", "a\\b"])
def test_path_traversal(name):
    assert "model name must not contain path traversal characters" in refusal(name)


@pytest.mark.parametrize(
    "name", [";rm -rf", "$(id)", "a|b", "a b", "-rf", ".git", "...", "..a", "m" * 256, "a\0b", "é", "a\n", "`x`"]
)
def test_characters_that_mean_something_elsewhere(name):
    assert "must have 1 to 255 of the characters" in refusal(name)


@given(st.text())
def test_an_accepted_name_is_one_harmless_path_component(name):
    try:
        check_model_name(name)
    except InferError:
        return
    assert name.isascii()
    assert os.path.normpath(name) == name == os.path.basename(name)
    assert not set(name) & set(" \t\n\0/\\;$()|&`'\"*?<>!#~{}[]")
    assert name[0] not in ".-"


def test_directories_are_models_and_hidden_ones_and_files_are_not(tmp_path):
    for name in ("b", "a", ".git", "..data"):
        (tmp_path / name).mkdir()
    (tmp_path / "readme.md").write_text("x")
    found = scan([str(tmp_path)])
    assert list(found.models) == ["a", "b"]
    assert found.models["a"] == ModelDirectory("a", str(tmp_path / "a"), str(tmp_path))
    assert not found.failures
    assert not found.errors


def test_a_bad_directory_name_is_reported(tmp_path):
    (tmp_path / "a b").mkdir()
    found = scan([str(tmp_path)])
    assert not found.models
    assert "invalid model name 'a b'" in found.failures["a b"]


def test_a_model_in_two_repositories_loads_from_neither(tmp_path):
    roots = [tmp_path / name for name in ("one", "two", "three")]
    for root in roots:
        (root / "m").mkdir(parents=True)
    found = scan([str(root) for root in roots])
    assert not found.models
    text = (
        f"failed to poll model 'm': not unique across all model repositories\n    it is in {roots[0]} and in {roots[1]}"
    )
    assert found.failures == {"m": text}


def test_the_same_repository_twice_is_one(tmp_path):
    (tmp_path / "m").mkdir()
    assert list(scan([str(tmp_path), str(tmp_path)]).models) == ["m"]


def test_repositories_that_cannot_be_read(tmp_path):
    (tmp_path / "file").write_text("")
    found = scan([str(tmp_path / "missing"), str(tmp_path / "file"), "nul\0"])
    assert "No such file" in found.errors[str(tmp_path / "missing")]
    assert "Not a directory" in found.errors[str(tmp_path / "file")]
    assert len(found.errors) == 3


def test_repositories_in_a_cloud_are_told_apart_from_directories_that_are_missing(tmp_path, monkeypatch):
    for url in ("s3://bucket/models", "gs://b", "as://account/container"):
        assert scan([url]).errors == {
            url: f"failed to read model repository '{url}': cloud repositories are not supported: copy or mount it"
        }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "x" / "m").mkdir(parents=True)
    assert list(scan(["s3://x"]).models) == ["m"]


def test_links_are_followed_and_those_that_lead_nowhere_are_named(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / ".store" / "m").mkdir(parents=True)
    (outside / "1").mkdir(parents=True)
    (root / "inside").symlink_to(root / ".store" / "m")
    (root / "out").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    (root / "absent").symlink_to("../nowhere")
    (root / ".#lock").symlink_to("user@host")
    (root / "notes").symlink_to(__file__)
    found = scan([str(root)])
    assert {name: model.path for name, model in found.models.items()} == {
        "inside": str(root / "inside"),
        "out": str(root / "out"),
    }
    assert found.failures == {
        "absent": f"failed to poll model 'absent': {root}/absent is a link to ../nowhere, which does not exist",
        "loop": f"failed to poll model 'loop': {root}/loop is a link to loop, which leads back to itself",
    }


def test_versions(tmp_path):
    model = tmp_path / "m"
    for name in ("10", "2", "01", "0", "-3", "1.5", "x", "²", "9" * 20, "configs", "warmup", "initial_state", ".tmp"):
        (model / name).mkdir(parents=True)
    (model / "3").write_text("a file")
    (model / "4").symlink_to(tmp_path.parent)
    (model / "5").symlink_to("absent")
    found = list_versions(ModelDirectory("m", str(model), str(tmp_path)))
    assert found.paths == {number: str(model / str(number)) for number in (2, 4, 10)}
    assert list(found.paths) == [2, 4, 10]
    assert found.broken == (f"{model}/5 is a link to absent, which does not exist",)
    texts = "\n".join(found.ignored)
    assert "ignore version directory '01' which contains leading zeros in its directory name" in texts
    for name in ("0", "-3", "1.5", "x", "²", "9" * 20):
        assert f"ignore version directory '{name}' which fails to convert to integral number" in texts
    assert f"version is not served: {found.broken[0]}" in texts
    assert len(found.ignored) == 8


def test_a_directory_that_vanished(tmp_path):
    with pytest.raises(FileNotFoundError):
        list_versions(ModelDirectory("m", str(tmp_path / "m"), str(tmp_path)))


def test_a_repository_that_is_none_says_what_it_seems_to_be(tmp_path):
    assert misplaced(str(tmp_path / "missing")) == ""
    assert misplaced(str(tmp_path)) == (
        f"{tmp_path} has no model directory: expected {tmp_path}/<model>/<version>/model.onnx"
    )
    (tmp_path / "net.onnx").write_text("")
    assert misplaced(str(tmp_path)).startswith(f"{tmp_path} has no model directory (net.onnx directly in it): ")
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_text("")
    assert misplaced(str(tmp_path)) == ""
    assert misplaced(str(tmp_path / "m")) == (
        f"{tmp_path}/m is a model's own directory, not a model repository: give the directory above it, {tmp_path}"
    )


def test_a_repository_of_models_with_numbers_for_names_is_one(tmp_path):
    (tmp_path / "7" / "1").mkdir(parents=True)
    (tmp_path / "7" / "1" / "model.onnx").write_text("")
    assert misplaced(str(tmp_path)) == ""


def test_repositories_that_cannot_be_read_are_named_once(tmp_path):
    missing = str(tmp_path / "missing")
    assert unreadable([str(tmp_path), missing, missing]) == [
        f"failed to read model repository '{missing}': No such file or directory"
    ]
