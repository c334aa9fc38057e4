"""Errors of requests that know where in the request they are: beside Triton's text, which stays as it is.

Raised by `broker.gateway.validation`, `.answers` and the HTTP front end. HTTP says it in a header (DETAIL), gRPC in
trailing metadata of that name, ZeroMQ, where no text is pinned, behind the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Literal, final

from shm.errors import Code, InferError, shortened

DETAIL: Final = "Tensorbroker-Detail"
MAX_DETAIL: Final = 1024  # characters
MAX_LISTED: Final = 16  # names
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f]")


@final
class Placed(InferError):
    """`place`: "inputs[1].data[3]", "" for the whole body; `problem`: what was expected there and what came."""

    def __init__(self, code: Code | str, message: str, place: str, problem: str) -> None:
        super().__init__(code, message)
        self.place = place
        self.problem = problem

    @property
    def detail(self) -> str:
        """Place and problem as a header's value: printable ASCII, at most MAX_DETAIL of it."""
        text = f"{self.place or 'the body'}: {self.problem}".replace("…", "...")
        return _UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", ascii_of(text))[:MAX_DETAIL]

    def inside(self, outer: str, prefix: str = "") -> Placed:
        """The same, as seen from around `outer`. `prefix`: of the message."""
        joint = "." if self.place and not self.place.startswith("[") else ""
        return Placed(self.code, prefix + self.message, f"{outer}{joint}{self.place}", self.problem)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.code, self.message, self.place, self.problem))


@final
class Within:
    """A `with` block that reads what lies in `outer`: what is raised there has its place in it. `prefix`: of texts."""

    __slots__ = ("_outer", "_prefix")

    def __init__(self, outer: str, prefix: str = "") -> None:
        self._outer, self._prefix = outer, prefix

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, Placed):
            raise error.inside(self._outer, self._prefix) from None
        if isinstance(error, InferError) and self._prefix:
            raise InferError(error.code, self._prefix + error.message) from None
        return False


def refused(message: str, place: str, problem: str) -> Placed:
    """INVALID_ARG."""
    return Placed(Code.INVALID_ARG, message, place, problem)


def reworded(error: InferError, message: str, code: Code | str | None = None) -> InferError:
    """`error` with another text, and another code if one is given; what is known of its place stays."""
    code = error.code if code is None else code
    return Placed(code, message, error.place, error.problem) if isinstance(error, Placed) else InferError(code, message)


def tensor_at(kind: Literal["input", "output"], index: int, name: object, field: str = "") -> str:
    """The place of one of a request's tensors, with the name that it gives itself if it is one."""
    place = f"{kind}s[{index}]{field and f'.{field}'}"
    return f"{kind} '{shortened(name)}', {place}" if isinstance(name, str) else place


def one_of(names: Iterable[str]) -> str:
    """The names that there are, for what was expected."""
    known = list(names)
    more = f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
    return "one of " * (len(known) > 1) + ", ".join(f"'{name}'" for name in known[:MAX_LISTED]) + more


def ascii_of(text: str) -> str:
    """`text` with what is not ASCII escaped."""
    return text.encode("ascii", "backslashreplace").decode()
