"""What a newcomer does wrong first: the answers say what is wrong, and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import LIMIT_S, Broker, command

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("flags", [(), ("--model-control-mode=explicit",)])
@pytest.mark.parametrize(("name", "reason"), [("nonexist", "No such file or directory"), ("file", "Not a directory")])
def test_a_repository_that_is_no_directory_is_refused(tmp_path, name, reason, flags):
    (tmp_path / "file").write_text("")
    path = tmp_path / name
    with Broker(path, tmp_path / "run", *flags) as broker:
        assert broker.process.wait(LIMIT_S) == 1
        text = f"error: creating server: Internal - failed to read model repository '{path}': {reason}"
        assert broker.log().count(text) == 1


def test_it_is_served_without_if_that_is_wanted(tmp_path):
    with Broker(tmp_path / "nonexist", tmp_path / "run", "--exit-on-error=false") as broker:
        broker.ready()
        assert broker.log().count("failed to read model repository") == 1


def test_check_says_what_a_directory_without_models_is(tmp_path):
    empty = command("check", str(tmp_path))
    assert (empty.returncode, empty.stderr) == (1, "")
    assert f"{tmp_path} has no model directory: expected {tmp_path}/<model>/<version>/model.onnx" in empty.stdout
    models.write_model(tmp_path, "m", models.add1())
    inside = command("check", str(tmp_path / "m"))
    assert inside.returncode == 1
    assert f"give the directory above it, {tmp_path}" in inside.stdout
    loose = command("check", str(tmp_path / "m" / "1"))
    assert loose.returncode == 1
    assert "(model.onnx directly in it)" in loose.stdout


def test_what_is_wrong_with_a_model_is_said_once_and_notes_are_its_own(tmp_path):
    models.write_repository(tmp_path, {"add1": models.add1(), "other": models.add1()})
    models.write_model(tmp_path, "bad", models.add1(), config="max_batch_size: 4\nname: 'b\x1b[31mad'")
    checked = command("check", str(tmp_path))
    assert checked.stderr == ""
    assert checked.stdout.count("unexpected directory name") == 1
    assert checked.stdout.count("add1: max_batch_size is not set") == 1
    assert "\x1b" not in checked.stdout
    explained = command("explain", "add1", "--json", "--model-repository", str(tmp_path))
    assert (explained.returncode, explained.stderr) == (0, "")
    assert json.loads(explained.stdout)["notes"][0].startswith("max_batch_size is not set")
    unknown = command("explain", "x", "--model-repository", str(tmp_path))
    assert unknown.returncode == 1
    assert "no model 'x' in the repository; there are: add1, bad, other" in unknown.stderr
    with Broker(tmp_path, tmp_path.with_name("run")) as broker:
        assert broker.process.wait(LIMIT_S) == 1
        lines = broker.log().splitlines()
        assert sum("] \"failed to load 'bad': " in line for line in lines) == 1
        assert sum("unexpected directory name" in line for line in lines) == 2, "in the log and in the table"
        assert sum("model 'add1': max_batch_size is not set" in line for line in lines) == 1
        assert "failed to load all models (--exit-on-error=false serves" in broker.log()


def test_an_installation_for_clients_says_what_serving_needs(tmp_path, monkeypatch):
    # As if the packages were not there: Python runs this module at start, in every process.
    hidden = "import sys\nsys.modules.update(dict.fromkeys(['tritonclient', 'onnx']))\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    models.write_model(tmp_path / "repository", "add1", models.add1())
    needs = "the loader needs onnx and tritonclient: pip install 'tensorbroker[cpu]'"
    for arguments in (("check",), ("explain", "add1", "--model-repository")):
        done = command(*arguments, str(tmp_path / "repository"))
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{needs}\n")
    with Broker(tmp_path / "repository", tmp_path / "run") as broker:
        assert broker.process.wait(LIMIT_S) == 1
        assert f"error: creating server: Internal - {needs}" in broker.log()
        assert "Traceback" not in broker.log()


def test_a_shape_without_the_batch_dimension_nobody_asked_for_is_explained(tmp_path):
    models.write_model(tmp_path / "repository", "rank1", models.identity(dims=("N",)))
    with (
        Broker(tmp_path / "repository", tmp_path / "run") as broker,
        clientlib.connect(f"ipc://{broker.ready().directory}") as client,
        pytest.raises(InferError) as refusal,
    ):
        client.infer("rank1", {"x": np.zeros(3, np.float32)})
    assert refusal.value.message.startswith(
        "unexpected shape for input 'x' for model 'rank1'. Expected [-1,1], got [3]."
    )
    assert "max_batch_size was set to 4 by auto-completion" in refusal.value.message


def test_a_client_imports_and_needs_nothing_of_a_server():
    """Nor is a version of numpy too new: whoever has the client beside other packages can install both."""
    print_modules = "import sys, clientlib; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", print_modules], capture_output=True, text=True, check=True)
    heavy = (
        "aiohttp broker cuda google grpc ml_dtypes onnx onnxruntime prometheus_client tensorrt torch tritonclient zmq"
    )
    assert not set(done.stdout.split()) & {*heavy.split(), "zmq"}
    needed = [need for need in requires("tensorbroker") or () if "extra" not in need]
    assert sorted(need.partition(">=")[0] for need in needed) == ["msgspec", "numpy", "posix-ipc"]
    assert not any(sign in need for need in needed for sign in ("<", "==", "!=", "~="))
