"""`SmallBroker` with CUDA regions: the real registry's, and a worker process that opens what clients register."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import weakref
from pathlib import Path
from typing import Any

import msgspec

from broker.quota import Quota
from broker.records import Peer, RegionEntry, region_info
from broker.registry import Registry
from shm import messages
from tests.fakes.cuda_children import Child
from tests.fakes.small_broker import SmallBroker

_numbers = itertools.count(1)


class CudaBroker(SmallBroker):
    """It serves the GPUs in `devices`. `entries`: what is registered, by name; `unregistered`: names, in order."""

    def __init__(self, directory: Path, devices: tuple[str, ...]) -> None:
        self.registry = Registry(Quota(1 << 30))
        self.registry.cuda_devices = lambda: devices
        self.entries: dict[str, RegionEntry] = {}
        self.unregistered: list[str] = []
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        super().__init__(directory)

    def _number(self, session: Any) -> int:
        return self._numbers.setdefault(session, next(_numbers))

    def _listen(self, session: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its process ended without reading a reply
            super()._listen(session)

    def _answer(self, session: Any, asked: Any, fds: list[int], out: list[int]) -> Any:
        if isinstance(asked, messages.RegisterCuda):
            peer = Peer(self._number(session), 0, os.getuid())
            copies = [os.dup(fd) for fd in fds]
            entry = self.registry.register_cuda(peer, asked.name, asked.memory, asked.writable, *copies)
            self.entries[asked.name] = entry
            return region_info(entry)
        if isinstance(asked, messages.Unregister):
            self.unregistered.append(asked.name)
            asyncio.run(self.registry.unregister(self._number(session), asked.name))
        return super()._answer(session, asked, fds, out)

    def give(self, worker: Child, number: int, name: str) -> Any:
        """Have `worker` (tests.fakes.cuda_roles:Worker) open region `name`."""
        entry = self.entries[name]
        memory = msgspec.to_builtins(entry.cuda, builtin_types=(bytes,))
        return worker.call("add", number, 1, memory, fd=entry.fd)

    def close(self) -> None:
        self.stop()
        self.registry.close()
