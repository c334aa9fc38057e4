"""Triton's rate limiter (`--rate-limit=execution_count`): which instances may run together, and which goes first.

An instance runs only while all resources that its `rate_limiter` names are there for it. Among those that wait, the one
with the least product of `priority` and executions goes first, and what it lacks is kept for it: a large claim is not
starved by small ones. Pure: no clock, no thread; `broker.worker.scheduler` asks, under its lock, and
`broker.worker.models` has it admit what is loaded. One per worker process: resources are those of one worker's models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, final

from broker.repository.config import InstanceGroup
from broker.repository.scheduling import Allowance, Resource
from shm.errors import Code, InferError

GLOBAL: Final = -1  # the device of a resource that all devices share
LOADING: Final = 2  # executions that loading counts as: in Triton an instance is initialised and warmed up in turn
CREDIT: Final = 10  # executions that one which was idle may catch up on; in Triton all of them, while others wait
Pool = tuple[int, str]  # device, name of the resource


@final
class Claim:
    """One instance's claim. `passed`: its executions times its priority, in the virtual time of the resources."""

    __slots__ = ("needs", "passed", "priority")

    def __init__(self, resources: Sequence[Resource] = (), priority: int = 1, device: int = 0) -> None:
        self.needs: dict[Pool, int] = {(GLOBAL if r.is_global else device, r.name): r.count for r in resources}
        self.priority = max(1, priority)
        self.passed = LOADING * self.priority


@final
class RateLimiter:
    """What there is of each resource, and what of it is in use.

    A claim that was idle, or is new, does not catch up on what it never asked for: its virtual time is at least that of
    the last one that began on its resources, less a small credit.
    """

    __slots__ = ("_begun", "_claims", "_given", "_limits", "_used")

    def __init__(self, given: Sequence[Allowance] = ()) -> None:
        """`given`: what the command line says there is; what it says nothing of is as large as the largest claim, or
        absent if it says anything at all (as in Triton).
        """
        self._given = tuple(given)
        self._claims: dict[Claim, None] = {}
        self._limits: dict[Pool, int] = {}
        self._used: dict[Pool, int] = {}
        self._begun: dict[Pool, int] = {}  # the virtual time of the last one that began

    def admit(self, claims: Sequence[Claim]) -> None:
        """Instances are loaded. Raises InferError INVALID_ARG, and admits none, when one could never run."""
        known = dict(self._claims)
        known.update(dict.fromkeys(claims))
        self._limits = self._limits_for(known)
        self._claims = known

    def remove(self, claims: Iterable[Claim]) -> None:
        """They will not run any more. Those that were not admitted are no error."""
        for claim in claims:
            self._claims.pop(claim, None)
        self._limits = self._limits_for(self._claims)
        for pool in [pool for pool in self._begun if pool not in self._limits]:
            del self._begun[pool]

    def turn(self, claim: Claim) -> tuple[int, int, int]:
        """The lower, the earlier it goes. Of equals, who has the lower priority number."""
        floor = min((self._begun.get(pool, 0) for pool in claim.needs), default=0)
        return max(claim.passed, floor - CREDIT * claim.priority), claim.priority, claim.passed

    def fits(self, claim: Claim, kept: frozenset[Pool] | set[Pool] = frozenset()) -> bool:
        """Are its resources there, none of them `kept` for others that go before it?"""
        for pool, count in claim.needs.items():
            if pool in kept or self._used.get(pool, 0) + count > self._limits[pool]:
                return False
        return True

    def begin(self, claim: Claim) -> None:
        """It runs. Only what `fits` may."""
        began = self.turn(claim)[0]
        claim.passed = began + claim.priority
        for pool, count in claim.needs.items():
            self._used[pool] = self._used.get(pool, 0) + count
            self._begun[pool] = max(began, self._begun.get(pool, 0))

    def end(self, claim: Claim) -> None:
        """It has run."""
        for pool, count in claim.needs.items():
            self._used[pool] -= count
            if not self._used[pool]:
                del self._used[pool]

    def _limits_for(self, claims: Iterable[Claim]) -> dict[Pool, int]:
        limits: dict[Pool, int] = {}
        for claim in claims:
            for pool, count in claim.needs.items():
                limits[pool] = max(count, limits.get(pool, 0))
        if self._given:
            for pool, least in limits.items():
                limits[pool] = self._given_of(pool)
                if limits[pool] < least:
                    raise InferError(
                        Code.INVALID_ARG,
                        f'Resource count for "{pool[1]}" is limited to {limits[pool]} which will prevent scheduling of '
                        f"one or more model instances, the minimum required count is {least}",
                    )
        everywhere = {name for device, name in limits if device == GLOBAL}
        for device, name in limits:
            if device != GLOBAL and name in everywhere:
                raise InferError(
                    Code.INVALID_ARG,
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    "configuration.",
                )
        return limits

    def _given_of(self, pool: Pool) -> int:
        """The device says nothing of a global resource. Triton reads names on the command line in lower case."""
        device, name = pool
        return max(
            (
                allowance.count
                for allowance in self._given
                if name in (allowance.name, allowance.name.lower())
                and (device == GLOBAL or allowance.device in (None, device))
            ),
            default=0,
        )


class _Instance(Protocol):
    index: int


class Limited(Protocol):
    """What is asked of `broker.worker.model.LoadedModel`."""

    @property
    def claims(self) -> Sequence[Claim]:
        """One of each instance; () when the limiter has no say."""

    @property
    def free(self) -> Sequence[_Instance]:
        """Those that run nothing."""


def idle(limiter: RateLimiter | None, model: Limited) -> int:
    """How many instances could begin at once; of those under the limiter one, as it may be another's turn then."""
    if limiter is None or not model.claims:
        return len(model.free)
    return int(any(limiter.fits(model.claims[instance.index]) for instance in model.free))


def claims_of(groups: Sequence[InstanceGroup]) -> tuple[Claim, ...]:
    """One per instance, in order; () when the limiter has no say: no resource is named and no priority differs."""
    if not any(group.resources for group in groups) and len({group.priority for group in groups}) < 2:
        return ()
    return tuple(
        Claim(group.resources, group.priority, group.gpus[0] if group.gpus else 0)
        for group in groups
        for _ in range(group.count)
    )
