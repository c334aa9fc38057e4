"""The loader as a process of its own: stdout carries nothing but the protocol, and its death costs one model."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from broker.repository.check import LOADER_COMMAND, check, describe_exit
from broker.repository.config import LoadFailure, ModelConfig
from broker.repository.protocol import LoadRequest, LoadRun, encode_request
from shm.errors import InferError
from tests.fakes import models

TIMEOUT = 60


def loader(request: bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        LOADER_COMMAND,
        input=request,
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
        env=os.environ | environment,
    )


def test_check_answers_for_every_model(tmp_path):
    root = models.write_samples(tmp_path / "root")
    models.write_model(root, "broken", b"not a model")
    (root / "bad name").mkdir()
    missing = str(tmp_path / "missing")
    results = {result.name: result for result in check([str(root), missing])}
    failed = {name for name, result in results.items() if isinstance(result, LoadFailure)}
    assert failed == {"broken", "bad name", missing}
    assert results["add1"].input[0].zero_copy
    assert not results["topk"].input[0].zero_copy
    assert list(results) == sorted(results)


def test_what_it_finds_goes_to_its_reader_alone(tmp_path):
    models.write_model(tmp_path, "broken", b"")
    models.write_model(tmp_path, "good", models.add1())
    done = loader(encode_request(LoadRequest(repositories=(str(tmp_path),))))
    assert done.returncode == 0
    run = LoadRun()
    run.feed(done.stdout)
    assert run.finished
    assert isinstance(run.results["good"], ModelConfig)
    assert run.results["good"].notes[0].startswith("max_batch_size is not set")
    assert run.results["broken"].reason
    assert done.stderr == b""


def test_what_a_library_prints_does_not_reach_the_stream(tmp_path):
    # A module that Python imports at start, in place of a library that writes to descriptor 1 during the load.
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.write, 1, b'noise')\n")
    models.write_model(tmp_path / "root", "m", models.add1())
    request = encode_request(LoadRequest(repositories=(str(tmp_path / "root"),)))
    done = loader(request, PYTHONPATH=str(tmp_path))
    assert b"noise" in done.stderr
    assert b"noise" not in done.stdout


def test_only_the_models_that_were_asked_for(tmp_path):
    models.write_repository(tmp_path, {"a": models.add1(), "b": models.add1()})
    done = loader(encode_request(LoadRequest(repositories=(str(tmp_path),), models=("b", "../a"))))
    run = LoadRun()
    run.feed(done.stdout)
    assert run.plan.models == ("b", "../a")
    assert isinstance(run.results["b"], ModelConfig)
    assert run.results["../a"].reason == (
        f"failed to load '../a', failed to poll from model repository: there is no directory {tmp_path}/../a"
    )


def test_a_request_that_cannot_be_read():
    done = loader(b"\xc1")
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"load request cannot be read" in done.stderr


def test_a_loader_that_is_killed_costs_the_model_it_was_reading(tmp_path):
    # Its answer about `b` is larger than the pipe, so that it cannot be past `b` when it is killed.
    inputs = [models.tensor(f"input_{index}", ["batch", 4]) for index in range(100)]
    wide = models.build([], inputs, [models.tensor("input_0", ["batch", 4])])
    models.write_repository(tmp_path, {"a": models.add1(), "b": wide, "c": models.add1()})
    process = subprocess.Popen(LOADER_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    run = LoadRun()
    try:
        fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        process.stdin.write(encode_request(LoadRequest(repositories=(str(tmp_path),))))
        process.stdin.close()
        while run.current != "b":
            data = os.read(process.stdout.fileno(), 64)
            assert data, "the loader ended early"
            run.feed(data)
    finally:
        process.kill()
        process.stdout.close()
        process.wait(TIMEOUT)
    assert run.ended(describe_exit(process.returncode)) == ("c",)
    assert isinstance(run.results["a"], ModelConfig)
    assert run.results["b"].reason == "the loader process was killed by SIGKILL while it read this model's files"


PEER = """
import os, signal, sys, msgpack

def say(**message):
    body = msgpack.packb(message)
    os.write(1, len(body).to_bytes(4, "little") + body)

names = msgpack.unpackb(sys.stdin.buffer.read())["models"]
say(type="Plan", models=names)
for name in names:
    say(type="Begun", name=name)
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "garbage":
        os.write(1, b"Traceback (most recent call last)")
    if name in ("garbage", "hang"):
        signal.pause()
    if name == "exit":
        sys.exit(3)
    say(type="Failed", failure={"name": name, "reason": "answered"})
say(type="Finished")
"""


def test_check_goes_on_after_every_kind_of_death():
    assert reasons("a", "crash", "garbage", "exit", "z", silence_s=60) == {
        "a": "answered",
        "crash": "the loader process was killed by SIGSEGV",
        "exit": "the loader process exited with status 3",
        "garbage": "the loader process failed: the loader announced a message of 1667330644 bytes",
        "z": "answered",
    }


def test_check_goes_on_after_a_loader_that_says_nothing():
    for silence_s in (0.5, 4.0, 30.0):  # on a busy machine others, too, may say nothing for the first
        try:
            found = reasons("hang", "z", silence_s=silence_s)
        except InferError:
            continue
        assert found["hang"] == f"the loader process wrote nothing for {silence_s:g} s"
        if found["z"] == "answered":
            return
    pytest.fail("every loader was taken for a silent one")


def reasons(*names: str, silence_s: float) -> dict[str, str]:
    results = check(["/"], models=names, command=(sys.executable, "-c", PEER), silence_s=silence_s)
    return {result.name: result.reason.removesuffix(" while it read this model's files") for result in results}


def test_a_loader_that_cannot_start_is_an_error():
    with pytest.raises(InferError, match="exited with status 5 before it had listed the models"):
        check(["/"], command=(sys.executable, "-c", "import sys; sys.exit(5)"))


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-200, "was killed by signal 200"),
    ],
)
def test_how_a_process_ended(status, text):
    assert describe_exit(status) == text
