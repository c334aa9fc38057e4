"""Why CUDA can be used or not, as a process finds out; and that nobody finds out who did not ask."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest

from tests.fakes.cuda import CudaEnv

PROBE = """
import json
from shm.cuda import driver
status = driver.probe()
print(json.dumps([status.kind, status.text, [[d.ordinal, d.uuid, d.name, d.total_memory] for d in status.devices]]))
"""


def probe(env: CudaEnv, program: str = PROBE) -> tuple[str, str, list[list[object]]]:
    result = env.run("-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    kind, text, devices = json.loads(result.stdout)
    return kind, text, devices


def test_devices_are_found_by_uuid(cuda_env: CudaEnv) -> None:
    kind, text, devices = probe(cuda_env)
    assert (kind, text) == ("ok", "")
    assert [device[0] for device in devices] == list(range(len(devices)))
    assert all(str(device[1]).startswith("GPU-") for device in devices)
    assert all(("SIMULATED" in str(device[2])) == cuda_env.simulated for device in devices)


def test_numbers_follow_cuda_visible_devices_and_uuids_do_not(cuda_sim: CudaEnv) -> None:
    three = probe(cuda_sim.with_settings(CUSIM_DEVICES=3))[2]
    turned = probe(cuda_sim.with_settings(CUSIM_DEVICES=3, CUDA_VISIBLE_DEVICES="2,0"))[2]
    assert [device[1] for device in turned] == [three[2][1], three[0][1]]
    one = probe(cuda_sim.with_settings(CUSIM_DEVICES=3, CUDA_VISIBLE_DEVICES=three[1][1]))[2]
    assert [device[:2] for device in one] == [[0, three[1][1]]]


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"CUSIM_DEVICES": 0}, "no device", "the driver sees no GPU"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "no device", "the driver sees no GPU; CUDA_VISIBLE_DEVICES is ''"),
        ({"CUSIM_FAIL": "cuInit:803"}, "version mismatch", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
        ({"CUSIM_DRIVER_VERSION": 11080}, "version mismatch", "the driver is of CUDA 11.8, at least 12.0 is needed"),
        ({"CUSIM_FAIL": "cuInit:999"}, "driver error", "cuInit failed with CUDA_ERROR_UNKNOWN (999)"),
        ({"CUSIM_FAIL": "cuDeviceGetUuid:2"}, "driver error", "cuDeviceGetUuid failed with CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_each_reason_is_told_apart(cuda_sim: CudaEnv, settings: dict[str, object], kind: str, text: str) -> None:
    found, said, devices = probe(cuda_sim.with_settings(**settings))
    assert (found, devices) == (kind, [])
    assert text in said


def test_a_machine_without_a_driver_says_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has NVIDIA's driver")
    pytest.importorskip("cuda.bindings")
    kind, text, _ = probe(CudaEnv(simulated=False, library=None, directory=Path()))
    assert kind == "no driver"
    assert "libcuda.so.1 was not found" in text


def test_a_missing_package_is_named(cuda_env: CudaEnv) -> None:
    kind, text, _ = probe(cuda_env, "import sys; sys.modules['cuda'] = None\n" + PROBE)
    assert kind == "no bindings"
    assert "pip install 'tensorbroker[cuda]'" in text


def test_a_probe_makes_no_context(cuda_sim: CudaEnv) -> None:
    result = cuda_sim.run("-c", PROBE + "import os; print(os.getpid())")
    calls = cuda_sim.calls(int(result.stdout.splitlines()[1]))
    assert calls["cuInit"] == 1
    assert not any("Ctx" in name for name in calls)


CONTEXTS = """
import threading
from shm.cuda import driver
from shm.errors import InferError

driver.probe()
current = lambda: int(driver.call("cuCtxGetCurrent"))
with driver.Context(0):
    mine = current()
    with driver.Context(1):
        other = current()
    assert current() == mine != other
    seen = []
    thread = threading.Thread(target=lambda: seen.append(current()))
    thread.start(); thread.join()
    assert seen == [0]  # a context is a thread's
    with driver.Context(0):
        assert current() == mine
assert current() == 0
try:
    with driver.Context(0):
        raise KeyError
except KeyError:
    assert current() == 0
try:
    driver.call("cuMemAlloc", 64)
except driver.CudaError as error:
    assert (error.function, error.name, error.number) == ("cuMemAlloc", "CUDA_ERROR_INVALID_CONTEXT", 201), error
try:
    driver.call("cuGraphCreate", 0)
except InferError as error:
    assert "function cuGraphCreate is not found" in error.message
"""


def test_a_context_is_entered_and_left_by_thread(cuda_sim: CudaEnv) -> None:
    result = cuda_sim.with_settings(CUSIM_DEVICES=2).run("-c", CONTEXTS)
    assert result.returncode == 0, result.stderr


FORKED = """
import os
from shm.cuda import driver

driver.probe()
child = os.fork()
if not child:
    status = driver.probe()
    os._exit(0 if status.kind == "driver error" and "start processes by spawn" in status.text else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_is_told_what_it_did(cuda_env: CudaEnv) -> None:
    result = cuda_env.run("-c", FORKED)
    assert result.returncode == 0, result.stderr


STICKY = """
from shm.cuda import driver

driver.probe()
with driver.Context(0):
    memory = driver.call("cuMemAlloc", 1024)
    try:
        driver.call("cuMemcpyDtoD", int(memory), int(memory) + 1000, 1024)
    except driver.CudaError as error:
        assert error.sticky and error.name == "CUDA_ERROR_ILLEGAL_ADDRESS", error
    try:
        driver.call("cuMemAlloc", 64)
    except driver.CudaError as error:
        assert error.sticky
"""


def test_an_error_that_ends_the_context_is_known_as_one(cuda_sim: CudaEnv) -> None:
    result = cuda_sim.run("-c", STICKY)
    assert result.returncode == 0, result.stderr


NOBODY = """
import pkgutil, sys
import clientlib, clientlib.client, clientlib.remote.client, broker.server, broker.worker.loop, broker.zygote
import broker.gateway.process, shm.cuda.driver, shm.cuda.handles
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("cuda", "torch", "tensorrt"))
assert loaded == [], loaded
"""


def test_nothing_imports_cuda_until_it_is_used(cuda_env: CudaEnv) -> None:
    result = cuda_env.run("-c", NOBODY)
    assert result.returncode == 0, result.stderr
