"""Configurations and files that came with a load, in place of those of the model repository.

Used by `broker.models`. Files go into private directories (0700) below the broker's run directory, laid out as a model
repository of one model; one goes away with the last version that was loaded from it, all with the broker. As in Triton,
a model that is loaded with files consists of these alone: the repository need not even have a model of that name.
Files from the network bring no code, which would run as the broker's user, unless --allow-code-overrides says so.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from dataclasses import dataclass
from typing import final

from broker.repository.config import YES_NO, ModelConfig
from shm.errors import Code, InferError
from shm.load_parameters import read

DIRECTORY = "overrides"
# What Python or the dynamic loader would run, wherever it lies: an own backend imports its neighbours.
_CODE = re.compile(r"\.(?:py[a-z]?|pth|dylib|dll|so(?:\.[0-9.]+)?)$", re.IGNORECASE | re.ASCII)
_HOST_CODE = "engine_host_code_allowed"  # TensorRT plans that bring a runtime of their own
_ALLOW = "put it into the model repository, or start the server with --allow-code-overrides=true"
_CHUNK = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class Override:
    """`config` None: the repository's. `repository`: where the model's files are, "" for the broker's repositories.

    `code`: may these files be run?
    """

    config: str | None = None
    repository: str = ""
    code: bool = True


@final
class Overrides:
    """The directories of all overrides, in `directory`, which belongs to this broker alone.

    `remote_code`: may files that come through a gateway be code (--allow-code-overrides)?
    """

    __slots__ = ("_directory", "_numbers", "_remote_code")

    def __init__(self, directory: str, remote_code: bool = False) -> None:
        self._remote_code = remote_code
        self._directory = os.path.join(directory, DIRECTORY)
        self._numbers = itertools.count(1)

    def clear(self) -> None:
        """Remove everything, also what a broker left that was killed."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def take(self, model: str, parameters: int, remote: bool = False) -> Override:
        """Read the descriptor `parameters` and write its files. Blocks. `model` is a checked name.

        `remote`: they came through a gateway. Raises InferError: INVALID_ARG for what is no `shm.load_parameters`, and
        for code that is not allowed; INTERNAL, as in Triton, for a path that leads out of the model's directory or
        cannot be written.
        """
        found, offset = read(parameters)
        if not found.files:
            return Override(found.config)
        if found.config is None:
            raise InferError(Code.INVALID_ARG, "Load parameter 'config' must be specified for model file override")
        paths = {path: _inside(model, path) for path in found.files}
        code = self._remote_code or not remote
        if not code and (path := next((path for path, normal in paths.items() if _CODE.search(normal)), None)):
            raise _refused(model, f"'file:{path}' is code")
        repository = os.path.join(self._directory, str(next(self._numbers)))
        directory = os.path.join(repository, model)
        try:
            for part in (self._directory, repository, directory):
                os.makedirs(part, 0o700, exist_ok=True)
            for path, size in found.files.items():
                target = os.path.join(directory, paths[path])
                os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
                _copy(parameters, offset, size, target)
                offset += size
        except (OSError, ValueError) as error:
            self.discard(repository)
            reason = getattr(error, "strerror", None) or error
            raise InferError(
                Code.INTERNAL,
                f"failed to load '{model}', failed to poll from model repository: its files cannot be written to "
                f"the run directory: {reason}",
            ) from error
        return Override(found.config, repository, code)

    def discard(self, repository: str) -> None:
        """Nothing was loaded from this one, or nothing is any more. Blocks."""
        if repository:
            shutil.rmtree(repository, ignore_errors=True)


def check_code(override: Override, config: ModelConfig) -> None:
    """What a loader made of it runs nothing that may not be run. Raises InferError INVALID_ARG."""
    allows = YES_NO.get(config.parameters.get(_HOST_CODE, "no").lower(), True)
    if override.repository and not override.code and allows:
        raise _refused(config.name, f"parameter '{_HOST_CODE}' lets the model's file bring code")


def _refused(model: str, why: str) -> InferError:
    return InferError(
        Code.INVALID_ARG,
        f"failed to load '{model}', failed to poll from model repository: {why}, which would run as the server's user "
        f"and is not taken over the network: {_ALLOW}",
    )


def _inside(model: str, path: str) -> str:
    """The normalised path, if it stays in the directory that it is relative to."""
    normal = os.path.normpath(path) if path else "."
    if os.path.isabs(normal) or normal.split(os.sep)[0] in (os.curdir, os.pardir) or "\0" in path:
        raise InferError(
            Code.INTERNAL,
            f"failed to load '{model}', failed to poll from model repository: Invalid file parameter 'file:{path}' "
            f"with normalized path '{normal}' must stay within model directory.",
        )
    return normal


def _copy(source: int, offset: int, size: int, target: str) -> None:
    """`size` bytes of a sealed memfd into a new file."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while size:
            copied = os.sendfile(descriptor, source, offset, min(size, _CHUNK))
            if not copied:
                raise OSError(0, "the parameters end before the file does")
            offset += copied
            size -= copied
    finally:
        os.close(descriptor)
