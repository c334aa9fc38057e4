"""Triton's repository index: what was ever loaded by version, the rest of the repositories by name.

Used by `broker.models`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from broker.catalogue import READY, UNAVAILABLE, Catalogue
from broker.repository.scan import scan
from shm.message_values import IndexEntry

IN_SEVERAL = "model appears in two or more repositories"


async def repository_index(catalogue: Catalogue, repositories: Sequence[str], *, ready: bool) -> list[IndexEntry]:
    """`ready`: only what is READY."""
    found = await asyncio.to_thread(scan, repositories)
    known = [IndexEntry(name=m.name, version=m.version, state=m.state, reason=m.reason) for m in catalogue.all()]
    if ready:
        return [entry for entry in known if entry.state == READY]
    twice = [IndexEntry(name=name, state=UNAVAILABLE, reason=IN_SEVERAL) for name in found.in_several]
    known = [entry for entry in known if entry.version or entry.name not in found.in_several]
    names = {*found.models, *found.failures} - {entry.name for entry in (*known, *twice)}
    return sorted((*known, *twice, *(IndexEntry(name=name) for name in names)), key=lambda entry: entry.name)
