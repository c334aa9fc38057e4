"""Ts that wait in one line, with turns for the clients they come from.

Used by `broker.worker.batcher`, one per priority level, and by gateways for what cannot be sent yet. A client is a
number (see `shm.admission.Request.client`): what one client sends stays in order, and one that sends much delays its
own requests, not those of others. A client alone pays one comparison.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar, final


class Waits(Protocol):
    """What stands in line. Hashable by identity."""

    @property
    def client(self) -> int:
        """Whose turn it takes."""


T = TypeVar("T", bound=Waits)


@final
class FairLine(Generic[T]):
    """Clients take turns, request by request. `shared`: several wait, else all that waits is `_client`'s, in `_own`.

    Each line is first in, first out, and quick to take one from the middle: cancelling thousands must cost nobody else
    anything. `_served` had the latest turn. If it waits again, it is the last of `_clients`: one that had nothing in
    line comes before it, or with one request at a time it would wait for a turn of the other's more than that one does.
    """

    __slots__ = ("_client", "_clients", "_own", "_passed", "_served")

    def __init__(self) -> None:
        self._client = 0
        self._own: OrderedDict[T, None] = OrderedDict()
        self._clients: OrderedDict[int, OrderedDict[T, None]] = OrderedDict()  # two or more, in the order of turns
        self._passed = False
        self._served: int | None = None

    def __bool__(self) -> bool:
        return bool(self._own or self._clients)

    @property
    def shared(self) -> bool:
        """Do several clients wait?"""
        return bool(self._clients)

    def add(self, request: T) -> None:
        """Queue behind the others of its client."""
        client = request.client
        if not self._clients:
            if client == self._client or not self._own:
                self._client = client
                self._own[request] = None
                return
            self._clients[self._client] = self._own
            self._own = OrderedDict()
        line = self._clients.get(client)
        if line is None:
            line = self._clients[client] = OrderedDict()
            served = self._served
            if served is not None and served != client and served in self._clients:
                self._clients.move_to_end(served)
        line[request] = None

    def __iter__(self) -> Iterator[T]:
        """All that wait, in the order of turns. Nothing may be added or removed meanwhile."""
        return self._in_turns() if self._clients else iter(self._own)

    def pass_over(self) -> None:
        """While iterating over several clients: leave out the client whose request came last. It keeps its turn."""
        self._passed = True

    def _in_turns(self) -> Iterator[T]:
        again: deque[Iterator[T]] = deque()
        for line in self._clients.values():
            requests = iter(line)
            self._passed = False
            yield next(requests)
            if not self._passed:
                again.append(requests)
        while again:
            requests = again.popleft()
            request = next(requests, None)
            if request is not None:
                self._passed = False
                yield request
                if not self._passed:
                    again.append(requests)

    def first(self) -> T:
        """The one that `pop` takes out. Not of an empty line."""
        return next(iter(next(iter(self._clients.values())) if self._clients else self._own))

    def pop(self) -> T:
        """Take out the next one. Not of an empty line."""
        if not self._clients:
            self._served = self._client
            return self._own.popitem(last=False)[0]
        client, line = next(iter(self._clients.items()))
        request = line.popitem(last=False)[0]
        self._served = client
        self._turn_over(client, line)
        return request

    def serve(self, batch: list[T]) -> None:
        """Take out the first requests that iterating has given, those passed over not among them: their clients have
        had their turn.
        """
        at = 0
        while self._clients and at < len(batch):
            request = batch[at]
            client = request.client
            line = self._clients[client]
            del line[request]
            self._served = client
            self._turn_over(client, line)
            at += 1
        if at == len(batch):
            return
        self._served, own = self._client, self._own
        if len(own) == len(batch) - at:
            own.clear()
        else:
            for _ in range(len(batch) - at):
                own.popitem(last=False)

    def _turn_over(self, client: int, line: OrderedDict[T, None]) -> None:
        if line:
            self._clients.move_to_end(client)
            return
        del self._clients[client]
        if len(self._clients) == 1:
            self._client, self._own = self._clients.popitem()

    def serve_at_once(self, client: int) -> None:
        """Nobody waits, and `client` has a turn without standing in line."""
        self._served = client

    def has(self, request: T) -> bool:
        """Does it wait here?"""
        return request in self._clients.get(request.client, ()) if self._clients else request in self._own

    def remove(self, request: T) -> bool:
        """Drop one request; False when it is not here."""
        if not self.has(request):
            return False
        if not self._clients:
            del self._own[request]
            return True
        client = request.client
        line = self._clients[client]
        del line[request]
        if not line:
            self._turn_over(client, line)
        return True

    def heads(self) -> Iterator[T]:
        """The oldest request of each client."""
        lines = self._clients.values() if self._clients else (self._own,)
        return (next(iter(line)) for line in lines if line)

    def beyond_its_share(self, request: T) -> T | None:
        """The newest request of the client that has most waiting, if that of `request` has less even with it."""
        client = request.client
        lines = self._clients or {self._client: self._own}
        most = max(lines.values(), key=lambda line: len(line))
        return next(reversed(most)) if len(most) > len(lines.get(client, ())) + 1 else None

    def oldest_of_the_greediest(self) -> T:
        """The oldest request of the client that has most waiting. Not of an empty line."""
        line = max(self._clients.values(), key=lambda line: len(line)) if self._clients else self._own
        return next(iter(line))
