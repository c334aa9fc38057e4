"""Loads that failed: what whoever asked is told, what the log says, what is remembered. Texts and codes are Triton's.

Used by `broker.models`. There are two kinds: a configuration that is wrong, of which nothing is served ("failed to
poll", 500), and versions that could not be loaded with it ("load failed", 400), which the index then shows one by one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from broker.catalogue import UNAVAILABLE, Model, Version
from broker.repository.config import LoadFailure
from broker.repository.scan import NOT_UNIQUE
from shm.errors import Code, InferError

_IN_PATH = r"[\w./+-]"  # a root that begins or ends in the middle of a path is another one
_OUTWARDS = re.compile(r"is a link to /.*?(?=, which )")  # `scan.broken_link`
BAD_OVERRIDE = "Invalid config override: "


def roots_of(repositories: Iterable[str]) -> tuple[str, ...]:
    """How paths in `repositories` begin, also with links followed. Looks at the disk."""
    found = {form for each in repositories if each for form in (each.rstrip("/"), os.path.realpath(each).rstrip("/"))}
    return tuple(sorted(filter(None, found), key=lambda root: (-len(root), root)))


def for_clients(reason: str, roots: Iterable[str]) -> str:
    """`reason` with paths as they are seen from the repository: where that lies is the operator's business, and in the
    log.
    """
    for root in filter(None, roots):
        name = os.path.basename(root).replace("\\", r"\\")  # of which `re.sub` would make references
        reason = re.sub(rf"(?<!{_IN_PATH}){re.escape(root)}/+", "", reason)
        reason = re.sub(rf"(?<!{_IN_PATH}){re.escape(root)}(?!{_IN_PATH})", name, reason)
    return _OUTWARDS.sub("is a link out of the model repository", reason)


def shown_to_clients(failure: LoadFailure, roots: Iterable[str]) -> LoadFailure:
    """The same for a failure."""
    return replace(failure, reason=for_clients(failure.reason, roots))


def not_polled(model: str) -> str:
    """How Triton's text of a configuration that is wrong begins."""
    return f"failed to load '{model}', failed to poll from model repository"


def is_unknown(failure: LoadFailure) -> bool:
    """Is there no such model? Then there is nothing to remember."""
    return failure.reason.startswith(not_polled(failure.name))


def is_of_override(failure: LoadFailure) -> bool:
    """Does it say nothing about what is in the repository?"""
    return failure.reason.startswith(BAD_OVERRIDE)


def is_ambiguous(failure: LoadFailure) -> bool:
    """Is it in several repositories? Then what serves is not served any more, as in Triton: it may be either."""
    return failure.reason.startswith(NOT_UNIQUE % failure.name)


def refusal(failure: LoadFailure) -> InferError:
    """For whoever asked for the load."""
    if is_unknown(failure):
        return InferError(Code.INTERNAL, failure.reason)
    if failure.versions:
        failed = [failure.cause] if failure.cause else failure.versions  # as in Triton, without those that go with it
        return versions_failed(failure.name, dict.fromkeys(failed, failure.reason))
    code = Code.INVALID_ARG if is_of_override(failure) else Code.INTERNAL
    return InferError(code, f"{not_polled(failure.name)}: {failure.reason}")


def versions_failed(model: str, reasons: Mapping[int, str]) -> InferError:
    """For whoever asked for the load. `reasons` by version."""
    parts = (f"version {number} is at UNAVAILABLE state: {_closed(why)}\n" for number, why in reasons.items())
    return InferError(Code.INVALID_ARG, f"load failed for model '{model}': {''.join(parts)}")


class Unclosed(str):
    """Why a version that has been unloaded ended only with its worker."""

    __slots__ = ()


def not_unloaded(model: str, problems: Mapping[int, str]) -> InferError:
    """For whoever asked for the unload. `problems` by version."""
    failed = ",".join(str(number) for number, why in sorted(problems.items()) if not isinstance(why, Unclosed))
    if failed:
        return InferError(Code.INTERNAL, f"failed to unload '{model}', versions that are still available: {failed}")
    return InferError(
        Code.INTERNAL, f"'{model}' is unloaded, but {'; '.join(problems.values())}: its worker is being replaced"
    )


def _closed(why: str) -> str:
    """With Triton's semicolon: behind the reason, not behind the fix that stands in the lines below it."""
    first, line, rest = why.partition("\n")
    return f"{first};{line}{rest}"


def told(failure: LoadFailure) -> Iterator[str]:
    """Lines for the log."""
    start = f"failed to load '{failure.name}'"  # some reasons say it themselves, as Triton's do
    if failure.reason.startswith(start):
        yield failure.reason
        return
    if not failure.versions:
        yield f"{start}: {failure.reason}"
    for number, reason in failure.by_version().items():
        yield f"{start} version {number}: {reason}"


def remember(model: Model, failure: LoadFailure) -> None:
    """What serves goes on."""
    if not failure.versions:
        model.failure = failure.reason
        for version in model.versions.values():
            if version.generation:
                version.load_failed(failure.reason)
    for number, reason in failure.by_version().items():
        model.versions.setdefault(number, Version(state=UNAVAILABLE)).load_failed(reason)
