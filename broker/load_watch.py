"""Loads that are under way, and since when: what takes long is named to whoever waits for it.

Kept by `broker.workers`. `broker.version_life` and `broker.loading` say what begins and ends; clients that wait for the
start hear of it (`broker.control`), and so do the status document and the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple, final

SLOW_S: Final = 5.0  # a load that has taken less is not worth a word
LOGGED_S: Final = 30.0  # the log has it from then on: at this age, and whenever that has doubled
LOOK_S: Final = 5.0
SHOWN: Final = 3  # of them, to clients

_log = logging.getLogger(__name__)


class _Load(NamedTuple):
    what: str
    until: str  # what ends it, and which setting decides that
    since_ns: int

    def text(self, now_ns: int) -> str:
        return f"{self.what} for {(now_ns - self.since_ns) / 1e9:.0f} s; {self.until}"


@final
class LoadWatch:
    """`limit_s`: how long a worker may take to load a model. Times are CLOCK_MONOTONIC, in ns."""

    __slots__ = ("_loads", "_logged_ns", "_until")

    def __init__(self, limit_s: float) -> None:
        self._until = f"it is given up after {limit_s:g} s (--model-load-timeout-secs)"
        self._loads: dict[Hashable, _Load] = {}
        self._logged_ns: dict[Hashable, int] = {}  # its age when the log was told last

    @contextlib.contextmanager
    def load(self, model: str, version: int, worker: str, doing: str = "has been loading in") -> Iterator[None]:
        """A version is brought to a worker. `doing`: in between its name and the worker's."""
        key = model, version, worker
        what = f"model '{model}' version {version} {doing} worker '{worker}'"
        self._loads[key] = _Load(what, self._until, time.monotonic_ns())
        try:
            yield
        finally:
            self._end(key)

    def reading(self, loader: Hashable, model: str | None, limit_s: float) -> None:
        """A loader process reads the files of `model`, or none any more. It may be silent for `limit_s`."""
        self._end(loader)
        if model is not None:
            until = f"its loader is ended after {limit_s:g} s without progress"
            self._loads[loader] = _Load(f"the files of model '{model}' have been read", until, time.monotonic_ns())

    def of(self, model: str, version: str, now_ns: int) -> str:
        """What takes long of this version, "" if nothing does."""
        return "; ".join(
            load.text(now_ns)
            for key, load in self._slow(now_ns, SLOW_S)
            if isinstance(key, tuple) and key[0] == model and str(key[1]) == version
        )

    def waits_for(self, now_ns: int) -> str:
        """The loads that have taken longest, "" if none takes long."""
        slow = [load.text(now_ns) for _, load in self._slow(now_ns, SLOW_S)]
        more = f" (and {len(slow) - SHOWN} more)" if len(slow) > SHOWN else ""
        return "; ".join(slow[:SHOWN]) + more

    def for_log(self, now_ns: int) -> list[str]:
        """What the log is to be told now."""
        texts = []
        for key, load in self._slow(now_ns, LOGGED_S):
            age_ns = now_ns - load.since_ns
            if age_ns >= 2 * self._logged_ns.get(key, 0):
                self._logged_ns[key] = age_ns
                texts.append(load.text(now_ns))
        return texts

    async def keep_telling(self) -> None:
        """Tell the log, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for text in self.for_log(time.monotonic_ns()):
                _log.warning("%s", text)

    def _slow(self, now_ns: int, after_s: float) -> list[tuple[Hashable, _Load]]:
        slow = [item for item in self._loads.items() if now_ns - item[1].since_ns >= after_s * 1e9]
        return sorted(slow, key=lambda item: item[1].since_ns)

    def _end(self, key: Hashable) -> None:
        self._loads.pop(key, None)
        self._logged_ns.pop(key, None)
