"""What comes with a load in a memfd: read back as packed, and nothing believed."""

from __future__ import annotations

import fcntl
import os
import tempfile
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from broker.overrides import Override, Overrides, check_code
from shm.errors import InferError
from shm.load_parameters import MAX_CONFIG, MAX_FILES, pack, read, split
from tests.fakes.broker import descriptor

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def memfd(data: bytes, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def framed(header: object, rest: bytes = b"") -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return len(packed).to_bytes(4, "little") + packed + rest


def test_files_arrive_in_a_private_repository(tmp_path):
    contents = {"1/model.onnx": os.urandom(3 << 20), "empty": b"", "a/./b": b"x"}
    overrides = Overrides(str(tmp_path))
    with descriptor(pack("{}", contents)) as fd:
        found = overrides.take("m", fd)
    assert found.config == "{}"
    for path, data in contents.items():
        with open(os.path.join(found.repository, "m", path), "rb") as file:
            assert file.read() == data
    assert os.stat(found.repository).st_mode & 0o777 == 0o700
    overrides.discard(found.repository)
    assert not os.path.exists(found.repository)
    with descriptor(pack("text", {})) as fd:
        assert overrides.take("m", fd).repository == ""


@pytest.mark.parametrize(
    "path",
    [
        "backend.py",
        "./backend.py",
        "1/../backend.PY",
        "1/model.py",
        "1/x.pyc",
        "lib/x.so",
        "x.so.1.2",
        "a.cpython.so",
        "x.pth",
    ],
)
def test_code_from_the_network_is_refused_unless_it_is_allowed(tmp_path, path):
    files = {"1/model.onnx": b"x", path: b"code"}
    with descriptor(pack("{}", files)) as fd:
        with pytest.raises(InferError, match="--allow-code-overrides=true") as raised:
            Overrides(str(tmp_path)).take("m", fd, True)
        assert raised.value.code == "INVALID_ARG"
        assert f"'file:{path}' is code" in raised.value.message
        assert not os.listdir(tmp_path)
        for overrides, remote in ((Overrides(str(tmp_path)), False), (Overrides(str(tmp_path), True), True)):
            found = overrides.take("m", fd, remote)
            assert os.path.exists(os.path.join(found.repository, "m", path))
            overrides.discard(found.repository)
    with descriptor(pack("{}", {"1/model.onnx": b"x", "1/python": b"", "pyramid.bin": b"", "a.solid": b""})) as fd:
        assert Overrides(str(tmp_path)).take("m", fd, True).code is False


def test_a_plan_from_the_network_may_not_bring_code():
    for value, refused in (("true", True), ("YES", True), ("?", True), ("false", False), ("0", False)):
        config: Any = SimpleNamespace(name="m", parameters={"engine_host_code_allowed": value})
        for override in (Override("{}"), Override("{}", "/files")):
            check_code(override, config)
        if not refused:
            check_code(Override("{}", "/files", code=False), config)
            continue
        with pytest.raises(InferError, match=r"engine_host_code_allowed.*--allow-code-overrides=true"):
            check_code(Override("{}", "/files", code=False), config)
    plain: Any = SimpleNamespace(name="m", parameters={})
    check_code(Override("{}", "/files", code=False), plain)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        framed(b"\xc1"),
        framed(["config"]),
        framed({"config": 1}),
        framed({"files": {"x": -1}}),
        framed({"files": {"x": 5}}, b"four"),
        framed({"files": {"x": 1 << 62}}, b"four"),
        framed({}, b"more"),
        framed({"other": 1}),
        framed({"files": {str(at): 0 for at in range(MAX_FILES + 1)}}),
    ],
)
def test_what_is_no_load_parameters_is_refused(data):
    with descriptor(memfd(data)) as fd, pytest.raises(InferError, match=r"load param|with a load") as raised:
        read(fd)
    assert raised.value.code == "INVALID_ARG"


def test_memory_that_may_change_is_refused():
    data = framed({"config": "{}"})
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        with pytest.raises(InferError, match="sealed against any change"):
            read(file.fileno())
    with descriptor(memfd(data, fcntl.F_SEAL_SHRINK)) as fd, pytest.raises(InferError, match="sealed"):
        read(fd)
    ours, theirs = os.pipe()
    os.close(theirs)
    with descriptor(ours) as fd, pytest.raises(InferError, match="sealed"):
        read(fd)


def test_parameters_are_told_apart():
    assert split("m", {}) == (None, {})
    assert split("m", {"config": "{}", "file:1/m": b"x"}) == ("{}", {"1/m": b"x"})
    for wrong in ({"file:1/m": b"x"}, {"config": b"x"}, {"config": "", "file:x": "text"}, {"other": "x"}):
        with pytest.raises(InferError):
            split("m", wrong)
    with pytest.raises(InferError, match=f"the limit is {MAX_CONFIG}"):
        pack("x" * (MAX_CONFIG + 1), {})
