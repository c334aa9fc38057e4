"""The double of TensorRT has the real module's names and arguments, as `tensorrt_lean` shows them.

The real module is looked at in a process of its own: without a GPU it is easily made to crash.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import tensorrt as double

CLASSES = ("ILogger", "Runtime", "ICudaEngine", "IExecutionContext", "IOutputAllocator")
# Methods that an application overrides: the bindings call them and do not show them.
CALLBACKS = {("IOutputAllocator", "reallocate_output_async"), ("IOutputAllocator", "notify_shape")}
ENUMERATIONS = ("DataType", "TensorIOMode", "TensorLocation", "ExecutionContextAllocationStrategy")
LOOK = """
import importlib, json, sys

for name in ("tensorrt_lean", "tensorrt"):
    try:
        trt = importlib.import_module(name)
        break
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
else:
    sys.exit(reason)
from broker.worker.backends.tensorrt_engine import Log

classes, enumerations = json.loads(sys.argv[1])
log = Log(trt)
runtime = trt.Runtime(log.logger)
print(json.dumps({
    "documented": {each: {n: m.__doc__ or "" for n, m in vars(getattr(trt, each)).items()} for each in classes},
    "members": {each: list(getattr(trt, each).__members__) for each in enumerations}
        | {"Severity": list(trt.ILogger.Severity.__members__)},
    "log": [log.errors, log.take()],
}))
sys.stdout.flush()
import os
os._exit(0)
"""


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps([CLASSES, ENUMERATIONS])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    if result.returncode == 1 and "ModuleNotFoundError" in result.stderr:
        pytest.skip(f"the double of TensorRT is held against nothing: {result.stderr.strip()}")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def methods(cls: type) -> list[tuple[str, Any]]:
    return [
        (name, each)
        for name, each in vars(cls).items()
        if inspect.isfunction(each) and not (name.startswith("_") and name != "__init__")
    ]


def signatures(method: str, text: str) -> list[list[str]]:
    """The argument names of every overload, by the text that pybind11 makes."""
    found = re.findall(rf"^\s*(?:\d+\. )?{method}\((.*)\) ->", text, re.MULTILINE)
    names = [[part.split(":")[0].strip() for part in each.split(", ") if ": " in part] for each in found]
    return [[name for name in each if name != "self"] for each in names if each]


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_has_the_real_ones_arguments(real: dict[str, Any], name: str) -> None:
    documented = real["documented"][name]
    for method, ours in methods(getattr(double, name)):
        if (name, method) in CALLBACKS or (method == "__init__" and name in ("ICudaEngine", "IExecutionContext")):
            continue
        wanted = list(inspect.signature(ours).parameters)[1:]
        overloads = signatures(method, documented[method])
        # What has a default may be left out by the double, which takes what the backend passes.
        assert any(each[: len(wanted)] == wanted for each in overloads), (method, wanted, overloads)


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_every_member_is_one_of_the_real_ones(real: dict[str, Any], name: str) -> None:
    assert {member.name for member in getattr(double, name)} <= set(real["members"][name])


def test_severities_and_attributes(real: dict[str, Any]) -> None:
    assert {each.name for each in double.ILogger.Severity} <= set(real["members"]["Severity"])
    assert {"num_io_tensors", "num_optimization_profiles"} <= set(real["documented"]["ICudaEngine"])
    assert "engine_host_code_allowed" in real["documented"]["Runtime"]


def test_the_real_bindings_use_our_logger(real: dict[str, Any]) -> None:
    """A runtime without a GPU says what is wrong there, and nowhere else; with one it has nothing to say."""
    errors, text = real["log"]
    assert bool(errors) == bool(text)
