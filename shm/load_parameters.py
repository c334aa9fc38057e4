"""What a load of a model brings along: a configuration and files, in a sealed memfd beside `LoadModel`.

Written by clients and gateways (`pack`), read by the broker (`read`), which gets the descriptor from a stranger and
believes nothing about it. The memfd holds u32 (little endian) length + msgpack `LoadParameters` + the files' bytes, one
after the other. Files can be as large as models: the broker copies them from the descriptor and never holds them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping

import msgspec

from shm.errors import Code, InferError

MAX_CONFIG = 1 << 20  # bytes of its text
MAX_FILES = 1024
_MAX_HEADER = 4 << 20
_PREFIX = 4
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class LoadParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`config`: in Triton's JSON form; None: that of the repository. `files`: path → byte size."""

    config: str | None = None
    files: dict[str, int] = {}


def pack(config: str | None, files: Mapping[str, bytes]) -> int:
    """A sealed memfd, the caller's. Raises InferError INVALID_ARG for what no broker would take."""
    header = msgspec.msgpack.encode(
        LoadParameters(config=config, files={path: len(data) for path, data in files.items()})
    )
    _check(config, len(files), len(header))
    descriptor = os.memfd_create("tensorbroker-load", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in (len(header).to_bytes(_PREFIX, "little"), header, *files.values()):
            view = memoryview(part)
            while view:
                view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(descriptor: int) -> tuple[LoadParameters, int]:
    """What it says, and at which offset the first file begins. Raises InferError INVALID_ARG."""
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # no memfd: reading it might block
        sealed = False
    if not sealed:
        raise InferError(Code.INVALID_ARG, "load parameters must be in a memfd that is sealed against any change")
    total = os.fstat(descriptor).st_size
    size = int.from_bytes(os.pread(descriptor, _PREFIX, 0), "little")
    if not 0 < size <= min(_MAX_HEADER, total - _PREFIX):
        raise InferError(Code.INVALID_ARG, f"load parameters of {total} bytes cannot have a header of {size}")
    try:
        found = msgspec.msgpack.decode(os.pread(descriptor, size, _PREFIX), type=LoadParameters)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InferError(Code.INVALID_ARG, f"load parameters cannot be read: {error}") from None
    _check(found.config, len(found.files), size)
    sizes = found.files.values()
    if any(each < 0 for each in sizes) or _PREFIX + size + sum(sizes) != total:
        raise InferError(Code.INVALID_ARG, f"load parameters of {total} bytes do not hold the files that they name")
    return found, _PREFIX + size


def split(model: str, parameters: Mapping[str, str | bytes]) -> tuple[str | None, dict[str, bytes]]:
    """Triton's load parameters of `model`: `config`, and `file:<path>` with the contents.

    Raises InferError: INVALID_ARG; INTERNAL, as in Triton, for files without a configuration.
    """
    config = parameters.get("config")
    if config is not None and not isinstance(config, str):
        raise InferError(Code.INVALID_ARG, "load parameter 'config' must be text: a configuration in JSON form")
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if not name.startswith("file:"):
            if name != "config":
                raise InferError(Code.INVALID_ARG, f"unrecognized load parameter '{name}'.")
        elif not isinstance(value, bytes):
            raise InferError(Code.INVALID_ARG, f"load parameter '{name}' must be the contents of a file, as bytes")
        else:
            files[name.removeprefix("file:")] = value
    if files and config is None:
        raise InferError(
            Code.INTERNAL,
            f"failed to load '{model}', failed to poll from model repository: Load parameter 'config' must be "
            "specified for model file override",
        )
    return config, files


def _check(config: str | None, files: int, header: int) -> None:
    if config is not None and len(config) > MAX_CONFIG:
        raise InferError(Code.INVALID_ARG, f"the configuration has {len(config)} characters, the limit is {MAX_CONFIG}")
    if files > MAX_FILES or header > _MAX_HEADER:
        raise InferError(Code.INVALID_ARG, f"{files} files, at most {MAX_FILES} can come with a load, in short paths")
