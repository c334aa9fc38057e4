"""Where a model's own code has failed: for the log (`complain`), since clients get one line (`described`).

Used wherever an exception of a backend ends a request or a load. The same exception at the same line is logged at most
once in ten seconds, with how often it came meanwhile. InferError is how a backend answers; it leaves nothing here.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, NamedTuple, final

from broker.repository.config import ModelConfig
from shm.errors import InferError

EVERY_NS: Final = 10_000_000_000
PLACES: Final = 64  # that are remembered; the one that was seen longest ago goes first
LINES: Final = 40  # of a traceback, from its end
_LINE: Final = 500  # characters of one

_log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """When a place was logged last, and how often it has been seen since."""

    logged_ns: int
    since: int


@final
class Tracebacks:
    """Thread-safe. `clock`: CLOCK_MONOTONIC in ns."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str, int, str], _Seen] = OrderedDict()

    def report(self, config: ModelConfig, error: BaseException) -> None:
        """Log where `error` comes from, if that is in the model's directory."""
        cause = error.__cause__ if isinstance(error, InferError) else error
        if cause is None or isinstance(cause, InferError):
            return
        own = [
            (entry.tb_frame.f_code.co_filename, entry.tb_lineno)
            for entry in _entries(cause.__traceback__)
            if entry.tb_frame.f_code.co_filename.startswith(f"{config.directory}/")
        ]
        if not own or not config.directory:
            return
        count = self._count((config.name, *own[-1], type(cause).__name__))
        if count:
            meanwhile = f" ({count - 1} times more since it was logged last)" if count > 1 else ""
            lines = "".join(traceback.format_exception(cause)).rstrip().splitlines()[-LINES:]
            text = "\n".join(line[:_LINE] for line in lines)
            _log.error("model '%s' raised %s%s\n%s", config.name, type(cause).__name__, meanwhile, text)

    def _count(self, place: tuple[str, str, int, str]) -> int:
        """How often it was seen since it was logged last, this time included; 0: not to be logged now."""
        now = self._clock()
        with self._lock:
            seen = self._seen.pop(place, None)
            is_due = seen is None or now - seen.logged_ns >= EVERY_NS
            since = 1 if seen is None else seen.since + 1
            self._seen[place] = _Seen(now, 0) if seen is None or is_due else _Seen(seen.logged_ns, since)
            while len(self._seen) > PLACES:
                self._seen.popitem(last=False)
        return since if is_due else 0


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


complain: Final = Tracebacks().report
