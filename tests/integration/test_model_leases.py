"""Leases keep models loaded in a real broker, and --model-memory-limit lets the least recently used go for others."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clientlib
from clientlib import Client
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import Broker, HandClient, eventually
from tests.fakes.gateways import Gateway, url_of
from tests.fakes.lone_worker import WAIT, Gate
from tests.integration.test_principals import CONFIG

SIDE = 1500
MODEL_BYTES = SIDE * SIDE * 4  # 9 MB
LIMIT = 4 * MODEL_BYTES - MODEL_BYTES // 2  # three of them and the small ones
X = np.ones((1, SIDE), np.float32)
ENSEMBLE = """platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: [1, SIDE] }
output { name: "y" data_type: TYPE_FP32 dims: [1, SIDE] }
ensemble_scheduling {
  step { model_name: "a" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } }
  step { model_name: "b" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "y" value: "y" } }
}
""".replace("SIDE", str(SIDE))


# y = x, with memory that grows by just what is said: a runtime's allocator may keep a second copy of a model.
HOLDS = f"""import numpy as np


def load(context):
    return Holds()


class Holds:
    def __init__(self):
        self.memory = np.ones({MODEL_BYTES}, np.uint8)

    def bind(self, inputs, outputs):
        return Run(inputs[0], outputs[0])

    def close(self):
        self.memory = None


class Run:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def run(self):
        if self.y.memory is not None:
            self.y.memory[:] = self.x.memory

    def results(self):
        return [] if self.y.memory is not None else [self.x.memory.view(np.float32).reshape(self.x.shape).copy()]
"""
LARGE = f"""backend: "holds"
input {{ name: "x" data_type: TYPE_FP32 dims: [1, {SIDE}] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [1, {SIDE}] }}
"""


def write_large(root: Path, name: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(LARGE)
    (root / name / "backend.py").write_text(HOLDS)
    (root / name / "1" / "weights").write_bytes(bytes(MODEL_BYTES))  # what it is taken to need before its first load


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name in "abcd":
        write_large(root, name)
    models.write_model(root, "small", models.add1())
    (root / "both" / "1").mkdir(parents=True)
    (root / "both" / "config.pbtxt").write_text(ENSEMBLE)
    return root


@pytest.fixture(scope="module")
def shared_broker(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    flags = ("--model-control-mode=explicit", "--load-model=small", f"--model-memory-limit={LIMIT}")
    with Gateway(repository, tmp_path_factory.mktemp("run"), *flags) as broker:
        yield broker.ready()


@pytest.fixture
def broker(shared_broker: Gateway) -> Iterator[Gateway]:
    yield shared_broker
    with connect(shared_broker) as client:
        for name in (*"abcd", "both"):
            client.unload(name)


@pytest.fixture
def client(broker: Gateway) -> Iterator[Client]:
    with connect(broker) as client:
        yield client


def connect(broker: Broker) -> Client:
    return clientlib.connect(f"ipc://{broker.directory}")


def refusal(call: Any, *arguments: Any, **options: Any) -> InferError:
    with pytest.raises(InferError) as raised:
        call(*arguments, **options)
    return raised.value


def ready(client: Client) -> list[str]:
    return sorted(name for name, model in client.models().items() if model.state == "READY" and name != "small")


def status(broker: Broker) -> dict[str, Any]:
    with contextlib.closing(HandClient(broker.path)) as hand:
        hand.ask("Hello", protocol=1)
        found: dict[str, Any] = hand.ask("GetStatus")["status"]
        return found


def leases(broker: Broker, name: str) -> int:
    return next((model["leases"] for model in status(broker)["models"] if model["name"] == name), 0)


# --- leases ---------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_and_nobody_unloads_it(broker: Gateway, client: Client) -> None:
    assert ready(client) == []
    with client.keep_loaded("a") as a, connect(broker) as other:
        assert np.array_equal(a({"x": X})["y"], X)
        with other.keep_loaded("a", version=1):
            error = refusal(other.unload, "a")
            assert error.code == "UNAVAILABLE"
            assert error.message.startswith("failed to unload 'a', 2 leases of 2 sessions keep it loaded: ")
            assert leases(broker, "a") == 2
        assert "1 lease of 1 session keeps it" in refusal(client.unload, "a").message  # whoever asks
        assert "1 lease" in broker.post("/v2/repository/models/a/unload", {})[1]["error"]
        other.load("a")  # a reload takes nothing away
        assert ready(client) == ["a"]
    client.unload("a")
    assert ready(client) == []


def test_an_ensembles_lease_is_its_members_too(client: Client) -> None:
    with client.keep_loaded("both") as both:
        assert np.array_equal(both({"x": X})["y"], X)
        assert "(through 'both')" in refusal(client.unload, "b").message
        assert ready(client) == ["a", "b", "both"]
        with client.keep_loaded("b"):
            pass
    with client.keep_loaded("b"):
        client.unload("both", unload_dependents=True)
        assert ready(client) == ["b"]


def test_what_cannot_be_kept_says_so_and_holds_nothing(broker: Gateway, client: Client) -> None:
    with pytest.raises(InferError, match="failed to poll from model repository"), client.keep_loaded("nothing"):
        pass
    with pytest.raises(InferError, match="version 7 is not found"), client.keep_loaded("a", 7):
        pass
    client.unload("a")
    for transport in ("http", "grpc", "zmq"):
        with clientlib.connect(url_of(broker, transport)) as remote:
            assert refusal(remote.keep_loaded, "a").code == "UNSUPPORTED"


def test_a_reload_takes_no_version_that_is_kept(client: Client) -> None:
    files = {"2/model.onnx": models.add1().SerializeToString()}
    with client.keep_loaded("a", 1):
        error = refusal(client.load, "a", config={}, files=files)
        assert "version 1 would be unloaded, and 1 lease on it" in error.message
        assert ready(client) == ["a"]


def test_leases_on_an_event_loop(broker: Gateway) -> None:
    asyncio.run(keep_on_a_loop(broker))


async def keep_on_a_loop(broker: Gateway) -> None:
    async with await clientlib.connect_async(f"ipc://{broker.directory}") as client:
        async with client.keep_loaded("a") as a:
            assert np.array_equal((await a({"x": X}))["y"], X)
            with pytest.raises(InferError, match="1 lease of 1 session keeps it"):
                await client.unload("a")
        await client.unload("a")


def test_loads_and_leases_at_the_same_time_are_one_load(broker: Gateway) -> None:
    before, held, problems = broker.log().count("loading: c:1"), threading.Barrier(6), list[BaseException]()

    def keep() -> None:
        try:
            with connect(broker) as client, client.keep_loaded("c"):
                held.wait(30)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=keep) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems, problems[0]
    assert broker.log().count("loading: c:1") - before <= 2


HOLD = """
import sys, clientlib
with clientlib.connect(sys.argv[1]).keep_loaded("a"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lease_ends_with_its_process(broker: Gateway, client: Client) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, f"ipc://{broker.directory}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert "1 lease" in refusal(client.unload, "a").message
        process.kill()
    eventually(lambda: leases(broker, "a") == 0)
    client.unload("a")


def test_a_lease_is_taken_again_from_the_next_broker(repository: Path, tmp_path: Path) -> None:
    flags = ("--model-control-mode=explicit",)
    with contextlib.ExitStack() as stack:
        with Broker(repository, tmp_path / "run", *flags) as first:
            client = stack.enter_context(connect(first.ready()))
            a = stack.enter_context(client.keep_loaded("a"))
            assert np.array_equal(a({"x": X})["y"], X)
        with Broker(repository, tmp_path / "run", *flags) as second:
            second.ready()
            assert client.models()["a"].state == "READY"  # what was in flight then fails, which is not asked here
            assert np.array_equal(a({"x": X})["y"], X)
            with connect(second) as other:
                assert "1 lease of 1 session" in refusal(other.unload, "a").message
            stack.close()


def test_in_other_control_modes_it_only_keeps(repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    models.write_model(root, "m", models.add1())
    with Broker(root, tmp_path / "run") as broker, connect(broker.ready()) as client:
        with client.keep_loaded("m") as m:
            assert np.array_equal(m({"x": np.ones((1, 4), np.float32)})["y"], np.full((1, 4), 2, np.float32))
            assert leases(broker, "m") == 1
        models.write_model(root, "late", models.add1())
        with pytest.raises(InferError, match="unknown model: 'late'"), client.keep_loaded("late"):
            pass


# --- the budget -----------------------------------------------------------------------------------------------------


def use(client: Client, name: str) -> None:
    """One request, until it is counted: the worker says when a model was last used when it comes to a pause."""

    def counted() -> int:
        (row,) = client.statistics(name)
        count: int = row["inference_count"]
        return count

    before = counted()
    client.infer(name, {"x": X})
    eventually(lambda: counted() > before, "it is counted")
    time.sleep(0.002)  # LAST_MS is in milliseconds


def test_the_least_recently_used_goes(broker: Gateway, client: Client) -> None:
    for name in "abc":
        client.load(name)
    for name in "bca":
        use(client, name)
    client.load("d")
    assert ready(client) == ["a", "c", "d"]
    assert "'d' needed its memory (--model-memory-limit)" in refusal(client.model, "b").message
    found = status(broker)
    rows = {model["name"]: model for model in found["models"] if model["state"] == "READY"}
    assert found["quotas"]["model_memory_limit"] == LIMIT
    for name in "acd":
        assert MODEL_BYTES * 0.9 < rows[name]["memory_bytes"] < MODEL_BYTES * 1.5


def test_what_is_kept_or_was_loaded_at_start_stays_and_the_refusal_says_who(broker: Gateway, client: Client) -> None:
    with client.keep_loaded("a"), client.keep_loaded("both"):
        client.load("c")
        with client.keep_loaded("c"):
            error = refusal(client.load, "d")
    message = error.message
    assert f"of the {LIMIT} of --model-memory-limit" in message
    for part in ("'a' ", "(1 lease)", "(member of 'both')", "'small' ", "(not loaded on demand)"):
        assert part in message
    assert ready(client) == ["a", "b", "both", "c"]  # nothing went in vain
    client.load("d")
    assert "d" in ready(client)
    assert client.models()["small"].state == "READY"


def test_what_takes_more_than_its_files_does_not_exceed_the_limit_either(
    broker: Gateway, client: Client, repository: Path
) -> None:
    hungry = repository / "hungry"
    write_large(repository, "hungry")
    (hungry / "1" / "weights").write_bytes(b"")
    try:
        for name in "abc":
            client.load(name)
        use(client, "a")
        client.load("hungry")  # its files fit beside the others
        assert ready(client) in (["a", "b", "hungry"], ["a", "c", "hungry"])
        client.unload("hungry")
        (hungry / "1" / "weights").write_bytes(b"more")  # other files: nothing is known of it
        code = (hungry / "backend.py").read_text().replace(f"np.ones({MODEL_BYTES}", f"np.ones({2 * MODEL_BYTES}")
        (hungry / "backend.py").write_text(code)
        with client.keep_loaded("a"), client.keep_loaded("b"), client.keep_loaded("c"):
            message = refusal(client.load, "hungry").message
            assert ready(client) == ["a", "b", "c"]  # nothing went in vain
        taken = re.search(rf"it takes (\d+) bytes, and of the {LIMIT} of --model-memory-limit \d+ are used", message)
        assert taken is not None
        assert int(taken[1]) > 2 * MODEL_BYTES * 0.9
        rows = {model["name"]: model for model in status(broker)["models"]}
        assert rows["hungry"]["state"] == "UNAVAILABLE"
    finally:
        client.unload("hungry")
        shutil.rmtree(hungry)


def test_an_ensemble_goes_before_its_members_and_is_refused_if_they_do_not_fit(client: Client) -> None:
    client.load("both")
    client.load("c")
    with client.keep_loaded("c"), client.keep_loaded("d"):
        assert ready(client) in (["a", "c", "d"], ["b", "c", "d"])
        assert "both" in refusal(client.load, "both").message
        assert ready(client) in (["a", "c", "d"], ["b", "c", "d"])


def test_what_runs_stays(tmp_path: Path) -> None:
    root, x = tmp_path / "repository", np.full((1, 4), WAIT, np.float32)
    write_large(root, "a")
    with contextlib.ExitStack() as stack:
        gate = stack.enter_context(contextlib.closing(Gate(root / "gate")))
        (gate.directory / "config.pbtxt").write_text(CONFIG.format(gate.directory))
        (gate.directory / "1" / "weights").write_bytes(bytes(MODEL_BYTES // 2))
        limit = MODEL_BYTES + MODEL_BYTES // 3  # either of them, and what a worker needs beside a model
        flags = ("--model-control-mode=explicit", f"--model-memory-limit={limit}")
        broker = stack.enter_context(Broker(root, tmp_path / "run", *flags)).ready()
        client = stack.enter_context(connect(broker))
        client.load("gate")
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(client.infer("gate", {"x": x})["y"]))
        asking.start()
        gate.entered()
        assert "'gate' " in (message := refusal(client.load, "a").message)
        assert "(requests wait or run)" in message
        assert ready(client) == ["gate"]
        gate.let()
        asking.join(30)
        assert np.array_equal(answers[0], x + 1)
        eventually(lambda: status(broker)["workers"][0]["in_flight"] == 0, "it has ended in the worker, too")
        client.load("a")
        assert ready(client) == ["a"]
