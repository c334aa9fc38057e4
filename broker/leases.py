"""Who keeps which models loaded: leases, which end at the latest with the session that took them. Pure.

Owned by `broker.models`. The rule: while anybody holds a lease on a model, nobody can unload it, whoever asks, the
holder included; a lease on an ensemble keeps its members as well. It does not stand against the repository: a model
whose directory goes while the repositories are polled is unloaded all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import final

from shm.errors import Code, InferError

MAX_LEASES = 1024  # of one session


@final
class Leases:
    """By session and the number that it gave the lease: (model, version; "": whichever is the latest)."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[int, dict[int, tuple[str, str]]] = {}

    def take(self, session: int, lease: int, model: str, version: str = "") -> None:
        """From now on it counts; the same again changes nothing.

        Raises InferError when the session uses this number for another model, or has MAX_LEASES.
        """
        held = self._held.setdefault(session, {})
        if held.get(lease) == (model, version):
            return
        if lease in held:
            raise InferError(Code.INVALID_ARG, f"lease {lease} of this session is held already, on '{held[lease][0]}'")
        if len(held) >= MAX_LEASES:
            raise InferError(Code.UNAVAILABLE, f"this session holds {MAX_LEASES} leases on models, the most there are")
        held[lease] = (model, version)

    def is_held(self, session: int, lease: int) -> bool:
        """Has it not ended?"""
        return lease in self._held.get(session, {})

    def end(self, session: int, lease: int) -> str:
        """Returns the model that it was on; one that is not held, or not any more, is no error ("")."""
        held = self._held.get(session, {})
        model = held.pop(lease, ("", ""))[0]
        if not held:
            self._held.pop(session, None)
        return model

    def end_all(self, session: int) -> set[str]:
        """The session has ended. Returns the models that it held."""
        return {model for model, _ in self._held.pop(session, {}).values()}

    def count(self, model: str) -> int:
        """How many are held on it."""
        return sum(each == model for _, each, _ in self._all())

    def versions(self, model: str) -> Counter[int]:
        """How many are held on which version of it; those on the latest are not among them."""
        return Counter(
            int(version)
            for _, each, version in self._all()
            if each == model and version.isascii() and version.isdigit()
        )

    def refusal(self, model: str, ensembles: Iterable[str] = ()) -> str:
        """Why it cannot be unloaded, or "". `ensembles`: those that are loaded and use it, directly or not."""
        names = (model, *ensembles)
        held = [(session, each) for session, each, _ in self._all() if each in names]
        if not held:
            return ""
        sessions = len({session for session, _ in held})
        through = sorted({each for _, each in held} - {model})
        of = f" (through {', '.join(repr(name) for name in through)})" if through else ""
        return (
            f"{_number(len(held), 'lease')} of {_number(sessions, 'session')} {'keep' if len(held) > 1 else 'keeps'} "
            f"it loaded{of}: it can be unloaded when every keep_loaded() has ended"
        )

    def _all(self) -> Iterable[tuple[int, str, str]]:
        for session, held in self._held.items():
            for model, version in held.values():
                yield session, model, version


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
