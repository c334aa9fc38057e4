"""Control mode explicit in a real broker: loads with configuration and files on every transport, reloads under load."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway, url_of

TRANSPORTS = ("native", "http", "grpc", "zmq")
RELOADS = 12
X = np.ones((1, 4), np.float32)
SLOW = """
import os, time
ENOUGH = os.path.join(os.path.dirname(__file__), "..", "..", "enough-of-slow")

def load(context):
    until = time.monotonic() + 30
    while not os.path.exists(ENOUGH) and time.monotonic() < until:
        time.sleep(0.01)
    raise ValueError("never")
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    models.write_repository(root, {"add1": models.add1(), "steady": models.add1()})
    tensors = 'input {name: "x" data_type: TYPE_FP32 dims: -1} output {name: "y" data_type: TYPE_FP32 dims: -1}'
    group = 'parameters { key: "worker_group" value { string_value: "default" } }'  # that of the others
    slow = models.write_model(root, "slow", models.add1(), config=f"max_batch_size: 4 {tensors} {group}")
    (slow / "backend.py").write_text(SLOW)
    return root


@pytest.fixture(scope="module")
def shared_broker(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    flags = ("--model-control-mode=explicit", "--load-model=steady")
    with Gateway(repository, tmp_path_factory.mktemp("run"), *flags) as broker:
        broker.ready()
        for transport in TRANSPORTS:  # a gateway keeps the channel that its first request opens
            with clientlib.connect(url_of(broker, transport)) as client:
                client.infer("steady", {"x": X})
        yield broker


@pytest.fixture
def broker(shared_broker: Gateway) -> Iterator[Gateway]:
    """Afterwards: descriptors as before, no files of an override."""
    before = shared_broker.descriptors()
    yield shared_broker
    with clientlib.connect(f"ipc://{shared_broker.directory}") as client:
        for name in ("add1", "made", "slow"):
            client.unload(name)
    eventually(lambda: shared_broker.descriptors() <= before, "descriptors are back")
    eventually(lambda: overrides(shared_broker) == [], "overrides are gone")


def overrides(broker: Gateway) -> list[str]:
    directory = broker.directory / "overrides"
    return sorted(os.listdir(directory)) if directory.exists() else []


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(InferError) as raised:
        call(*arguments, **options)
    return raised.value.message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_configuration_and_files_that_come_with_a_load(broker, transport):
    with clientlib.connect(url_of(broker, transport)) as client:
        client.load("add1", config={"max_batch_size": 2})
        assert client.model("add1").metadata.max_batch_size == 2
        # The files are the whole model, and as large as a session's datagram is not.
        weights = np.eye(256, dtype=np.float32)
        model = models.build(
            [models.helper.make_node("MatMul", ["x", "w"], ["y"])],
            [models.tensor("x", ["batch", 256])],
            [models.tensor("y", ["batch", 256])],
            {"w": weights},
        )
        files = {"3/model.onnx": model.SerializeToString(), "file:config.pbtxt": b"is not looked at"}
        client.load("made", config=json.dumps({"max_batch_size": 8}), files=files)
        x = np.arange(256, dtype=np.float32)[None]
        assert np.array_equal(client.infer("made", {"x": x})["y"], x)
        (directory,) = overrides(broker)
        mode = (broker.directory / "overrides" / directory).stat().st_mode & 0o777
        assert mode == 0o700
        # Another set replaces it, a broken one does not.
        client.load("made", config={"max_batch_size": 16}, files=files)
        eventually(lambda: len(overrides(broker)) == 1, "the first one is gone")
        text = refusal(client.load, "made", config={}, files={"1/model.onnx": b"no model"})
        assert text.startswith("load failed for model 'made': version 1 is at UNAVAILABLE state: ")
        eventually(lambda: len(overrides(broker)) == 1, "that of the broken one is gone")
        assert np.array_equal(client.infer("made", {"x": x})["y"], x)
        client.load("add1")
        assert client.infer("add1", {"x": X})["y"][0, 0] == 2
        client.unload("made")
        eventually(lambda: overrides(broker) == [])
        text = refusal(client.load, "made")
        assert text.startswith("failed to load 'made', failed to poll from model repository: there is no directory ")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_code_that_comes_with_a_load_is_run_for_the_brokers_own_user_only(broker, transport, tmp_path):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef load(context):\n    raise ValueError('it ran')\n".encode()
    config = {
        "backend": "made",
        "parameters": {"worker_group": {"string_value": "default"}},  # that of the others
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    with clientlib.connect(url_of(broker, transport)) as client:
        text = refusal(client.load, "made", config=config, files={"backend.py": code, "1/data": b""})
    native = transport == "native"
    assert (tmp_path / "ran").exists() is native
    assert ("it ran" if native else "--allow-code-overrides=true") in text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_of_a_load_that_are_refused(broker, transport, tmp_path):
    with clientlib.connect(url_of(broker, transport)) as client:
        text = refusal(client.load, "add1", files={"1/model.onnx": b""})
        assert text == "Load parameter 'config' must be specified for model file override"
        text = refusal(client.load, "add1", config="{")
        polled = "failed to load 'add1', failed to poll from model repository: "
        assert text.startswith(f"{polled}Invalid config override: ")
        for path in ("../x", "a/../../x", str(tmp_path / "x"), "."):
            text = refusal(client.load, "add1", config={"backend": "identity"}, files={path: b"x"})
            where = f"'file:{path}' with normalized path '{os.path.normpath(path)}'"
            assert text == f"{polled}Invalid file parameter {where} must stay within model directory."
        assert not (tmp_path / "x").exists()
        text = refusal(client.load, "add1", config={}, files={"1": b"", "1/model.onnx": b""})
        assert text.startswith(f"{polled}its files cannot be written to ")
        text = refusal(client.load, "add1", config={}, files={"x" * 300: b""})
        assert text.startswith(f"{polled}its files cannot be written to ")
        assert overrides(broker) == []


def test_tritons_own_clients_override(broker):
    model = models.matmul().SerializeToString()
    http = triton_http.InferenceServerClient(f"127.0.0.1:{broker.ports['http']}")
    grpc = triton_grpc.InferenceServerClient(f"127.0.0.1:{broker.ports['grpc']}")
    with pytest.raises(InferenceServerException, match="is empty"):
        http.load_model("made", config="{}", files={"file:1/model.onnx": b""})
    (row,) = (row for row in http.get_model_repository_index() if (row["name"], row.get("version")) == ("made", "1"))
    assert row["reason"] == "made/1/model.onnx: is empty (0 bytes)"
    for client in (http, grpc):
        client.load_model("made", config='{"max_batch_size": 3}', files={"file:1/model.onnx": model})
        assert client.is_model_ready("made")
        with pytest.raises(InferenceServerException, match="Load parameter 'config' must be specified"):
            client.load_model("made", files={"file:1/model.onnx": model})
        client.unload_model("made", unload_dependents=True)
        assert not client.is_model_ready("made")
        client.load_model("add1", config='{"max_batch_size": 5}')
        client.load_model("add1")
        client.unload_model("never heard of")
    assert {row["name"]: row.get("reason", "") for row in http.get_model_repository_index()}["made"] == "unloaded"
    http.close()
    grpc.close()


@pytest.mark.parametrize("transport", ["native", "grpc"])
def test_reloads_under_load_fail_no_request(broker, transport):
    problems: list[BaseException] = []
    counts = [0] * 4
    stop = threading.Event()

    def ask(index: int) -> None:
        try:
            with clientlib.connect(url_of(broker, transport)) as client:
                while not stop.is_set():
                    assert np.array_equal(client.infer("add1", {"x": X})["y"], X + 1)
                    counts[index] += 1
        except BaseException as error:
            problems.append(error)

    with clientlib.connect(f"ipc://{broker.directory}") as control:
        control.load("add1")
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(counts))]
        for thread in threads:
            thread.start()
        eventually(lambda: problems or all(counts), "requests run")
        for number in range(RELOADS):
            before = list(counts)
            control.load("add1", **({"config": {"max_batch_size": 4 + number}} if number % 2 else {}))
            eventually(lambda: problems or all(map(int.__gt__, counts, before)), "they run on")  # noqa: B023
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not problems, problems[0]


def test_counters_go_on_over_a_reload_and_begin_anew_after_an_unload(broker):
    def successes() -> int:
        (row,) = client.statistics("made")
        count: int = row["inference_stats"]["success"]["count"]
        return count

    files = {"1/model.onnx": models.add1().SerializeToString()}
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        for _ in range(2):
            client.load("made", config={}, files=files)
            client.infer("made", {"x": X})
            eventually(lambda: successes() == 1)
            client.load("made", config={"max_batch_size": 2}, files=files)
            client.infer("made", {"x": X})
            eventually(lambda: successes() == 2)
            client.unload("made")


def test_loads_of_one_model_at_the_same_time_are_one(broker, repository):
    answers: list[str] = []
    connected = threading.Barrier(9)

    def load() -> None:
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            connected.wait(60)
            answers.append(refusal(client.load, "slow"))

    before = broker.log().count("loading: slow:1")
    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    connected.wait(60)
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        eventually(lambda: broker.log().count("loading: slow:1") > before)
        # Meanwhile another one is loaded, and a third one answers.
        client.load("add1")
        for _ in range(200):
            client.infer("steady", {"x": X})
        assert not answers, "the slow load still runs"
    (repository.parent / "enough-of-slow").touch()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 8
    assert set(answers) == {answers[0]}
    assert "never" in answers[0]
    assert broker.log().count("loading: slow:1") - before <= 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_unloaded_model_is_unknown_whatever_asks_for_it_and_comes_back(broker, transport):
    with clientlib.connect(url_of(broker, transport)) as client:
        client.load("add1")
        region = client.create_region(f"of.{transport}", X.nbytes)
        array = region.array((1, 4), np.float32)
        array[:] = X

        def tensor() -> Any:
            return region.tensor((1, 4), np.float32)

        plan = client.prepare("add1", {"x": tensor()})
        asks = (
            plan.infer,
            lambda: next(plan.stream()),
            lambda: client.infer("add1", {"x": X}),
            lambda: next(client.stream("add1", {"x": X})),
            lambda: client.prepare("add1", {"x": tensor()}),
            lambda: client.model("add1"),
        )
        for ask in asks:
            ask()
        for _ in range(2):
            client.unload("add1")
            for ask in (*asks, plan.infer):
                with pytest.raises(InferError) as raised:
                    ask()
                assert raised.value.code == "NOT_FOUND", raised.value
                assert raised.value.message.startswith("Request for unknown model: 'add1' has no available versions")
                assert "client.load('add1') loads it" in raised.value.message
            client.load("add1")
            for ask in asks:
                ask()
