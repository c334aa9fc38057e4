"""--model-memory-limit: which models go, least recently used first, when another one needs the room.

Used by `broker.models`. Only what was loaded on demand goes, by a client's load or lease: not what was loaded at start,
what somebody holds a lease on, a member of an ensemble that is loaded, or what has requests that wait or run. Sizes are
those of `broker.model_sizes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import final

from broker.catalogue import UNLOADING, Catalogue
from broker.ensemble_members import ensembles_of
from broker.leases import Leases
from broker.model_sizes import ModelSizes, files_size
from broker.repository.config import ModelConfig
from broker.statistics_blocks import StatisticsBlocks

SHOWN = 8  # models that a refusal names

_log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that takes memory, or an ensemble. `stays`: why it may not go, "" if it may. `users`: see `to_unload`."""

    name: str
    byte_size: int
    last_ms: int = 0
    stays: str = ""
    users: frozenset[str] = frozenset()


def to_unload(models: Iterable[Loaded], needed: int) -> list[str] | None:
    """Which go, in this order, for `needed` bytes; None when all that may go are not enough. Pure.

    `users` of a model are the ensembles that have it as a member: it may go after them. An ensemble that would go
    without giving any room stays.
    """
    left = {model.name: model for model in models}
    going: list[Loaded] = []
    freed = 0
    while freed < needed:
        free = [model for model in left.values() if not model.stays and not (model.users & left.keys())]
        if not free:
            return None
        model = min(free, key=lambda each: (each.last_ms, each.name))
        del left[model.name]
        going.append(model)
        freed += model.byte_size
    used_by_those = {user for model in going if model.byte_size for user in _all_users(model, going)}
    return [model.name for model in going if model.byte_size or model.name in used_by_those]


def _all_users(model: Loaded, among: list[Loaded]) -> set[str]:
    found = set(model.users)
    for other in reversed(among):  # an ensemble goes after those that use it
        if other.name in found:
            found |= other.users
    return found


@final
class ModelMemory:
    """`limit` in bytes, 0: none. `unload(model, why)` unloads one; `is_changing`: is it loaded or unloaded just now?

    `now_ms`: wall clock, as LAST_MS of the statistics page.
    """

    __slots__ = (
        "_blocks",
        "_catalogue",
        "_demanded",
        "_is_changing",
        "_leases",
        "_now_ms",
        "_one",
        "_reserved",
        "_together",
        "_unload",
        "limit",
        "sizes",
    )

    def __init__(
        self,
        catalogue: Catalogue,
        blocks: StatisticsBlocks,
        leases: Leases,
        limit: int,
        unload: Callable[[str, str], Awaitable[object]],
        is_changing: Callable[[str], bool],
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.limit = limit
        self.sizes = ModelSizes()
        self._catalogue = catalogue
        self._blocks = blocks
        self._leases = leases
        self._unload = unload
        self._is_changing = is_changing
        self._now_ms = now_ms
        self._demanded: dict[str, int] = {}  # what may go, and when it was last wanted, not counting requests
        self._reserved: dict[str, int] = {}  # by loads under way
        self._together: Counter[str] = Counter()
        self._one = asyncio.Lock()  # makes room at a time

    # --- what was loaded how ---------------------------------------------------------------------------------------

    def demanded(self, model: str) -> None:
        """A client had it loaded, just now."""
        self._demanded[model] = self._now_ms()

    def wanted(self, model: str) -> None:
        """A lease on it has ended: so long it was in use."""
        if model in self._demanded:
            self._demanded[model] = self._now_ms()

    def forget(self, model: str) -> None:
        """It was unloaded."""
        self._demanded.pop(model, None)

    @contextlib.contextmanager
    def together(self, models: Collection[str]) -> Iterator[None]:
        """None of them goes meanwhile: an ensemble of them is being loaded."""
        self._together.update(models)
        try:
            yield
        finally:
            self._together.subtract(models)

    # --- room ------------------------------------------------------------------------------------------------------

    async def make_room(self, config: ModelConfig) -> str:
        """For a model that is to be loaded, with its turn held. Returns why there is none, or "": then it is reserved.

        Of one that is loaded already only what it grows by counts: for a moment there are both.
        """
        if config.ensemble is not None:
            return ""
        files = {n: await asyncio.to_thread(files_size, path) for n, path in config.versions.items()}
        wanted = self.sizes.note(config.name, files)
        if not self.limit:
            return ""
        async with self._one:
            self._reserved[config.name] = wanted
            problem = await self._until_it_fits(config.name)
            if problem:
                del self._reserved[config.name]
            return problem

    async def measured(self, config: ModelConfig) -> str:
        """Its workers have it, and it does not serve yet: what it takes is known. Returns why that is too much, or "".

        As `make_room`, which knew its files only.
        """
        if config.name not in self._reserved:
            return ""
        async with self._one:
            self._reserved[config.name] = sum(self.sizes.of(config.name, number) for number in config.versions)
            return await self._until_it_fits(config.name)

    async def loaded(self, model: str) -> None:
        """It serves, or it failed. If a reload has made it larger than there is room for, others go."""
        if self._reserved.pop(model, None) is None:
            return
        async with self._one:
            if problem := await self._until_it_fits(model):
                _log.warning("model '%s' is larger than its files: %s", model, problem)

    async def _until_it_fits(self, model: str) -> str:
        """Again after each: what may go changes meanwhile."""
        while True:
            rows = self._rows()
            over = sum(row.byte_size for row in rows) - self.limit
            if over <= 0:
                return ""
            going = to_unload(rows, over)
            if going is None:
                return self._refusal(model, rows)
            _log.info("unloading '%s', which was not used for longest, to make room for '%s'", going[0], model)
            await self._unload(going[0], f"'{model}' needed its memory (--model-memory-limit)")

    def _rows(self) -> list[Loaded]:
        """Everything that is loaded, is being loaded, or has not gone yet."""
        sizes = dict.fromkeys(self._reserved, 0)
        last: dict[str, int] = {}
        going = set[str]()
        for name, number, version in self._catalogue.versions():
            if version.state == UNLOADING:
                going.add(name)
            if version.generation or version.state == UNLOADING:
                sizes[name] = sizes.get(name, 0) + self.sizes.of(name, number)
                last[name] = max(last.get(name, 0), self._blocks.last_ms(name, number))
        return [
            Loaded(
                name,
                max(byte_size, self._reserved.get(name, 0)),
                max(last.get(name, 0), self._demanded.get(name, 0)),
                "is being unloaded" if name in going else self._stays(name),
                frozenset(ensembles_of(self._catalogue, name)),
            )
            for name, byte_size in sizes.items()
        ]

    def _stays(self, model: str) -> str:
        if self._is_changing(model):
            return "is being loaded or unloaded"
        if held := self._leases.count(model):
            return f"{held} lease{'s' * (held > 1)}"
        if self._together[model] > 0:
            return "an ensemble of it is being loaded"
        if model not in self._demanded:
            return "not loaded on demand"
        busy = any(self._blocks.busy(model, number) for number in self._catalogue.known[model].versions)
        return "requests wait or run" if busy else ""

    def _refusal(self, model: str, rows: list[Loaded]) -> str:
        wanted = sum(row.byte_size for row in rows if row.name == model)
        others = sorted((row for row in rows if row.name != model), key=lambda row: -row.byte_size)
        others = [row for row in others if row.byte_size]
        used = sum(row.byte_size for row in others)
        shown = [f"'{row.name}' {row.byte_size} ({self._why(row, rows)})" for row in others[:SHOWN]]
        more = [f"{len(others) - SHOWN} more"] if len(others) > SHOWN else []
        return (
            f"it takes {wanted} bytes, and of the {self.limit} of --model-memory-limit {used} are used"
            f"{': ' + ', '.join(shown + more) if shown else ''}; what is in use cannot be unloaded for it"
        )

    def _why(self, row: Loaded, rows: list[Loaded]) -> str:
        if row.stays:
            return row.stays
        by_name = {each.name: each for each in rows}
        users = [f"member of '{user}'" for user in sorted(row.users) if user in by_name]
        return users[0] if users else "idle"
