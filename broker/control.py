"""What each request of a session does: one function per type, looked up in a table.

The service behind every `broker.sessions.Session`. It translates between messages and the parts that own the truth
(models, registry, plans, channels); it keeps no state of its own but the progress of the start-up load. The functions
for what mostly gateways ask are in `broker.gateway_answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, final

from broker import gateway_answers, lease_answers
from broker.channels import MAX_CHANNELS, Channels
from broker.gateway.options import LogOptions
from broker.lookup_hints import hinted
from broker.plans import ModelLookup, Plans
from broker.principals import Principals
from broker.records import CLIENT, GATEWAY, WORKER, Peer, RegionEntry, record, region_info
from broker.registry import RegionWorker, Registry
from broker.sessions import Answer, Session
from broker.settings import LogState, TraceState
from shm import messages
from shm.cuda.descriptor import VMM
from shm.errors import Code, InferError
from shm.gateway_messages import GetServer, Serving
from shm.lease_messages import KeepLoaded, LetGo
from shm.messages import PROTOCOL, Message, Request, Starting
from shm.sockets import close_all

STARTING_S = 5.0  # between two looks at what the start waits for

log = logging.getLogger(__name__)


class Models(gateway_answers.Models, lease_answers.Models, ModelLookup, Protocol):
    """What control messages need of the models. `explicit`: clients may load and unload them."""

    explicit: bool

    async def load(self, model: str, parameters: int = -1, remote: bool = False) -> None:
        """Load or reload, with a descriptor that stays the caller's; `remote`: from the network. Raises InferError."""

    async def unload(self, model: str, dependents: bool = False) -> None:
        """Raises InferError with Triton's texts."""

    def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        """`model_stats` in Triton's JSON form."""


async def _no_worker(uuid: str) -> RegionWorker | None:
    return None


@final
class Control:
    """Answers requests. `status` makes the document of GetStatus, `metrics` that of GetMetrics.

    `strict_readiness`: Triton's flag. `waits_for`: what the start waits for (`broker.load_watch`). `on_serving`: called
    with what a gateway says when it listens, or cannot.
    """

    def __init__(
        self,
        *,
        models: Models,
        registry: Registry,
        plans: Plans,
        channels: Channels,
        status: Callable[[], dict[str, Any]],
        epoch: str,
        version: str,
        strict_readiness: bool = True,
        log_state: LogState | None = None,
        trace_state: TraceState | None = None,
        metrics: Callable[[], dict[str, Any]] = dict,
        waits_for: Callable[[int], str] = lambda now_ns: "",
    ) -> None:
        self.models = models
        self.registry = registry
        self.plans = plans
        self.channels = channels
        self.status = status
        self.principals = Principals(registry, partial(open_cuda, self))
        self.strict_readiness = strict_readiness
        self.log_state = log_state or LogState(LogOptions(), lambda options: None)
        self.trace_state = trace_state or TraceState()
        self.metrics = metrics
        self.on_serving: Callable[[Peer, Serving], None] | None = None
        self.cuda_worker: Callable[[str], Awaitable[RegionWorker | None]] = _no_worker  # one that opens its memory
        self.exiting = False
        self._epoch = epoch
        self._version = version
        self._waits_for = waits_for
        self._progress = (0, 0)
        self._changed = asyncio.Event()
        self._started = False
        self._reaper: asyncio.Task[None] | None = None

    # --- start-up --------------------------------------------------------------------------------------------------

    def report(self, done: int, total: int) -> None:
        """The start-up load has come so far: everybody who waits for Welcome is told."""
        self._progress = (done, total)
        self._wake()

    def started(self) -> None:
        """The start-up load has ended: sessions are welcome."""
        self._started = True
        self._reaper = asyncio.create_task(self.principals.keep_reaping(), name="regions without a name")
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def welcome(self, session: Session) -> Message:
        """The reply to Hello, after Starting notices for as long as the start-up load runs."""
        told: Starting | None = None
        while not self._started and session.peer.role != WORKER:  # whose warm-up may be what the load waits for
            done, total = self._progress
            notice = Starting(done=done, total=total, waits_for=self._waits_for(time.monotonic_ns()))
            if notice != told:
                session.send(notice)
                told = notice
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), STARTING_S)
        return messages.Welcome(
            protocol=PROTOCOL,
            epoch=self._epoch,
            session=session.peer.session,
            version=self._version,
            max_channels=MAX_CHANNELS,
        )

    # --- requests --------------------------------------------------------------------------------------------------

    async def answer(self, peer: Peer, request: Request, fds: list[int]) -> Answer:
        """The reply to `request`. Takes `fds` over. Raises InferError, OSError."""
        # What workers have accepted runs to its end, steps in other workers included.
        if self.exiting and peer.role != WORKER and not isinstance(request, GetServer | Serving):
            close_all(fds)
            raise InferError(Code.UNAVAILABLE, "Server exiting")
        if isinstance(request, messages.RegisterPool):
            return Answer(region_info(register_pool(self, peer, request, fds)))
        if isinstance(request, messages.RegisterCuda):
            entry = register_cuda(self, peer, request, fds)
            await open_cuda(self, entry)
            return Answer(region_info(entry))
        if isinstance(request, messages.RegisterEvents):
            entry = self.registry.register_cuda(peer, request.name, request.events, writable=False)
            await open_cuda(self, entry)
            return Answer(region_info(entry))
        if isinstance(request, messages.LoadModel):
            return await load_model(self, peer, request, fds)
        try:
            return await _ANSWERS[type(request)](self, peer, request)
        except InferError as error:
            if peer.role != CLIENT:
                raise
            raise hinted(error, self.models.all, explicit=self.models.explicit) from None

    async def end(self, peer: Peer) -> None:
        """Give back what a session holds: channels first, since nothing else is free while a worker is in them."""
        lease_answers.end(self.models, peer.session)
        try:
            await self.channels.end(peer.session)
            self.plans.end(peer.session)
            await self.registry.unregister(peer.session)
        except InferError as error:
            log.warning("end of session %d: %s", peer.session, error.message)
        except Exception:
            log.exception("end of session %d", peer.session)


def register_pool(control: Control, peer: Peer, request: messages.RegisterPool, fds: list[int]) -> RegionEntry:
    """Admit the memfd that came along."""
    if len(fds) != 1:
        close_all(fds)
        raise InferError(
            Code.INVALID_ARG,
            f"RegisterPool needs exactly one descriptor, the pool's memfd; {len(fds)} came with region "
            f"'{request.name}'",
        )
    return control.registry.register_pool(peer, request.name, request.byte_size, fds[0])


def register_cuda(control: Control, peer: Peer, request: messages.RegisterCuda, fds: list[int]) -> RegionEntry:
    """Note memory of a GPU. What is wrong with it only a worker can tell, which opens it."""
    expected = 1 if request.memory.kind == VMM else 0
    if len(fds) != expected:
        close_all(fds)
        raise InferError(
            Code.INVALID_ARG,
            f"RegisterCuda of {request.memory.kind} memory needs {expected} descriptors; {len(fds)} came with region "
            f"'{request.name}'",
        )
    return control.registry.register_cuda(peer, request.name, request.memory, request.writable, *fds)


async def open_cuda(control: Control, entry: RegionEntry) -> None:
    """Have a worker that will use it open it, if one can now: what it cannot open is not registered (InferError)."""
    what = entry.cuda or entry.events
    worker = await control.cuda_worker(what.device) if what is not None else None
    if worker is None:
        return
    try:
        await control.registry.map_at(worker, (entry,))
    except InferError:
        if not entry.draining:  # else its name may be another's by now
            await control.registry.unregister(entry.session, entry.name)
        raise


async def register_system(control: Control, peer: Peer, request: messages.RegisterSystem) -> Answer:
    """Open a POSIX name on the client's behalf; it gets the same open file."""
    entry = await control.registry.register_system(peer, request.name, request.key, request.byte_size, request.offset)
    return Answer(region_info(entry), (entry.fd,))


async def share_region(control: Control, peer: Peer, request: messages.ShareRegion) -> Answer:
    """The token with which other sessions of the same uid can open the region."""
    return Answer(messages.Token(token=control.registry.share(peer.session, request.name)))


async def open_region(control: Control, peer: Peer, request: messages.OpenRegion) -> Answer:
    """Another session's shared region, under a name of this session."""
    entry = control.registry.open(peer, request.name, request.token)
    return Answer(region_info(entry), (entry.fd,))


async def unregister(control: Control, peer: Peer, request: messages.Unregister) -> Answer:
    """Answered when no worker will use the region for a new request."""
    await control.registry.unregister(peer.session, request.name)
    return Answer(messages.Done())


async def list_regions(control: Control, peer: Peer, request: messages.ListRegions) -> Answer:
    """The session's own regions."""
    return Answer(messages.Regions(regions=tuple(record(entry) for entry in control.registry.of(peer.session))))


async def prepare(control: Control, peer: Peer, request: messages.Prepare) -> Answer:
    """Check a plan and bind it."""
    owner = 0 if peer.role == GATEWAY else peer.session
    return Answer(await control.plans.prepare(peer.session, request, owner))


async def prepare_step(control: Control, peer: Peer, request: messages.PrepareStep) -> Answer:
    """The same for a step of an ensemble."""
    if peer.role != WORKER:
        raise InferError(Code.INVALID_ARG, "only the broker's own workers prepare steps of ensembles")
    return Answer(await control.plans.prepare(peer.session, request.plan, request.owner, request))


async def prepare_at(control: Control, peer: Peer, request: messages.PrepareAt) -> Answer:
    """Bind a plan to one more worker."""
    await control.plans.prepare_at(peer.session, request)
    return Answer(messages.Done())


async def release(control: Control, peer: Peer, request: messages.Release) -> Answer:
    """Forget a plan."""
    control.plans.release(peer.session, request.index, request.generation)
    return Answer(messages.Done())


async def open_channel(control: Control, peer: Peer, request: messages.OpenChannel) -> Answer:
    """A channel that its worker watches by now."""
    channel, pipe_read = await control.channels.open(peer, request.worker, request.slots)
    reply = messages.ChannelInfo(channel=channel.channel, worker=request.worker, slots=channel.slots)
    return Answer(reply, (channel.memory, channel.bell, pipe_read), owned=(pipe_read,))


async def close_channel(control: Control, peer: Peer, request: messages.CloseChannel) -> Answer:
    """Answered when the worker is idle on it."""
    await control.channels.close(peer.session, request.channel)
    return Answer(messages.Done())


async def get_models(control: Control, peer: Peer, request: messages.GetModels) -> Answer:
    """Every model that is known, ready or not."""
    return Answer(messages.Models(models=tuple(control.models.all())))


async def get_model(control: Control, peer: Peer, request: messages.GetModel) -> Answer:
    """One model version, the latest for \"\"."""
    return Answer(messages.Models(models=(control.models.metadata(request.model, request.version),)))


async def get_statistics(control: Control, peer: Peer, request: messages.GetStatistics) -> Answer:
    """Counters of one model or of all."""
    statistics = control.models.statistics(request.model, request.version)
    return Answer(messages.Statistics(model_stats=tuple(statistics)))


async def get_status(control: Control, peer: Peer, request: messages.GetStatus) -> Answer:
    """What `tensorbroker status` prints."""
    return Answer(messages.Status(status=control.status()))


async def load_model(control: Control, peer: Peer, request: messages.LoadModel, fds: list[int]) -> Answer:
    """Load or reload a model; goes on if the client leaves. Takes `fds` over."""

    async def load() -> None:
        try:
            if len(fds) != request.parameters:
                raise InferError(
                    Code.INVALID_ARG,
                    f"LoadModel needs {int(request.parameters)} descriptors, one if it has parameters; {len(fds)} came",
                )
            await control.models.load(request.model, fds[0] if fds else -1, peer.role == GATEWAY)
        finally:
            close_all(fds)

    await _to_the_end(load())
    return Answer(messages.Done())


async def unload_model(control: Control, peer: Peer, request: messages.UnloadModel) -> Answer:
    """Unload a model; goes on if the client leaves."""
    await _to_the_end(control.models.unload(request.model, request.unload_dependents))
    return Answer(messages.Done())


async def keep_loaded(control: Control, peer: Peer, request: KeepLoaded) -> Answer:
    """A lease; the load that it may need goes on if the client leaves, its lease does not."""
    control.models.leases.take(peer.session, request.lease, request.model, request.version)
    await _to_the_end(lease_answers.keep_loaded(control.models, peer, request))
    return Answer(messages.Done())


async def let_go(control: Control, peer: Peer, request: LetGo) -> Answer:
    """A lease has ended."""
    return await lease_answers.let_go(control.models, peer, request)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work`, which is not cancelled with whoever waits."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


_ANSWERS: dict[type[Message], Callable[[Control, Peer, Any], Awaitable[Answer]]] = {
    **gateway_answers.ANSWERS,
    messages.RegisterSystem: register_system,
    messages.ShareRegion: share_region,
    messages.OpenRegion: open_region,
    messages.Unregister: unregister,
    messages.ListRegions: list_regions,
    messages.Prepare: prepare,
    messages.PrepareStep: prepare_step,
    messages.PrepareAt: prepare_at,
    messages.Release: release,
    messages.OpenChannel: open_channel,
    messages.CloseChannel: close_channel,
    messages.GetModels: get_models,
    messages.GetModel: get_model,
    messages.GetStatistics: get_statistics,
    messages.GetStatus: get_status,
    messages.UnloadModel: unload_model,
    KeepLoaded: keep_loaded,
    LetGo: let_go,
}
