"""Applications with GPU memory and a real broker, all the way: simulated; not run on hardware.

TensorRT is a double (tests/doubles/tensorrt.py); the models on the CPU are built in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from shm.errors import InferError
from tests.doubles import tensorrt as double
from tests.fakes import models
from tests.fakes.broker import Broker, eventually
from tests.fakes.cuda import ROOT, CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.cuda_worker import BACKEND

pytestmark = pytest.mark.timeout(120)
IDENTITY = """backend: "identity" max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { kind: %s } ]
"""
ADDER = """backend: "tensorrt" default_model_filename: "model.plan" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_GPU gpus: 0 } ]
"""
PIPE = """platform: "ensemble" max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [
  { model_name: "on_cpu" model_version: -1
    input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "MID" } },
  { model_name: "add" model_version: -1
    input_map { key: "INPUT0" value: "MID" } input_map { key: "INPUT1" value: "IN" }
    output_map { key: "OUTPUT0" value: "OUT" } }
] }
"""
GPU_PIPE = """platform: "ensemble" max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [
  { model_name: "add" model_version: -1
    input_map { key: "INPUT0" value: "IN" } input_map { key: "INPUT1" value: "IN" }
    output_map { key: "OUTPUT0" value: "MID" } },
  { model_name: "add" model_version: -1
    input_map { key: "INPUT0" value: "MID" } input_map { key: "INPUT1" value: "IN" }
    output_map { key: "OUTPUT0" value: "OUT" } }
] }
"""
PROFILE = [[1, 4], [4, 4], [8, 4]]
PLAN = (
    [double.tensor(f"INPUT{at}", [-1, 4], profiles=[PROFILE]) for at in range(2)],
    [double.tensor("OUTPUT0", [-1, 4])],
)


@pytest.fixture(scope="module")
def broker(cuda_sim: CudaEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp("served")
    repository = directory / "repository"
    models.write_model(repository, "on_cpu", config=IDENTITY % "KIND_CPU")
    models.write_model(repository, "near", config=IDENTITY % "KIND_AUTO")
    for name, fault in (("add", ""), ("broken", "sticky")):
        models.write_model(repository, name, config=ADDER)
        (repository / name / "backend.py").write_text(BACKEND)
        (repository / name / "1" / "model.plan").write_bytes(double.plan("add", *PLAN, fault=fault))
    models.write_model(repository, "kept", config=IDENTITY % "KIND_CPU" + "response_cache { enable: true }")
    models.write_model(repository, "pipe", config=PIPE)
    models.write_model(repository, "gpu_pipe", config=GPU_PIPE)
    (directory / "run").mkdir()
    with Broker(
        repository,
        directory / "run",
        "--exit-on-error=false",
        "--cache-config=local,size=1048576",
        before=lambda: os.environ.update(cuda_sim.environ, PYTHONPATH=str(ROOT)),
    ) as running:
        yield running.ready()


@pytest.fixture
def user(broker: Broker, cuda_sim: CudaEnv) -> Iterator[Child]:
    with Child(cuda_sim, "tests.fakes.cuda_user:User", f"ipc://{broker.directory}") as child:
        yield child


def worker_of(broker: Broker, key: str) -> dict[str, object]:
    return next(row for row in broker.status()["workers"] if row["key"] == key)


DOUBLES = {"cuMemcpyDtoHAsync": 2, "cuMemcpyHtoDAsync": 1, "cuLaunchHostFunc": 1}  # what its `add` enqueues
DONE = {"cuEventRecord": 1, "cuEventSynchronize": 1}


def per_request(env: CudaEnv, pid: int, ask: Callable[[], object], times: int = 10) -> dict[str, float]:
    """How often worker `pid` calls each function of the driver for one request, once all of them are alike.

    Without cuCtxPushCurrent, which each of a worker's few threads calls once. What earlier clients had may be closed
    meanwhile, once: then it is looked at again.
    """
    for _ in range(3):
        ask()
    for _ in range(3):
        before = env.calls(pid)
        for _ in range(times):
            ask()
        now = env.calls(pid)
        pushed = now["cuCtxPushCurrent"] - before["cuCtxPushCurrent"]
        assert pushed <= THREADS, f"{pushed} times"
        grown = {name: (now[name] - before.get(name, 0)) / times for name in now.keys() - {"cuCtxPushCurrent"}}
        if all(calls.is_integer() for calls in grown.values()):
            break
    return {name: calls for name, calls in grown.items() if calls}


THREADS = 4
# What a request costs in calls of the driver: no open, no context, no allocation, and copies only where memory lies
# elsewhere than its model runs. The figures are the design's: a call more fails here.
CALLS: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "in place": ("add", "gpu", "gpu", DOUBLES | DONE),
    "in place, by handle": ("add", "legacy", "legacy", DOUBLES | DONE),
    "host to GPU": ("add", "host", "host", {**DOUBLES, "cuMemcpyHtoDAsync": 1 + 2, "cuMemcpyDtoHAsync": 2 + 1} | DONE),
    "GPU to host": ("on_cpu", "gpu", "gpu", {"cuMemcpyDtoHAsync": 1, "cuMemcpyHtoDAsync": 1}),
    "GPU to host, input alone": ("on_cpu", "gpu", "host", {"cuMemcpyDtoHAsync": 1}),
    "host alone": ("on_cpu", "host", "host", {}),
}


@pytest.mark.parametrize("way", CALLS)
def test_calls_of_the_driver_per_request(broker: Broker, user: Child, cuda_sim: CudaEnv, way: str) -> None:
    model, source, target, expected = CALLS[way]
    user.call("allocate", "in", source)
    if target != source:
        user.call("allocate", "out", target)
    names = ("INPUT0", "INPUT1") if model == "add" else ("INPUT0",)
    user.call("prepare", model, dict.fromkeys(names, "in"), {"OUTPUT0": "in" if target == source else "out"}, [1, 4])
    worker = "gpu0/tensorrt" if model == "add" else "cpu/default"
    values = dict.fromkeys(names, 3)
    pid: int = worker_of(broker, worker)["pid"]  # type: ignore[assignment]
    found = per_request(cuda_sim, pid, lambda: user.call("infer", values, "OUTPUT0"))
    if model == "on_cpu":  # each side is waited for: the input before the run, the output before the answer
        sides = sum(expected.values())
        expected = expected | {name: sides for name in DONE if sides}
    assert found == expected
    copied, *result = user.call("infer", values, "OUTPUT0")
    assert result == [3 * len(names)] * 4
    if way.startswith("in place"):
        assert copied == 0, "not a byte on the host"


@pytest.mark.parametrize("model", ["on_cpu", "near"])
def test_models_that_run_on_the_cpu_get_copies(user: Child, model: str) -> None:
    user.call("allocate", "g", "gpu")
    user.call("allocate", "h", "host")
    for region, out, copied in (("g", "g", 32), ("g", "h", 16), ("h", "g", 16), ("h", "h", 0)):
        user.call("prepare", model, {"INPUT0": region}, {"OUTPUT0": out}, [1, 4])
        # 32 by the model itself: what it reads is copied by policy, and its outputs are the runtime's.
        assert user.call("infer", {"INPUT0": 5}, "OUTPUT0") == [32 + copied, 5, 5, 5, 5]


def test_a_member_of_an_ensemble_may_be_on_a_gpu(user: Child) -> None:
    user.call("allocate", "h", "host")
    user.call("prepare", "pipe", {"IN": "h"}, {"OUT": "h"}, [1, 4])
    for value in (1, 2, 3):
        assert user.call("infer", {"IN": value}, "OUT")[1:] == [2 * value] * 4


@pytest.mark.parametrize("model", ["pipe", "gpu_pipe"])
def test_ensembles_read_and_write_gpu_memory(user: Child, model: str) -> None:
    """Of a member on the same GPU in place; else copies are counted, of inputs and outputs that are there."""
    user.call("allocate", "h", "host")
    user.call("allocate", "g", "gpu")
    for source, target in (("g", "g"), ("g", "h"), ("h", "g")):
        user.call("prepare", model, {"IN": source}, {"OUT": target}, [1, 4])
        for value in (1, 2, 3):
            copied, *found = user.call("infer", {"IN": value}, "OUT")
            assert found == [(2 if model == "pipe" else 3) * value] * 4
        if (model, source, target) == ("gpu_pipe", "g", "g"):
            assert copied == 0, "what lies between the steps is the members' to copy"


def test_a_step_that_fails_on_gpu_memory_is_that_requests_error(user: Child) -> None:
    user.call("allocate", "g", "gpu")
    user.call("prepare", "gpu_pipe", {"IN": "g"}, {"OUT": "g"}, [1, 4])
    assert user.call("infer", {"IN": 1}, "OUT")[1:] == [3] * 4
    user.call("unregister", "g")
    with pytest.raises(InferError, match="Unable to find shared memory region: 'g'"):
        user.call("run_again")


def test_answers_for_gpu_memory_are_kept_too(broker: Broker, user: Child) -> None:
    """The key is made of what was copied from there."""
    user.call("allocate", "a", "gpu")
    user.call("allocate", "b", "gpu")
    user.call("allocate", "h", "host")
    found = []
    for source, target, value in (("a", "a", 7), ("b", "a", 7), ("a", "b", 8), ("h", "a", 8), ("b", "h", 8)):
        user.call("prepare", "kept", {"INPUT0": source}, {"OUTPUT0": target}, [1, 4])
        found.append(user.call("infer", {"INPUT0": value}, "OUTPUT0")[1:])
    assert found == [[7] * 4, [7] * 4, [8] * 4, [8] * 4, [8] * 4]
    (row,) = broker.client().ask("GetStatistics", model="kept")["model_stats"]
    counts = {name: row["inference_stats"][name]["count"] for name in ("cache_hit", "cache_miss")}
    assert counts == {"cache_hit": 3, "cache_miss": 2}
    assert row["execution_count"] == 2


def test_a_region_that_is_unregistered_is_closed_everywhere(broker: Broker, user: Child, cuda_sim: CudaEnv) -> None:
    pid: int = worker_of(broker, "gpu0/tensorrt")["pid"]  # type: ignore[assignment]
    eventually(lambda: _open_now(cuda_sim, pid) == 0, "what earlier clients had is closed")
    before = cuda_sim.calls(pid)
    user.call("allocate", "r", "legacy")
    user.call("prepare", "add", {"INPUT0": "r", "INPUT1": "r"}, {"OUTPUT0": "r"}, [1, 4])
    user.call("infer", {"INPUT0": 1, "INPUT1": 2}, "OUTPUT0")
    user.call("unregister", "r")
    after = cuda_sim.calls(pid)
    names = ("cuIpcOpenMemHandle", "cuIpcCloseMemHandle")
    assert [after[name] - before.get(name, 0) for name in names] == [1, 1]


def test_a_client_that_is_killed_leaves_nothing_open(broker: Broker, cuda_sim: CudaEnv) -> None:
    pid: int = worker_of(broker, "gpu0/tensorrt")["pid"]  # type: ignore[assignment]
    with Child(cuda_sim, "tests.fakes.cuda_user:User", f"ipc://{broker.directory}") as user:
        user.call("allocate", "r", "legacy")
        user.call("prepare", "add", {"INPUT0": "r", "INPUT1": "r"}, {"OUTPUT0": "r"}, [1, 4])
        user.call("infer", {"INPUT0": 1, "INPUT1": 2}, "OUTPUT0")
        user.kill()
    eventually(lambda: _open_now(cuda_sim, pid) == 0, "its memory is closed")


def _open_now(env: CudaEnv, pid: int) -> int:
    calls = env.calls(pid)
    return calls.get("cuIpcOpenMemHandle", 0) - calls.get("cuIpcCloseMemHandle", 0)


def test_a_worker_that_is_killed_comes_back_to_the_same_memory(broker: Broker, user: Child) -> None:
    user.call("allocate", "r", "gpu")
    user.call("allocate", "l", "legacy")
    user.call("prepare", "add", {"INPUT0": "r", "INPUT1": "l"}, {"OUTPUT0": "r"}, [1, 4])
    assert user.call("infer", {"INPUT0": 1, "INPUT1": 2}, "OUTPUT0") == [0, 3, 3, 3, 3]
    os.kill(worker_of(broker, "gpu0/tensorrt")["pid"], 9)  # type: ignore[arg-type]
    assert user.call("infer", {"INPUT0": 2, "INPUT1": 2}, "OUTPUT0") == [0, 4, 4, 4, 4]


def test_a_run_that_loses_the_context_is_that_requests_error_and_the_worker_comes_back(
    broker: Broker, user: Child
) -> None:
    restarts: int = worker_of(broker, "gpu0/tensorrt")["restarts"]  # type: ignore[assignment]
    user.call("allocate", "r", "gpu")
    user.call("prepare", "broken", {"INPUT0": "r", "INPUT1": "r"}, {"OUTPUT0": "r"}, [1, 4])
    with pytest.raises(InferError) as raised:
        user.call("infer", {"INPUT0": 1, "INPUT1": 2}, "OUTPUT0")
    assert raised.value.code == "UNAVAILABLE"
    eventually(lambda: worker_of(broker, "gpu0/tensorrt")["restarts"] == restarts + 2, "it ran once more, alone")
    user.call("prepare", "add", {"INPUT0": "r", "INPUT1": "r"}, {"OUTPUT0": "r"}, [1, 4])
    assert user.call("infer", {"INPUT0": 1, "INPUT1": 2}, "OUTPUT0") == [0, 3, 3, 3, 3]
