"""Rows O-01 … O-06: what is loaded is broken, hostile or deadly; what serves goes on serving.

O-07 is in `test_restricted`, the loader's own death in `tests/integration/test_models_loading.py`, O-08 … O-11 in
`test_model_changes`. O-12 has nothing to try: no file of a model is a pickle here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import clientlib
from tests.fakes import models
from tests.faults import child
from tests.faults.lab import SAME, Lab, scaled
from tests.faults.load_lab import LoadLab, load, mend, settled, without_paths

SHARED = 'parameters { key: "worker_group" value { string_value: "default" } }\n'  # that of the canary's model
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
LOADER = """
import ctypes, os, sys, threading, time

def load(context):
    act = context.config.parameters["act"]
    if act == "segfault":
        ctypes.string_at(0)
    if act == "exit":
        os._exit(0)
    if act == "sys_exit":
        sys.exit(3)
    if act == "memory":
        raise MemoryError
    if act == "raise":
        raise ValueError("not today")
    if act == "late":
        time.sleep(1)
        raise ValueError("not after a second either")
    if act == "allocate":
        bytearray(1 << 50)
    if act == "nothing":
        return None
"""


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with LoadLab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def victim(lab: Lab) -> Path:
    """The directory of `victim`, as it is when all is well."""
    return mend(lab)


# --- O-01: files that are no models ----------------------------------------------------------------------------------


def _other_opset() -> bytes:
    model = models.add1()
    model.opset_import[0].version = 99
    return model.SerializeToString()


def _unknown_operator() -> bytes:
    tensors = [models.tensor("x", ["batch", "n"])], [models.tensor("y", ["batch", "n"])]
    return models.build([helper.make_node("NoSuchThing", ["x"], ["y"])], *tensors).SerializeToString()


def _mixed_types() -> bytes:
    nodes = [helper.make_node("Add", ["x", "one"], ["y"])]
    tensors = [models.tensor("x", ["batch", "n"])], [models.tensor("y", ["batch", "n"])]
    return models.build(nodes, *tensors, {"one": np.ones(1, np.int64)}).SerializeToString()


def _cycle() -> bytes:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Add", ["a", "a"], ["b"])]
    nodes.append(helper.make_node("Identity", ["b"], ["y"]))
    tensors = [models.tensor("x", ["batch", "n"])], [models.tensor("y", ["batch", "n"])]
    return models.build(nodes, *tensors).SerializeToString()


GOOD = models.add1().SerializeToString()
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty (0 bytes)"),
    "text": (b"<html>404 Not Found</html>", "is not an ONNX model"),
    "half": (GOOD[: len(GOOD) // 2], "is not an ONNX model"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "another opset": (_other_opset(), "pset 99"),
    "an unknown operator": (_unknown_operator(), "NoSuchThing"),
    "mixed types": (_mixed_types(), "onnx runtime error"),
    "a cycle": (_cycle(), "onnx runtime error"),
    "other tensors": (models.two_input().SerializeToString(), ""),
}


def test_o01_files_that_are_no_models(lab: Lab, victim: Path) -> None:
    """[O-01] refused with a reason that names the model; what was loaded serves on; mended, it loads."""
    (victim / "config.pbtxt").write_text(TENSORS)
    for kind, (data, part) in BROKEN.items():
        (victim / "1" / "model.onnx").write_bytes(data)
        (code, message), right = lab.offend(load, model="victim")
        assert code in ("INTERNAL", "INVALID_ARG"), (kind, message)
        assert "victim" in message, kind
        assert part in message, kind
        assert right, kind
    settled(lab)


def test_o01_no_file_where_one_should_be(lab: Lab) -> None:
    """[O-01] the same for what cannot be read at all."""
    for what in ("no file", "no version", "a directory", "a fifo", "a link to nowhere", "a link to itself"):
        victim = mend(lab)
        path = victim / "1" / "model.onnx"
        path.unlink()
        match what:
            case "no version":
                path.parent.rmdir()
            case "a directory":
                path.mkdir()
            case "a fifo":
                os.mkfifo(path)
            case "a link to nowhere":
                path.symlink_to(lab.repository.parent / "outside" / "absent.onnx")
            case "a link to itself":
                path.symlink_to(path)
        (code, message), right = lab.offend(load, model="victim")
        assert code in ("INTERNAL", "INVALID_ARG"), (what, message)
        assert "victim" in message, what
        assert right, what
    settled(lab)


# --- O-02: loads that fail late, or kill ------------------------------------------------------------------------------


def test_o02_loads_that_fail(lab: Lab) -> None:
    """[O-02] only that model is refused."""
    for act in ("raise", "late", "memory", "allocate", "sys_exit", "nothing"):
        _deadly(lab, act)
        (code, message), right = lab.offend(load, model="deadly")
        assert code == "INVALID_ARG", act
        assert message.startswith("load failed for model 'deadly': version 1 is at UNAVAILABLE state: "), act
        assert right, act
    _gone(lab)
    lab.settled()


@pytest.mark.parametrize("act", ["segfault", "exit"])
def test_o02_a_load_that_kills_its_worker(lab: Lab, act: str) -> None:
    """[O-02] ✱ the worker comes back without it, and those who wait for the other models are served."""
    _deadly(lab, act)
    (code, message), right = lab.offend(load, model="deadly", timeout_s=110)
    assert code == "INVALID_ARG"
    assert "the worker died 5 times in a row while loading it" in message
    assert right
    _gone(lab)
    lab.settled(replaced=SAME)


def _deadly(lab: Lab, act: str) -> None:
    config = f'backend: "deadly"\nmax_batch_size: 4\n{TENSORS}{SHARED}'
    config += f'parameters {{ key: "act" value {{ string_value: "{act}" }} }}\n'
    directory = models.write_model(lab.repository, "deadly", config=config)
    (directory / "backend.py").write_text(LOADER)


def _gone(lab: Lab) -> None:
    """A good model of that name is loaded and unloaded: nothing is held against the name."""
    shutil.rmtree(lab.repository / "deadly")
    models.write_model(lab.repository, "deadly", models.add1())
    assert lab.offend(load_and_unload, model="deadly") == [["OK", ""], ["OK", ""]]
    shutil.rmtree(lab.repository / "deadly")


def load_and_unload(model: str) -> list[list[str]]:
    with clientlib.connect() as client:
        return [child.refusal(client.load, model), child.refusal(client.unload, model)]


# --- O-03, O-04: names ------------------------------------------------------------------------------------------------

PWNED = f"/tmp/tensorbroker-pwned-{os.getpid()}"
NAMES = ["", " ", ".", "..", " ..", "../outside/victim", "a/b", "/etc", "victim/", "./victim", "victim/../victim",
         "..\\outside", "victim\0", "victim\n", "-rf", "~", "v\u0456ctim", "x" * 256, "%2e%2e", "link"]  # fmt: skip
SHELL = [text % PWNED for text in ("$(touch %s)", "`touch %s`", "a;touch %s", "a|touch %s", "a&touch %s")]
SHELL += [text.replace("/", "${HOME:0:1}") for text in SHELL] + ["${HOME}", "a b", "*"]


def refusals(names: list[str], generated: int) -> list[list[str]]:
    """What the loads and unloads of these names, and of so many that do not exist, are answered."""
    with clientlib.connect() as client:
        told = []
        for name in names:
            code, message = child.refusal(client.load, name)
            told.append([code, without_paths(message), *child.refusal(client.unload, name)])
        for number in range(generated):
            code, message = child.refusal(client.load, f"made-up-{number}.of_names+{number * 7}")
            assert code == "INTERNAL", message
            assert "failed to poll from model repository" in message
        return told


def test_o03_o04_names_that_are_no_names(lab: Lab) -> None:
    """[O-03] [O-04] refused before a file is looked at; none is kept, however many there are."""
    (lab.repository / "link").symlink_to(lab.repository.parent / "outside" / "absent")
    before = len(lab.status()["models"])
    told = lab.offend(refusals, names=[*NAMES, *SHELL], generated=scaled(3, 10_000), timeout_s=3000)
    for name, (code, message, _, _) in zip([*NAMES, *SHELL], told, strict=True):
        assert code in ("INVALID_ARG", "INTERNAL"), (name, message)
        assert message, name
    assert len(lab.status()["models"]) == before
    assert not os.path.exists(PWNED)
    (lab.repository / "link").unlink()
    lab.settled()


def test_o04_shell_characters_in_a_configuration(lab: Lab, victim: Path) -> None:
    """[O-04] they are text, or refused; no process is started for them."""
    evil = f"$(touch {PWNED});`touch {PWNED}`|touch {PWNED}&"
    for where, config in {
        "instance name": f'instance_group {{ name: "{evil}" count: 1 kind: KIND_CPU }}',
        "file name": f'default_model_filename: "{evil}"',
        "worker group": f'parameters {{ key: "worker_group" value {{ string_value: "{evil}" }} }}',
        "label file": f'output {{ name: "y" data_type: TYPE_FP32 dims: -1 label_filename: "{evil}" }}',
        "backend": f'backend: "{evil}"',
    }.items():
        (victim / "config.pbtxt").write_text(config)
        (code, message), right = lab.offend(load, model="victim")
        assert right, where
        assert code in (["OK"] if where == "instance name" else ["INVALID_ARG", "INTERNAL"]), (where, message)
    assert not os.path.exists(PWNED)
    settled(lab)


# --- O-05: weights elsewhere ----------------------------------------------------------------------------------------


def _external(location: str, length: int = 16) -> bytes:
    model = models.add1()
    weights = model.graph.initializer[0]
    weights.ClearField("raw_data")
    weights.dims[:] = [length // 4]
    weights.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("length", str(length))):
        entry = weights.external_data.add()
        entry.key, entry.value = key, value
    return model.SerializeToString()


def _in_place(path: Path) -> str:
    path.with_name("w").write_bytes(np.ones(4, np.float32).tobytes())
    return "w"


def _through(link: Callable[[Path, Path], None], location: str) -> Callable[[Path], str]:
    def prepare(path: Path) -> str:
        outside = path.parents[3] / "outside" / "weights"
        outside.mkdir(exist_ok=True)
        (outside / "w").write_bytes(np.ones(4, np.float32).tobytes())
        link(outside, path.parent)
        return location.format(outside=outside)

    return prepare


WEIGHTS: dict[str, Callable[[Path], str]] = {
    "..": _through(lambda outside, here: None, "../../../outside/weights/w"),
    "absolute": _through(lambda outside, here: None, "{outside}/w"),
    "a link": _through(lambda outside, here: (here / "w").symlink_to(outside / "w"), "w"),
    "a link of a directory": _through(lambda outside, here: (here / "d").symlink_to(outside), "d/w"),
    "a hard link": _through(lambda outside, here: os.link(outside / "w", here / "w"), "w"),
    "missing": _through(lambda outside, here: None, "w"),
}


def test_o05_weights_that_lie_elsewhere(lab: Lab) -> None:
    """[O-05] a model file does not decide what else is read."""
    for how, place in WEIGHTS.items():
        path = mend(lab) / "1" / "model.onnx"
        path.write_bytes(_external(place(path)))
        (code, message), right = lab.offend(load, model="victim")
        assert code == "INVALID_ARG", (how, message)
        assert "external data of tensor 'one'" in message, how
        assert right, how
    settled(lab)


def test_o05_weights_beside_the_model_and_sparse_ones(lab: Lab, victim: Path) -> None:
    """[O-05] what lies beside the file is read; a file with holes has zeros there, and costs what was asked for."""
    path = victim / "1" / "model.onnx"
    path.write_bytes(_external(_in_place(path)))
    assert lab.offend(load, model="victim")[0] == ["OK", ""]
    with path.with_name("w").open("wb") as file:
        file.truncate(1 << 40)
    path.write_bytes(_external("w", 1 << 40))
    (code, message), _ = lab.offend(load, model="victim")
    assert code in ("INTERNAL", "INVALID_ARG"), message
    settled(lab)


# --- O-06: configurations that are too much -------------------------------------------------------------------------

HUGE: dict[str, tuple[str, str]] = {
    "100 MiB": ("# " + "x" * (100 << 20), "the limit is 1 MiB"),
    "deep": ("model_warmup { inputs { key: \"x\" value { " * 5000, "config.pbtxt"),
    "unknown": ("no_such_field: 1", 'has no field named "no_such_field"'),
    "instances": ("instance_group { count: 1000000 kind: KIND_CPU }", "instance"),
    "queue": ("max_batch_size: 4\ndynamic_batching { default_queue_policy { max_queue_size: 9223372036854775808 } }",
              "config.pbtxt:2:"),
    "batch": ("max_batch_size: 99999999999", "config.pbtxt:1:"),
    "dims": ("max_batch_size: 4\ninput { name: \"x\" data_type: TYPE_FP32 dims: 0 }", "dimension must be integer >= 1"),
    "warm-up": ("max_batch_size: 4\nmodel_warmup { name: \"w\" batch_size: 4294967295 inputs { key: \"x\" value "
                "{ data_type: TYPE_FP32 dims: 4 zero_data: true } } }", ""),
    "warm-ups": ("max_batch_size: 4\nmodel_warmup { name: \"w\" batch_size: 1 inputs { key: \"x\" value "
                 "{ data_type: TYPE_FP32 dims: 1099511627776 zero_data: true } } }", ""),
    "priorities": ("max_batch_size: 4\ndynamic_batching { priority_levels: 18446744073709551615 "
                   "default_priority_level: 1 }", ""),
    "threads": ('parameters { key: "intra_op_thread_count" value { string_value: "1000000000" } }', ""),
}  # fmt: skip


def test_o06_configurations_that_are_too_much(lab: Lab, victim: Path) -> None:
    """[O-06] refused in words; nothing is allocated for them."""
    for what, (text, part) in HUGE.items():
        (victim / "config.pbtxt").write_text(text)
        (code, message), right = lab.offend(load, model="victim")
        assert code in ("INTERNAL", "INVALID_ARG"), what
        assert part in message, (what, message)
        assert right, what
    settled(lab)


def test_o06_overrides_that_are_too_much(lab: Lab, victim: Path) -> None:
    """[O-06] the same for what comes with a load."""
    for what in ("deep", "instances", "batch"):
        (code, message), right = lab.offend(load, model="victim", config=HUGE[what][0])
        assert code == "INVALID_ARG" if what in ("deep", "batch") else "INTERNAL", (what, code)
        assert "victim" in message, what
        assert right, what
    settled(lab)
