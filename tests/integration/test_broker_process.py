"""The broker as an operator meets it: command line, start, end, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal

import msgpack
import pytest

from shm.errors import Code
from tests.fakes import models
from tests.fakes.broker import (
    LIMIT_S,
    Broker,
    Ending,
    HandClient,
    alive,
    command,
    descriptor,
    eventually,
    open_channel,
    pool,
    tensor,
)
from tests.fakes.processes import name_of

pytestmark = pytest.mark.timeout(180)


def test_a_second_broker_is_refused_and_the_first_serves_on(broker, repository):
    second = command("serve", "--model-repository", str(repository), "--directory", str(broker.directory))
    assert second.returncode == 1
    assert f"already running (pid {broker.pid})" in second.stderr
    assert broker.client().ask("ListRegions")["type"] == "Regions"


def test_sigterm_ends_it_with_status_0_and_says_goodbye(repository, tmp_path):
    with Broker(repository, tmp_path / "run") as broker:
        client = broker.ready().client()
        os.close(client.register("r"))
        family = broker.descendants()
        assert {"tb-worker", "tb-zygote"} <= {name_of(pid) for pid in family}
        broker.process.send_signal(signal.SIGTERM)
        goodbye = client.receive()
        assert (goodbye["type"], goodbye["reason"]) == ("Goodbye", "the broker is shutting down")
        assert client.receive() is None
        assert broker.process.wait(LIMIT_S) == 0
        assert os.listdir(broker.directory) == []
        assert not any(alive(pid) for pid in family)
        assert "Signal (15) received." in broker.log()


def test_nobody_need_read_what_it_prints(repository, tmp_path):
    with Broker(repository, tmp_path / "run") as broker:
        assert broker.process.stdout is not None
        broker.process.stdout.close()
        eventually(lambda: "Started session service" in broker.log())
        assert broker.client().ask("ListRegions")["type"] == "Regions"
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(LIMIT_S) == 0
        assert "Traceback" not in broker.log()


def test_sigterm_under_load_ends_every_request_once_and_loses_none_that_was_accepted(repository, tmp_path):
    with Broker(repository, tmp_path / "run") as broker:
        client = broker.ready().client()
        positions = 4096  # many more than slots: no two requests in flight share an output
        os.close(client.register("r", 64 + positions * 32))
        plan = client.ask(
            "Prepare",
            model="add1",
            inputs=[tensor("x", "r", (2, 4))],
            outputs=[tensor("y", "r", (2, 4), offset=64)],
            output_positions=positions,
        )
        word = plan["index"] | plan["generation"] << 32
        channel = open_channel(client)
        endings: list[Ending] = []
        asked = False  # once: a second signal ends it at once
        while broker.process.poll() is None and not channel.gone:
            if len(endings) == 200 and not asked:
                asked = True
                broker.process.send_signal(signal.SIGTERM)
            endings.append(Ending())
            if not channel.submit(endings[-1], word, 0, len(endings) % positions, 0, 0):
                endings.pop()
                channel.wait(0.01)
            channel.reap()
        assert broker.process.wait(LIMIT_S) == 0
        channel.reap()
        codes = [ending.entry[2] & 0xFFFFFFFF for ending in endings if ending.entry]
        refused = codes.index(Code.UNAVAILABLE) if Code.UNAVAILABLE in codes else len(codes)
        assert refused >= 200 - channel.slots
        assert set(codes[:refused]) == {Code.OK}
        assert set(codes[refused:]) <= {Code.UNAVAILABLE}  # submitted when nobody took requests any more
        assert all(b"Server is stopping" in ending.note for ending in endings if ending.note)
        assert channel.outstanding <= channel.slots
        channel.close()


def test_after_sigkill_the_next_one_takes_over(repository, tmp_path):
    with Broker(repository, tmp_path / "run") as broker:
        client = broker.ready().client()
        epoch = broker.status()["broker"]["epoch"]
        family = broker.descendants()
        broker.process.kill()
        assert client.receive() is None
        broker.process.wait()
        assert sorted(os.listdir(broker.directory)) == ["broker.lock", "broker.sock"]
        eventually(lambda: not any(alive(pid) for pid in family), "workers end with their broker")
        answer = command("status", "--directory", str(broker.directory))
        assert (answer.returncode, "no broker is running in" in answer.stderr) == (1, True)
    with Broker(repository, tmp_path / "run") as broker:
        assert broker.ready().status()["broker"]["epoch"] != epoch


SLOW = """backend: "own"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
LOADS_LATER = """
import os, time

def load(context):
    while not os.path.exists({mark!r}):
        time.sleep(0.01)
    return Model()

class Model:
    def bind(self, inputs, outputs): ...

    def close(self): ...
"""


def _connected(path: str) -> HandClient | None:
    """None: it does not listen yet."""
    try:
        return HandClient(path)
    except OSError:
        return None


def test_sigterm_while_it_loads(repository, tmp_path):
    with Broker(repository, tmp_path / "run") as broker:
        eventually(lambda: os.path.exists(broker.path))
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(LIMIT_S) == 0
        assert os.listdir(broker.directory) == []


def test_sessions_wait_for_the_start_up_load_and_are_told(tmp_path):
    repository, mark = tmp_path / "repository", tmp_path / "go on"
    (models.write_model(repository, "slow", config=SLOW) / "backend.py").write_text(LOADS_LATER.format(mark=str(mark)))
    with Broker(repository, tmp_path / "run") as broker:
        client = eventually(lambda: _connected(broker.path), "it listens")
        client.send_raw(msgpack.packb({"type": "Hello", "id": 5, "protocol": 1}))
        kinds = []
        while True:
            message = msgpack.unpackb(client.socket.recv(65536))
            kinds.append(message["type"])
            if message["type"] != "Starting":
                break
            mark.touch()
        client.close()
        assert message["type"] == "Welcome"
        assert message["id"] == 5
        assert kinds[0] == "Starting"
        broker.ready()


def test_a_broken_model_ends_it_or_is_shown(tmp_path):
    repository = models.write_repository(tmp_path / "repository", {"add1": models.add1()})
    broken = repository / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"not a model")
    (repository / "empty").mkdir()
    checked = command("check", str(repository))
    assert checked.returncode == 1
    assert "UNAVAILABLE" in checked.stdout
    with Broker(repository, tmp_path / "run") as broker:
        assert broker.process.wait(LIMIT_S) == 1
        assert "error: creating server: Internal - failed to load all models" in broker.log()
        assert "\"failed to load 'broken' version 1: /" in broker.log()
        assert "\"failed to load 'empty', no version" in broker.log()  # a reason that says it itself
    with Broker(repository, tmp_path / "run", "--exit-on-error=false") as broker:
        described = {model["name"]: model for model in broker.ready().status()["models"]}
        assert described["add1"]["state"] == "READY"
        assert described["broken"]["state"] == "UNAVAILABLE"
        assert described["broken"]["reason"]
        assert "| broken | 1       | UNAVAILABLE" in broker.log()
        assert "| empty  | -       | UNAVAILABLE" in broker.log()


def test_explicit_control_loads_and_unloads(repository, tmp_path):
    flags = ("--model-control-mode=explicit", "--load-model=add1")
    with Broker(repository, tmp_path / "run", *flags) as broker:
        client = broker.ready().client()
        assert [model["name"] for model in client.ask("GetModels")["models"]] == ["add1"]
        assert client.ask("LoadModel", model="two_input")["type"] == "Done"
        assert client.ask("GetModel", model="two_input")["models"][0]["state"] == "READY"
        assert client.ask("UnloadModel", model="two_input")["type"] == "Done"
        assert client.ask("GetModel", model="two_input")["code"] == "NOT_FOUND"
        assert "path traversal" in client.ask("LoadModel", model="../x")["message"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("serve",), "--model-repository must be specified"),
        (("serve", "--model-repository=/x", "--no-such-flag"), "Unexpected argument: --no-such-flag"),
        (("serve", "--model-repository=/x", "positional"), "Unexpected argument: positional"),
        (("serve", "--model-repository=/x", "--allow-http=maybe"), "invalid value for bool option: maybe"),
        (("fly",), "Unexpected argument: fly"),
        (("status", "--directory", "/nonexistent/run"), "no broker is running in /nonexistent/run"),
    ],
)
def test_refused_command_lines(arguments, text):
    answer = command(*arguments)
    assert answer.returncode == 1
    assert text in answer.stderr
    assert "Traceback" not in answer.stderr


def test_explain_shows_the_final_configuration(repository):
    answer = command("explain", "add1", "--json", "--model-repository", str(repository))
    document = json.loads(answer.stdout)
    assert document["config"]["name"] == "add1"
    assert document["inputs"]["x"]["zero_copy"] is True
    assert document["origins"]["input[x].dims"] == "model"
    text = command("explain", "add1", "--model-repository", str(repository)).stdout
    assert "# input x: zero-copy: " in text
    assert re.search(r'^backend: "onnxruntime" +# model$', text, re.MULTILINE)
    assert command("explain", "nope", "--model-repository", str(repository)).returncode == 1


def test_quota_is_refused_with_numbers(repository, tmp_path):
    with Broker(repository, tmp_path / "run", "--region-memory", "64K") as broker:
        client = broker.ready().client()
        os.close(client.register("a", 40960))
        fd = pool(40960)
        with descriptor(fd):
            failure = client.ask("RegisterPool", [fd], name="b", byte_size=40960)
            assert failure["code"] == "UNAVAILABLE"
            for number in ("asked 40960", "used 40960", "limit 65536"):
                assert number in failure["message"]
            client.ask("Unregister", name="a")
            assert client.ask("RegisterPool", [fd], name="b", byte_size=40960)["type"] == "RegionInfo"
