"""The truth about models: loads them at start, on request, or as the repositories change.

Made by the composition root; what is known of models is in `broker.catalogue`, how a version comes to a worker and goes
in `broker.version_life`. Configurations come from loader processes (`broker.loading`). Texts are Triton's where it has
one. An ensemble is loaded after its members, and again when one of them has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import final

from msgspec.structs import replace

from broker import load_failures, polling
from broker.catalogue import UNLOADED, Catalogue, Model
from broker.ensemble_members import as_members_are, ensembles_of, members_first, misfit
from broker.gpus import Gpus
from broker.lease_rules import check_free, check_versions
from broker.leases import Leases
from broker.loading import results
from broker.loads import Loads, Turns, Unawaited
from broker.model_memory import ModelMemory
from broker.overrides import Override, Overrides, check_code
from broker.repository.config import CHANGED, LoadFailure, ModelConfig
from broker.repository.ensembles import members
from broker.repository.protocol import LoadRequest, Plan
from broker.repository.scan import check_model_name, check_traversal
from broker.repository.scheduling import Ensemble
from broker.repository_index import repository_index
from broker.version_life import LOADS, VersionLife
from broker.workers import Workers
from shm.errors import Code, InferError
from shm.message_values import IndexEntry

NOT_EXPLICIT = (
    "explicit model load / unload is not allowed if polling is enabled: start the broker with "
    "--model-control-mode=explicit"
)
POLL_LOADS_S = 5.0  # of loads that a look brought about; then the next look is taken while they go on

_log = logging.getLogger(__name__)
_Report = Callable[[int, int], None]


@final
class Models(Catalogue):
    """All models of the repositories in `request`.

    `control_mode` "none": all are loaded at start and nothing changes later; "poll": besides, `keep_polling` does what
    the repositories' changes ask for; "explicit": those in `startup_models` are loaded ("*": all), and `load` and
    `unload` work. `directory`: where files that come with a load may be written. `loads`, `retries`: see VersionLife.
    `memory_limit`: see ModelMemory. `remote_code`: see Overrides.
    """

    __slots__ = (
        "_ensembles",
        "_gpus",
        "_life",
        "_loads",
        "_overrides",
        "_poll",
        "_request",
        "_roots",
        "_startup",
        "_turns",
        "_unawaited",
        "_waiting",
        "_workers",
        "explicit",
        "leases",
        "memory",
    )

    def __init__(
        self,
        workers: Workers,
        request: LoadRequest,
        *,
        control_mode: str = "none",
        startup_models: tuple[str, ...] = (),
        directory: str = "",
        loads: int = LOADS,
        retries: int = 0,
        gpus: Gpus | None = None,
        memory_limit: int = 0,
        remote_code: bool = False,
    ) -> None:
        super().__init__(workers.blocks)
        self._gpus = gpus
        self._workers = workers
        self._request = request
        self.explicit = control_mode == "explicit"
        self._roots = load_failures.roots_of(request.repositories)
        self._startup = startup_models if self.explicit else ("*",)
        self._overrides = Overrides(directory, remote_code)
        self.leases = Leases()
        self._turns = Turns()
        self.memory = ModelMemory(self, workers.blocks, self.leases, memory_limit, self._unload_all, self._turns.taken)
        self._life = VersionLife(workers, self, self._overrides, self.memory, self._roots, loads=loads, retries=retries)
        self._loads = Loads()
        self._waiting: dict[str, asyncio.Task[None]] = {}  # loads that have not looked at the files yet
        self._unawaited = Unawaited()
        # Those that are to serve whenever their members let them, as they were read.
        self._ensembles: dict[str, ModelConfig] = {}
        self._poll = polling.Poll(request.repositories, self._follow) if control_mode == "poll" else None
        workers.on_model_lost = self._lost

    async def stop(self) -> None:
        """End the loads that are under way; none begins any more."""
        await self._unawaited.stop()
        await self._loads.stop()

    def close(self) -> None:
        """Remove what came with loads."""
        self._overrides.clear()

    # --- at start, and as repositories change ----------------------------------------------------------------------

    async def start(self, report: _Report) -> None:
        """Load what there is at start. `report(done, total)` as it goes. A model that fails is UNAVAILABLE.

        Raises InferError INTERNAL when the models cannot even be listed.
        """
        self._overrides.clear()
        if not self._startup:
            report(0, 0)
            return
        if self._poll is not None:
            await self._poll.begin()
        await self._load_many(() if "*" in self._startup else self._startup, report)

    async def keep_polling(self, poll_s: float) -> None:
        """Control mode poll, after `start`, until cancelled. Whatever is in the repositories, this goes on."""
        assert self._poll is not None
        await self._poll.keep_on(poll_s)

    async def _follow(self, changes: polling.Changes) -> None:
        for name in (*changes.deleted, *changes.changed):
            await self._loads.end(name)  # of files that are not there any more
        for name in changes.deleted:
            await self._unload_all(name)
        if changes.changed:
            loads = self._unawaited.begin(self._load_many(changes.changed, lambda done, total: None))
            await asyncio.wait((loads,), timeout=POLL_LOADS_S)

    async def _load_many(self, names: Iterable[str], report: _Report) -> None:
        """Load models (none named: all): plain ones while the loader reads the next, then ensembles, members first."""
        asked, tried, done, total = tuple(names), set[str](), 0, 0
        found, loads = dict[str, ModelConfig](), list[asyncio.Task[None]]()

        async def serve(config: ModelConfig) -> None:
            async with self._turns.of(config.name):
                await self._serve(config, coming=found)

        async def load(config: ModelConfig) -> None:
            nonlocal done
            try:
                await self._loads.run(config.name, serve(config))
            except InferError as error:
                _log.error("%s", error.message)
            done += 1
            report(done, total)

        while True:
            async for result in results(replace(self._request, models=asked), self._gpus, self._workers.loads):
                match result:
                    case Plan():
                        total += len(result.models)
                        report(done, total)
                    case LoadFailure():
                        if load_failures.is_ambiguous(result) and self.serving(result.name) is not None:
                            await self._unload_all(result.name)
                        if result.name not in tried or not load_failures.is_unknown(result):
                            self._failed(result)
                        done += 1
                        report(done, total)
                    case ModelConfig(ensemble=None):
                        found[result.name] = result
                        loads.append(asyncio.create_task(load(result)))
                    case ModelConfig():
                        found[result.name] = result
            # Members that nobody named, of ensembles that somebody did.
            wanted = {name for config in found.values() if config.ensemble for name in members(config.ensemble)}
            asked = tuple(sorted(wanted - found.keys() - self.known.keys() - tried))
            if not asked:
                break
            tried |= set(asked)
        await asyncio.gather(*loads)
        for config in members_first(found):
            await load(config)
        for name in found:
            await self._changed(name, found.keys())

    # --- on request ------------------------------------------------------------------------------------------------

    async def load(self, model: str, parameters: int = -1, remote: bool = False) -> None:
        """Read one model's directory again and load what is there; what is loaded serves until then.

        `parameters`: a descriptor (`shm.load_parameters`, still the caller's) with what takes the repository's place.
        `remote`: they came through a gateway. Raises InferError with Triton's texts.
        """
        self._need_explicit()
        check_traversal(model)
        try:
            check_model_name(model)
        except InferError as error:  # no directory of that name is looked at
            raise InferError(Code.INTERNAL, f"{load_failures.not_polled(model)}: {error.message}") from None
        if parameters >= 0:
            await self._load_one(model, await asyncio.to_thread(self._overrides.take, model, parameters, remote))
            return
        # Whoever asks for what has not begun yet gets just that: it sees the same files.
        task = self._waiting.get(model)
        if task is None:
            task = self._waiting[model] = asyncio.create_task(self._load_one(model, Override()))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            task.add_done_callback(lambda ended: self._begun(model, ended))
        await asyncio.shield(task)

    async def unload(self, model: str, dependents: bool = False) -> None:
        """Stop serving all versions of a model; one that is not known is no error, as in Triton.

        Returns when no new request is taken; those accepted are finished meanwhile. `dependents`: members of an
        ensemble too, unless another one that is loaded needs them, or a lease. Raises InferError UNAVAILABLE where a
        lease keeps `model` itself.
        """
        self._need_explicit()
        check_free(self, self.leases, model)
        await self._loads.end(model)
        config = self.serving(model)
        problems = await self._unload_all(model, asked=True)
        if dependents and config is not None and config.ensemble is not None:
            for member in members(config.ensemble):
                if not ensembles_of(self, member) and not self.leases.refusal(member):
                    await self.unload(member, dependents=True)
        if problems:
            raise load_failures.not_unloaded(model, problems)

    def _begun(self, model: str, load: asyncio.Task[None] | None) -> None:
        """Whoever asks from now on gets another load."""
        if self._waiting.get(model) is load:
            del self._waiting[model]

    async def _load_one(self, model: str, override: Override, above: tuple[str, ...] = ()) -> None:
        """`above`: the ensembles that it is loaded for, outermost first."""
        await self._loads.run(model, self._load_now(model, override, above))

    async def _load_now(self, model: str, override: Override, above: tuple[str, ...]) -> None:
        served = self.serving(model) is not None
        try:
            async with self._turns.of(model):
                if override == Override():
                    self._waiting.pop(model, None)
                config = await self._read(model, override)
                if config.ensemble is None:
                    failures = await self._serve(config, override.repository)
            if config.ensemble is not None:
                # Nobody's turn is held meanwhile: ensembles that are members of each other would wait for ever.
                with self.memory.together(members(config.ensemble)):
                    await self._load_members(config.ensemble, (*above, model))
                    async with self._turns.of(model):
                        config = await self._read(model, override)
                        failures = await self._serve(config, override.repository)
        except BaseException:
            await asyncio.to_thread(self._overrides.discard, override.repository)
            raise
        if not served and self.serving(model) is not None:
            self.memory.demanded(model)
        await self._changed(model)
        if not config.versions:
            raise InferError(Code.INTERNAL, f"failed to load '{model}', no version is available")
        if failures:
            raise load_failures.versions_failed(model, failures)

    async def _load_members(self, ensemble: Ensemble, above: tuple[str, ...]) -> None:
        """Those that do not serve. What goes wrong is said of the ensemble."""
        for member in members(ensemble):
            if member not in above and self.serving(member) is None:
                try:
                    await self._load_one(member, Override(), above)
                except InferError as error:
                    _log.error("%s", error.message)

    async def _read(self, model: str, override: Override) -> ModelConfig:
        """Have a loader configure it. Raises InferError as `load`."""
        request = replace(self._request, models=(model,))
        if override.repository:
            request = replace(request, repositories=(override.repository,))
        if override.config is not None:
            request = replace(request, overrides={model: override.config})
        result = [each async for each in results(request, self._gpus, self._workers.loads)][-1]
        if isinstance(result, LoadFailure):
            roots = (*self._roots, *load_failures.roots_of((override.repository,)))
            if not load_failures.is_unknown(result) and not load_failures.is_of_override(result):
                self._failed(result, roots)
            raise load_failures.refusal(load_failures.shown_to_clients(result, roots))
        assert isinstance(result, ModelConfig), "a result for every model"
        check_code(override, result)
        check_versions(self, self.leases, result)
        return result

    # --- one model -------------------------------------------------------------------------------------------------

    async def _serve(
        self, config: ModelConfig, files: str = "", coming: Mapping[str, ModelConfig] = MappingProxyType({})
    ) -> dict[int, str]:
        """With its turn: load what `config` says. Returns why versions failed."""
        model = self.known.setdefault(config.name, Model())
        model.failure = "" if config.versions else "Not loaded: No model version was found"
        if config.ensemble is None:
            self._ensembles.pop(config.name, None)
            return await self._life.serve(config, files)
        problem, serves = misfit(self, config, coming), self.serving(config.name) is not None
        if not (problem and serves):  # else what serves goes on
            self._ensembles[config.name] = config
        if not problem:
            return await self._life.serve(as_members_are(self, config), files)
        _log.error("failed to load '%s': %s", config.name, problem)
        if not serves:
            model.failure = problem
        await self._life.tidy(model.versions, files)
        return dict.fromkeys(config.versions, problem)

    async def _unload_all(
        self, name: str, reason: str = "", *, asked: bool = False, comes_back: bool = False
    ) -> dict[int, str]:
        """Returns why versions could not be unloaded. `asked`: then leases are respected.

        `comes_back`: an ensemble goes until its members are back, for `reason`.
        """
        model = self.known.get(name)
        if model is None:
            return {}
        async with self._turns.of(name):
            if asked:
                check_free(self, self.leases, name)
            if not comes_back:
                self._ensembles.pop(name, None)
                self.memory.forget(name)
            model.failure = ""
            reason = f"{UNLOADED}: {reason}" if reason else UNLOADED
            problems = await self._life.unload(name, model.versions, reason)
            failed = [n for n, found in model.versions.items() if found.config is None and found.reason != UNLOADED]
            for number in failed:
                del model.versions[number]  # it never served: nothing to say of it any more
            if not model.versions and self.known.get(name) is model:
                del self.known[name]
        await self._changed(name)
        return problems

    async def _changed(self, member: str, but: Collection[str] = ()) -> None:
        """A model was loaded or unloaded: the ensembles that use it are loaded again, or cannot be served any more.

        An ensemble that went because a member had gone comes back with it, as in Triton; one that was unloaded stays.
        `but`: those that were loaded after it anyway.
        """
        for name, config in list(self._ensembles.items()):
            if config.ensemble is None or member not in members(config.ensemble) or name in but:
                continue
            if problem := misfit(self, config):
                if self.serving(name) is not None:
                    await self._unload_all(name, problem, comes_back=True)
                continue
            async with self._turns.of(name):
                if self._ensembles.get(name) is not config:
                    continue
                model = self.known.setdefault(name, Model())
                model.failure = ""
                files = next((found.files for found in model.versions.values() if found.generation), "")
                await self._life.serve(as_members_are(self, config), files)
            await self._changed(name, but)

    def _need_explicit(self) -> None:
        if not self.explicit:
            raise InferError(Code.UNAVAILABLE, NOT_EXPLICIT)

    def _failed(self, failure: LoadFailure, roots: Iterable[str] = ()) -> None:
        """`roots`: where its files are, if not only in the model repositories."""
        for line in load_failures.told(failure):
            _log.error("%s", line)
        shown = load_failures.shown_to_clients(failure, roots or self._roots)
        load_failures.remember(self.known.setdefault(failure.name, Model()), shown)

    def _lost(self, model: str, number: int, generation: int, reason: str) -> None:
        """A worker had to come back without it."""
        if model not in self.known or not self.known[model].versions[number].lose_workers(model, number, reason):
            return  # what was lost does not serve any more, or not yet
        _log.error("failed to load '%s' version %d: %s", model, number, reason)
        # What served and cannot be had again, because its files have changed: what is there now is.
        again = CHANGED in reason
        self._unawaited.begin(self._load_many((model,), lambda done, total: None) if again else self._changed(model))

    async def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Triton's repository index. `ready`: only what is READY."""
        return await repository_index(self, self._request.repositories, ready=ready)
