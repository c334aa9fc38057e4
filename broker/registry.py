"""The truth about regions: who registered which memory under which name, who opened it, and who still maps it.

Called by `broker.control` for sessions, by `broker.principals` for those on whose behalf gateways act (they have
negative session numbers), and by `broker.plans` to find what a plan names. It keeps one descriptor per region and never
maps it: a client that truncates its file can kill whoever does.

    names[session][name] → RegionEntry → fd
                              ↑ source
    a region opened by token, or by a gateway for a principal, is an entry of its own; it is retired with the entry it
    was opened from

    registered ── unregister ──▶ draining ── all workers acknowledged, no request uses it ──▶ closed, forgotten
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, final

from broker.closing import Closer
from broker.cuda_regions import OfGpu, check_served, identity_of
from broker.quota import Quota
from broker.records import Peer, RegionEntry, entry_of
from broker.reservation import Reservations
from shm import regions
from shm.cuda.descriptor import CudaMemory
from shm.errors import Code, InferError, raise_first
from shm.sockets import close_all

log = logging.getLogger(__name__)
CATCH_UP_S = 1.0
Close = Callable[[RegionEntry], "asyncio.Future[None] | None"]  # None: it is done


class RegionWorker(Protocol):
    """What regions need of a worker."""

    key: str

    async def add_region(self, entry: RegionEntry) -> None:
        """Returns when the worker's process has mapped the region."""

    async def retire_region(self, region: int, generation: int) -> asyncio.Future[None] | None:
        """Returns when no new request of the worker can use the region; if some still do, what ends with the last."""

    async def region_used(self, region: int, generation: int) -> bool:
        """Has a request used it since this was last asked? What `retire_region` returned is up to date afterwards."""


@final
class Registry:
    """All regions of all sessions. Methods that await survive the end of the session and of workers meanwhile."""

    def __init__(self, quota: Quota, close: Close | None = None) -> None:
        """`close`: how descriptors are closed, if not by `broker.closing.Closer`."""
        self.quota = quota
        self._close = close if close is not None else Closer()
        self._closing: dict[int, asyncio.Future[None]] = {}  # by generation: draining ones that nobody holds
        self.cuda_devices: Callable[[], Sequence[str]] = tuple  # UUIDs of the GPUs, in the broker's order
        self.cuda_reason: Callable[[], str] = str  # why there are no (more) of them
        self._names: dict[int, dict[str, RegionEntry]] = {}
        self._tokens: dict[str, RegionEntry] = {}
        self._draining: dict[int, RegionEntry] = {}  # by generation
        self._holders: dict[int, list[RegionWorker]] = {}  # by generation: in which requests may use a draining one
        self._mapped: dict[int, list[RegionWorker]] = {}  # by generation: who has been asked to map it
        self._counts: Counter[int] = Counter()  # by session, as `of` has them
        self._bytes: Counter[int] = Counter()
        self._opened: dict[int, list[RegionEntry]] = {}  # by generation of the source
        self._expulsions: set[asyncio.Task[None]] = set()
        self._free: list[int] = []
        self._indexes = itertools.count(1)
        self._generations = itertools.count(1)
        self._reservations = Reservations()

    # --- looking ---------------------------------------------------------------------------------------------------

    def find(self, session: int, name: str) -> RegionEntry:
        """The live region `name` of `session`. Raises NOT_FOUND."""
        entry = self._names.get(session, {}).get(name)
        if entry is None:
            raise InferError(Code.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
        return entry

    def of(self, session: int) -> list[RegionEntry]:
        """Regions of `session`, retired ones that some worker still has to acknowledge included."""
        draining = (entry for entry in self._draining.values() if entry.session == session)
        return [*self._names.get(session, {}).values(), *draining]

    def usage(self, session: int) -> tuple[int, int]:
        """How many regions `of` has, and their bytes."""
        return self._counts[session], self._bytes[session]

    def __len__(self) -> int:
        return self._counts.total()

    def __iter__(self) -> Iterator[RegionEntry]:
        for names in self._names.values():
            yield from names.values()
        yield from self._draining.values()

    # --- registering -----------------------------------------------------------------------------------------------

    def register_pool(self, peer: Peer, name: str, byte_size: int, fd: int) -> RegionEntry:
        """Admit a sealed memfd that the client made. Takes `fd` over, whatever happens."""
        try:
            self._admit(peer, name, "pool", byte_size)
        except BaseException:
            os.close(fd)
            raise
        try:
            source = regions.check_pool(fd, byte_size)
        except BaseException:
            os.close(fd)
            self._discharge(peer.uid, "pool", byte_size)
            raise
        return self._enter(peer, name, "pool", fd, byte_size, 0, source)

    async def register_system(self, peer: Peer, name: str, key: str, byte_size: int, offset: int) -> RegionEntry:
        """Open POSIX shared memory `key` on behalf of `peer` and make sure that all its pages exist."""
        self._check_name(peer.session, name)
        fd, source = regions.open_system(name, key, byte_size, offset, peer.uid)
        try:
            self._admit(peer, name, "system", byte_size)
            try:
                await self._reservations.reserve(fd, offset, byte_size)
                self._check_name(peer.session, name)  # gateways may register for one principal at the same time
            except BaseException:
                self._discharge(peer.uid, "system", byte_size)
                raise
        except BaseException:
            os.close(fd)
            raise
        entry = self._enter(peer, name, "system", fd, byte_size, offset, source)
        entry.key = key
        return entry

    def register_cuda(self, peer: Peer, name: str, what: OfGpu, writable: bool, fd: int = -1) -> RegionEntry:
        """Note GPU memory, or events, for the workers of that GPU. Takes `fd` over (of VMM memory), in any case."""
        kind = "cuda" if isinstance(what, CudaMemory) else "events"
        try:
            what.check(name)
            check_served(name, what, self.cuda_devices())
            self._admit(peer, name, kind, what.byte_size)
        except BaseException:
            close_all((fd,))
            raise
        identity = identity_of(what, fd, writable=writable)
        entry = self._enter(peer, name, kind, fd, what.byte_size, what.offset, identity)
        entry.cuda, entry.events = (what, None) if isinstance(what, CudaMemory) else (None, what)
        return entry

    def share(self, session: int, name: str) -> str:
        """The token under which other sessions of the same uid can open region `name`; always the same one."""
        entry = self.find(session, name)
        if entry.cuda is not None or entry.events is not None:
            raise InferError(
                Code.UNSUPPORTED, f"region '{name}' is memory of a GPU: only the session that registered it can use it"
            )
        if entry.source is not None:
            raise InferError(
                Code.INVALID_ARG, f"region '{name}' was opened from another session: ask its owner for the token"
            )
        if not entry.token:
            entry.token = secrets.token_hex(16)
            self._tokens[entry.token] = entry
        return entry.token

    def open(self, peer: Peer, name: str, token: str) -> RegionEntry:
        """Give `peer` the shared region behind `token`, under a name of its own. Raises NOT_FOUND, ALREADY_EXISTS."""
        owner = self._tokens.get(token)
        if owner is None or owner.owner_uid != peer.uid:
            raise InferError(
                Code.NOT_FOUND,
                "Unable to find shared memory region: no region is shared under this token; its owner may have "
                "unregistered it or ended",
            )
        return self._open(peer, name, owner)

    def alias(self, peer: Peer, owner: RegionEntry) -> RegionEntry:
        """`owner`, a region of a principal, in the session of gateway `peer`; always the same one.

        Its name is as hard to guess as a token, so it is no name of a region that the gateway itself registers.
        """
        for opened in self._opened.get(owner.generation, ()):
            if opened.session == peer.session and not opened.draining:
                return opened
        return self._open(peer, secrets.token_hex(16), owner)

    def _open(self, peer: Peer, name: str, owner: RegionEntry) -> RegionEntry:
        self._check_name(peer.session, name)
        self.quota.take_region(peer.uid, owner.kind)  # its bytes are the owner's
        try:
            fd = os.dup(owner.fd) if owner.fd >= 0 else -1
        except BaseException:
            self.quota.give_region(peer.uid, owner.kind)
            raise
        identity = regions.FileIdentity(owner.device, owner.inode, owner.file_size, owner.writable)
        entry = self._entry(peer, name, owner.kind, fd, owner.byte_size, owner.offset, identity)
        entry.source, entry.cuda, entry.owner_session = owner.identity, owner.cuda, owner.session
        self._opened.setdefault(owner.generation, []).append(entry)
        return self._add(entry)

    # --- mapping and retiring --------------------------------------------------------------------------------------

    async def map_at(self, worker: RegionWorker, entries: Iterable[RegionEntry]) -> None:
        """Return when `worker` has all of `entries`. Raises NOT_FOUND if one is retired before that."""
        for entry in entries:
            if not entry.draining:
                holders = self._mapped.setdefault(entry.generation, [])
                if worker not in holders:
                    holders.append(worker)
                await worker.add_region(entry)
            if entry.draining:
                raise InferError(Code.NOT_FOUND, f"Unable to find shared memory region: '{entry.name}'")

    async def unregister(self, session: int, name: str = "", kind: str = "") -> None:
        """Retire `name`, or all regions of `session` for "", and return when every worker has acknowledged.

        Unknown names succeed, and so do regions of another `kind` ("": any). The name is free at once. What was opened
        from these regions is retired too. All are known to `of` until no request uses them, and their memory is free.
        """
        names = self._names.get(session, {})
        chosen = [names[name]] if name in names else list(names.values()) if not name else []
        owners = [entry for entry in chosen if kind in ("", entry.kind)]
        # By generation, because a session may open its own token.
        retired = {e.generation: e for owner in owners for e in (owner, *self._opened.get(owner.generation, ()))}
        retired = {generation: entry for generation, entry in retired.items() if not entry.draining}
        for entry in retired.values():
            self._withdraw(entry)
        # Shielded: the session may end, which must not leave an entry draining for good.
        await asyncio.shield(asyncio.gather(*(self._drain(entry) for entry in retired.values())))
        if closing := [self._closing[generation] for generation in retired if generation in self._closing]:
            await asyncio.wait(closing)  # then their quota is free, too

    async def used(self, entry: RegionEntry) -> bool:
        """Has a request used this system region, or what was opened from it, since this was last asked?"""
        asked = [
            worker.region_used(*opened.identity)
            for opened in (entry, *self._opened.get(entry.generation, ()))
            for worker in self._mapped.get(opened.generation, ())
        ]
        return any(await asyncio.gather(*asked))

    async def catch_up(self, session: int) -> None:
        """Return when `of` knows which draining regions of `session` requests have stopped using by now."""
        asked = [
            worker.region_used(*opened.identity)
            for entry in self._draining.values()
            if entry.session == session
            for opened in (entry, *self._opened.get(entry.generation, ()))
            for worker in self._holders.get(opened.generation, ())
        ]
        if asked:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*asked), CATCH_UP_S)

    def expel(self, generation: int) -> RegionEntry | None:
        """Retire a region on the broker's own account: its file was truncated under a worker. None: it is already."""
        found = next((entry for entry in self if entry.generation == generation), None)
        if found is not None:  # what a gateway opened for a principal cannot be left: it would be opened again
            found = next((entry for entry in self if entry.session < 0 and entry.identity == found.source), found)
        if found is None or found.draining:
            return None
        task = asyncio.create_task(self.unregister(found.session, found.name))
        self._expulsions.add(task)
        task.add_done_callback(self._expelled)
        return found

    def close(self) -> None:
        """Close every descriptor. Only when no worker runs any more."""
        self._reservations.close()
        for entry in list(self):
            entry.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _check_name(self, session: int, name: str) -> None:
        if name in self._names.get(session, {}):
            raise InferError(Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")

    def _admit(self, peer: Peer, name: str, kind: str, byte_size: int) -> None:
        """Everything that can be refused before the memory is looked at; charges the quota."""
        self._check_name(peer.session, name)
        if byte_size == 0:
            raise InferError(
                Code.INVALID_ARG, f"failed to register shared memory region '{name}': invalid args: byte_size is 0"
            )
        self.quota.take_region(peer.uid, kind)
        take = {"cuda": self.quota.take_cuda, "events": self.quota.take_events}.get(kind, self.quota.take)
        try:
            take(peer.uid, byte_size, f"shared memory region '{name}'")
        except InferError:
            self.quota.give_region(peer.uid, kind)
            raise

    def _discharge(self, uid: int, kind: str, byte_size: int) -> None:
        self.quota.give_region(uid, kind)
        {"cuda": self.quota.give_cuda, "events": self.quota.give_events}.get(kind, self.quota.give)(uid, byte_size)

    def _enter(
        self, peer: Peer, name: str, kind: str, fd: int, byte_size: int, offset: int, source: regions.FileIdentity
    ) -> RegionEntry:
        return self._add(self._entry(peer, name, kind, fd, byte_size, offset, source))

    def _entry(
        self, peer: Peer, name: str, kind: str, fd: int, byte_size: int, offset: int, source: regions.FileIdentity
    ) -> RegionEntry:
        index = self._free.pop() if self._free else next(self._indexes)
        return entry_of(peer, (index, next(self._generations)), name, kind, fd, byte_size, offset, source)

    def _add(self, entry: RegionEntry) -> RegionEntry:
        self._names.setdefault(entry.session, {})[entry.name] = entry
        self._counts[entry.session] += 1
        self._bytes[entry.session] += entry.byte_size
        return entry

    def _remove(self, entry: RegionEntry) -> None:
        del self._draining[entry.generation]
        self._counts[entry.session] -= 1
        self._bytes[entry.session] -= entry.byte_size
        if not self._counts[entry.session]:
            del self._counts[entry.session], self._bytes[entry.session]

    def _expelled(self, task: asyncio.Task[None]) -> None:
        self._expulsions.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.warning("a truncated region was retired without its workers' word: %s", error)

    def _withdraw(self, entry: RegionEntry) -> None:
        """No new plan finds `entry` from here on; its name and its token are free."""
        entry.draining = True
        names = self._names[entry.session]
        del names[entry.name]
        if not names:
            del self._names[entry.session]
        self._tokens.pop(entry.token, None)
        self._draining[entry.generation] = entry
        self._holders[entry.generation] = self._mapped.pop(entry.generation, [])

    async def _drain(self, entry: RegionEntry) -> None:
        """Tell the workers that map `entry`; it is forgotten when no request of theirs uses it."""
        workers = tuple(self._holders[entry.generation])
        results = await asyncio.gather(*(self._take_from(worker, entry) for worker in workers), return_exceptions=True)
        self._settle(entry)
        raise_first(results)

    async def _take_from(self, worker: RegionWorker, entry: RegionEntry) -> None:
        last = None
        try:
            last = await worker.retire_region(*entry.identity)
        finally:
            if last is None:
                self._let_go(worker, entry)
            else:
                last.add_done_callback(lambda _: self._let_go(worker, entry))
                if entry.cuda is not None:  # its owner may free it as soon as it is told, even under the driver's feet
                    await asyncio.shield(last)

    def _let_go(self, worker: RegionWorker, entry: RegionEntry) -> None:
        self._holders[entry.generation].remove(worker)
        self._settle(entry)

    def _settle(self, entry: RegionEntry) -> None:
        """Close a draining region that nobody holds any more, and forget it."""
        if self._holders.get(entry.generation, True) or self._opened.get(entry.generation):
            return
        del self._holders[entry.generation]  # it is settled once
        closing = self._close(entry)
        if closing is None:
            self._forget(entry)
        else:
            self._closing[entry.generation] = closing
            closing.add_done_callback(lambda _: self._forget(entry))

    def _forget(self, entry: RegionEntry) -> None:
        """Its memory is free: quota and index go back."""
        self._closing.pop(entry.generation, None)
        self._remove(entry)
        self._opened.pop(entry.generation, None)
        if entry.source is None:
            self._discharge(entry.owner_uid, entry.kind, entry.byte_size)
        else:
            self.quota.give_region(entry.owner_uid, entry.kind)
            siblings = self._opened.get(entry.source[1], [])
            if entry in siblings:
                siblings.remove(entry)
        self._free.append(entry.region)
        if entry.source is not None and (owner := self._draining.get(entry.source[1])) is not None:
            self._settle(owner)
