"""Requests that wait in one line, with turns for the clients they come from.

Used by `broker.worker.batcher`, one per priority level. A client is a channel: what one client sends stays in order,
and one that sends much delays its own requests, not those of others. A client alone pays one comparison. Clients are
kept by `id`: a line must not keep the channel, and with it the memory, of a client whose last request has left.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import final

from shm.admission import Request

# First in, first out, and quick to take one from the middle: cancelling thousands must cost nobody else anything.
Line = OrderedDict[Request, None]


@final
class FairLine:
    """Clients take turns, request by request. `shared`: several wait, else all that waits is `_client`'s, in `_own`."""

    __slots__ = ("_client", "_clients", "_own", "_passed")

    def __init__(self) -> None:
        self._client = 0
        self._own: Line = OrderedDict()
        self._clients: OrderedDict[int, Line] = OrderedDict()  # two or more, in the order of their turns
        self._passed = False

    def __bool__(self) -> bool:
        return bool(self._own or self._clients)

    @property
    def shared(self) -> bool:
        """Do several clients wait?"""
        return bool(self._clients)

    def add(self, request: Request) -> None:
        """Queue behind the others of its client."""
        client = id(request.channel)
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
        line[request] = None

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in the order of turns. Nothing may be added or removed meanwhile."""
        return self._in_turns() if self._clients else iter(self._own)

    def pass_over(self) -> None:
        """While iterating over several clients: leave out the client whose request came last. It keeps its turn."""
        self._passed = True

    def _in_turns(self) -> Iterator[Request]:
        again: deque[Iterator[Request]] = deque()
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

    def pop(self) -> Request:
        """Take out the next one. Not of an empty line."""
        if not self._clients:
            return self._own.popitem(last=False)[0]
        client, line = next(iter(self._clients.items()))
        request = line.popitem(last=False)[0]
        self._turn_over(client, line)
        return request

    def serve(self, batch: list[Request]) -> None:
        """Take out the first requests that iterating has given, those passed over not among them: their clients have
        had their turn.
        """
        at = 0
        while self._clients and at < len(batch):
            request = batch[at]
            client = id(request.channel)
            line = self._clients[client]
            del line[request]
            self._turn_over(client, line)
            at += 1
        own = self._own
        if len(own) == len(batch) - at:
            own.clear()
        else:
            for _ in range(len(batch) - at):
                own.popitem(last=False)

    def _turn_over(self, client: int, line: Line) -> None:
        if line:
            self._clients.move_to_end(client)
            return
        del self._clients[client]
        if len(self._clients) == 1:
            self._client, self._own = self._clients.popitem()

    def has(self, request: Request) -> bool:
        """Does it wait here?"""
        return request in self._clients.get(id(request.channel), ()) if self._clients else request in self._own

    def remove(self, request: Request) -> bool:
        """Drop one request; False when it is not here."""
        if not self.has(request):
            return False
        if not self._clients:
            del self._own[request]
            return True
        client = id(request.channel)
        line = self._clients[client]
        del line[request]
        if not line:
            self._turn_over(client, line)
        return True

    def heads(self) -> Iterator[Request]:
        """The oldest request of each client."""
        lines = self._clients.values() if self._clients else (self._own,)
        return (next(iter(line)) for line in lines if line)

    def beyond_its_share(self, request: Request) -> Request | None:
        """The newest request of the client that has most waiting, if that of `request` has less even with it."""
        client = id(request.channel)
        lines = self._clients or {self._client: self._own}
        most = max(lines.values(), key=lambda line: len(line))
        return next(reversed(most)) if len(most) > len(lines.get(client, ())) + 1 else None

    def oldest_of_the_greediest(self) -> Request:
        """The oldest request of the client that has most waiting. Not of an empty line."""
        line = max(self._clients.values(), key=lambda line: len(line)) if self._clients else self._own
        return next(iter(line))
