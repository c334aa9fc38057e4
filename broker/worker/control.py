"""The control thread: carries out what the broker says over the link.

Owns the tables of regions, plans, channels and models; the loop reads what is in them. Everything here is quick, or
runs in a thread of its own (loads), or is remembered and looked at again (`_waits`): an unregister must never wait
behind a model that takes a minute to load.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import final

from broker.worker import last_words, link, messages
from broker.worker.cache import ResponseCache
from broker.worker.ensembles.remote.elsewhere import Elsewhere
from broker.worker.link import Link
from broker.worker.load_threads import LoadThreads
from broker.worker.loop import DEPOSE_NS, Loop
from broker.worker.models import ModelTable
from broker.worker.overlap import Crowds
from broker.worker.plans import Plan
from broker.worker.rate_limiter import RateLimiter
from broker.worker.regions import Region, RegionTable
from broker.worker.tracebacks import complain
from shm import recovery, sockets, statistics
from shm.errors import Code, InferError, forget_frames
from shm.statistics import StatisticsPage
from shm.worker_channel import WorkerChannel

STOPPING = (Code.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new inference requests")
NO_GPU = 72  # exit status of a worker whose GPU is gone
LOOK_MS = 5  # how often waits are looked at while there are any
_now = time.monotonic_ns


@final
class Control:
    """One per process; `run` is the main thread's loop."""

    def __init__(self, to_broker: Link, page: StatisticsPage, start: messages.Start) -> None:
        self._link = to_broker
        self._page = page
        self._watch_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        own_block = page.block(start.block)
        self._loop = Loop(own_block, self._report_broken, self._watch_fd)
        if start.rate_limit is not None:
            self._loop.scheduler.limiter = RateLimiter(start.rate_limit)
        device = _device_of(start.worker)
        for word in statistics.GPU_NOW:
            own_block[word] = 0  # a predecessor's
        self._regions = RegionTable(device, own_block, peers=start.cuda_peers)
        self._crowds = Crowds(self._loop.live_requests)
        self._leaving: list[Plan] = []  # closed plans whose memory is let go when their last request has ended
        self._retired: list[Region] = []  # retired regions that requests still use, as the broker was told
        self._plans: dict[int, dict[int, Plan]] = {}  # session → plan word → plan
        self._channels: dict[int, WorkerChannel] = {}
        self._sessions: dict[int, int] = {}  # channel → session
        self._served: dict[int, dict[int, WorkerChannel]] = {}  # session → its channels, detached ones until idle
        self._of_steps: set[int] = set()  # sessions of other workers, for steps of their ensembles
        self._fds: dict[int, tuple[int, int]] = {}  # channel → its doorbell and pipe
        cache = ResponseCache(start.cache_byte_size, own_block) if start.cache_byte_size else None
        self._elsewhere = Elsewhere(
            lambda: to_broker.send(messages.WantSession()),
            lambda session, model: to_broker.send(messages.Offence(session=session, model=model)),
        )
        self._loop.hot_set.look_beside(self._elsewhere.session.lanes, self._elsewhere.session.watch)
        self._models = ModelTable(self._loop, cache, self._elsewhere, device, start.before)
        self._waits: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._load_threads = LoadThreads()
        self._threads = 0
        self._draining = False

    def run(self) -> None:
        """Serve the link until the broker says drain, or is gone."""
        self._need_threads(1)
        self._link.send(messages.Ready(pid=os.getpid()))
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        poll.register(self._watch_fd, select.POLLIN)
        while True:
            timeout: int | None = LOOK_MS if self._waits or self._leaving else None
            if timeout is None and self._loop.busy:
                timeout = DEPOSE_NS // 1_000_000
            ready = {fd for fd, _ in poll.poll(timeout)}
            if self._watch_fd in ready:
                os.eventfd_read(self._watch_fd)
            if self._loop.busy:
                self._loop.watch(_now())
            for _ in range(64 if self._link.fileno() in ready else 0):
                received = self._link.receive()
                if received is None:
                    break
                self._handle(*received)
            self._look()

    def _handle(self, message: messages.ToWorker, fds: list[int]) -> None:
        try:
            name = type(message).__name__
            answer = getattr(self, f"_on_{name}")(message, fds)
        except InferError as error:
            self._refuse(message.id, error)
        except Exception as error:
            if not link.is_lacking(error):
                traceback.print_exc()
            self._refuse(message.id, error)
        else:
            if answer:
                self._acknowledge(message.id)
        finally:
            sockets.close_all(fds)

    def _acknowledge(self, number: int, detail: str = "") -> None:
        self._link.send(messages.Acknowledged(id=number, detail=detail))

    def _refuse(self, number: int, error: BaseException) -> None:
        self._link.send(link.refusal(number, error))

    def _when(self, ready: Callable[[], bool], then: Callable[[], None]) -> None:
        """Do `then` once `ready`, looked at every few milliseconds."""
        self._waits.append((ready, then))

    def _look(self) -> None:
        if self._leaving:
            self._let_go()
        waiting, self._waits = self._waits, []
        for ready, then in waiting:
            if ready():
                then()
            else:
                self._waits.append((ready, then))

    # --- models -------------------------------------------------------------------------------------------------

    def _on_LoadInstances(self, message: messages.LoadInstances, fds: list[int]) -> bool:
        blocks = [self._page.block(index) for index in message.blocks]
        load = message.config.name, message.version, message.generation
        self._models.begin(load)
        try:
            self._in_thread(message, lambda: self._load(message, blocks))
        except RuntimeError as error:
            self._models.end(load)
            raise BlockingIOError(errno.EAGAIN, f"there is no thread to load it in: {error}") from error
        return False

    def _load(self, message: messages.LoadInstances, blocks: Sequence[memoryview]) -> None:
        try:
            model = self._models.load(message, list(blocks))
            self._models.publish(model, self._all_plans)
        finally:
            self._models.end((message.config.name, message.version, message.generation))
        retired = sum(len(model.instances) for model in self._loop.scheduler.retired)  # may still be at work
        self._need_threads(self._models.instances + retired)

    def _on_UnloadModel(self, message: messages.UnloadModel, fds: list[int]) -> bool:
        load = message.model, message.version, message.generation
        if self._models.give_up(load):
            self._when(lambda: self._models.has_ended(load), lambda: self._acknowledge(message.id))
        else:
            unloaded = self._models.unload(*load[:2], self._all_plans, message.generation)
            detail = messages.UNLOADED if unloaded else ""
            self._when(self._loop.looked(), lambda: self._acknowledge(message.id, detail))
        return False

    def _in_thread(self, message: messages.LoadInstances, work: Callable[[], None]) -> None:
        def body() -> None:
            try:
                work()
            except BaseException as error:  # a model's own code may exit: that must be answered like anything else
                complain(message.config, error)
                self._refuse(message.id, error)
                forget_frames(error)  # it came through what was loaded so far, and the backend may hold it
            else:
                self._acknowledge(message.id)

        self._load_threads.run(body)

    def _need_threads(self, instances: int) -> None:
        """One thread per instance and a spare, so that somebody can always lead. With fewer, instances take turns."""
        while self._threads < instances + 1:
            try:
                threading.Thread(target=self._serve, name=f"instance-{self._threads + 1}", daemon=True).start()
            except RuntimeError:
                if not self._threads:
                    raise
                return
            self._threads += 1

    def _serve(self) -> None:
        try:
            self._loop.serve()
        except BaseException as error:
            last_words.end(error)  # a worker whose loop is broken must not look alive

    # --- regions and plans --------------------------------------------------------------------------------------

    def _all_plans(self) -> list[Plan]:
        return [plan for plans in list(self._plans.values()) for plan in list(plans.values())]

    def _on_AddRegion(self, message: messages.AddRegion, fds: list[int]) -> bool:
        self._regions.add(message, fds[0] if fds else -1)
        return True

    def _on_RetireRegion(self, message: messages.RetireRegion, fds: list[int]) -> bool:
        region = self._regions.get(message.region, message.generation)
        self._regions.retire(message.region, message.generation)
        if region is None:
            return True
        verdict = (Code.NOT_FOUND, f"Unable to find shared memory region: '{region.info.name}'")
        for plan in self._all_plans():
            if plan.names(region):
                self._models.close(plan, verdict)
                self._leaving.append(plan)
        if self._leaving:
            self._let_go()
        if not any(plan.names(region) for plan in self._leaving):
            region.close()
            return True
        self._retired.append(region)
        self._acknowledge(message.id, messages.IN_USE)
        return False

    def _on_AskRegion(self, message: messages.AskRegion, fds: list[int]) -> bool:
        if self._leaving:
            self._let_go()
        region = self._regions.get(message.region, message.generation)
        if region is None:
            return True
        running = any(plan.busy.find(1) >= 0 and plan.names(region) for plan in self._all_plans())
        used, region.used = region.used, False  # before the answer, which a request may follow at once
        self._acknowledge(message.id, messages.USED if used or running else "")
        return False

    def _on_BindPlan(self, message: messages.BindPlan, fds: list[int]) -> bool:
        plans = self._plans.setdefault(message.session, {})
        key = message.index | message.generation << 32
        known = plans.get(key)
        if known is not None:
            known.refused_until_ns = message.refused_until_ns
            return True
        plan = Plan(message, self._regions, self._crowds)
        with self._models.lock:  # it changes which plans are simple
            self._crowds.enter(plan)
        plans[key] = plan
        self._models.bind(plan)
        return True

    def _on_DropPlan(self, message: messages.DropPlan, fds: list[int]) -> bool:
        plan = self._plans.get(message.session, {}).pop(message.index | message.generation << 32, None)
        if plan is not None:
            self._models.close(plan, (Code.NOT_FOUND, "the plan was released"))
            self._models.release(plan)
            self._leaving.append(plan)
            self._prune(message.session)
        return message.id > 0

    def _prune(self, session: int) -> None:
        """Forget a session that has neither plans nor channels. (A channel holds on to the table of its plans.)"""
        if not self._plans.get(session) and session not in self._served:
            self._plans.pop(session, None)

    def _let_go(self) -> None:
        """Unmap what closed plans hold, once the last request of each has ended."""
        leaving, self._leaving = self._leaving, []
        idle = [plan for plan in leaving if plan.busy.find(1) < 0]
        # Only then is a look at all requests of a session worth its time: one may be taken and not admitted yet.
        channels = [c for session in {plan.session for plan in idle} for c in self._served.get(session, {}).values()]
        live = {id(request.plan) for channel in channels for request in channel.live if request is not None}
        for plan in leaving:
            if id(plan) in live or plan.busy.find(1) >= 0:
                self._leaving.append(plan)
            else:
                with self._models.lock:
                    self._crowds.leave(plan)
                plan.forget_memory()
        retired, self._retired = self._retired, []
        for region in retired:
            if any(plan.names(region) for plan in self._leaving):
                self._retired.append(region)
            else:
                region.close()
                self._link.send(messages.RegionIdle(region=region.info.region, generation=region.info.generation))

    # --- channels -----------------------------------------------------------------------------------------------

    def _on_AttachChannel(self, message: messages.AttachChannel, fds: list[int]) -> bool:
        memory, ledger, bell, pipe = fds
        plans = self._plans.setdefault(message.session, {})
        channel = WorkerChannel(memory, ledger, bell, pipe, message.slots, plans, message.channel)
        self._channels[message.channel] = channel
        self._sessions[message.channel] = message.session
        self._served.setdefault(message.session, {})[message.channel] = channel
        self._fds[message.channel] = (bell, pipe)
        del fds[2:]  # kept; the other two are mapped and can be closed
        if message.steps:
            self._of_steps.add(message.session)
        self._loop.attach(channel, recovery.recover(channel, _now()))
        return True

    def _on_DetachChannel(self, message: messages.DetachChannel, fds: list[int]) -> bool:
        channel = self._channels.pop(message.channel, None)
        if channel is None:
            return True
        self._loop.detach(channel)
        session = self._sessions[message.channel]
        if message.ended:
            self._loop.scheduler.gone(session)
            self._loop.wake()

        def idle() -> bool:
            return all(request is None for request in channel.live)

        def gone() -> None:
            self._loop.release(channel)
            channel.close()
            sockets.close_all(self._fds.pop(message.channel))
            del self._sessions[message.channel]
            del self._served[session][message.channel]
            if not self._served[session]:
                del self._served[session]
                self._of_steps.discard(session)
            self._prune(session)
            self._acknowledge(message.id)

        self._when(idle, gone)
        return False

    def _report_broken(self, channel: WorkerChannel) -> None:
        self._link.send(messages.ChannelBroken(channel=channel.number, reason=channel.broken))

    def _on_OpenSession(self, message: messages.OpenSession, fds: list[int]) -> bool:
        self._elsewhere.session.connected(socket.socket(fileno=fds.pop()))
        return True

    def _on_Ping(self, message: messages.Ping, fds: list[int]) -> bool:
        if not self._models.is_loading:  # the driver may hold its lock for seconds, and everybody waits for this thread
            self._regions.measure()
        return True

    # --- the end ------------------------------------------------------------------------------------------------

    def _on_Drain(self, message: messages.Drain, fds: list[int]) -> bool:
        """What was published by now is finished; what comes later is refused."""
        tails = [(channel, channel.published()) for channel in self._channels.values()]

        def taken() -> bool:
            return all(channel.head >= tail or bool(channel.broken) for channel, tail in tails)

        def close() -> None:
            for plan in self._all_plans():
                if plan.session not in self._of_steps:
                    self._models.close(plan, STOPPING)
            self._when(lambda: self._loop.finished() and not self._is_relay(), last)

        def last() -> None:
            """Other workers finish what they have accepted, too: each lets go of the others when it has."""
            self._elsewhere.session.close(STOPPING)
            self._when(lambda: not self._of_steps and self._loop.finished(), leave)

        def leave() -> None:
            self._acknowledge(message.id)
            sys.stderr.flush()
            os._exit(0)

        self._loop.wake()
        self._when(taken, close)
        return False

    def _is_relay(self) -> bool:
        """May steps of other workers' ensembles come, for ensembles here with members elsewhere?"""
        return any(plan.step and plan.model is not None and plan.model.config.remote for plan in self._all_plans())


def _device_of(worker: str) -> str:
    """The UUID of the GPU that a worker of this key is for. "" on the CPU, which imports nothing of CUDA.

    Ends the process if there is no such GPU any more.
    """
    if not worker.startswith("gpu"):
        return ""
    from broker.worker.cuda.windows import own_device

    try:
        return own_device(worker)
    except InferError as error:
        print(error.message, file=sys.stderr, flush=True)
        os._exit(NO_GPU)
