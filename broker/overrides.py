"""Configurations and files that came with a load, in place of those of the model repository.

Used by `broker.models`. Files go into private directories (0700) below the broker's run directory, laid out as a model
repository of one model; one goes away with the last version that was loaded from it, all with the broker. As in Triton,
a model that is loaded with files consists of these alone: the repository need not even have a model of that name.
"""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass
from typing import final

from shm.errors import Code, InferError
from shm.load_parameters import read

DIRECTORY = "overrides"
_CHUNK = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class Override:
    """`config` None: the repository's. `repository`: where the model's files are, "" for the broker's repositories."""

    config: str | None = None
    repository: str = ""


@final
class Overrides:
    """The directories of all overrides, in `directory`, which belongs to this broker alone."""

    __slots__ = ("_directory", "_numbers")

    def __init__(self, directory: str) -> None:
        self._directory = os.path.join(directory, DIRECTORY)
        self._numbers = itertools.count(1)

    def clear(self) -> None:
        """Remove everything, also what a broker left that was killed."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def take(self, model: str, parameters: int) -> Override:
        """Read the descriptor `parameters` and write its files. Blocks. `model` is a checked name.

        Raises InferError: INVALID_ARG for what is no `shm.load_parameters`; INTERNAL, as in Triton, for a path that
        leads out of the model's directory or cannot be written.
        """
        found, offset = read(parameters)
        if not found.files:
            return Override(found.config)
        if found.config is None:
            raise InferError(Code.INVALID_ARG, "Load parameter 'config' must be specified for model file override")
        paths = {path: _inside(model, path) for path in found.files}
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
                f"{repository}: {reason}",
            ) from error
        return Override(found.config, repository)

    def discard(self, repository: str) -> None:
        """Nothing was loaded from this one, or nothing is any more. Blocks."""
        if repository:
            shutil.rmtree(repository, ignore_errors=True)


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
