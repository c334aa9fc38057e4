"""Loads versions of models on workers and unloads them: the steps, without the question who may ask for them.

Made by `broker.models`, which sees to it that one model is changed by one task at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Awaitable, Iterator
from typing import final

from broker.catalogue import LOADING, READY, UNAVAILABLE, UNLOADED, UNLOADING, Catalogue, Version
from broker.load_failures import Unclosed, for_clients
from broker.logical_worker import Worker
from broker.model_memory import ModelMemory
from broker.model_sizes import resident
from broker.overrides import Overrides
from broker.repository.config import ModelConfig
from broker.repository.placement import placed
from broker.workers import Workers
from shm.errors import Code, InferError, raise_first

LOADS = 4  # at a time, as in Triton
DRAIN_LOOK_S = 0.05
CLOSE_LOOK_S = 0.01  # most models are closed at once
CLOSED_SOON_S = 1.0  # for the versions that a load leaves behind

_log = logging.getLogger(__name__)


@final
class VersionLife:
    """`loads`: how many versions load at a time. `retries`: how often more than once each is tried. `roots`: of the
    repositories (`load_failures.roots_of`).
    """

    __slots__ = (
        "_catalogue",
        "_draining",
        "_generations",
        "_may_load",
        "_memory",
        "_overrides",
        "_retries",
        "_roots",
        "_workers",
    )

    def __init__(
        self,
        workers: Workers,
        catalogue: Catalogue,
        overrides: Overrides,
        memory: ModelMemory,
        roots: tuple[str, ...] = (),
        *,
        loads: int = LOADS,
        retries: int = 0,
    ) -> None:
        self._workers = workers
        self._catalogue = catalogue
        self._overrides = overrides
        self._memory = memory
        self._may_load = asyncio.Semaphore(loads)
        self._retries = retries
        self._roots = roots
        self._generations = itertools.count(1)
        self._draining: set[asyncio.Task[None]] = set()

    async def serve(self, config: ModelConfig, files: str = "") -> dict[int, str]:
        """Load every version of `config`, then unload the others. Returns why versions failed.

        A version serves as before until its successor is ready, and goes on if that fails. `files`: the private
        repository in which the versions lie.
        """
        for note in config.notes:
            is_missing = note.startswith("version ") and note.endswith("is not present")
            (_log.error if is_missing else _log.warning)("model '%s': %s", config.name, note)
        versions = self._catalogue.known[config.name].versions
        try:
            if no_room := await self._memory.make_room(config):
                self._refuse(config, no_room)
                return dict.fromkeys(config.versions, no_room)
            reasons = await asyncio.gather(*(self._load(config, number, files) for number in config.versions))
            gone = {number: found for number, found in versions.items() if number not in config.versions}
            await self.unload(config.name, gone, patience_s=CLOSED_SOON_S)
        finally:
            await self._memory.loaded(config.name)
            await self.tidy(versions, files)
        return {number: reason for number, reason in zip(config.versions, reasons, strict=True) if reason}

    async def unload(
        self, model: str, versions: dict[int, Version], reason: str = UNLOADED, *, patience_s: float = math.inf
    ) -> dict[int, str]:
        """Returns when new requests for `versions` end; those accepted are finished meanwhile. Says what failed.

        Of those without any, when they are closed, which goes on in the background after `patience_s`. (That it ends at
        some time is up to `broker.workers`.)
        """
        serving = {number: found for number, found in versions.items() if found.generation}
        files = {found.files for found in serving.values()}
        problems = await asyncio.gather(*(self._unload(model, *each, reason, patience_s) for each in serving.items()))
        for path in files:
            await self.tidy(self._catalogue.known[model].versions, path)
        return {number: problem for number, problem in zip(serving, problems, strict=True) if problem}

    def _refuse(self, config: ModelConfig, reason: str) -> None:
        """No version of it is tried. What serves goes on."""
        for number in config.versions:
            version = self._catalogue.known[config.name].versions.setdefault(number, Version())
            _log.error("failed to load '%s' version %d: %s", config.name, number, reason)
            version.load_failed(reason)

    async def _load(self, config: ModelConfig, number: int, files: str) -> str:
        """One version. Returns why it failed, "" if it did not."""
        version = self._catalogue.known[config.name].versions.setdefault(number, Version())
        serving = version.generation > 0
        if not serving:
            if version.state == UNAVAILABLE and not self._workers.blocks.busy(config.name, number):
                self._workers.give_back((config.name, number))  # its counters begin anew, as in Triton
            version.state, version.reason = LOADING, ""
        _log.info("loading: %s:%d", config.name, number)
        generation, began = next(self._generations), time.monotonic()
        try:
            workers = await self._on_workers(config, number, generation, version)
        except InferError as error:
            _log.error("failed to load '%s' version %d: %s", config.name, number, error.message)
            own = os.path.dirname(config.directory).rstrip("/")  # none of the others, of files that came with a load
            reason = for_clients(error.message, (own, *self._roots))
            version.load_failed(reason)
            return reason
        except asyncio.CancelledError:
            if not serving:
                version.state, version.reason = UNAVAILABLE, UNLOADED
            raise
        previous, version.workers, old_files, version.files = version.workers, workers, version.files, files
        version.config, version.generation, version.state, version.reason = config, generation, READY, ""
        version.load_s = time.monotonic() - began
        self._workers.blocks.bound((config.name, number), [round(ms * 1e6) for ms in config.first_response_buckets])
        left = [self._leave(worker, config.name, number) for worker in previous if worker not in workers]
        for problem in await asyncio.gather(*left, return_exceptions=True):
            if isinstance(problem, BaseException):
                _log.error("model '%s' version %d has moved; where it was: %s", config.name, number, problem)
        if old_files != files:
            await self.tidy(self._catalogue.known[config.name].versions, old_files)
        _log.info("successfully loaded '%s' version %d", config.name, number)
        return ""

    async def _on_workers(
        self, config: ModelConfig, number: int, generation: int, version: Version
    ) -> tuple[Worker, ...]:
        """On all workers that it has instances on, or on none: where one fails, the others go back."""
        first, *others = placed(config).items()
        done: dict[str, Worker] = {}  # noted by each itself: a load that is cancelled would forget who had ended

        async def bring(key: str, part: ModelConfig) -> None:
            done[key] = await self._on_a_worker(key, part, number, generation)

        try:
            async with self._may_load:
                # What is wrong with a model's files shows on the first; only what is a worker's own is left to others.
                for each in ([first], others):
                    results = await asyncio.gather(*(bring(*one) for one in each), return_exceptions=True)
                    raise_first(results)
            # Not with a turn to load: what goes for it may have ensembles loaded anew.
            if not version.generation and (no_room := await self._memory.measured(config)):
                raise InferError(Code.UNAVAILABLE, no_room)
        except BaseException:
            if done:
                await self._go_back(config.name, number, version, list(done.values()))
            raise
        return tuple(done[key] for key, _ in (first, *others))

    async def _on_a_worker(self, key: str, config: ModelConfig, number: int, generation: int) -> Worker:
        for left in range(self._retries, -1, -1):
            try:
                worker, loads = self._workers.start(key), self._workers.loads
                with loads.load(config.name, number, key, "has waited for"):
                    await worker.until_up()
                with self._measured(worker, (config.name, number)), loads.load(config.name, number, key):
                    await worker.load(config, number, generation, self._blocks(config, number, key))
            except InferError as error:
                if not left:
                    raise
                _log.warning("loading '%s' version %d failed, once more: %s", config.name, number, error.message)
            else:
                return worker
        raise AssertionError("there is a last try")

    @contextlib.contextmanager
    def _measured(self, worker: Worker, version: tuple[str, int]) -> Iterator[None]:
        """What it takes is how much `worker` grows meanwhile."""
        sizes = self._memory.sizes
        sizes.begin(worker.key, worker.pid, resident(worker.pid))
        loaded = False
        try:
            yield
            loaded = True
        finally:
            sizes.end(worker.key, version if loaded else None, worker.pid, resident(worker.pid))

    def _leave(self, worker: Worker, model: str, number: int) -> Awaitable[None]:
        self._memory.sizes.disturb(worker.key)
        return worker.unload(model, number)

    async def _go_back(self, model: str, number: int, version: Version, workers: list[Worker]) -> None:
        """These have loaded what another worker could not: they serve again what served before, or nothing."""
        before = placed(version.config) if version.generation and version.config is not None else {}
        for worker in workers:
            try:
                if worker in version.workers and (part := before.get(worker.key)) is not None:
                    await self._on_a_worker(worker.key, part, number, next(self._generations))
                else:
                    await self._leave(worker, model, number)
                continue
            except InferError as error:
                _log.error("model '%s' version %d on '%s': %s", model, number, worker.key, error.message)
            version.workers = tuple(each for each in version.workers if each is not worker)
            with contextlib.suppress(InferError):
                await self._leave(worker, model, number)
        if version.generation and not version.workers:
            version.state, version.reason, version.generation = UNAVAILABLE, UNLOADED, 0

    async def _unload(self, model: str, number: int, version: Version, reason: str, patience_s: float) -> str:
        """One version. Returns why it failed, "" if it did not."""
        version.state, version.reason, version.generation = UNLOADING, "", 0
        self._workers.unclosed.pop((model, number), None)
        problem = ""
        unloads = (self._leave(worker, model, number) for worker in version.workers)
        results = await asyncio.gather(*unloads, return_exceptions=True)
        for at, error in enumerate(results):
            if isinstance(error, InferError):
                _log.error("failed to unload '%s' version %d: %s", model, number, error.message)
                problem, results[at] = error.message, None
        raise_first(results)
        if self._workers.blocks.closing(model, number):
            problem = problem or await self._closed(model, number, patience_s)
        if self._workers.blocks.busy(model, number):
            task = asyncio.create_task(self._drained(model, number, version, reason), name=f"{model}:{number} drains")
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)
        else:
            self._ended(model, number, version, reason)
        return problem

    async def _closed(self, model: str, number: int, patience_s: float) -> str:
        """Returns when nothing of it is being closed any more, and how that ended, "" if it went well."""
        quiet, until = 0, time.monotonic() + patience_s  # looks in a row: instances are closed one after another
        while quiet < 2 and time.monotonic() < until:
            await asyncio.sleep(CLOSE_LOOK_S)
            quiet = 0 if self._workers.blocks.closing(model, number) else quiet + 1
        return self._unclosed(model, number)

    def _unclosed(self, model: str, number: int) -> str:
        problem = self._workers.unclosed.pop((model, number), "")
        if problem:
            _log.error("'%s' version %d is unloaded, but %s", model, number, problem)
        return Unclosed(problem)

    async def _drained(self, model: str, number: int, version: Version, reason: str) -> None:
        quiet = 0  # looks in a row: a request that goes from the queue to an instance shows in neither for a moment
        while quiet < 2 and version.state == UNLOADING:
            await asyncio.sleep(DRAIN_LOOK_S)
            quiet = 0 if self._workers.blocks.busy(model, number) else quiet + 1
        self._unclosed(model, number)
        self._ended(model, number, version, reason)

    def _ended(self, model: str, number: int, version: Version, reason: str) -> None:
        if version.state == UNLOADING:  # it may be loading again
            version.state, version.reason = UNAVAILABLE, reason
            _log.info("successfully unloaded '%s' version %d", model, number)

    def _blocks(self, config: ModelConfig, number: int, worker: str) -> tuple[int, ...]:
        """Statistics blocks, if need be those of versions that do not serve any more."""
        owner, blocks = (config.name, number), self._workers.blocks
        count = max(1, sum(group.count for group in config.instance_group))  # an ensemble has no instances
        for name, other, version in self._catalogue.versions():
            if blocks.has_room(owner, count, worker):
                break
            if not version.generation and version.state == UNAVAILABLE:
                self._workers.give_back((name, other))
        taken = blocks.take(owner, count, worker)
        blocks.unmeasured(taken)
        return taken

    async def tidy(self, versions: dict[int, Version], files: str) -> None:
        """The private repository `files` goes with the last version of its model that serves from it."""
        if files and not any(found.generation and found.files == files for found in versions.values()):
            await asyncio.to_thread(self._overrides.discard, files)
