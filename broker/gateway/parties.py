"""Which callers are one, so that whoever asks much delays only itself: a number each, for `shm.fair_line`.

Used by `broker.gateway.peers`, on its event loop. One is a process of this host with all of its connections, as far as
the kernel tells: the peer of a Unix or ZeroMQ socket is known by its pid, that of TCP by the inode of its socket, which
is looked for among the descriptors of the processes (/proc) once it asks again. Until it is found all are one together,
so that a connection for each request gains nothing; where it cannot be seen (in another container), a connection counts
by itself. Processes of another uid are one together, as are those of another host. It decides nothing but the order of
requests: what it says may be wrong for a moment.
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Set
from typing import Final, final

from broker.gateway.sock_diag import Endpoint, SocketOwners

KEPT: Final = 4096  # connections, and parties; those that asked for nothing for longest go first
MOST: Final = 0xFFFF  # a number has 16 bits; 0 is nobody
AGAIN_S: Final = 1.0  # the same address may be another's by then
PAUSE: Final = 20  # looks at /proc take a twentieth of the time of one thread at most
LOOKS: Final = 2  # for one socket
UNKNOWN: Final = "unknown"  # the party of those that have not been found yet
Search = Callable[[Set[int], Iterable[int]], dict[int, int]]


@final
class _Connection:
    """`inode` 0: not a socket of this host. `looks` that may still find its process. `stays`: it has asked again."""

    __slots__ = ("inode", "looked_at", "looks", "party", "stays")

    def __init__(self, inode: int, party: Hashable, looks: int, now: float) -> None:
        self.inode = inode
        self.party = party
        self.looks = looks
        self.looked_at = now
        self.stays = False


@final
class Parties:
    """Of one gateway. `search` finds the processes that have sockets open (`processes_of`), on another thread."""

    def __init__(
        self, owners: SocketOwners, search: Search | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._owners = owners
        self._uid = os.geteuid()
        self._search = search or processes_of
        self._clock = clock
        self._connections: OrderedDict[tuple[Endpoint, Endpoint], _Connection] = OrderedDict()
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._searching: asyncio.Task[None] | None = None
        self._rests_until = 0.0

    def number(self, party: Hashable) -> int:
        """Of a party that is known: 1 to MOST, the same in all gateways. Two with the same number share turns."""
        number = self._numbers.get(party)
        if number is None:
            number = self._numbers[party] = zlib.crc32(repr(party).encode()) % MOST + 1
            if len(self._numbers) > KEPT:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(party)
        return number

    def of_pid(self, pid: int) -> int:
        """Of a process."""
        return self.number(("pid", pid))

    def of_tcp(self, peer: Endpoint, local: Endpoint) -> int:
        """Of the party at the other end of a connection."""
        now = self._clock()
        known = self._connections.get((peer, local))
        if known is not None:
            known.stays = True
        if known is None or now - known.looked_at >= AGAIN_S:
            known = self._look(peer, local, known, now)
        worth_it = known.looks and known.stays and len(self._connections) > 1
        if worth_it and self._searching is None and now >= self._rests_until:
            self._searching = asyncio.get_running_loop().create_task(self._find())
        return self.number(known.party)

    def _look(self, peer: Endpoint, local: Endpoint, known: _Connection | None, now: float) -> _Connection:
        """Ask the kernel, in 6 µs, whose the socket is now."""
        uid, inode = self._owners.owner(peer, local) or (0, 0)
        if known is not None and known.inode == inode:
            known.looked_at = now
            self._connections.move_to_end((peer, local))
            return known
        if not inode:
            known = _Connection(0, ("host", peer[0]), 0, now)
        elif uid != self._uid and self._uid:
            known = _Connection(inode, ("uid", uid), 0, now)
        else:
            known = _Connection(inode, UNKNOWN, LOOKS, now)
        self._connections[peer, local] = known
        self._connections.move_to_end((peer, local))
        if len(self._connections) > KEPT:
            self._connections.popitem(last=False)
        return known

    async def _find(self) -> None:
        """Look for the processes of all sockets that are worth it and of which they are not known."""
        wanted = {known.inode: known for known in self._connections.values() if known.looks and known.stays}
        pids = [party[1] for party in reversed(self._numbers) if isinstance(party, tuple) and party[0] == "pid"]
        began = self._clock()
        try:
            found = await asyncio.to_thread(self._search, frozenset(wanted), pids)
        except OSError:  # there is no descriptor left to read /proc with
            found = {}
        finally:
            self._searching = None
            self._rests_until = self._clock() + PAUSE * (self._clock() - began)
        for inode, known in wanted.items():
            known.looks -= 1
            if inode in found:
                known.looks, known.party = 0, ("pid", found[inode])
            elif not known.looks:
                known.party = ("socket", inode)


def processes_of(inodes: Set[int], first: Iterable[int] = ()) -> dict[int, int]:
    """The pids of the processes that have these sockets open, by inode, as far as /proc shows them.

    `first`: where to begin. Of several that share a socket it is the first that is found.
    """
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    seen = set()
    for pid in (*first, *(int(name) for name in os.listdir("/proc") if name.isdigit())):
        if not wanted:
            break
        if pid not in seen:
            seen.add(pid)
            for link in _descriptors(pid):
                inode = wanted.pop(link, None)
                if inode is not None:
                    found[inode] = pid
    return found


def _descriptors(pid: int) -> Iterable[str]:
    """What the descriptors of a process are; nothing, where that is another's business or it has ended."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(f"{folder}/{name}")
        except OSError:
            continue
