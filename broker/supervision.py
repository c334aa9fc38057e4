"""The rules of supervision, without processes: when to restart, whom to blame, what counts as hung.

`broker.workers`, `broker.logical_worker` and what that is made of ask them about workers, `broker.gateways` about
gateways, `broker.server` about regions that shrink. Nothing here reads a clock, a page or a descriptor: times are
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, final

RESTART_DELAYS_S = (0.0, 0.1, 0.5, 2.0, 10.0, 30.0)
HOPELESS = 4  # failed starts in a row after which waiting requests are ended: the next try is 10 s away or more
BLAME_WINDOW_NS = 60_000_000_000
REFUSAL_NS = 60_000_000_000
HANG_FLOOR_S = 10.0
HANG_FACTOR = 10
HANG_UNMEASURED_S = 120.0

CLOSE_PART = 10  # of the time that a load may take, the end of what was loaded may take one
CLOSE_FLOOR_S = 5.0

TRUNCATED_REGIONS = 3  # of one session within BLAME_WINDOW_NS
PING_EVERY_S = 5.0
PING_LIMIT_S = 30.0
STOOD_STILL_NS = 1_000_000_000  # four looks for hangs that did not take place
LOAD_S = 600.0  # for a worker, or its replacements, to load a model; for a replacement to load all
REST_AFTER_S = 60.0  # without anything to serve: then a worker's process ends, until it is wanted again
PING_STEP_NS = 1_000_000_000  # between two looks there may be more only if the broker itself stood still

Load = tuple[str, int, int]  # model, version, generation


@final
class BackOff:
    """How long to wait before the next start of a worker. Only deaths before it was ready count."""

    __slots__ = ("failures",)

    def __init__(self) -> None:
        self.failures = 0

    def after_death(self, was_ready: bool) -> float:
        """Seconds until the next start. A worker that had been ready is replaced at once, always."""
        if was_ready:
            self.failures = 0
            return RESTART_DELAYS_S[0]
        delay = RESTART_DELAYS_S[min(self.failures, len(RESTART_DELAYS_S) - 1)]
        self.failures += 1
        return delay

    @property
    def hopeless(self) -> bool:
        """Too many failed starts in a row for requests to go on waiting for the next one."""
        return self.failures > HOPELESS


@final
class LoadDeaths:
    """Which model load a worker must come back without, after `limit` deaths in a row while loading it.

    A death is blamed on a load only when no other load was outstanding. Loads that died in company twice, or alone
    once, are suspects: each is loaded with nothing beside it from then on, so that the next death names the right one.
    """

    __slots__ = ("_alone", "_company", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._alone: dict[Load, int] = {}
        self._company: dict[Load, int] = {}

    def died(self, outstanding: Iterable[Load]) -> Load | None:
        """The process died while these loads were outstanding. Returns the one to give up, if it is its turn."""
        loads = tuple(outstanding)
        if len(loads) == 1:
            load = loads[0]
            self._alone[load] = self._alone.get(load, 0) + 1
            if self._alone[load] >= self.limit:
                self.forget(load)
                return load
        else:
            for load in loads:
                self._company[load] = self._company.get(load, 0) + 1
        return None

    def suspect(self, load: Load) -> bool:
        """Must this be loaded alone?"""
        return load in self._alone or self._company.get(load, 0) >= 2

    def forget(self, load: Load) -> None:
        """It was loaded, or is not wanted any more."""
        self._alone.pop(load, None)
        self._company.pop(load, None)


@final
class Offenders:
    """(session, model) pairs whose requests killed workers: two endings of requests that ran alone, within 60 s."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], int] = {}

    def ending(self, session: int, model: str, now_ns: int) -> bool:
        """A request of this pair was alone at its second death. True: refuse the pair for `REFUSAL_NS`."""
        self._last = {pair: at for pair, at in self._last.items() if now_ns - at <= BLAME_WINDOW_NS}
        if self._last.pop((session, model), None) is not None:
            return True
        self._last[session, model] = now_ns
        return False


@final
class Truncations:
    """Sessions that registered what was truncated under workers: three regions within 60 s are no accident.

    Each region may have cost a start of every worker that mapped it, and of all who wait for those.
    """

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at: dict[int, dict[int, int]] = {}  # by session: generation of the region → when

    def region(self, session: int, generation: int, now_ns: int) -> bool:
        """This one was found truncated. True: the session must go."""
        self._at.setdefault(session, {})[generation] = now_ns
        for other, regions in tuple(self._at.items()):
            recent = {region: at for region, at in regions.items() if now_ns - at <= BLAME_WINDOW_NS}
            if recent:
                self._at[other] = recent
            else:
                del self._at[other]
        return len(self._at[session]) >= TRUNCATED_REGIONS


class Running(NamedTuple):
    """A model instance's block in the statistics page, read while its BATCH word was not zero."""

    block: int
    started_ns: int
    expected_ns: int
    hang_timeout_s: float  # the model's own setting; 0 = none


def hang_limit_s(expected_ns: int, hang_timeout_s: float) -> float:
    """How long a batch may run whose longest run so far, at its size or larger, took `expected_ns` (0: unmeasured)."""
    if hang_timeout_s > 0:
        return hang_timeout_s
    if expected_ns == 0:
        return HANG_UNMEASURED_S
    return max(HANG_FLOOR_S, HANG_FACTOR * expected_ns / 1e9)


def close_limit_s(load_s: float) -> float:
    """How long `close` of a model's backend may take, where a load may take `load_s`."""
    return max(CLOSE_FLOOR_S, load_s / CLOSE_PART)


@final
class HangWatch:
    """Finds instances that run longer than they may.

    The words of a block are not read in one step, so BATCH may be new while STARTED is still that of the batch
    before: a verdict needs the same STARTED in two samples. Time in which nobody looked does not count: the machine may
    have been frozen, and the model with it.
    """

    __slots__ = ("_sampled_ns", "_seen")

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # by block: STARTED, and how long nobody looked since
        self._sampled_ns = 0

    def sample(self, running: Iterable[Running], now_ns: int) -> list[Running]:
        """The instances that hang. Call it with everything that runs now."""
        step_ns, self._sampled_ns = now_ns - self._sampled_ns, now_ns
        unseen_ns = step_ns if step_ns > STOOD_STILL_NS else 0
        seen: dict[int, tuple[int, int]] = {}
        hung: list[Running] = []
        for instance in running:
            started_ns, missed_ns = self._seen.get(instance.block, (-1, 0))
            known = started_ns == instance.started_ns
            missed_ns = missed_ns + unseen_ns if known else 0
            seen[instance.block] = instance.started_ns, missed_ns
            limit_ns = hang_limit_s(instance.expected_ns, instance.hang_timeout_s) * 1e9
            if known and now_ns - instance.started_ns - missed_ns > limit_ns:
                hung.append(instance)
        self._seen = seen
        return hung


@final
class Pulse:
    """Finds a process that runs nothing and does not answer: one that is stopped, or wedged outside of a model.

    While a model runs or loads, which may keep the process from answering, silence does not count. It is added up look
    by look, so that a broker that stood still itself does not take that for the worker's silence.
    """

    __slots__ = ("_asked_ns", "_every_ns", "_limit_ns", "_looked_ns", "_silent_ns")

    def __init__(self, every_s: float, limit_s: float, now_ns: int) -> None:
        self._every_ns = int(every_s * 1e9)
        self._limit_ns = int(limit_s * 1e9)
        self._asked_ns = self._looked_ns = now_ns
        self._silent_ns = 0

    def is_gone(self, answered: bool, busy: bool, now_ns: int) -> bool:
        """Has it been silent for too long? `answered`: it owes no answer. Called at every look."""
        step_ns, self._looked_ns = min(now_ns - self._looked_ns, PING_STEP_NS), now_ns
        self._silent_ns = 0 if answered or busy else self._silent_ns + step_ns
        return self._silent_ns > self._limit_ns

    def is_due(self, now_ns: int) -> bool:
        """Is it time to ask again? True is taken as said: it is asked now."""
        if now_ns - self._asked_ns < self._every_ns:
            return False
        self._asked_ns = now_ns
        return True


@final
class Idleness:
    """For how long a worker has served nothing, as looks at it have shown."""

    __slots__ = ("_limit_ns", "_since_ns")

    def __init__(self, limit_s: float) -> None:
        self._limit_ns = int(limit_s * 1e9)
        self._since_ns: int | None = None  # None: the latest look found it at work

    def is_long(self, idle: bool, now_ns: int) -> bool:
        """Has every look for longer than the limit found it `idle`? Called at every look."""
        if not idle:
            self._since_ns = None
        elif self._since_ns is None:
            self._since_ns = now_ns
        return self._since_ns is not None and now_ns - self._since_ns > self._limit_ns
