"""What a worker must have, and bringing its current process to have it.

Used by `broker.logical_worker` alone, which says which process is current and when it is up. Everything asked for is
recorded first, so that a process which dies before it acknowledges makes no difference: the replacement is brought it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, final

from msgspec.structs import replace

from broker.supervision import Load, LoadDeaths
from broker.worker.messages import UNLOADED, AddRegion, BindPlan, LinkMessage, LoadInstances, UnloadModel
from broker.worker_process import Lacking, ProcessDied, WorkerProcess
from broker.worker_tasks import overdue, silent, task, task_undone
from shm.errors import Code, InferError, fresh

ANSWER_S = 30.0  # for a worker, or its replacement, to acknowledge
RESPONDS_S = 1.0  # to give a sign of life, where another worker can be asked instead
END_LOAD_S = 10.0  # for a load that is not wanted any more to end by itself; then its process is killed
LOADS = 4  # at a time in one worker, unless --model-load-thread-count says otherwise
REPLAYED = 64  # acknowledgements outstanding during a replay
NOT_WANTED = "what it was for has ended meanwhile, so the worker is not asked any more to"
STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"

_log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


@final
class Wanted:
    """One thing that the process must have. `sent` and `done` are lives: 0 none, else the latest one."""

    __slots__ = ("descriptors", "done", "dropped", "error", "lock", "message", "sent")

    def __init__(self, message: LinkMessage, descriptors: tuple[int, ...] = ()) -> None:
        self.message = message
        self.descriptors = descriptors
        self.sent = 0
        self.done = 0
        self.error: InferError | None = None
        self.dropped = False
        self.lock = asyncio.Lock()


@final
class DesiredState:
    """Models, regions, plans and channels of one worker; `process` is the current one, `up` is set once it has all.
    `wanted` is set when something needs a process: of a worker at rest, the next one then starts.

    `on_lost` is told of what a replacement refused although a predecessor had it. `loads`: at a time.
    """

    __slots__ = (
        "_alone",
        "_awaited",
        "_describe",
        "_ending",
        "_on_lost",
        "_slots",
        "channels",
        "deaths",
        "loading",
        "models",
        "plans",
        "process",
        "regions",
        "stopping",
        "up",
        "wanted",
    )

    def __init__(
        self,
        deaths: LoadDeaths,
        on_lost: Callable[[LinkMessage, str], None],
        describe: Callable[[], str],
        loads: int = LOADS,
    ) -> None:
        self.process: WorkerProcess | None = None
        self.up = asyncio.Event()
        self.stopping = asyncio.Event()
        self.wanted = asyncio.Event()
        self.models: dict[Load, Wanted] = {}
        self.regions: dict[tuple[int, int], Wanted] = {}
        self.plans: dict[tuple[int, int, int], Wanted] = {}
        self.channels: dict[int, Wanted] = {}
        self.loading: set[Load] = set()  # outstanding in the current process
        self.deaths = deaths
        self._on_lost = on_lost
        self._describe = describe
        self._slots = asyncio.Semaphore(loads)
        self._alone = asyncio.Lock()
        self._awaited = 0  # who waits for a process to ask it for something
        self._ending: set[asyncio.Task[None]] = set()  # loads that nobody wants any more

    @property
    def serves_nothing(self) -> bool:
        """No model, no load that is under way, and no steps of other workers' ensembles: these keep their models.

        Regions, plans and channels of clients are brought to the next process like to any replacement.
        """
        if self.models or self.loading or self._ending or self._awaited:
            return False
        return not any(map(_is_step, self.plans.values()))

    @property
    def holds_nothing(self) -> bool:
        """Would it make no difference if the next process were brought nothing?"""
        return not (self.models or self.regions or self.plans or self.channels or self.wanted.is_set())

    async def responds(self) -> bool:
        """Is there a process that is up, and gives a sign of life soon? One that owes one for longer does not."""
        return self.process is not None and self.up.is_set() and await self.process.answers(RESPONDS_S)

    async def until_up(self, limit_s: float) -> None:
        """Returns when there is a process that has all, or after `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._come_up()

    async def have(
        self,
        table: dict[K, Wanted],
        key: K,
        wanted: Wanted,
        undo: LinkMessage | None,
        limit_s: float = ANSWER_S,
    ) -> None:
        """Record it and return when the current process has acknowledged it; what is there already is not sent again.

        Raises InferError when the worker refuses, or does not answer in time; it is not wanted any more then, unless
        an earlier call recorded it. A process that was asked and did not answer in time hangs, so it is killed.
        """
        present = table.get(key)
        shared = present is not None and present.message == wanted.message
        if present is not None and shared:
            wanted = present
        else:
            table[key] = wanted
        try:
            async with asyncio.timeout(limit_s), wanted.lock:
                await self._bring(wanted)
        except BaseException as error:
            if not shared or wanted.error is not None:
                self.abandon(table, key, undo, wanted)
            if isinstance(error, asyncio.CancelledError) and not shared:
                self._end_load(wanted)
            if not isinstance(error, TimeoutError):
                raise
            asked = self.process is not None and wanted.sent == self.process.life != wanted.done
            refusal = self._no_answer(task(wanted.message), limit_s, overdue(wanted.message, asked=asked))
            if self.process is not None and asked:
                self.process.kill(f"did not {task(wanted.message, to_all=True)} within {limit_s:g} s")
            raise fresh(refusal) from None

    async def forget(self, table: dict[K, Wanted], key: K, undo: LinkMessage) -> str:
        """Take it back; returns when the current process has acknowledged that (with the detail), or never had it."""
        wanted = table.pop(key, None)
        if wanted is None:
            return ""
        wanted.dropped = True
        process = self.process
        if process is None or wanted.sent != process.life:
            return ""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await process.request(undo)
        except ProcessDied:
            return ""  # and with it what it had
        except TimeoutError:
            raise self._no_answer(task_undone(wanted.message, undo), ANSWER_S, silent(process.pid)) from None

    def abandon(self, table: dict[K, Wanted], key: K, undo: LinkMessage | None, only: Wanted | None = None) -> None:
        """Take it back without waiting for the process. `only`: unless something else has its place by now."""
        wanted = table.get(key) if only is None else only
        if wanted is None:
            return
        if table.get(key) is wanted:
            del table[key]
        wanted.dropped = True
        process = self.process
        if undo is not None and wanted.error is None and process is not None and wanted.sent == process.life:
            with contextlib.suppress(ProcessDied):
                process.post(undo)

    def refuse(self, session: int, model: str, until_ns: int, *, tell: bool) -> None:
        """Requests of `session` for `model` end as refused until then (CLOCK_MONOTONIC). `tell` the process, too."""
        process = self.process if tell else None
        for wanted in self.plans.values():
            message = wanted.message
            if isinstance(message, BindPlan) and (message.session, message.model) == (session, model):
                wanted.message = replace(message, refused_until_ns=until_ns)
                if process is not None and wanted.done == process.life:
                    with contextlib.suppress(ProcessDied):
                        process.post(wanted.message)

    def truncated_regions(self) -> list[AddRegion]:
        """Those whose file is smaller by now than what of it was registered."""
        found: list[AddRegion] = []
        for wanted in self.regions.values():
            message = wanted.message
            if isinstance(message, AddRegion) and message.kind == "system":
                with contextlib.suppress(OSError):
                    size = os.fstat(wanted.descriptors[0]).st_size
                    if size < message.offset + message.byte_size:
                        _log.error("region '%s' was truncated to %d bytes: retired", message.name, size)
                        found.append(message)
        return found

    def _end_load(self, wanted: Wanted) -> None:
        """Nobody wants it any more while the process may still be loading it. What else was sent is undone at once."""
        process, message = self.process, wanted.message
        if isinstance(message, LoadInstances) and process is not None and wanted.sent == process.life:
            task = asyncio.create_task(self._ended(process, message))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _ended(self, process: WorkerProcess, load: LoadInstances) -> None:
        undo = UnloadModel(model=load.config.name, version=load.version, generation=load.generation)
        try:
            async with asyncio.timeout(END_LOAD_S):
                had_begun_to_serve = await process.request(undo) == UNLOADED
            key = load.config.name, load.version, load.generation
            if had_begun_to_serve and any(supersedes(key, other) for other in self.models):
                process.kill(f"has unloaded what model '{load.config.name}' is to go on with")  # in place of it
        except (ProcessDied, InferError):
            pass  # and with it what it loaded
        except TimeoutError:
            self.loading.clear()  # its death is not the fault of what it loads besides
            what = f"model '{load.config.name}' version {load.version} was unloaded while it was loading"
            process.kill(f"{what}, and the load did not end within {END_LOAD_S:g} s")

    async def bring_models(self) -> None:
        """To a new process, before anything else. Raises ProcessDied."""
        # A load that has not succeeded yet is brought by whoever asked for it: it may never end, and a reload comes
        # after what it is to replace. One that killed processes comes before there are requests it could take along.
        loads = [load for load in self.models if not any(supersedes(load, other) for other in self.models)]
        suspects = [load for load in loads if self.deaths.suspect(load)]
        crowd = [load for load in loads if load not in suspects and self.models[load].done]
        await self._bring_all(self.models, crowd, len(crowd))
        await self._bring_all(self.models, suspects, 1)

    async def bring_rest(self) -> None:
        """To a process that has its models: regions, then plans, then channels. Raises ProcessDied."""
        await self._bring_all(self.regions, list(self.regions), REPLAYED)
        for key, wanted in tuple(self.plans.items()):
            if not self._has_regions(wanted.message):  # of clients that have not let go of them yet
                self.abandon(self.plans, key, None)
        await self._bring_all(self.plans, list(self.plans), REPLAYED)
        await self._bring_all(self.channels, list(self.channels), REPLAYED)

    def _has_regions(self, plan: LinkMessage) -> bool:
        """False: a request of it could only be told that a region is gone."""
        assert isinstance(plan, BindPlan)
        tensors = (*plan.inputs, *plan.outputs, *([plan.credit] if plan.credit is not None else ()))
        named = [(tensor.region, tensor.generation) for tensor in tensors]
        if plan.events is not None:
            named.append(plan.events)
        return all(region in self.regions for region in named)

    async def _come_up(self) -> None:
        self.wanted.set()
        self._awaited += 1  # `wanted` does not outlast the beginning of a rest: a worker that is awaited has none
        try:
            await self.up.wait()
        finally:
            self._awaited -= 1

    async def _bring(self, wanted: Wanted) -> None:
        while True:
            await self._come_up()
            process = self.process
            if wanted.error is not None:
                raise fresh(wanted.error)
            if process is None or self.stopping.is_set():
                raise InferError(Code.UNAVAILABLE, STOPPING)
            if wanted.dropped:
                raise InferError(Code.UNAVAILABLE, f"{NOT_WANTED} {task(wanted.message)}")
            if wanted.done == process.life:
                return
            with contextlib.suppress(ProcessDied):
                await self._send(process, wanted)
                return

    async def _bring_all(self, table: dict[K, Wanted], keys: list[K], width: int) -> None:
        process = self.process
        assert process is not None
        lacking = ""
        for at in range(0, len(keys), max(1, width)):
            batch = [table[key] for key in keys[at : at + width] if key in table]
            answers: list[Any] = await asyncio.gather(
                *(self._replay(process, wanted) for wanted in batch), return_exceptions=True
            )
            for wanted, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Lacking) and _was_loaded(wanted):
                    lacking = answer.message
                elif isinstance(answer, InferError):
                    if wanted.done:  # else whoever asked for it still waits, and is told
                        self._on_lost(wanted.message, answer.message)
                elif isinstance(answer, BaseException):
                    try:
                        raise answer
                    finally:
                        del answer, answers  # see `fresh`
        for key in [key for key in keys if key in table and table[key].error is not None]:
            self.abandon(table, key, None)
        if lacking:  # its models are not lost: a process that starts later, when this has passed, can have them
            process.kill(f"cannot take up its work: {lacking}")
            raise ProcessDied

    async def _replay(self, process: WorkerProcess, wanted: Wanted) -> None:
        """`_send`, unless it was taken back meanwhile: its descriptors may be closed, or be others by now."""
        if not wanted.dropped:
            await self._send(process, wanted)

    async def _send(self, process: WorkerProcess, wanted: Wanted) -> None:
        """Raises ProcessDied, and InferError when the worker refuses."""
        message = wanted.message
        wanted.sent = process.life
        try:
            if isinstance(message, LoadInstances):
                await self._send_load(process, message)
            else:
                await process.request(message, wanted.descriptors)
        except InferError as error:
            if not (isinstance(error, Lacking) and _was_loaded(wanted)):
                wanted.error = fresh(error)
            raise
        wanted.done = process.life

    async def _send_load(self, process: WorkerProcess, message: LoadInstances) -> None:
        load = (message.config.name, message.version, message.generation)
        turn = self._alone if self.deaths.suspect(load) else contextlib.nullcontext()
        async with turn, self._slots:
            self.loading.add(load)
            try:
                await process.request(message)
            finally:
                self.loading.discard(load)
        self.deaths.forget(load)

    def _no_answer(self, what: str, limit_s: float, remedy: str) -> InferError:
        """`what`: as `broker.worker_tasks` words it. `remedy`: "" where no process was asked."""
        who = f"the worker process {self.process.pid}" if self.process is not None else "the worker"
        more = f"; {remedy}" if remedy else ""
        return InferError(Code.UNAVAILABLE, f"{who} did not {what} within {limit_s:g} s ({self._describe()}){more}")


def _is_step(wanted: Wanted) -> bool:
    """Is it a plan of another worker's ensemble?"""
    return isinstance(wanted.message, BindPlan) and wanted.message.step


def _was_loaded(wanted: Wanted) -> bool:
    """Is it a model that an earlier process had?"""
    return isinstance(wanted.message, LoadInstances) and wanted.done > 0


def supersedes(newer: Load, older: Load) -> bool:
    """Is `newer` a later load of the same version of the same model?"""
    return newer[:2] == older[:2] and newer[2] > older[2]
