"""What a client of the native transport knows and says: regions, plans, channels; without I/O.

Every verb is a procedure (see `clientlib.session`) that `Client` drives with blocking calls and `AsyncClient` with
awaits. A procedure gets the `Link` it runs on as its first argument: after a lost session it is run again on the next
one, so nothing a link says may be remembered without it.

    Native ── Link (one session) ── lanes
           ├─ regions, store        registered again on every new link
           └─ plans (weak)          prepared again when they are next used
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, final

from clientlib import process
from clientlib.arena import Block, Store
from clientlib.arguments import LONGEST_TEXT, model_text, shown, text, version_text, whole
from clientlib.attaching import attach_regions
from clientlib.binding import Binder
from clientlib.cuda_order import Orders, Ring
from clientlib.failures import ModelAbsent, RoomNeeded, is_absent
from clientlib.layout import Layout, sketch
from clientlib.leases import Leases
from clientlib.link import Bound, L, LeftLanes, Link, PlanState, Prepared
from clientlib.recipe import Recipe
from clientlib.region import MappedRegion, TensorRef
from clientlib.session import Answer, Call, Procedure
from clientlib.spread import Spread
from shm import messages
from shm.errors import Code, ConnectionLost, InferError
from shm.load_parameters import pack
from shm.messages import ModelMetadata, RegionRecord, Welcome
from shm.regions import create_pool
from shm.sockets import close_all

LIBRARY = "clientlib (Python)"
MakeRegion = Callable[..., MappedRegion]


@final
class Native(Generic[L]):
    """The state of one client. Made by the client, which also owns the link's session."""

    def __init__(self, directory: str, slots: int, spin_s: float, make_region: MakeRegion) -> None:
        self.directory = directory
        self.link: Link[L] | None = None
        self.closed = False
        self.made_in = process.generation
        self.regions: dict[str, MappedRegion] = {}
        self.known: dict[tuple[str, str], ModelMetadata] = {}  # by name and version asked for, as last heard
        self.leases = Leases()
        self.orders = Orders()
        self._store = Store()
        self._left: LeftLanes[L] = LeftLanes()
        self.binder: Binder[L] = Binder(slots, spin_s, self._unbind_all)
        self._make_region = make_region
        self._lock = threading.Lock()  # for the set: adding while another thread goes through it is an error
        self._plans: weakref.WeakSet[PlanState[L]] = weakref.WeakSet()
        # (link, index, generation), appended to when a plan is collected, in any thread; sent with the next prepare.
        self._released: deque[tuple[Link[L], int, int]] = deque()
        process.tell_after_fork(self)

    # --- life ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises InferError when the client was closed or belongs to another process."""
        process.check(self.made_in)
        if self.closed:
            raise InferError(Code.UNAVAILABLE, "the client was closed")

    def lose(self, link: Link[L]) -> None:
        """`link` is of no use any more: the next call makes a new one."""
        if self.link is link:
            self.link = None
            self._released.clear()
            link.session.close()
            self._left.take(link)
        # Also by a thread that comes second: it may not go on with its old channel while the first is still at it.
        self._unbind_all()

    def close(self) -> None:
        """End the session. Arrays stay valid, everything else says that the client was closed."""
        if self.closed or self.made_in != process.generation:
            return
        self.closed = True
        link, self.link = self.link, None
        self._released.clear()
        self._unbind_all()
        if link is not None:
            link.closed = True
            self._left.take(link)
        self._left.close()
        if link is not None:
            link.session.close()
        for region in (*self.regions.values(), *self._store.regions()):
            region.release_fd()
            region.retired = "lost when the client was closed"
        self.regions.clear()
        self._store = Store()

    def leave_to_parent(self) -> None:
        """In a forked child: nothing of this client works here."""
        for plan in tuple(self._plans):  # without the lock, which a thread of the parent may hold
            plan.unbind()
        if self.link is not None:
            self.link.session.leave_to_parent()
            for lane in self.link.lanes.all():
                lane.leave_to_parent()

    def _unbind_all(self) -> None:
        with self._lock:
            plans = tuple(self._plans)
        for plan in plans:
            plan.unbind()

    # --- sessions --------------------------------------------------------------------------------------------------

    def greet(self) -> Procedure[Welcome]:
        """The first call of a session; answered when the broker's start-up load has ended."""
        reply, _ = yield Call(messages.Hello(protocol=messages.PROTOCOL, library=LIBRARY))
        assert isinstance(reply, Welcome)
        return reply

    def attach(self) -> Procedure[None]:
        """Register on a new session what was registered on the one before."""
        yield from attach_regions(self.regions, self._store.regions())
        yield from self.orders.attach()

    def call(
        self, link: Link[L], message: messages.Message, expects: int, fds: Sequence[int] = ()
    ) -> Procedure[Answer]:
        """Any message of the protocol, for who knows what it means."""
        answer = yield Call(message, fds, expects)
        return answer

    # --- regions ---------------------------------------------------------------------------------------------------

    def create_region(self, link: Link[L], name: str, byte_size: int) -> Procedure[MappedRegion]:
        """A pool region: memory made here, admitted by the broker."""
        name = text(name, "name")
        region = yield from self._create(name, whole(byte_size, "byte_size", 1))
        self.regions[name] = region
        return region

    def _create(self, name: str, byte_size: int) -> Procedure[MappedRegion]:
        fd = create_pool(byte_size)
        try:
            yield Call(messages.RegisterPool(name=name, byte_size=byte_size), (fd,))
        except BaseException:
            os.close(fd)
            raise
        return self._make_region(name, fd, 0, byte_size, True, kind="pool", key="")

    def register_system(
        self, link: Link[L], name: str, key: str, byte_size: int, offset: int
    ) -> Procedure[MappedRegion]:
        """A POSIX shared memory object that somebody made; the broker opens it and passes its descriptor."""
        asked = messages.RegisterSystem(
            name=text(name, "name"),
            key=text(key, "key", LONGEST_TEXT),
            byte_size=whole(byte_size, "byte_size", 1),
            offset=whole(offset, "offset"),
        )
        reply, fds = yield Call(asked, expects=1)
        return self._opened(reply, fds[0], key)

    def open_region(self, link: Link[L], name: str | None, token: str) -> Procedure[MappedRegion]:
        """A region that another session shared; without a name it gets one that follows from the token."""
        token = text(token, "token")
        name = f"shared.{token[:16]}" if name is None else text(name, "name")
        reply, fds = yield Call(messages.OpenRegion(name=name, token=token), expects=1)
        return self._opened(reply, fds[0], "")

    def _opened(self, reply: messages.Reply, fd: int, key: str) -> MappedRegion:
        assert isinstance(reply, messages.RegionInfo)
        region = self._make_region(
            reply.name, fd, reply.offset, reply.byte_size, reply.writable, kind=reply.kind, key=key
        )
        self.regions[reply.name] = region
        return region

    def share(self, link: Link[L], region: MappedRegion) -> Procedure[str]:
        """A token for `region`."""
        if not isinstance(region, MappedRegion):
            raise InferError(Code.INVALID_ARG, f"region must be a region of this client, got {shown(region)}")
        self._check_region(region)
        reply, _ = yield Call(messages.ShareRegion(name=region.name))
        assert isinstance(reply, messages.Token)
        return reply.token

    def unregister(self, link: Link[L], name: str | None) -> Procedure[None]:
        """Retire one region, or all that the application registered. Unknown names succeed, as in Triton."""
        # One by one, because "all" would include the client's own chunks.
        for each in [*self.regions] if name is None else [text(name, "name")]:
            yield Call(messages.Unregister(name=each))
            region = self.regions.pop(each, None)
            if region is not None:
                region.retired = "unregistered"
                region.release_fd()

    def list_regions(self, link: Link[L]) -> Procedure[list[RegionRecord]]:
        """What the broker knows of this session's regions; without rings of events, which are no application's."""
        reply, _ = yield Call(messages.ListRegions())
        assert isinstance(reply, messages.Regions)
        return [region for region in reply.regions if region.kind != "events"]

    def _check_region(self, region: MappedRegion) -> None:
        if self.regions.get(region.name) is not region:
            why = f": it was {region.retired}" if region.retired else ": it belongs to another client"
            raise InferError(Code.NOT_FOUND, f"Unable to find shared memory region: '{region.name}'{why}")

    def _check_regions(self, recipe: Recipe) -> None:
        refs = [*recipe.inputs.values(), *(recipe.outputs.values() if isinstance(recipe.outputs, dict) else ())]
        for ref in refs:
            if isinstance(ref, TensorRef):
                self._check_region(ref.region)

    # --- models ----------------------------------------------------------------------------------------------------

    def models(self, link: Link[L]) -> Procedure[dict[str, ModelMetadata]]:
        """Every model by name: of its versions the highest that is ready, else the highest."""
        reply, _ = yield Call(messages.GetModels())
        assert isinstance(reply, messages.Models)
        return {model.name: model for model in sorted(reply.models, key=lambda model: model.state == "READY")}

    def model(self, link: Link[L], name: str, version: str | int) -> Procedure[ModelMetadata]:
        """One model. Raises InferError with Triton's lookup texts."""
        name, version = model_text(name), version_text(version)
        reply, _ = yield Call(messages.GetModel(model=name, version=version))
        assert isinstance(reply, messages.Models)
        model = self.known[name, version] = reply.models[0]
        return model

    def statistics(self, link: Link[L], model: str, version: str | int) -> Procedure[list[dict[str, Any]]]:
        """Triton's model_stats."""
        model = model_text(model, empty=True)
        reply, _ = yield Call(messages.GetStatistics(model=model, version=version_text(version)))
        assert isinstance(reply, messages.Statistics)
        return list(reply.model_stats)

    def load(self, link: Link[L], model: str, config: str | None, files: Mapping[str, bytes]) -> Procedure[None]:
        """Load or reload a model; returns when it is ready."""
        fds = [] if config is None else [pack(config, files)]
        try:
            yield Call(messages.LoadModel(model=model_text(model), parameters=bool(fds)), fds)
        finally:
            close_all(fds)

    def unload(self, link: Link[L], model: str, unload_dependents: bool) -> Procedure[None]:
        """Unload a model."""
        yield Call(messages.UnloadModel(model=model_text(model), unload_dependents=bool(unload_dependents)))

    # --- plans -----------------------------------------------------------------------------------------------------

    def prepare(self, link: Link[L], plan: PlanState[L], known: ModelMetadata | None = None) -> Procedure[None]:
        """Lay `plan` out and have the broker check it and bind it to a worker. `known`: the model, if just heard of."""
        yield from self._release_dropped(link)
        recipe = plan.recipe
        self._check_regions(recipe)
        model = known or (yield from self.model(link, recipe.model, recipe.version))
        sizes = sketch(recipe, model)
        block = (yield from self._allocate(sizes.byte_size)) if sizes.byte_size else None
        layout = sizes.place(block)
        yield from self._prepare(link, plan, layout)
        layout.ranges.enter()
        with self._lock:
            self._plans.add(plan)

    def _prepare(self, link: Link[L], plan: PlanState[L], layout: Layout) -> Procedure[Prepared[L]]:
        """On `layout`. One for all threads that see the need at the same time: the first to have it gives it to all."""
        self._check_regions(plan.recipe)  # the broker goes by names, which may be other regions' by now
        before = plan.prepared
        events = self.orders.known(plan.recipe.events)
        reply, _ = yield Call(
            messages.Prepare(
                model=plan.recipe.model,
                version=plan.recipe.version,
                inputs=tuple(tensor.spec for tensor in layout.inputs),
                outputs=tuple(tensor.spec for tensor in layout.outputs),
                input_positions=layout.input_positions,
                output_positions=layout.output_positions,
                responses=layout.responses,
                parameters=plan.recipe.parameters,
                events=events,
            )
        )
        assert isinstance(reply, messages.Prepared)
        made = Prepared(link, layout, reply, bool(events))
        with self._lock:
            found = plan.prepared
            if found is not before and found is not None and found.serves_like(made):
                self.released(made)
                return found
            plan.prepared = made
        if found is not None:
            self.released(found)
            plan.unbind()  # who is bound to it
        return made

    def _allocate(self, byte_size: int) -> Procedure[Block]:
        while (block := self._store.allocate(byte_size)) is None:
            for idle in self._store.retire_idle():
                idle.retired = "not used any more"
                idle.release_fd()
                yield Call(messages.Unregister(name=idle.name))
            number = len(self._store.regions()) + 1
            name = f"clientlib.{number}.{os.urandom(4).hex()}"
            region = yield from self._create(name, self._store.next_chunk(byte_size))
            if (block := self._store.allocate(byte_size)) is not None:
                # Others were making one at the same time, and one serves all.
                region.release_fd()
                yield Call(messages.Unregister(name=name))
                break
            self._store.add(region)
        return block

    def grow(self, link: Link[L], plan: PlanState[L], needed: RoomNeeded) -> Procedure[None]:
        """Give an output of `plan` the room that a result turned out to need."""
        # Twice as much as needed on average: results that vary a little do not grow it each time.
        plan.recipe.rooms[needed.output] = 1 << (needed.byte_size - 1).bit_length()
        yield from self.prepare(link, plan)
        plan.unbind()

    def give_events(self, link: Link[L], plan: PlanState[L], ring: Ring) -> Procedure[None]:
        """Let requests of `plan` name events of `ring`."""
        if not ring.registered:
            yield from self.orders.register(ring)
        plan.recipe.events = ring.name
        prepared = plan.prepared
        if prepared is not None:  # else `bind` prepares it
            yield from self._prepare(link, plan, prepared.layout)
        plan.unbind()

    def bind(self, link: Link[L], plan: PlanState[L]) -> Procedure[Bound[L]]:
        """What the calling thread or loop needs to submit requests of `plan`."""
        prepared = plan.prepared
        if prepared is None or prepared.layout.region_retired:
            yield from self.prepare(link, plan)
            prepared = plan.prepared
            assert prepared is not None
        elif prepared.link is not link:
            prepared = yield from self._prepare(link, plan, prepared.layout)
        elif prepared.moved:
            try:
                prepared = yield from self._prepare(link, plan, prepared.layout)
            except InferError as error:
                if isinstance(error, ConnectionLost):
                    raise
                if is_absent(error):  # it was unloaded; the next request asks again
                    raise ModelAbsent(error.code, error.message) from None
                # Else its worker has the word: what was prepared is good again when it is loaded where it was.
        if not prepared.workers:
            return (yield from self.binder.bind(link, prepared, prepared.worker))
        return (yield from self.binder.bind_several(link, Spread(plan.recipe.model, link, prepared)))

    def released(self, prepared: Prepared[L]) -> None:
        """Nobody will use this preparation any more. Any thread, any time."""
        if prepared.link is self.link:
            self._released.append((prepared.link, prepared.index, prepared.generation))

    def release(self, link: Link[L], prepared: Prepared[L]) -> Procedure[None]:
        """The same, told to the broker now."""
        self.released(prepared)
        yield from self._release_dropped(link)

    def _release_dropped(self, link: Link[L]) -> Procedure[None]:
        while self._released:  # by any thread at any time
            try:
                prepared_on, index, generation = self._released.popleft()
            except IndexError:  # another thread was first
                return
            if prepared_on is link:
                yield Call(messages.Release(index=index, generation=generation))
