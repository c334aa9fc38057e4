"""How a plan comes to a worker: the worker told of it, and a channel of the caller's thread or loop opened to it.

Procedures (see `clientlib.session`), used by `clientlib.native`, and by the clients for what `clientlib.spread` lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, final

from clientlib.failures import is_out_of_channels
from clientlib.link import Bound, L, Link, Prepared
from clientlib.session import Answer, Call, Procedure, Unanswered
from clientlib.spread import Spread
from shm import messages
from shm.client_channel import ClientChannel
from shm.errors import Code, ConnectionLost, InferError
from shm.sockets import close_all


@final
class Binder(Generic[L]):
    """`slots` and `spin_s`: of the channels it opens. `unbind`: no plan may use a channel that was given back."""

    __slots__ = ("_slots", "_spin_s", "_unbind")

    def __init__(self, slots: int, spin_s: float, unbind: Callable[[], None]) -> None:
        self._unbind = unbind
        self._slots = slots
        self._spin_s = spin_s

    def bind(self, link: Link[L], prepared: Prepared[L], worker: str) -> Procedure[Bound[L]]:
        """What it takes to submit to a worker that knows the plan."""
        lane = link.lanes.mine(worker)
        if lane is None:
            lane = yield from self._open_channel(link, worker)
        return Bound(lane, prepared.layout, prepared.word, prepared.events)

    def bind_at(
        self, link: Link[L], spread: Spread[L], worker: str, *, wait: bool = True
    ) -> Procedure[Bound[L] | None]:
        """Let requests go to one more worker. None: all of `spread` ended with its session.

        It may be none that the plan prefers, but the one that has a sequence: then other requests do not go there.
        """
        prepared = spread.prepared
        if prepared.link is not link:
            return None
        # Where a channel is to be opened without waiting for long, the broker looks first whether the worker responds.
        if worker not in prepared.bound_at or not (wait or link.lanes.mine(worker)):
            ask = messages.PrepareAt(index=prepared.index, generation=prepared.generation, worker=worker, wait=wait)
            try:
                yield Call(ask)
            except InferError as error:
                if worker in spread.workers or error.code != Code.NOT_FOUND.name:
                    raise
                link.homes.leave(prepared.layout.model, worker)  # any worker can say that the sequence is lost
                worker = prepared.worker
            prepared.bound_at.add(worker)
        bound = yield from self.bind(link, prepared, worker)
        if worker in spread.workers:
            spread.bounds[worker] = bound
        return bound

    def bind_missing(self, link: Link[L], spread: Spread[L]) -> Procedure[None]:
        """The same with all workers that are up and respond."""
        for worker in spread.missing():
            try:
                yield from self.bind_at(link, spread, worker, wait=False)
            except ConnectionLost:
                raise
            except InferError:
                pass  # the next try is `Spread.is_due`'s

    def bind_several(self, link: Link[L], spread: Spread[L]) -> Procedure[Bound[L]]:
        """A plan that several workers may serve, with all of them that respond; where none does, one is waited for."""
        prepared = spread.prepared
        yield from self.bind_missing(link, spread)
        bounds = spread.bounds
        bound = bounds.get(prepared.worker) or next(iter(bounds.values()), None)
        if bound is None:
            bound = yield from self.bind(link, prepared, prepared.worker)
            if prepared.worker in spread.workers:
                bounds[prepared.worker] = bound
        bound.spread = spread
        return bound

    def _open_channel(self, link: Link[L], worker: str) -> Procedure[L]:
        late = functools.partial(self._keep, link)
        ask = Call(messages.OpenChannel(worker=worker, slots=self._slots), expects=3, late=late)
        while True:
            try:
                reply, fds = yield ask
                break
            except ConnectionLost:
                raise
            except InferError as error:
                if error.code != Code.UNAVAILABLE.name or isinstance(error, Unanswered):
                    raise
                full = is_out_of_channels(error)
                if full and (lane := link.lanes.mine(worker)) is not None:
                    return lane  # one that was left meanwhile
                unused = link.lanes.give_up() if full else None
                if unused is None:
                    # Several threads may have asked for the last channel at once.
                    if (lane := link.lanes.shared(worker)) is not None:
                        return lane
                    raise
            yield from self._close_channel(unused)
        assert isinstance(reply, messages.ChannelInfo)
        channel = self._channel(reply, fds)
        lane = link.lanes.add(worker, channel, link)
        if lane.channel is channel:
            lane.number = reply.channel
        else:  # others opened one at the same time
            yield Call(messages.CloseChannel(channel=reply.channel))
        return lane

    def _channel(self, reply: messages.ChannelInfo, fds: list[int]) -> ClientChannel:
        """Takes `fds` over."""
        try:
            memory, bell, pipe = fds
            return ClientChannel(memory, bell, pipe, reply.slots, self._spin_s)
        except BaseException:
            close_all(fds)
            raise

    def _keep(self, link: Link[L], answer: Answer) -> bool:
        """A channel that came after its thread's patience is for that thread's next request, or another's."""
        reply, fds = answer
        assert isinstance(reply, messages.ChannelInfo)
        try:
            channel = self._channel(reply, fds)
        except (InferError, OSError):
            return False
        return link.lanes.keep(reply.worker, channel, reply.channel, link)

    def _close_channel(self, unused: L) -> Procedure[None]:
        self._unbind()
        try:
            yield Call(messages.CloseChannel(channel=unused.number))
        except ConnectionLost:
            raise
        except InferError:
            pass  # the broker has closed it all the same, without its worker's word
