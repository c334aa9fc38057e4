"""Principals' regions as a gateway sees them: registered on their behalf, and opened under an alias to plan on.

The truth is the broker's. This keeps the aliases that were used lately, so that a request that names a region asks
nobody. The memory is never mapped and never read: its owner may truncate the file at any time, and touching a page that
is gone would end the gateway for everybody. What must be written here is written with pwrite, and the descriptor for it
is kept for seconds only, since memory that its owner has given up lives as long as somebody holds it open.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, final

from broker.gateway.kserve import Buffer, Caller
from broker.gateway.placed import refused
from broker.gateway.turns import Turn
from clientlib.region import MappedRegion
from shm.cuda.descriptor import HANDLE_SIZE
from shm.errors import Code, InferError
from shm.gateway_messages import ListFor, RegisterCudaFor, RegisterFor, UnregisterFor, UseRegion
from shm.message_values import Message, Principal, RegionRecord
from shm.messages import RegionInfo, Regions, Reply, Unregister

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
INVALID = "failed to register shared memory region: invalid args"  # Triton's
_REASONED = re.compile(r"(failed to register shared memory region(?: '.*')?: invalid args): (.+)", re.DOTALL)
KINDS = {"system": "system", "cuda": "CUDA"}  # as Triton's texts spell them
MAX_NAME = 256  # characters
MAX_DEVICE = 2**31 - 1
# Calls about CUDA regions at a time: they wait for a driver, or for a request's end, and the session takes 64 calls,
# those of others among them.
MAX_OPENING = MAX_RETIRING = 16
MAX_ALIASES = 4096
KEEP_S = 5.0  # a descriptor after its last use
MAX_SIZE = 2**63 - 1  # bytes, of what a message carries
_WRAP = 2**64  # sizes and offsets are unsigned there


class Client(Protocol):
    """What is needed of the client library (`clientlib.async_client.AsyncClient`)."""

    async def call(self, message: Message, expects: int = 0) -> tuple[Reply, list[int]]:
        """One message to the broker."""

    def name_region(self, info: RegionInfo, identity: tuple[int, int]) -> MappedRegion:
        """A region for plans, without its memory."""

    def forget_region(self, region: MappedRegion) -> None:
        """No new plan may use it."""


@final
class Writer:
    """An open description of a region's whole object."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        """Owns `fd`."""
        self._fd = fd

    def write(self, alias: Alias, offset: int, data: Buffer) -> None:
        """Put `data` at `offset` of the region. Raises InferError when the file has become too short, or is full."""
        at, view = alias.region.offset + offset, memoryview(data)
        if os.fstat(self._fd).st_size < at + view.nbytes:  # writing would make it longer again
            raise InferError(
                Code.INTERNAL, f"shared memory region '{alias.name}' changed size: unregister it and register it again"
            )
        try:
            while view.nbytes:
                written = os.pwrite(self._fd, view, at)
                at, view = at + written, view[written:]
        except OSError as error:
            raise InferError(
                Code.INTERNAL, f"cannot write to shared memory region '{alias.name}': {error.strerror}"
            ) from None

    def __del__(self) -> None:
        os.close(self._fd)


@final
class Alias:
    """A principal's region in the gateway's own session. `number` is another one for every registration."""

    __slots__ = ("__weakref__", "generation", "name", "number", "principal", "region", "turns", "used", "writer")

    def __init__(self, principal: Principal, name: str, number: int, generation: int, region: MappedRegion) -> None:
        self.principal = principal
        self.name = name  # the principal's own
        self.number = number
        self.generation = generation
        self.region = region
        self.writer: Writer | None = None  # for a while after it was needed
        self.used = 0.0  # when that was, on the loop's clock
        # By offset: who writes an output there. Only those that plans refer to are kept.
        self.turns: weakref.WeakValueDictionary[int, Turn] = weakref.WeakValueDictionary()

    def turn(self, offset: int) -> Turn:
        """What whoever writes an output at `offset` holds meanwhile."""
        turn = self.turns.get(offset)
        if turn is None:
            turn = self.turns[offset] = Turn()
        return turn


@final
class RegionCache:
    """The verbs of the shared memory extension, and the aliases that were used last."""

    def __init__(self, client: Client, *, allowed: bool = True, limit: int = MAX_ALIASES) -> None:
        """`allowed`: --allow-client-shm. `limit`: how many aliases are kept. `dropped` is told of each that goes."""
        self.dropped: Callable[[Alias], None] = lambda alias: None
        self._client = client
        self._allowed = allowed
        self._limit = limit
        self._aliases: OrderedDict[tuple[Principal, str], Alias] = OrderedDict()
        self._numbers = itertools.count(1)
        self._opening, self._retiring = asyncio.Semaphore(MAX_OPENING), asyncio.Semaphore(MAX_RETIRING)

    # --- verbs -----------------------------------------------------------------------------------------------------

    async def register_system(self, caller: Caller, name: str, key: str, byte_size: int, offset: int) -> None:
        """Register POSIX shared memory for the caller's principal."""
        principal = self._principal(caller)
        _check_name(name)
        if not (0 <= byte_size <= MAX_SIZE and 0 <= offset <= MAX_SIZE):
            raise InferError(Code.INVALID_ARG, f"failed to register shared memory region '{name}': invalid args")
        await self._client.call(
            RegisterFor(principal=principal, name=name, key=key, byte_size=byte_size, offset=offset)
        )

    async def register_cuda(self, caller: Caller, name: str, handle: bytes, device: int, byte_size: int) -> None:
        """Register an allocation on GPU `device` of the broker for the caller's principal, by its IPC handle."""
        principal = self._principal(caller)
        if not 0 <= device <= MAX_DEVICE:
            raise refused(INVALID, f"region '{name}'", f"a device is 0 to {MAX_DEVICE}, got {device}")
        if len(handle) != HANDLE_SIZE and not name:
            raise _wrong_length(name, handle)
        _check_name(name)
        if not 0 <= byte_size <= MAX_SIZE:
            text = f"failed to register shared memory region '{name}': invalid args"
            raise refused(text, f"region '{name}'", f"its size is 1 to {MAX_SIZE} bytes, got {byte_size}")
        short = handle[: HANDLE_SIZE + 1]  # of what is too long enough to see that it is
        asked = RegisterCudaFor(principal=principal, name=name, handle=short, ordinal=device, byte_size=byte_size)
        async with self._opening:
            try:
                await self._client.call(asked)
            except InferError as error:
                raise _explained(error, name, handle) from None

    async def unregister(self, caller: Caller, kind: str, name: str) -> None:
        """Retire one region of the caller's principal, or with `name` "" all of `kind`. Unknown names succeed.

        Of CUDA regions it returns when no request uses them any more: their owner may free the memory then.
        """
        principal = self._principal(caller)
        if len(name) > MAX_NAME:
            return
        try:
            async with contextlib.nullcontext() if kind == "system" else self._retiring:
                await self._client.call(UnregisterFor(principal=principal, name=name, kind=kind))
        finally:
            for key in [key for key in self._aliases if key[0] == principal and name in ("", key[1])]:
                self._drop(key)  # whatever has become of them: who uses the name again asks

    async def records(self, caller: Caller, kind: str, name: str) -> list[RegionRecord]:
        """The caller's regions of `kind` in order of their names. Raises NOT_FOUND for a `name` that is none."""
        found: Sequence[RegionRecord] = ()
        if self._allowed and caller.principal is not None:
            reply, _ = await self._client.call(ListFor(principal=caller.principal))
            assert isinstance(reply, Regions)
            found = reply.regions
        if not name:
            return sorted((record for record in found if record.kind == kind), key=lambda record: record.name)
        for record in found:
            if record.name == name:
                if record.kind != kind:
                    raise InferError(
                        Code.NOT_FOUND,
                        f"The region named '{name}' is registered as {KINDS.get(record.kind, record.kind)} shared "
                        f"memory, not {KINDS[kind]} shared memory",
                    )
                return [record]
        raise InferError(Code.NOT_FOUND, f"Unable to find {kind} shared memory region: '{name}'")

    # --- use at inference ------------------------------------------------------------------------------------------

    def find(self, principal: Principal, name: str) -> Alias | None:
        """The alias of a region that was used before; None: `open` it."""
        key = (principal, name)
        alias = self._aliases.get(key)
        if alias is not None:
            self._aliases.move_to_end(key)
        return alias

    async def open(self, caller: Caller, name: str) -> Alias:
        """Have the broker open a region of the caller here. Raises NOT_FOUND for what the caller has not."""
        principal = caller.principal if self._allowed else None
        if principal is None or not 1 <= len(name) <= MAX_NAME:
            raise unknown(name)
        try:
            reply, _ = await self._client.call(UseRegion(principal=principal, name=name))
        except InferError as error:
            if error.code == Code.NOT_FOUND.name:
                raise unknown(name) from None
            raise
        assert isinstance(reply, RegionInfo)
        alias = self._keep((principal, name), reply)
        while len(self._aliases) > self._limit:
            oldest = self._drop(next(iter(self._aliases)))
            with contextlib.suppress(InferError):
                await self._client.call(Unregister(name=oldest.region.name))
        return alias

    async def writer(self, alias: Alias) -> Writer:
        """What writes to a region. Raises NOT_FOUND when it was retired."""
        loop = asyncio.get_running_loop()
        alias.used = loop.time()
        if alias.writer is None:
            asked = UseRegion(principal=alias.principal, name=alias.name, descriptor=True)
            reply, fds = await self._client.call(asked, expects=1)
            writer = Writer(fds[0])
            assert isinstance(reply, RegionInfo)
            if reply.generation != alias.generation:
                raise unknown(alias.name)
            if alias.writer is None:
                alias.writer = writer
                loop.call_later(KEEP_S, _let_go, alias)
        return alias.writer

    def forget(self, alias: Alias) -> None:
        """It was retired: whoever uses the name again asks."""
        key = (alias.principal, alias.name)
        if self._aliases.get(key) is alias:
            self._drop(key)

    def _keep(self, key: tuple[Principal, str], info: RegionInfo) -> Alias:
        known = self._aliases.get(key)
        if known is not None and (known.region.name, known.generation) == (info.name, info.generation):
            return known  # others asked at the same time
        if known is not None:  # it was registered anew
            self.dropped(known)
        region = self._client.name_region(info, (info.device, info.inode))
        alias = self._aliases[key] = Alias(*key, next(self._numbers), info.generation, region)
        self._aliases.move_to_end(key)
        return alias

    def _drop(self, key: tuple[Principal, str]) -> Alias:
        alias = self._aliases.pop(key)
        self._client.forget_region(alias.region)
        self.dropped(alias)
        return alias

    def _principal(self, caller: Caller) -> Principal:
        principal = caller.principal if self._allowed else None
        if principal is None:
            raise InferError(Code.UNSUPPORTED, DISABLED)
        return principal


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= MAX_NAME:
        raise InferError(
            Code.INVALID_ARG, f"cannot register shared memory region '{name}': a name has 1 to {MAX_NAME} characters"
        )


def _explained(error: InferError, name: str, handle: bytes) -> InferError:
    """Why the caller's own memory on a GPU was refused, beside Triton's text, which does not say it."""
    if len(handle) != HANDLE_SIZE:
        return _wrong_length(name, handle) if error.message == INVALID else error
    reasoned = _REASONED.fullmatch(error.message)
    return error if reasoned is None else refused(reasoned[1], f"region '{name}'", reasoned[2])


def _wrong_length(name: str, handle: bytes) -> InferError:
    return refused(INVALID, f"region '{name}'", f"a handle has {HANDLE_SIZE} bytes, {len(handle)} came")


def _let_go(alias: Alias) -> None:
    """Close the descriptor unless it was needed meanwhile."""
    loop = asyncio.get_running_loop()
    left = alias.used + KEEP_S - loop.time()
    if left > 0:
        loop.call_later(left, _let_go, alias)
    else:
        alias.writer = None


@final
class OutsideRegion(InferError):
    """A range that begins in the window and ends outside it."""


def unknown(name: str) -> InferError:
    """The error for a region that the caller has not."""
    return InferError(Code.NOT_FOUND, f"Unable to find shared memory region: '{name}'")


def check_range(name: str, region_byte_size: int, offset: int, byte_size: int) -> None:
    """Does [offset, offset + byte_size) lie in the window that was registered as `name`? Raises as Triton does.

    Negative numbers count as the unsigned ones with the same bits, which is how Triton reads them.
    """
    offset, byte_size = offset % _WRAP, byte_size % _WRAP
    if offset >= region_byte_size:
        raise InferError(Code.INVALID_ARG, f"Invalid offset for shared memory region: '{name}'")
    if byte_size > _WRAP - 1 - offset:
        raise InferError(
            Code.INVALID_ARG,
            f"Integer overflow detected: byte_size ({byte_size}) + offset ({offset}) exceeds maximum value "
            f"({_WRAP - 1}) for region '{name}'",
        )
    if offset + byte_size > region_byte_size:
        raise OutsideRegion(Code.INVALID_ARG, f"Invalid offset + byte size for shared memory region: '{name}'")
