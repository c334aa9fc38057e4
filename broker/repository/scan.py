"""Which models and versions a repository holds, by directory names alone.

Called by the broker (to list and poll) and by the loader (to find the files). Opens no file and parses nothing.
Symbolic links are followed, as in Triton, also those that lead out of a repository: it is the operator's, and shared
stores are linked into it. Paths stay as they are seen from the repository, so a link that is set anew counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence

import msgspec

from shm.errors import Code, InferError

NOT_UNIQUE = "failed to poll model '%s': not unique across all model repositories"
# ASCII only and no leading punctuation: a name is also a path component, a log field, a metric label and an argument.
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")
_LIKE_CONFIG = re.compile(r"config\.?(?:p[a-z.]*|txt|json|ya?ml)", re.IGNORECASE)
_CLOUDS = ("s3://", "gs://", "as://")  # Triton's
_VERSION = re.compile(r"[0-9]{1,19}")
_MAX_VERSION = 2**63 - 1
_MODEL_FILES = frozenset({".onnx", ".plan", ".pt", ".pt2", ".savedmodel", ".graphdef", ".xml"})
_NOWHERE = {errno.ENOENT: "does not exist", errno.ELOOP: "leads back to itself"}
_NEVER_VERSIONS = frozenset({"configs", "warmup", "initial_state"})  # Triton's names for other things


class ModelDirectory(msgspec.Struct, frozen=True):
    """A directory with a valid model name. `repository` is absolute, free of symbolic links; `path` is that and `name`.

    `links`: may what its configuration names lie elsewhere, behind a link? Not where that one came with a load.
    """

    name: str
    path: str
    repository: str
    links: bool = True


class Repositories(msgspec.Struct, frozen=True):
    """What a scan found. A name is in `models` or in `failures` (name → reason), never in both.

    `errors`: repositories that could not be read at all (path → reason). `in_several`: failures that are in more than
    one repository.
    """

    models: dict[str, ModelDirectory]
    failures: dict[str, str]
    errors: dict[str, str]
    in_several: frozenset[str] = frozenset()


class Versions(msgspec.Struct, frozen=True):
    """Version number → absolute path, ascending, before any version policy. `ignored`: one sentence per directory that
    is none; `no_numbers`: the names of those that are called something else; `broken`: one sentence per version that is
    a link to nowhere.
    """

    paths: dict[int, str]
    ignored: tuple[str, ...]
    no_numbers: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()


def check_traversal(name: str) -> None:
    """Raise InferError INVALID_ARG for a name that is empty or leads elsewhere, as Triton does."""
    if not name.strip():
        raise InferError(Code.INVALID_ARG, "Model name cannot be empty. Please enter a valid name to deploy.")
    if name.strip() == ".." or "/" in name or "\\" in name:
        raise InferError(
            Code.INVALID_ARG, f"invalid model name {name!r}, model name must not contain path traversal characters"
        )


def check_model_name(name: str) -> None:
    """Raise InferError INVALID_ARG unless `name` may name a model directory."""
    check_traversal(name)
    if not _MODEL_NAME.fullmatch(name):
        raise InferError(
            Code.INVALID_ARG,
            f"invalid model name {name!r}, model name must have 1 to 255 of the characters A-Z a-z 0-9 _ . + - and "
            "start with a letter, a digit or _",
        )


def is_inside(path: str, directory: str) -> bool:
    """Does `path`, with all symbolic links followed, lie in or below `directory`?"""
    root = os.path.realpath(directory)
    return os.path.commonpath((root, os.path.realpath(path))) == root


def broken_link(path: str) -> str:
    """Of a symbolic link that cannot be followed: what it is, and where it leads; else ""."""
    try:
        os.stat(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            why = _NOWHERE.get(error.errno or 0, f"cannot be reached: {error.strerror}")
            return f"{path} is a link to {os.readlink(path)}, which {why}"
    return ""


def scan(repositories: Sequence[str]) -> Repositories:
    """List the model directories of all `repositories`. Never raises for what it finds on disk."""
    models: dict[str, ModelDirectory] = {}
    failures: dict[str, str] = {}
    errors: dict[str, str] = {}
    in_several: set[str] = set()
    for repository in dict.fromkeys(repositories):
        root, names, problem = _list(repository)
        if problem:
            errors[repository] = problem
            continue
        broken = dict(_broken(root))
        for name in sorted({*names, *broken}):
            try:
                check_model_name(name)
            except InferError as error:
                failures[name] = f"{error.message}\n    fix: rename the directory, for instance to {_plain(name)}"
                continue
            if name in models or name in failures:
                other = models.pop(name, None)
                in_several.add(name)
                failures.setdefault(name, NOT_UNIQUE % name)
                if other is not None:
                    failures[name] += f"\n    it is in {other.repository} and in {root}"
            elif name in broken:
                failures[name] = f"failed to poll model '{name}': {broken[name]}"
            else:
                models[name] = ModelDirectory(name, os.path.join(root, name), root)
    return Repositories(models, failures, errors, frozenset(in_several))


def _plain(name: str) -> str:
    """A model name that is as near to `name` as may be."""
    letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", letters).lstrip(".+-")[:255] or "model"


def unreadable(repositories: Sequence[str]) -> list[str]:
    """Why repositories cannot be read at all: one sentence each."""
    return [error for _, _, error in map(_list, dict.fromkeys(repositories)) if error]


def misplaced(repository: str) -> str:
    """Why a readable repository seems to hold no models, or "": as a sentence that says what it should look like."""
    root, names, error = _list(repository)
    if error:
        return ""
    layout = f"expected {os.path.join(root, '<model>', '<version>', 'model.onnx')}"
    versions = [name for name in names if _VERSION.fullmatch(name) and _model_files(os.path.join(root, name))]
    if versions or os.path.isfile(os.path.join(root, "config.pbtxt")):
        return (
            f"{root} is a model's own directory, not a model repository: give the directory above it, "
            f"{os.path.dirname(root)}"
        )
    if names:
        return ""
    found = f" ({', '.join(files[:3])} directly in it)" if (files := _model_files(root)) else ""
    return f"{root} has no model directory{found}: {layout}"


def list_versions(model: ModelDirectory) -> Versions:
    """List the version directories of one model. Raises OSError when the model's directory cannot be read."""
    paths: dict[int, str] = {}
    ignored: list[str] = []
    no_numbers: list[str] = []
    for name in _subdirectories(model.path):
        path = os.path.join(model.path, name)
        if name in _NEVER_VERSIONS:
            continue
        if not _VERSION.fullmatch(name) or not 0 < int(name) <= _MAX_VERSION:
            ignored.append(f"ignore version directory '{name}' which fails to convert to integral number")
            no_numbers.append(name)
        elif name.startswith("0"):
            ignored.append(f"ignore version directory '{name}' which contains leading zeros in its directory name")
        else:
            paths[int(name)] = path
    broken = tuple(why for name, why in _broken(model.path) if _VERSION.fullmatch(name))
    ignored += [f"version is not served: {why}" for why in broken]
    return Versions(dict(sorted(paths.items())), tuple(ignored), tuple(no_numbers), broken)


def why_no_version(path: str) -> str:
    """What somebody may have meant who made a model directory without a version, as a line to add; or ""."""
    with contextlib.suppress(OSError):
        repository, name = os.path.split(path)
        if _VERSION.fullmatch(name) and misplaced(repository):
            return (
                f"\n    fix: '{name}' is a version of a model: give {os.path.dirname(repository)} as a model repository"
            )
        if files := _model_files(path):
            return f"\n    fix: move {files[0]} into {os.path.join(path, '1')}"
        for name in _subdirectories(path):
            inner = os.path.join(path, name)
            if _model_files(inner):
                return f"\n    fix: give '{name}' a number as its name"
            if os.path.isfile(os.path.join(inner, "config.pbtxt")) or any(
                map(_VERSION.fullmatch, _subdirectories(inner))
            ):
                return f"\n    fix: '{name}' is a model itself: give {path} as a model repository, or move it up"
    return ""


def misnamed(path: str) -> tuple[str, ...]:
    """A sentence per file in a model's directory that may be meant as the configuration it does not have."""
    with contextlib.suppress(OSError):
        return tuple(
            f"{os.path.join(path, name)} is not read: a configuration is called config.pbtxt"
            for name in sorted(filter(_LIKE_CONFIG.fullmatch, os.listdir(path)))
        )
    return ()


def _model_files(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(name for name in os.listdir(path) if os.path.splitext(name)[1] in _MODEL_FILES)
    return []


def _list(repository: str) -> tuple[str, list[str], str]:
    """Its real path, the names of its directories, and why it cannot be read."""
    if repository.startswith(_CLOUDS) and not os.path.isdir(repository):
        problem = "cloud repositories are not supported: copy or mount it"
        return "", [], f"failed to read model repository {repository!r}: {problem}"
    try:
        root = os.path.realpath(repository)
        return root, _subdirectories(root), ""
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        return "", [], f"failed to read model repository {repository!r}: {getattr(error, 'strerror', error)}"


def _broken(path: str) -> Iterator[tuple[str, str]]:
    """The links in `path` that lead nowhere and are called like a model or version, and why."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(filter(_MODEL_NAME.fullmatch, os.listdir(path)))
    for name in names:
        if why := broken_link(os.path.join(path, name)):
            yield name, why


def _subdirectories(path: str) -> list[str]:
    """Sorted names of the directories in `path`; hidden ones (`.git`, `..data`) are not part of a repository."""
    # os.path.isdir, not DirEntry.is_dir: a link that loops must not hide its neighbours behind an OSError.
    return sorted(
        name for name in os.listdir(path) if not name.startswith(".") and os.path.isdir(os.path.join(path, name))
    )
