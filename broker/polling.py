"""Control mode poll: what has changed in the model repositories, and whether it is complete.

Used by `broker.models`. `Poll` looks every now and then; `manifests` reads the disk; `Watch` is the state machine on
what it finds. A model counts as
changed when its files differ from those that were acted on last, and as settled when two looks in a row found the same:
a directory into which somebody copies is left alone. The same holds for what has gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, final

from broker.repository.scan import scan
from shm.errors import InferError

SETTLE_S = 1.0  # between two looks at something that is changing
MAX_ENTRIES = 100_000  # of one model; what lies behind them is not watched
_CACHES = frozenset({"__pycache__"})  # written by whoever loads Python files

_log = logging.getLogger(__name__)

Manifest = tuple[tuple[str, int, int, int], ...]  # (path, mtime in ns, byte size, inode) of every file


class Changes(NamedTuple):
    """`restless`: something is still changing, look again soon."""

    changed: tuple[str, ...]
    deleted: tuple[str, ...]
    restless: bool


@final
class Poll:
    """`act` is awaited with what has become due."""

    __slots__ = ("_act", "_repositories", "_watch")

    def __init__(self, repositories: Sequence[str], act: Callable[[Changes], Awaitable[None]]) -> None:
        self._repositories = repositories
        self._act = act
        self._watch = Watch({})

    async def begin(self) -> None:
        """What is there now is what the start-up load sees."""
        first = await asyncio.to_thread(manifests, self._repositories)
        self._watch = Watch(first or {})

    async def keep_on(self, poll_s: float) -> None:
        """Until cancelled. Whatever is in the repositories, this goes on."""
        wait_s = poll_s
        while True:
            await asyncio.sleep(wait_s)
            try:
                restless = await self.look()
            except InferError as error:
                _log.error("failed to poll the model repositories: %s", error.message)
                restless = False
            except Exception:
                _log.exception("failed to poll the model repositories")
                restless = False
            wait_s = min(SETTLE_S, poll_s) if restless else poll_s

    async def look(self) -> bool:
        """Do what has become due. Returns whether something is still changing."""
        now = await asyncio.to_thread(manifests, self._repositories)
        if now is None:  # a repository that cannot be read has lost nothing
            return False
        changes = self._watch.look(now)
        await self._act(changes)
        return changes.restless


def manifests(repositories: Sequence[str]) -> dict[str, Manifest] | None:
    """Model → its files, also of models that cannot be served. None: a repository cannot be read. Blocks."""
    found = scan(repositories)
    if found.errors:
        return None
    listed = {name: _link(directory.path) + _manifest(directory.path) for name, directory in found.models.items()}
    return listed | {name: ((reason, 0, 0, 0),) for name, reason in found.failures.items()}


@final
class Watch:
    """`first`: what is acted on without this: the start-up load."""

    __slots__ = ("_acted", "_seen")

    def __init__(self, first: Mapping[str, Manifest]) -> None:
        self._acted = dict(first)
        self._seen = dict(first)

    def look(self, now: Mapping[str, Manifest]) -> Changes:
        """What to act on, given what is there `now`; it counts as acted on from here on, whatever comes of it."""
        different = {name for name in self._acted.keys() | now.keys() if self._acted.get(name) != now.get(name)}
        settled = {name for name in different if self._seen.get(name) == now.get(name)}
        self._seen = dict(now)
        for name in settled:
            if name in now:
                self._acted[name] = now[name]
            else:
                del self._acted[name]
        return Changes(
            tuple(sorted(settled & now.keys())), tuple(sorted(settled - now.keys())), bool(different - settled)
        )


def _manifest(directory: str) -> Manifest:
    """Symbolic links are followed, as when it is loaded, and where they lead is part of it; a loop of them ends at
    MAX_ENTRIES or the path limit.
    """
    entries: list[tuple[str, int, int, int]] = []
    waiting = [""]
    while waiting and len(entries) < MAX_ENTRIES:
        below = waiting.pop()
        try:
            names = sorted(os.listdir(os.path.join(directory, below)))
        except OSError as error:
            entries.append((f"{below}: {error.strerror}", 0, 0, 0))
            continue
        for name in names:
            if name in _CACHES:
                continue
            path = os.path.join(below, name)
            entries += _link(os.path.join(directory, path))
            try:
                status = os.stat(os.path.join(directory, path))
            except OSError as error:
                entries.append((f"{path}: {error.strerror}", 0, 0, 0))
                continue
            if os.path.isdir(os.path.join(directory, path)):
                entries.append((f"{path}/", 0, 0, 0))
                waiting.append(path)
            else:
                entries.append((path, status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(sorted(entries))


def _link(path: str) -> Manifest:
    """What a link says, as an entry: set anew, it may lead to files that are the same but for where they lie."""
    try:
        return ((f"{path} -> {os.readlink(path)}", 0, 0, 0),)
    except OSError:  # it is none
        return ()
