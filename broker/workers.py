"""All workers: one process per (device, group) that is wanted, whatever happens to the processes.

Made by the composition root; `broker.models` starts workers and loads models on them, sessions bind regions, plans and
channels to them. How one worker is kept alive is `broker.logical_worker`'s.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import final

from broker.coroner import PlanBook
from broker.desired_state import LOADS, STOPPING
from broker.load_watch import LoadWatch
from broker.logical_worker import Worker
from broker.repository.placement import DEFAULT, gpu_of
from broker.repository.scheduling import Allowance
from broker.silence import first_to_respond
from broker.statistics_blocks import StatisticsBlocks
from broker.supervision import (
    CLOSE_FLOOR_S,
    LOAD_S,
    PING_EVERY_S,
    PING_LIMIT_S,
    REFUSAL_NS,
    REST_AFTER_S,
    HangWatch,
    Offenders,
    Running,
    close_limit_s,
    hang_limit_s,
)
from broker.worker.messages import Predecessor, Start
from broker.worker_process import WorkerProcess
from broker.zygote_link import Zygote
from shm.errors import Code, InferError
from shm.statistics import BATCH, BLOCK, CLOSING, EXPECTED, STARTED

SAMPLE_S = 0.25
WORKER_ENTRY = "broker.worker.process"

_log = logging.getLogger(__name__)


def _ignore(*_: object) -> None:
    """Nobody asked to be told."""


def _no_gpu(ordinal: int) -> str:
    raise InferError(Code.UNAVAILABLE, f"there is no GPU {ordinal}")


@final
class Workers:
    """Owns the workers, the zygote they come from, and the watch over instances that hang and processes that are stuck.

    `plans` must be set before the first channel is attached. The `on_…` hooks are called from the event loop:
    a client broke the rules of its channel (hang up its session) · a system region was truncated and is retired
    everywhere · a model that was loaded is gone, for the reason given · a worker process asks for a session.
    """

    __slots__ = (
        "_closings",
        "_hangs",
        "_offenders",
        "_stopping",
        "_watch",
        "_workers",
        "_zygote",
        "blocks",
        "cache_byte_size",
        "close_s",
        "cuda_peers",
        "gpu_uuid",
        "load_s",
        "loads",
        "model_load_deaths",
        "model_loads",
        "on_channel_broken",
        "on_model_lost",
        "on_region_shrunk",
        "on_session_wanted",
        "ping_every_s",
        "ping_limit_s",
        "plans",
        "rate_limit",
        "rest_after_s",
        "unclosed",
    )

    def __init__(
        self,
        blocks: StatisticsBlocks,
        *,
        model_load_deaths: int = 5,
        model_loads: int = LOADS,
        load_s: float = LOAD_S,
        cache_byte_size: int = 0,
        rate_limit: tuple[Allowance, ...] | None = None,
        cuda_peers: bool = False,
        entry: str = WORKER_ENTRY,
        ping_every_s: float = PING_EVERY_S,
        ping_limit_s: float = PING_LIMIT_S,
        rest_after_s: float = REST_AFTER_S,
    ) -> None:
        """`model_loads`: at a time in one worker; `load_s`: how long one may take. `cache_byte_size`: of each worker's
        response cache (0: none). `rate_limit`: what there is of each resource, per worker (None: no rate limiter).
        `cuda_peers`: may one on a GPU reach memory of others? `entry`: the module whose `main(link)` is a worker's
        life. `ping_limit_s`: of silence, then it is killed. `rest_after_s`: without anything to serve, then its process
        ends.
        """
        self.blocks = blocks
        self.model_load_deaths = model_load_deaths
        self.model_loads = model_loads
        self.load_s = load_s
        self.close_s = close_limit_s(load_s)
        self.loads = LoadWatch(load_s)
        self.cache_byte_size = cache_byte_size
        self.rate_limit = rate_limit
        self.cuda_peers = cuda_peers
        self.ping_every_s = ping_every_s
        self.ping_limit_s = ping_limit_s
        self.rest_after_s = rest_after_s
        self.gpu_uuid: Callable[[int], str] = _no_gpu  # of an ordinal; raises InferError
        self.plans: PlanBook | None = None
        self.on_channel_broken: Callable[[int, str], None] = _ignore
        self.on_region_shrunk: Callable[[int, int], None] = _ignore
        self.on_model_lost: Callable[[str, int, int, str], None] = _ignore
        self.on_session_wanted: Callable[[WorkerProcess], None] = _ignore
        self._zygote = Zygote(entry)
        self._workers: dict[str, Worker] = {}
        self._hangs = HangWatch()
        self._closings = HangWatch()
        self.unclosed: dict[tuple[str, int], str] = {}  # (model, version) → how `close` of it ended with its worker
        self._offenders = Offenders()
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    def first_message(self, worker: str, block: int, before: Predecessor | None) -> Start:
        """What a new process of `worker` is told; `block`: its own in the statistics page."""
        return Start(
            worker=worker,
            broker_pid=os.getpid(),
            block=block,
            cache_byte_size=self.cache_byte_size,
            rate_limit=self.rate_limit,
            cuda_peers=self.cuda_peers,
            before=before,
        )

    def of(self, key: str) -> Worker:
        """Raises InferError NOT_FOUND."""
        worker = self._workers.get(key)
        if worker is None:
            raise InferError(Code.NOT_FOUND, f"no worker '{key}'; there are: {', '.join(self._workers) or 'none'}")
        return worker

    def start(self, key: str) -> Worker:
        """The worker `key`, started if there is none yet. Returns at once; its methods wait until it is ready.

        Raises InferError UNAVAILABLE once the broker is stopping, and for a GPU that is not there.
        """
        worker = self._workers.get(key)
        if worker is None:
            if self._stopping:
                raise InferError(Code.UNAVAILABLE, STOPPING)
            gpu = gpu_of(key)
            device = "" if gpu is None else self.gpu_uuid(gpu)
            worker = self._workers[key] = Worker(key, self, self._zygote, device)
            worker.start()
            if self._watch is None:
                self._watch = asyncio.create_task(self._look_for_hangs(), name="hang watch")
        return worker

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    async def on_gpu(self, uuid: str) -> Worker | None:
        """One that opens this GPU's memory: of those that run there, or where none does, of those that will copy it.

        One that is up and responds, or else one at rest, which comes up for what it is asked. None: they are about to
        come up.
        """
        there = [worker for worker in self if worker.device == uuid] or [worker for worker in self if not worker.device]
        for state in ("ready", "resting"):
            if found := [worker for worker in there if worker.state == state]:
                return await first_to_respond(found)
        return None

    @property
    def zygote_pid(self) -> int | None:
        """For the status page; None while there is none."""
        return self._zygote.pid

    def blame(self, session: int, model: str, now_ns: int, dead: Worker | None = None) -> None:
        """A request was alone when its worker's process died for the second time; `dead`: this one's, just now."""
        if self.plans is None or not self.plans.is_one_client(session):
            return
        if self._offenders.ending(session, model, now_ns):
            _log.error("session %d killed workers twice with model '%s': refused for 60 s", session, model)
            self.plans.refuse(session, model, now_ns + REFUSAL_NS)
            for worker in self:
                worker.refuse(session, model, now_ns + REFUSAL_NS, tell=worker is not dead)

    def quarantine(self, region: int, generation: int) -> None:
        """A region that was truncated under a worker is not given to any worker again."""
        for worker in self:
            worker.quarantine(region, generation)
        self.on_region_shrunk(region, generation)

    def give_back(self, owner: tuple[str, int]) -> None:
        """Free the statistics blocks of a model version that nothing serves: they tell nothing of it any more."""
        for block in self.blocks.give_back(owner):
            for worker in self:
                worker.instances.pop(block, None)

    async def stop(self, timeout: float) -> None:  # noqa: ASYNC109  one deadline for all workers, then they are killed
        """Drain every worker; kill what has not ended after `timeout` seconds; then the zygote. Leaves nothing."""
        self._stopping = True
        await asyncio.gather(*(worker.stop(timeout) for worker in self))  # what hangs now need not be waited for
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self._zygote.stop()

    async def _look_for_hangs(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self._sample(time.monotonic_ns())

    def _sample(self, now_ns: int) -> None:
        words = self.blocks.page.words
        running: list[Running] = []
        closing: list[Running] = []
        owners: dict[int, Worker] = {}
        for worker in self:
            busy = False
            for block, timeout_s in worker.instances.items():
                at = block * BLOCK
                if words[at + BATCH]:
                    running.append(Running(block, words[at + STARTED], words[at + EXPECTED], timeout_s))
                    owners[block] = worker
                    busy = True
                if began_ns := words[at + CLOSING]:
                    closing.append(Running(block, began_ns, 0, self.close_s))
                    owners[block] = worker
                    busy = True
            worker.look_after(busy, now_ns)
            if worker.key != DEFAULT and worker.let_rest(self.blocks.at_work(worker.instances), now_ns):
                del self._workers[worker.key]
                worker.forget()
                self.blocks.give_back_worker(worker.key)
        for hung in self._hangs.sample(running, now_ns):
            self._end_hung(hung, owners[hung.block], now_ns)
        for unclosed in self._closings.sample(closing, now_ns):
            self._end_unclosed(unclosed, owners[unclosed.block])

    def _end_hung(self, hung: Running, worker: Worker, now_ns: int) -> None:
        batch = self.blocks.page.words[hung.block * BLOCK + BATCH]
        ran_s = (now_ns - hung.started_ns) / 1e9
        limit_s = hang_limit_s(hung.expected_ns, hung.hang_timeout_s)
        name, version = self.blocks.owner(hung.block)
        what = f"a batch of {batch} for {ran_s:.1f} s"
        limit = f"the limit is {limit_s:.1f} s (model parameter hang_timeout_s)"
        worker.kill(
            f"hung: model '{name}' version {version} had run {what}, {limit}",
            f"model '{name}' version {version} hung: it had run {what} without a sign of life, {limit}",
        )

    def _end_unclosed(self, unclosed: Running, worker: Worker) -> None:
        name, version = owner = self.blocks.owner(unclosed.block)
        text = self.unclosed[owner] = (
            f"'close' of an instance of model '{name}' version {version} that serves nobody any more did not end "
            f"within {self.close_s:g} s (a tenth of --model-load-timeout-secs, at least {CLOSE_FLOOR_S:g} s)"
        )
        worker.kill(text)
