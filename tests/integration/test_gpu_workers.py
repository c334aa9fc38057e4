"""A real broker that sees GPUs: where instances run, what it says of them; simulated (see tests/fakes/cuda.py).

The models are of a backend of their own, which computes on the CPU wherever its worker is.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import Broker, eventually
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.lone_worker import Gate
from tests.fakes.processes import kill_new

pytestmark = pytest.mark.timeout(120)
MIRROR = """
def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs):
        return Binding(inputs[0].memory, outputs[0].memory)

    def close(self):
        pass

class Binding:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def run(self):
        self.y[:] = self.x

    def results(self):
        return []
"""
MODEL = """backend: "mirror" max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
MODELS = {
    "auto": "",
    "second": "instance_group [ { kind: KIND_GPU gpus: 1 } ]",
    "mixed": "instance_group [ { kind: KIND_GPU gpus: 0 count: 2 }, { kind: KIND_CPU } ]",
    "apart": 'instance_group [ { gpus: 1 } ] parameters { key: "worker_group" value { string_value: "own" } }',
    "third": "instance_group [ { kind: KIND_GPU gpus: [ 1, 2 ] } ]",
}


def serve(env: CudaEnv, tmp_path: Path, *more: str, backend: str = MIRROR, **texts: str) -> Broker:
    repository = tmp_path / "repository"
    for name, text in texts.items():
        models.write_model(repository, name, config=MODEL + text)
        (repository / name / "backend.py").write_text(backend)
    models.write_model(repository, "plain", models.identity(), config="max_batch_size: 4")
    (tmp_path / "run").mkdir()
    flags = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false", *more)
    return Broker(repository, tmp_path / "run", *flags, before=lambda: os.environ.update(env.environ))


def rows(broker: Broker, kind: str, key: str = "name") -> dict[str, dict[str, Any]]:
    return {row[key]: row for row in broker.status()[kind]}


@pytest.fixture(scope="module")
def broker(cuda_sim: CudaEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp("gpus")
    with serve(cuda_sim.with_settings(CUSIM_DEVICES=2), directory, "--cuda-peer-access=true", **MODELS) as broker:
        yield broker.ready()


def test_instances_run_in_the_workers_of_their_gpus(broker: Broker, cuda_sim: CudaEnv) -> None:
    status = broker.status()
    assert status["cuda"]["state"] == "ok"
    gpus = status["cuda"]["gpus"]
    assert [gpu["ordinal"] for gpu in gpus] == [0, 1]
    assert tuple(gpu["uuid"] for gpu in gpus) == cuda_sim.with_settings(CUSIM_DEVICES=2).devices()
    assert all("SIMULATED" in gpu["name"] for gpu in gpus)
    assert status["quotas"]["cuda_memory_per_uid"] == sum(gpu["total_memory"] for gpu in gpus) > 0
    served = {row["name"]: row["workers"] for row in status["models"] if row["state"] == "READY"}
    assert served == {
        "auto": ["gpu0/mirror", "gpu1/mirror"],
        "second": ["gpu1/mirror"],
        "mixed": ["gpu0/mirror", "cpu/mirror"],
        "plain": ["cpu/default"],
        "apart": ["gpu1/own"],
    }
    (failed,) = (row for row in status["models"] if row["state"] != "READY")
    assert "specifies invalid or unsupported gpu id 2. GPUs with at least" in failed["reason"]
    assert failed["reason"].partition("\n")[0].endswith("are: 0, 1: the broker sees 2 (CUDA_VISIBLE_DEVICES)")
    x = np.ones((1, 4), np.float32)
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        before = client.statistics("mixed")[0]["inference_stats"]["success"]["count"]
        for name in served.keys() - {"plain"}:
            for _ in range(8):
                assert (client.infer(name, {"INPUT0": x}, timeout=30)["OUTPUT0"] == x).all()
        eventually(lambda: client.statistics("mixed")[0]["inference_stats"]["success"]["count"] == before + 8)


def test_neither_broker_nor_zygote_loads_the_driver(broker: Broker) -> None:
    workers = {row["pid"]: row["key"] for row in broker.status()["workers"]}

    def loads_driver(pid: int) -> bool:
        return "libcuda" in Path(f"/proc/{pid}/maps").read_text()

    others = [broker.pid, *(pid for pid in broker.descendants() if pid not in workers)]
    assert len(others) >= 2
    assert not any(loads_driver(pid) for pid in others)


def test_a_worker_of_a_gpu_that_dies_comes_back_to_it(broker: Broker) -> None:
    worker = rows(broker, "workers", "key")["gpu1/mirror"]
    os.kill(worker["pid"], signal.SIGKILL)
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        x = np.ones((1, 4), np.float32)
        assert (client.infer("second", {"INPUT0": x}, timeout=30)["OUTPUT0"] == x).all()
    eventually(lambda: rows(broker, "workers", "key")["gpu1/mirror"]["state"] == "ready")
    assert rows(broker, "workers", "key")["gpu1/mirror"]["restarts"] == worker["restarts"] + 1


@pytest.mark.parametrize(
    ("settings", "state", "why"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "no device", "the driver sees no GPU; CUDA_VISIBLE_DEVICES is ''"),
        ({"CUSIM_DRIVER_VERSION": "11040"}, "version mismatch", "the driver is of CUDA 11.4, at least 12.0 is needed"),
    ],
)
def test_a_machine_without_a_usable_gpu_says_why(
    cuda_sim: CudaEnv, tmp_path: Path, settings: dict[str, str], state: str, why: str
) -> None:
    chosen = {"auto": "", "wants": "instance_group [ { kind: KIND_GPU } ]"}
    with serve(cuda_sim.with_settings(**settings), tmp_path, **chosen) as broker:
        status = broker.ready().status()
        assert status["cuda"]["state"] == state
        assert why in status["cuda"]["reason"]
        assert status["cuda"]["gpus"] == []
        assert f"CUDA is not available: {why}" in broker.log()
        found = {row["name"]: row for row in status["models"]}
        assert found["auto"]["workers"] == ["cpu/mirror"]
        text = "instance group wants_0 of model wants has kind KIND_GPU but no GPUs are available"
        assert f"{text}: CUDA is not available: {why}" in found["wants"]["reason"]
        with clientlib.connect(f"ipc://{broker.directory}") as client, pytest.raises(InferError, match="KIND_GPU"):
            client.load("wants")


TELLING = """
import os, time

def load(context):
    return Model(0.1 * (context.device == "%(slow)s"))

class Model:
    def __init__(self, takes_s):
        self.takes_s = takes_s

    def bind(self, inputs, outputs):
        return Binding(outputs[0].memory.view("<f4"), self.takes_s)

    def close(self):
        pass

class Binding:
    def __init__(self, y, takes_s):
        self.y, self.takes_s = y, takes_s

    def run(self):
        time.sleep(self.takes_s)
        self.y[:] = os.getpid()

    def results(self):
        return []
"""
HELD = """instance_group [ { kind: KIND_GPU gpus: 0 } ]
parameters { key: "worker_group" value { string_value: "mirror" } }
parameters { key: "gate" value { string_value: "%(gate)s" } }
parameters { key: "told" value { string_value: "%(told)s" } }
"""


def test_system_memory_goes_to_the_gpu_that_has_least_to_do(cuda_sim: CudaEnv, tmp_path: Path) -> None:
    """Another client's request holds one of them: nothing of this client's own tells of that, and it is the quicker."""
    env = cuda_sim.with_settings(CUSIM_DEVICES=2)
    gate = Gate(tmp_path / "repository" / "held")
    fifos = {name: gate.directory / name for name in ("gate", "told")}
    (gate.directory / "config.pbtxt").write_text(MODEL.replace("mirror", "gate") + HELD % fifos)
    with (
        contextlib.closing(gate),
        serve(env, tmp_path, backend=TELLING % {"slow": env.devices()[1]}, auto="") as broker,
        clientlib.connect(f"ipc://{broker.ready().directory}") as client,
        clientlib.connect(f"ipc://{broker.directory}") as other,
    ):
        keys = {row["pid"]: row["key"] for row in broker.status()["workers"]}
        x = np.ones((1, 4), np.float32)

        def used() -> set[str]:
            pids = {int(client.infer("auto", {"INPUT0": x}, timeout=30)["OUTPUT0"][0, 0]) for _ in range(3)}
            return {keys[pid] for pid in pids}

        with held_back(other) as plan:
            waiting = plan.submit()
            gate.entered()
            eventually(lambda: used() == {"gpu1/mirror"}, "the quick one is held up")
            gate.let()
            waiting.result(30)
        eventually(lambda: "gpu0/mirror" in used(), "it is free again")


def held_back(client: clientlib.Client) -> clientlib.Plan:
    """A request that the gate lets through when the test says so."""
    region = client.create_region("r", 4096)
    region.array((1, 4), np.float32)[:] = -1
    outputs = {"OUTPUT0": region.tensor((1, 4), "FP32", offset=64)}
    return client.prepare("held", {"INPUT0": region.tensor((1, 4), "FP32")}, outputs)


@pytest.fixture
def application(broker: Broker, cuda_sim: CudaEnv) -> Iterator[Child]:
    env = cuda_sim.with_settings(CUSIM_DEVICES=2)
    with Child(env, "tests.fakes.gpu_client:GpuClient", str(broker.directory)) as child:
        yield child


def test_plans_go_to_the_gpu_of_their_memory(application: Child) -> None:
    for gpu in (0, 1, 0):
        for value in (1.0, 2.0):
            answer = application.call("ask", "auto", gpu, value)
            assert answer == {"result": value, "worker": f"gpu{gpu}/mirror", "workers": []}
    assert application.call("ask", "mixed", 0, 3.0) == {"result": 3.0, "worker": "gpu0/mirror", "workers": []}
    assert application.call("ask", "mixed", 1, 4.0)["worker"] == "cpu/mirror", "which gets copies"
    there = {"result": 5.0, "worker": "gpu1/mirror", "workers": []}
    assert application.call("ask", "second", 0, 5.0) == there, "over the bus, which is allowed here"


@pytest.mark.parametrize("handle", [bytes(64), b"\xff" * 64, bytes(range(64))], ids=["zeros", "ones", "random"])
def test_what_cannot_be_opened_is_not_registered(application: Child, handle: bytes) -> None:
    with pytest.raises(InferError, match="failed to register shared memory region") as caught:
        application.call("register_nonsense", handle)
    assert caught.value.code == "INVALID_ARG"
    assert application.call("names") == ["0", "1"]
    assert application.call("ask", "auto", 0, 1.0)["result"] == 1.0


def test_one_user_registers_so_much_and_no_more(cuda_sim: CudaEnv, tmp_path: Path) -> None:
    with serve(cuda_sim, tmp_path, "--cuda-region-memory=100K", auto="") as broker:
        broker.ready()
        with Child(cuda_sim, "tests.fakes.gpu_client:GpuClient", str(broker.directory)) as child:
            assert child.call("ask", "auto", 0, 1.0)["result"] == 1.0
            with pytest.raises(InferError, match="--cuda-region-memory") as caught:
                child.call("alloc", "more", 64 << 10)
            assert caught.value.code == "UNAVAILABLE"
            child.call("unregister", "0")
            child.call("alloc", "more", 64 << 10)


def test_a_replacement_opens_clients_memory_again(broker: Broker, application: Child) -> None:
    assert application.call("ask", "second", 1, 1.0)["result"] == 1.0
    gone: set[int] = set()
    for value in (2.0, 3.0):
        kill_new(lambda: rows(broker, "workers", "key")["gpu1/mirror"]["pid"], gone)
        assert application.call("ask", "second", 1, value)["result"] == value
        eventually(lambda: rows(broker, "workers", "key")["gpu1/mirror"]["state"] == "ready")
