"""What a native client reads behind Triton's text when a model, or a version of it, is not there to be asked.

Called by `broker.control`. Triton's clients get the text as it is, so gateways do.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from shm.errors import Code, InferError
from shm.messages import ModelMetadata

_ABSENT = re.compile(
    r"Request for unknown model: '([A-Za-z0-9_][A-Za-z0-9_.-]*)' (?:is not found|has no available ver)"
)
_NO_VERSION = re.compile(r"Request for unknown model: '([^']+)' version \d+ is not found$")
MAX_LISTED = 16  # names, or numbers


def hinted(error: InferError, known: Callable[[], list[ModelMetadata]], *, explicit: bool) -> InferError:
    """`error`, with what there is instead, or how it comes to be there. `known`: every version of the models.

    `explicit`: clients may load models.
    """
    if found := _NO_VERSION.match(error.message):
        versions = sorted(int(row.version) for row in known() if row.name == found[1] and row.version)
        return _with(error, f"its versions: {_listed(list(map(str, versions)))}")
    found = _ABSENT.match(error.message)
    if found is None:
        return error
    if explicit:
        return _with(error, f"client.load('{found[1]}') loads it, if it is in the repository")
    if not error.message.endswith("is not found"):
        return error  # the reason stands there already
    return _with(error, f"models: {_listed(sorted({row.name for row in known()}))}")


def _with(error: InferError, hint: str) -> InferError:
    return InferError(Code[error.code], f"{error.message}; {hint}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return (", ".join(names[:MAX_LISTED]) or "none") + more
