"""The one error type that users see, and the codes that travel in completions.

    Exception
     └── InferError            .code (one of Triton's eight names), .message
          ├── ConnectionLost   the broker went away; the client reconnects by itself on the next call
          ├── ForkedError      a client object was used in a forked child: connect again there
          └── ProtocolError    the peer sent something that is not in the protocol; the connection is closed

A `TimeoutError` (built in) is raised only by `Pending.result(timeout=…)`, where the request itself goes on.
"""

from __future__ import annotations

import enum
import re
from typing import Any, NamedTuple, TypeGuard, TypeVar, final


@final
class Code(enum.IntEnum):
    """Status of a completion. 0 is success; the rest is TRITONSERVER_Error_Code + 1 (tritonserver.h)."""

    OK = 0
    UNKNOWN = 1
    INTERNAL = 2
    NOT_FOUND = 3
    INVALID_ARG = 4
    UNAVAILABLE = 5
    UNSUPPORTED = 6
    ALREADY_EXISTS = 7
    CANCELLED = 8


class InferError(Exception):
    """A request, or a control call, that ended without a result.

    `code` is one of Triton's names (`"INVALID_ARG"`, `"NOT_FOUND"`, …); `message` says what was expected,
    what came, and which setting fixes it.
    """

    def __init__(self, code: Code | str, message: str) -> None:
        super().__init__(message)
        self.code: str = code.name if isinstance(code, Code) else code
        self.message = message

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code!r}, {self.message!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.code, self.message))


class ConnectionLost(InferError):
    """The session to the broker ended while this call was waiting for it."""

    def __init__(self, message: str, code: Code | str = Code.UNAVAILABLE) -> None:
        super().__init__(code, message)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message, self.code))


class ForkedError(InferError):
    """A client made before `os.fork()` was used in the child."""

    def __init__(self) -> None:
        super().__init__(Code.UNAVAILABLE, "this client was made in another process: connect again after fork")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), ())


class ProtocolError(InferError):
    """A datagram that does not follow the protocol. The connection it came from is closed."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID_ARG, message)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message,))


E = TypeVar("E", bound=InferError)
_CAUSE, _CONTEXT = (vars(BaseException)[name] for name in ("__cause__", "__context__"))
_EXCEPTIONS = vars(BaseExceptionGroup)["exceptions"]


def fresh(error: E) -> E:
    """The same error, to be raised in place of one that an attribute or a local name holds.

    A raised error refers to its traceback, that to the frames it came through, and they to all their locals. Whatever
    else holds the error holds those as well, and a name in one of these frames makes a cycle: arrays and places of
    requests would stay in use until Python looks for cycles, which may be never.
    """
    copy = Exception.__new__(type(error), *error.args)  # one of own code may be made from other arguments
    copy.__dict__.update(error.__dict__)
    return copy


def forget_frames(error: BaseException) -> None:
    """`error` has been dealt with and is raised no more: whoever keeps it keeps nothing but its text.

    For errors that others have made: what raised one may hold it, and so, by the frames it came through, all that
    these had in hand (see `fresh`). Those that it came from, or consists of, are done likewise. None of their own code
    is run: a frozen dataclass, say, refuses its attributes to be set.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        BaseException.with_traceback(found, None)
        left += (_CAUSE.__get__(found), _CONTEXT.__get__(found))
        if issubclass(type(found), BaseExceptionGroup):
            left += _EXCEPTIONS.__get__(found)


def raise_first(results: list[Any]) -> None:
    """Raise the first error among what `asyncio.gather(…, return_exceptions=True)` gave; `results` is empty then.

    A list of the caller's that had the error would hold all that its frame has in hand (see `fresh`).
    """
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return
    results.clear()
    try:
        raise errors[0]
    finally:
        del errors


MAX_QUOTED = 64  # characters


@final
class TooSmall(NamedTuple):
    """An output that did not fit where it was to lie, and how many bytes it has."""

    output: str
    byte_size: int


_TOO_SMALL = re.compile(r"output '(.+?)' \(\d+ bytes\) should be at least (\d+) bytes")


def too_small(output: str, room: int, byte_size: int) -> str:
    """Triton's text for a result of `byte_size` bytes with `room` bytes for it. `output` is named with its model if
    that is known: "output 'y'", "output 'y' for model 'm'".
    """
    return (
        f"shared memory size specified with the request for {output} ({room} bytes) should be at least {byte_size} "
        "bytes to hold the results"
    )


def is_too_small(text: str) -> TooSmall | None:
    """What `too_small` was asked to say, of an output alone."""
    match = _TOO_SMALL.search(text)
    return TooSmall(match[1], int(match[2])) if match else None


def no_version(text: str) -> InferError:
    """Triton's for a model version that is no number above 0."""
    return InferError(
        Code.INVALID_ARG,
        f"failed to get model version from specified version string '{shortened(text)}' (details: stol), version "
        "should be an integral value > 0",
    )


def shortened(text: str) -> str:
    """What somebody sent, as an error quotes it: its beginning, where it is long."""
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def described(error: BaseException) -> str:
    """An exception that is no `InferError` as users read it, even if its own `__str__` fails."""
    try:
        text = str(error).strip()
    except BaseException:
        text = "its text cannot be had, its __str__ failed"
    if isinstance(error, SystemExit):  # of a model's code
        text = f"{text}{text and '; '}a model must not end its process (sys.exit, exit): let it raise another exception"
    if isinstance(error, KeyboardInterrupt):  # likewise
        text = text or "raised by the model's own code: no Ctrl-C reaches a worker"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def can_be_told(error: BaseException) -> TypeGuard[InferError]:
    """Is it an InferError of a code and a text? Own code makes them, too, of whatever it likes."""
    code, text = getattr(error, "code", None), getattr(error, "message", None)
    is_one = isinstance(error, InferError) and isinstance(code, str) and isinstance(text, str)
    return is_one and code in Code.__members__ and code != Code.OK.name


def as_infer_error(error: Exception) -> InferError:
    """One that may be kept or raised (see `fresh`): what `error` says, or INTERNAL with its description."""
    return fresh(error) if can_be_told(error) else InferError(Code.INTERNAL, described(error))
