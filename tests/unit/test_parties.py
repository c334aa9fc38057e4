"""Which connections are one party: what the kernel and /proc say of them, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Coroutine, Iterable, Set

from broker.gateway.parties import AGAIN_S, KEPT, LOOKS, MOST, Parties, processes_of
from broker.gateway.sock_diag import Endpoint, SocketOwners

LOCAL = (socket.inet_aton("127.0.0.1"), 8000)


def peer(port: int, host: str = "127.0.0.1") -> Endpoint:
    return socket.inet_aton(host), port


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Run a test on an event loop of its own."""

    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


class Host:
    """What there is: sockets by port (uid, inode), and the pids that have them open."""

    def __init__(self) -> None:
        self.sockets: dict[int, tuple[int, int]] = {}
        self.pids: dict[int, int] = {}
        self.now = 0.0
        self.asked = 0
        self.searches: list[tuple[Set[int], list[int]]] = []
        self.takes_s = 0.0

    def owner(self, peer: Endpoint, local: Endpoint) -> tuple[int, int] | None:
        self.asked += 1
        return self.sockets.get(peer[1])

    def search(self, inodes: Set[int], first: Iterable[int]) -> dict[int, int]:
        self.searches.append((inodes, list(first)))
        self.now += self.takes_s
        return {inode: self.pids[inode] for inode in inodes if inode in self.pids}

    def parties(self) -> Parties:
        return Parties(self, self.search, lambda: self.now)  # type: ignore[arg-type]


async def found(parties: Parties) -> None:
    """Until the look that is under way has ended."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


async def asked(parties: Parties, *ports: int) -> list[int]:
    """The parties of these connections, which ask twice each, with the look that this is worth."""
    for _ in range(2):
        for port in ports:
            parties.of_tcp(peer(port), LOCAL)
    await found(parties)
    return [parties.of_tcp(peer(port), LOCAL) for port in ports]


@on_a_loop
async def test_the_connections_of_a_process_become_one_party() -> None:
    host = Host()
    host.sockets = {port: (os.geteuid(), port * 10) for port in (1, 2, 3)}
    host.pids = {10: 7, 20: 7, 30: 8}
    parties = host.parties()
    await asked(parties, 1, 2)
    one, two, three = await asked(parties, 1, 2, 3)
    assert one == two == parties.of_pid(7)
    assert three == parties.of_pid(8) != one
    assert host.asked == 3, "the kernel is asked once in a while, not for every request"
    assert all(not inodes & {10, 20} for inodes, _ in host.searches[1:]), "what is known is not looked for"
    assert all(7 in first for _, first in host.searches[1:]), "whoever has connections is looked at first"


@on_a_loop
async def test_a_lone_connection_is_not_looked_for() -> None:
    host = Host()
    host.sockets = {1: (os.geteuid(), 10)}
    parties = host.parties()
    for _ in range(5):
        parties.of_tcp(peer(1), LOCAL)
    await found(parties)
    assert not host.searches


@on_a_loop
async def test_what_cannot_be_seen_counts_by_itself_and_is_not_looked_for_for_ever() -> None:
    host = Host()
    host.sockets = {port: (os.geteuid(), port * 10) for port in (1, 2)}
    parties = host.parties()
    for _ in range(10):
        numbers = await asked(parties, 1, 2)
    assert len(set(numbers)) == 2
    assert len(host.searches) == LOOKS


@on_a_loop
async def test_a_connection_for_each_request_gains_nothing_and_costs_no_look() -> None:
    host = Host()
    parties = host.parties()
    for port in range(1, 2 * KEPT):
        host.sockets[port] = (os.geteuid(), port)
    numbers = {parties.of_tcp(peer(port), LOCAL) for port in range(1, 2 * KEPT)}
    await found(parties)
    assert len(numbers) == 1
    assert not host.searches
    assert parties.of_pid(7) not in numbers


@on_a_loop
async def test_a_party_keeps_its_number_while_its_connections_ask() -> None:
    host = Host()
    host.sockets = {port: (os.geteuid(), port * 10) for port in (1, 2, 3)}
    host.pids = {10: 7, 20: 8, 30: 7}
    parties = host.parties()
    (one, _) = await asked(parties, 1, 2)
    for pid in range(100, 100 + 2 * KEPT):
        parties.of_pid(pid)
        parties.of_tcp(peer(1), LOCAL)
    assert (await asked(parties, 1, 3)) == [one, one]


@on_a_loop
async def test_a_look_without_a_free_descriptor_is_one_in_vain() -> None:
    host = Host()
    host.sockets = {port: (os.geteuid(), port * 10) for port in (1, 2)}

    def search(inodes: Set[int], first: Iterable[int]) -> dict[int, int]:
        host.searches.append((inodes, list(first)))
        raise OSError(24, "Too many open files")

    parties = Parties(host, search, lambda: host.now)  # type: ignore[arg-type]
    for _ in range(10):
        numbers = await asked(parties, 1, 2)
    assert len(set(numbers)) == 2
    assert len(host.searches) == LOOKS


@on_a_loop
async def test_looks_rest_as_long_as_they_cost() -> None:
    host = Host()
    host.takes_s = 0.1
    parties = host.parties()
    for port in range(1, 50):
        host.sockets[port] = (os.geteuid(), port)
        await asked(parties, port)
    assert len(host.searches) == 1
    host.now += 20 * host.takes_s
    await asked(parties, 49)
    assert len(host.searches) == 2


@on_a_loop
async def test_an_address_that_another_process_has_now() -> None:
    host = Host()
    host.sockets = {1: (os.geteuid(), 10), 2: (os.geteuid(), 20)}
    host.pids = {10: 7, 20: 8}
    parties = host.parties()
    numbers = await asked(parties, 1, 2)
    assert numbers[0] != numbers[1]
    host.sockets[1] = host.sockets[2]
    host.now += AGAIN_S
    assert (await asked(parties, 1)) == numbers[1:]


@on_a_loop
async def test_other_hosts_are_one_party_each() -> None:
    parties = Host().parties()
    numbers = [parties.of_tcp(peer(port, host), LOCAL) for host in ("10.0.0.1", "10.0.0.2") for port in (1, 2)]
    await found(parties)
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


def test_numbers_have_16_bits_and_are_the_same_in_all_gateways() -> None:
    one, other = Host().parties(), Host().parties()
    numbers = [one.of_pid(pid) for pid in range(1, 2 * KEPT)]
    assert all(1 <= number <= MOST for number in numbers)
    assert numbers[::-1] == [other.of_pid(pid) for pid in range(2 * KEPT - 1, 0, -1)]
    assert len(set(numbers)) > 0.9 * len(numbers), "few share one"


def test_the_kernel_and_proc_know_this_process() -> None:
    """Without any stand-in: a connection of this process, by its inode."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        (host, port), (local_host, local_port) = accepted.getpeername(), accepted.getsockname()
        owners = SocketOwners()
        try:
            owner = owners.owner((socket.inet_aton(host), port), (socket.inet_aton(local_host), local_port))
        finally:
            owners.close()
        assert owner == (os.geteuid(), os.fstat(client.fileno()).st_ino)
        assert processes_of({owner[1], 1 << 40}) == {owner[1]: os.getpid()}
