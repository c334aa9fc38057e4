"""One session with the broker, its channels, and the plans that were prepared on it.

Seen by `clientlib.native`, which fills it, and by the plans, which submit through it. All of it ends with the session.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, final

from clientlib.homes import Homes
from clientlib.layout import Layout
from clientlib.load import Load
from clientlib.recipe import Recipe
from shm import messages
from shm.client_channel import ClientChannel
from shm.errors import Code, InferError

if TYPE_CHECKING:
    from clientlib.spread import Spread


class Lane(Protocol):
    """A channel as one kind of client uses it."""

    worker: str
    channel: ClientChannel
    number: int  # of the channel, as the broker counts them

    def close(self) -> None:
        """Nobody may wait on it any more."""

    def leave_to_parent(self) -> None:
        """In a forked child: nobody may use it."""


L = TypeVar("L", bound=Lane)


class Lanes(Protocol[L]):
    """The channels of one session, as one kind of client shares them out."""

    def mine(self, worker: str) -> L | None:
        """The caller's lane to `worker`; None: open a channel and `add` it."""

    def add(self, worker: str, channel: ClientChannel, left: Link[L]) -> L:
        """Make a lane of a new channel; it is the caller's."""

    def keep(self, worker: str, channel: ClientChannel, number: int, left: Link[L]) -> bool:
        """Make a lane of a new channel, for whoever needs one next. False: nobody will; the channel is closed."""

    def shared(self, worker: str) -> L | None:
        """A lane to `worker` that others use too, when no channel can be opened any more."""

    def give_up(self) -> L | None:
        """At the broker's limit: a lane that nobody uses, closed on this side. None: there is none."""

    def all(self) -> list[L]:
        """Every lane there is."""

    def end(self) -> None:
        """The session has ended: hold no lane any more."""


class Session(Protocol):
    """A session as far as nobody waits for it."""

    def close(self) -> None:
        """End it."""

    def leave_to_parent(self) -> None:
        """In a forked child: close the copy of the socket only."""


@final
class Link(Generic[L]):
    """One session with the broker and what belongs to it alone."""

    def __init__(
        self, lose: Callable[[Link[L]], None], session: Session, lanes: Lanes[L], homes: Homes | None = None
    ) -> None:
        """`homes`: of sequences of models that several workers serve."""
        self.session = session
        self.lanes = lanes
        self.homes = homes if homes is not None else Homes()
        self.load = Load(lanes)
        self.closed = False  # by the client's close, not by the broker
        self._lose = lose

    def channel_gone(self) -> None:
        """Broker and worker of a channel are gone."""
        self._lose(self)


@final
class LeftLanes(Generic[L]):
    """Lanes of a client's sessions that have ended, as long as a request refers to them."""

    __slots__ = ("_lanes", "_lock")

    def __init__(self) -> None:
        self._lanes: weakref.WeakSet[L] = weakref.WeakSet()
        self._lock = threading.Lock()  # adding while another thread goes through them is an error

    def take(self, link: Link[L]) -> None:
        """The session of `link` has ended: its lanes go when nobody uses them any more."""
        with self._lock:
            self._lanes.update(link.lanes.all())
        link.lanes.end()

    def close(self) -> None:
        """Nobody may wait on one any more."""
        with self._lock:
            lanes = tuple(self._lanes)
        for lane in lanes:
            lane.close()


@final
class Bound(Generic[L]):
    """A plan prepared on a link: everything a request needs, so that the hot path looks in one place."""

    __slots__ = (
        "channel",
        "events",
        "input_positions",
        "lane",
        "layout",
        "live",
        "output_positions",
        "ranges",
        "spread",
        "word",
    )

    def __init__(self, lane: L, layout: Layout, word: int, events: bool) -> None:
        self.spread: Spread[L] | None = None  # there are other workers, too
        self.lane = lane
        self.channel = lane.channel
        self.layout = layout
        self.ranges = layout.ranges
        self.live = layout.ranges.live
        self.input_positions = layout.input_positions
        self.output_positions = layout.output_positions
        self.word = word
        self.events = events  # requests may name events (`clientlib.cuda_order`)


def outside(bound: Bound[Any], input_slot: int, output_slot: int) -> InferError:
    """The error for positions that the plan does not have."""
    return InferError(
        Code.INVALID_ARG,
        f"input_slot {input_slot} / output_slot {output_slot}: the plan has {bound.input_positions} input and "
        f"{bound.output_positions} output positions",
    )


@final
class Prepared(Generic[L]):
    """Where a plan was prepared last."""

    __slots__ = ("bound_at", "events", "generation", "index", "layout", "link", "moved", "worker", "workers")

    def __init__(self, link: Link[L], layout: Layout, reply: messages.Prepared, events: bool = False) -> None:
        self.link = link
        self.layout = layout
        self.events = events  # with a ring of them
        self.index, self.generation, self.worker = reply.index, reply.generation, reply.worker
        self.workers = reply.workers  # if there are several that may serve it
        self.bound_at = {reply.worker}
        self.moved = False  # a worker has said that it does not serve the model any more

    @property
    def word(self) -> int:
        """How a submission names the plan."""
        return self.index | self.generation << 32

    def serves_like(self, other: Prepared[L]) -> bool:
        """Is one of the two enough?"""
        same = self.link is other.link and self.layout is other.layout and self.events == other.events
        return same and not self.moved


class PlanState(Protocol[L]):
    """What this module keeps in a plan."""

    recipe: Recipe
    prepared: Prepared[L] | None

    def unbind(self) -> None:
        """Forget the channel and the plan's word, in every thread: they must be asked for again."""
