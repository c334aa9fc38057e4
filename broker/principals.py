"""Principals: those on whose behalf gateways register memory and run requests.

Called by `broker.gateway_answers`. To the registry a principal is a session without a connection: it has a negative
number, is made when it first registers something and is forgotten when nothing is left of it. Its regions belong to no
gateway and survive all of them.

    names[-7]["input0"] ◀── source ── names[gateway's session]["3f9c…"]     (UseRegion; what the gateway's plans name)

A region ends by unregister, with its principal, when its file is truncated under a worker, or by the reaper: a POSIX
object that has no name any more (st_nlink is 0: its creator is gone, or will never find it again) and that nothing has
used for 60 s is retired. Used means that a request ran on it (the workers say so) or that a gateway asked for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import final

from broker.records import Peer, RegionEntry, record
from broker.registry import Registry
from shm import regions
from shm.cuda.descriptor import HANDLE_SIZE, LEGACY, CudaMemory
from shm.errors import Code, InferError
from shm.message_values import Principal, RegionRecord

PRINCIPAL = "principal"  # role of its record
UNUSED_S = 60.0  # without a name and without use
LOOK_EVERY_S = 10.0
# What a worker says of memory that it cannot use, whichever name it knows it by.
_REFUSED = re.compile(r"failed to register shared memory region '.*': invalid args: (?P<why>.*)", re.DOTALL)

NO_BYTES = "a region has at least 1 byte"

log = logging.getLogger(__name__)


@final
class _Registration:
    """One that is under way: allocating pages takes time. `withdrawn`: nobody wants it any more."""

    __slots__ = ("name", "withdrawn")

    def __init__(self, name: str) -> None:
        self.name = name
        self.withdrawn = False


@final
class Principals:
    """All principals that own something."""

    def __init__(self, registry: Registry, open_cuda: Callable[[RegionEntry], Awaitable[None]]) -> None:
        """`open_cuda`: has a worker open the memory; raises InferError and retires it if that fails."""
        self._registry = registry
        self._open_cuda = open_cuda
        self._peers: dict[Principal, Peer] = {}
        self._last = 0
        self._busy: dict[Principal, set[_Registration]] = {}
        self._unused_since: dict[int, float] = {}  # by generation, of regions without a name

    def __len__(self) -> int:
        return len(self._peers)

    # --- what gateways ask -----------------------------------------------------------------------------------------

    async def register(self, principal: Principal, name: str, key: str, byte_size: int, offset: int) -> RegionEntry:
        """As `Registry.register_system`, in the principal's name and with its rights. Triton's texts.

        Registering a name again under the same key succeeds when the key leads to another object by now: whoever made
        the old one is gone or has made it anew, and the old registration is retired.
        """
        peer = self._peer(principal)
        registration = _Registration(name)
        self._busy.setdefault(principal, set()).add(registration)
        try:
            await self._retire_dead(peer, name, key, byte_size, offset)
            entry = await self._registry.register_system(peer, name, key, byte_size, offset)
            if registration.withdrawn:
                await self._registry.unregister(peer.session, name)
                raise InferError(Code.CANCELLED, f"shared memory region '{name}' was unregistered meanwhile")
            return entry
        except InferError as error:
            raise _in_tritons_words(error) from None
        finally:
            self._busy[principal].remove(registration)
            if not self._busy[principal]:
                del self._busy[principal]
            self._tidy(principal)

    async def register_cuda(
        self, principal: Principal, name: str, handle: bytes, ordinal: int, byte_size: int
    ) -> RegionEntry:
        """GPU memory by the handle of its whole allocation, of which it is the first bytes. Triton's texts.

        `ordinal` counts the GPUs that the broker sees. How large the allocation is, and whether it is on that GPU, is
        the driver's word to the worker that opens it. A region does not end with whoever exported it: a handle does not
        tell who that is. It stays until it is unregistered, or a new allocation at its address takes its place.
        """
        peer = self._peer(principal)
        try:
            devices = self._registry.cuda_devices()
            if not devices:
                raise _no_gpu(name, handle, self._registry.cuda_reason())
            memory = _memory(name, handle, ordinal, byte_size, devices)
            entry = self._registry.register_cuda(peer, name, memory, writable=True)
            entry.key = str(ordinal)
            await self._open_cuda(entry)
            return entry
        except InferError as error:
            raise _refusal(error, name, principal) from None
        finally:
            self._tidy(principal)

    async def unregister(self, principal: Principal, name: str, kind: str) -> None:
        """`name`, or for "" all of `kind` ("": any kind). What is unknown, or of another kind, is no error.

        What is being registered goes too, as soon as it is there: whoever asked for it may be gone by now.
        """
        if kind in ("", "system"):
            for registration in self._busy.get(principal, ()):
                registration.withdrawn |= name in ("", registration.name)
        peer = self._peers.get(principal)
        if peer is not None:
            await self._registry.unregister(peer.session, name, kind)
            self._tidy(principal)

    async def regions(self, principal: Principal) -> list[RegionRecord]:
        """Sorted by name. Unregistered ones are listed while requests use them, unless the name has a new owner."""
        peer = self._peers.get(principal)
        if peer is None:
            return []
        await self._registry.catch_up(peer.session)
        entries = sorted(self._registry.of(peer.session), key=lambda entry: (entry.draining, -entry.generation))
        rows: dict[str, RegionRecord] = {}
        for entry in entries:
            rows.setdefault(entry.name, record(entry))
        self._tidy(principal)
        return [rows[name] for name in sorted(rows)]

    def use(self, gateway: Peer, principal: Principal, name: str) -> RegionEntry:
        """The region in the gateway's own session; its name there is the same every time. Raises NOT_FOUND."""
        entry = self._registry.find(self._number(principal), name)
        self._unused_since.pop(entry.generation, None)
        return self._registry.alias(gateway, entry)

    # --- the reaper ------------------------------------------------------------------------------------------------

    async def keep_reaping(self) -> None:
        """Look every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.reap(time.monotonic())
            except InferError as error:
                log.warning("a region without a name was retired without its workers' word: %s", error.message)
            except Exception:  # the next look may go better
                log.exception("regions without a name could not be looked for")

    async def reap(self, now: float) -> None:
        """Retire regions whose object has no name and that nothing has used for `UNUSED_S`. `now`: seconds."""
        entries = [entry for peer in self._peers.values() for entry in self._registry.of(peer.session)]
        nameless = [
            entry
            for entry in entries
            if entry.kind == "system" and not entry.draining and os.fstat(entry.fd).st_nlink == 0
        ]
        known = {entry.generation for entry in nameless}
        self._unused_since = {key: since for key, since in self._unused_since.items() if key in known}
        for entry in nameless:
            if await self._registry.used(entry):
                self._unused_since[entry.generation] = now
            elif now - self._unused_since.setdefault(entry.generation, now) >= UNUSED_S and not entry.draining:
                log.info("region '%s' of uid %d is retired: its shared memory has no name", entry.name, entry.owner_uid)
                await self._registry.unregister(entry.session, entry.name)
        for principal in list(self._peers):
            self._tidy(principal)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _peer(self, principal: Principal) -> Peer:
        peer = self._peers.get(principal)
        if peer is None:
            self._last -= 1
            peer = self._peers[principal] = Peer(self._last, 0, principal.uid, PRINCIPAL)
        return peer

    def _number(self, principal: Principal) -> int:
        peer = self._peers.get(principal)
        return peer.session if peer is not None else 0  # which no session has

    async def _retire_dead(self, peer: Peer, name: str, key: str, byte_size: int, offset: int) -> None:
        """Make room for `name` if it is registered under the same key, and the key leads elsewhere now."""
        try:
            old = self._registry.find(peer.session, name)
            if old.key.lstrip("/") != key.lstrip("/"):
                return
            fd, new = regions.open_system(name, key, byte_size, offset, peer.uid)
        except InferError:
            return  # nothing to make room for, or nothing that could take its place
        os.close(fd)
        if (new.device, new.inode) != (old.device, old.inode):
            await self._registry.unregister(peer.session, name)

    def _tidy(self, principal: Principal) -> None:
        """Forget it if it owns nothing."""
        peer = self._peers.get(principal)
        if peer is not None and principal not in self._busy and not self._registry.usage(peer.session)[0]:
            del self._peers[principal]


def _in_tritons_words(error: InferError) -> InferError:
    """Whatever cannot be opened is INTERNAL on KServe's wire, as in Triton; natively, the code tells why."""
    if error.message.startswith("Unable to open shared memory region"):
        return InferError(Code.INTERNAL, error.message)
    return error


def _no_gpu(name: str, handle: bytes, reason: str) -> InferError:
    """Triton's two texts for it, and why there is none."""
    if len(handle) != HANDLE_SIZE:
        return InferError(Code.INVALID_ARG, f"failed to register shared memory region: invalid args: {reason}")
    return InferError(
        Code.INVALID_ARG,
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported: {reason}",
    )


def _memory(name: str, handle: bytes, ordinal: int, byte_size: int, devices: Sequence[str]) -> CudaMemory:
    """What such a registration means. `devices`: UUIDs. Raises InferError with Triton's texts."""
    if len(handle) != HANDLE_SIZE:
        raise InferError(Code.INVALID_ARG, "failed to register shared memory region: invalid args")
    if ordinal >= len(devices):
        raise _invalid(name, f"the broker's GPUs are 0 to {len(devices) - 1}, it is said to be on {ordinal}")
    if not byte_size:
        raise _invalid(name, NO_BYTES)
    return CudaMemory(
        kind=LEGACY, device=devices[ordinal], allocation_size=byte_size, offset=0, byte_size=byte_size, handle=handle
    )


def _invalid(name: str, why: str) -> InferError:
    return InferError(Code.INVALID_ARG, f"failed to register shared memory region '{name}': invalid args: {why}")


def _refusal(error: InferError, name: str, principal: Principal) -> InferError:
    """As Triton says it, with the name only for a wrong size; and why. The gateway tells the two apart."""
    if error.message.startswith(f"Unable to find shared memory region: '{name}'"):
        return InferError(Code.CANCELLED, f"shared memory region '{name}' was unregistered meanwhile")
    refused = _REFUSED.fullmatch(error.message)
    if refused is None:
        return error
    log.info("CUDA region '%s' of uid %d cannot be registered: %s", name, principal.uid, refused["why"])
    named = f" '{name}'" if refused["why"].startswith(("the allocation has", NO_BYTES)) else ""
    return InferError(
        Code.INVALID_ARG, f"failed to register shared memory region{named}: invalid args: {refused['why']}"
    )
