"""One worker as everybody else sees it, over the deaths of its processes.

Made by `broker.workers`. Starts a process, has it brought what the worker must have, and when it dies gives the endings
that are due, finds out why, and starts the next one. Knows no rule of who may ask for what.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from functools import partial
from typing import final

from broker import silence
from broker.coroner import CUT, bury, end
from broker.desired_state import ANSWER_S, RESPONDS_S, STOPPING, DesiredState, Wanted, supersedes
from broker.records import ChannelRecord, RegionEntry, add_region
from broker.region_uses import RegionUses, used
from broker.repository.config import ModelConfig
from broker.resting import Rest
from broker.supervision import BackOff, Load, LoadDeaths, Pulse
from broker.worker.messages import (
    AttachChannel,
    BindPlan,
    ChannelBroken,
    DetachChannel,
    Drain,
    DropPlan,
    LinkMessage,
    LoadInstances,
    Offence,
    Predecessor,
    RegionIdle,
    RetireRegion,
    UnloadModel,
)
from broker.worker_owner import Owner
from broker.worker_process import Exit, Notice, ProcessDied, WorkerProcess
from broker.worker_tasks import task
from broker.zygote_link import StartFailed, Zygote
from shm.errors import Code, InferError

COME_UP = 0.5  # of the time there is to stop: for a replacement, whose loads may not end, to end what was accepted
TAKE_OVER_S = 60.0  # for a replacement to take over regions, plans and channels
_log = logging.getLogger(__name__)


@final
class Worker:
    """A worker by its key, "device/group". Methods that await return once the current process has acknowledged.

    A process that dies meanwhile does not show: its replacement is brought the same. Where that takes more than 30 s,
    or the worker refuses, they raise InferError, and what was asked for is not wanted any more.
    """

    __slots__ = (
        "_back_off",
        "_before",
        "_block",
        "_given_up",
        "_kill_next",
        "_life",
        "_owner",
        "_pulse",
        "_records",
        "_rest",
        "_state",
        "_task",
        "_uses",
        "_was_ready",
        "_zygote",
        "device",
        "died_ns",
        "instances",
        "key",
        "last_death",
        "restarts",
        "silent_s",
        "state",
    )

    def __init__(self, key: str, owner: Owner, zygote: Zygote, device: str = "") -> None:
        self.key = key
        self.device = device  # the UUID of its GPU, "" on the CPU
        self.state = "starting"  # "ready", "backoff", "resting", "stopped"
        self.silent_s = 0.0  # as `silence.look` saw it last
        self.restarts, self.last_death, self.died_ns = 0, "", 0  # CLOCK_MONOTONIC
        self.instances: dict[int, float] = {}  # statistics block of what may run → its model's hang_timeout_s
        self._owner = owner
        self._zygote = zygote
        self._block = owner.blocks.take((key, 0), 1)[0]
        self._state = DesiredState(LoadDeaths(owner.model_load_deaths), self._lost, self.describe, owner.model_loads)
        self._records: dict[int, ChannelRecord] = {}
        self._rest = Rest(owner.rest_after_s)
        self._uses = RegionUses()
        self._life, self._kill_next = 0, False
        self._pulse = Pulse(owner.ping_every_s, owner.ping_limit_s, 0)
        self._was_ready = False
        self._back_off = BackOff()
        self._before: Predecessor | None = None
        self._given_up: Load | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin its life. Called once."""
        self._task = asyncio.create_task(self._run(), name=f"worker {self.key}")

    @property
    def pid(self) -> int | None:
        """Of the current process."""
        return self._state.process.pid if self._state.process is not None else None

    async def until_up(self) -> None:
        """Returns when a process has all that it must have, or after `load_s`: whoever asks it for more is told why."""
        await self._state.until_up(self._owner.load_s)

    async def responds(self) -> bool:
        """Is it up, and does it give a sign of life soon?"""
        return await self._state.responds()

    # --- what it must have -----------------------------------------------------------------------------------------

    async def load(self, config: ModelConfig, version: int, generation: int, blocks: tuple[int, ...]) -> None:
        """Load a version of a model; the generation of it that is loaded now serves until then."""
        load = (config.name, version, generation)
        message = LoadInstances(config=config.for_worker, version=version, generation=generation, blocks=blocks)
        models = self._state.models
        self.instances.update(dict.fromkeys(blocks, config.hang_timeout_s))
        await self._state.have(models, load, Wanted(message), None, self._owner.load_s)
        for older in [older for older in models if supersedes(load, older)]:
            del models[older]

    async def unload(self, model: str, version: int) -> None:
        """Returns when new requests for it end; those accepted are finished."""
        models = self._state.models
        for load in [load for load in models if load[:2] == (model, version)]:
            await self._state.forget(models, load, UnloadModel(model=model, version=version))

    def serves(self, model: str, version: int) -> bool:
        """Has a process of it loaded this, so that the next one will, too?"""
        return any(of[:2] == (model, version) and it.done and not it.error for of, it in self._state.models.items())

    async def add_region(self, entry: RegionEntry) -> None:
        """Map it. Asking again for what is there returns at once."""
        wanted = Wanted(add_region(entry), entry.descriptors)
        undo = RetireRegion(region=entry.region, generation=entry.generation)
        await self._state.have(self._state.regions, entry.identity, wanted, undo)

    async def retire_region(self, region: int, generation: int) -> asyncio.Future[None] | None:
        """Returns when no new request can use it; if accepted ones still do, what is done with the last of them."""
        key, undo = (region, generation), RetireRegion(region=region, generation=generation)
        return await self._uses.retire(key, self._state.forget(self._state.regions, key, undo))

    async def region_used(self, region: int, generation: int) -> bool:
        """Has a request used this system region since this was last asked? If the process cannot say, it may have.

        Also what has become of retired regions is known afterwards, as it was when this was asked.
        """
        process = self._state.process
        if process is None:
            return self.state != "resting"
        return await used(process, (region, generation), ANSWER_S)

    async def bind_plan(self, message: BindPlan) -> None:
        """Make it known."""
        key = (message.session, message.index, message.generation)
        undo = DropPlan(session=message.session, index=message.index, generation=message.generation)
        await self._state.have(self._state.plans, key, Wanted(message), undo)

    def drop_plan(self, session: int, index: int, generation: int) -> None:
        """Forget it; its requests in flight end as usual."""
        undo = DropPlan(session=session, index=index, generation=generation)
        self._state.abandon(self._state.plans, (session, index, generation), undo)

    async def attach_channel(self, record: ChannelRecord) -> None:
        """Have it served."""
        message = AttachChannel(channel=record.channel, session=record.session, slots=record.slots, steps=record.steps)
        descriptors = (record.memory, record.ledger, record.bell, record.pipe_write)
        self._records[record.channel] = record
        try:
            wanted, undo = Wanted(message, descriptors), DetachChannel(channel=record.channel)
            await self._state.have(self._state.channels, record.channel, wanted, undo)
        except BaseException:
            self._records.pop(record.channel, None)
            raise

    async def detach_channel(self, channel: int, *, ended: bool = False) -> None:
        """Returns when the worker is idle on it; then its descriptors may be closed."""
        if (record := self._records.pop(channel, None)) is not None:
            self._rest.forget(record)
        await self._state.forget(self._state.channels, channel, DetachChannel(channel=channel, ended=ended))

    def refuse(self, session: int, model: str, until_ns: int, *, tell: bool) -> None:
        """Requests of `session` for `model` end as refused until then (CLOCK_MONOTONIC). `tell` the process, too."""
        self._state.refuse(session, model, until_ns, tell=tell)

    def quarantine(self, region: int, generation: int) -> None:
        """No process gets this region any more."""
        key, undo = (region, generation), RetireRegion(region=region, generation=generation)
        self._state.abandon(self._state.regions, key, undo)

    # --- its life --------------------------------------------------------------------------------------------------

    def kill(self, reason: str, told: str = "") -> None:
        """SIGKILL the current process; it is replaced as after any death. As `WorkerProcess.kill`."""
        if (process := self._state.process) is not None:
            process.kill(reason, told)

    def look_after(self, busy: bool, now_ns: int) -> None:
        """Kill the process if it gives no sign of life. Called every now and then; `busy`: an instance runs."""
        process = self._state.process
        if self.state != "ready" or process is None or process.died.is_set():
            return
        if self._pulse.is_gone(process.answered, busy or bool(self._state.loading), now_ns):
            limit_s = self._owner.ping_limit_s
            self.kill(f"gave no sign of life for {limit_s:g} s although no model ran in it: stopped, or stuck")
        elif process.answered and self._pulse.is_due(now_ns):
            process.ping()
        self.silent_s = silence.look(self.key, process, self._records.values(), RESPONDS_S)

    def let_rest(self, busy: bool, now_ns: int) -> bool:
        """Once it has served nothing for long, its process ends until it is wanted. True: nobody has anything at it.

        Called every now and then; `busy`: something of an unloaded model still waits or runs.
        """
        state = self._state
        if self.state == "starting":  # it may be for a ring, and what rang shows when it is up
            return False
        taken = self._owner.blocks.taken(self.key)
        if self._rest.is_due(not busy and state.serves_nothing, taken, now_ns) and not self._rest.begun:
            self._rest.begin(state)
            _log.info("worker '%s' rests until it is wanted: it has served nothing for a while", self.key)
            self.kill("served nothing")
        return self._rest.begun and self.state == "resting" and state.holds_nothing

    def forget(self) -> None:
        """End a worker at rest that nobody has anything at."""
        self._state.stopping.set()
        self._state.wanted.set()

    async def stop(self, timeout: float) -> None:  # noqa: ASYNC109  what follows the deadline is part of stopping
        """Drain, wait for the exit, kill after `timeout` seconds. Returns when the process is gone."""
        state = self._state
        self.forget()
        try:
            async with asyncio.timeout(timeout if state.up.is_set() else timeout * COME_UP):
                await state.up.wait()
                if state.process is not None:
                    state.process.post(Drain())
                    await state.process.died.wait()
        except (TimeoutError, ProcessDied):
            self._kill_next = True
            self.kill(f"did not drain within {timeout:g} s")
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        state = self._state
        while not state.stopping.is_set():
            if self._rest.begun:
                self.state = "resting"
                self._owner.blocks.abandon_worker(self.key)
                await self._rest.last(self._records.values(), state.wanted)
                continue
            self.state = "starting"
            self._was_ready = False
            try:
                process = state.process = await self._fork()
            except (StartFailed, OSError) as error:  # OSError: no descriptors left
                await self._after_failed_start(str(error))
                continue
            await self._bring_up(process)
            await process.died.wait()
            ended = await process.ended(self._zygote.exit_code(process.pid, process.pidfd), self._bury)
            process.close()
            state.process = None
            if not (state.stopping.is_set() or self._rest.begun):
                try:
                    await self._after_death(process.pid, ended)
                except Exception:  # whoever was told of it may fail; the worker is replaced all the same
                    _log.exception("worker '%s': its death was not dealt with", self.key)
        end(self._records.values(), CUT if self._kill_next else STOPPING, time.monotonic_ns())
        self.state = "stopped"
        state.up.set()

    async def _fork(self) -> WorkerProcess:
        link, pid, pidfd = await self._zygote.fork()
        self._life += 1
        process = WorkerProcess(link, pid, pidfd, self._life, on_exit=self._exited, on_notice=self._noticed)
        if self._kill_next:
            process.kill("the broker is stopping")
        return process

    async def _bring_up(self, process: WorkerProcess) -> None:
        """Returns when it is ready, or will be dead."""
        start = self._owner.first_message(self.key, self._block, self._before)
        try:
            process.post(start, (self._owner.blocks.page.fd,))
            async with asyncio.timeout(ANSWER_S):
                await process.ready
            async with asyncio.timeout(self._owner.load_s):
                await self._state.bring_models()
            self._was_ready = True
            async with asyncio.timeout(TAKE_OVER_S):
                await self._state.bring_rest()
        except ProcessDied:
            return
        except TimeoutError:
            process.kill("did not become ready in time")
        except Exception:  # a worker that lacks something must not look ready
            _log.exception("worker '%s' cannot be brought up", self.key)
            process.kill("the broker could not bring it up")
        else:
            if not process.died.is_set():  # its last words and its death may come in one turn of the event loop
                self.state, self.silent_s = "ready", 0.0
                self._pulse = Pulse(self._owner.ping_every_s, self._owner.ping_limit_s, time.monotonic_ns())
                self._state.up.set()

    def _exited(self, process: WorkerProcess) -> None:
        """Before anything else that follows a death, in this turn of the event loop."""
        self.state = "starting"  # whoever hears of the death by its request sees it in the status, too
        self._state.up.clear()
        self._uses.died()
        self._was_ready |= bool(self._state.loading)  # there is a limit to deaths of loads: no need to wait in between
        self._given_up = self._state.deaths.died(self._state.loading)

    def _bury(self, process: WorkerProcess, death: str, now_ns: int) -> None:
        """The endings that are due."""
        plans, blocks = self._owner.plans, self._owner.blocks
        if plans is not None and not self._kill_next:
            ended = (now_ns, death, partial(blocks.lost, worker=self.key, now_ns=now_ns), process.kill_told)
            for session, model in bury(self._records.values(), plans, *ended, by_itself=process.by_itself):
                self._owner.blame(session, model, now_ns, self)
        blocks.abandon(tuple(self.instances))

    async def _after_death(self, pid: int, ended: Exit) -> None:
        ran_last = self._owner.blocks.ran_last(self.key) if ended.asks_who else ""
        self.last_death, self.died_ns = f"{ended.text}{ran_last}", time.monotonic_ns()
        self._before = Predecessor(ended.told, self.died_ns) if self._was_ready else self._before
        self.restarts += 1
        delay_s = self._back_off.after_death(self._was_ready)
        _log.error("worker '%s' (pid %d): %s; next start in %g s", self.key, pid, self.last_death, delay_s)
        if ended.signal == signal.SIGBUS:
            # Was a region truncated? Given to the replacement it would kill that too.
            for region in self._state.truncated_regions():
                self._owner.quarantine(region.region, region.generation)
        if self._given_up is not None:
            self._give_up(self._given_up, ended.text)
        await self._pause(delay_s)

    async def _after_failed_start(self, reason: str) -> None:
        self.last_death, self.died_ns = f"could not be started: {reason}", time.monotonic_ns()
        delay_s = self._back_off.after_death(False)
        _log.error("worker '%s' could not be started: %s; next try in %g s", self.key, reason, delay_s)
        if self._back_off.hopeless:
            end(self._records.values(), f"worker '{self.key}' cannot be started: {reason}", time.monotonic_ns())
        await self._pause(delay_s)

    async def _pause(self, delay_s: float) -> None:
        if delay_s:
            self.state = "backoff"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._state.stopping.wait()

    def _give_up(self, load: Load, death: str) -> None:
        reason = f"the worker died {self._state.deaths.limit} times in a row while loading it (last: {death})"
        wanted = self._state.models.pop(load, None)
        if wanted is not None:
            wanted.error = InferError(Code.UNAVAILABLE, reason)
            self._owner.on_model_lost(*load, reason)

    def _lost(self, message: LinkMessage, reason: str) -> None:
        if isinstance(message, LoadInstances):  # whoever is told says so in the log, in words about the model
            self._owner.on_model_lost(message.config.name, message.version, message.generation, reason)
            return
        _log.warning("worker '%s' cannot be given what it had, to %s: %s", self.key, task(message), reason)
        if isinstance(message, AttachChannel) and (record := self._records.pop(message.channel, None)) is not None:
            # Nobody would ever look at this channel again: what waits in it ends now, and its client must know.
            end((record,), f"worker '{self.key}' cannot serve this channel any more: {reason}", time.monotonic_ns())
            self._owner.on_channel_broken(message.channel, f"worker '{self.key}' cannot serve it any more: {reason}")

    def _noticed(self, message: Notice) -> None:
        if isinstance(message, RegionIdle):
            self._uses.idle((message.region, message.generation))
        elif isinstance(message, ChannelBroken):
            self._owner.on_channel_broken(message.channel, message.reason)
        elif isinstance(message, Offence):
            self._owner.blame(message.session, message.model, time.monotonic_ns())
        elif self._state.process is not None:
            self._owner.on_session_wanted(self._state.process)

    def describe(self) -> str:
        """Its state, and how its last process ended, in words."""
        ago_s = (time.monotonic_ns() - self.died_ns) / 1e9
        death = f", its last process ended {ago_s:.0f} s ago: {self.last_death}" if self.last_death else ""
        return f"worker '{self.key}'{'' if self.state == 'ready' else f' is {self.state}'}{death}"
