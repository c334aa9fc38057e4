"""What comes with a load in a memfd: read back as packed, and nothing believed."""

from __future__ import annotations

import fcntl
import os
import tempfile

import msgpack
import pytest

from broker.overrides import Overrides
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
