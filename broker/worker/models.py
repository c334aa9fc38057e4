"""The models of this worker, by name and version, and which plans run on which.

Loads come from threads of their own, everything else from the control thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import final

from broker.repository.scheduling import Step
from broker.worker import backends, resizing
from broker.worker.cache import ResponseCache
from broker.worker.cached import Cached
from broker.worker.ensembles.ensemble import Ensemble
from broker.worker.ensembles.remote.elsewhere import Elsewhere, SpreadEnsemble
from broker.worker.loop import Loop
from broker.worker.messages import LoadInstances, Predecessor
from broker.worker.model import LoadedModel, not_loaded
from broker.worker.plans import Plan, adopt
from broker.worker.sequence_endings import Pasts
from broker.worker.sequences import Sequences
from broker.worker.streams import Streams
from broker.worker.trim import trim
from shm import statistics
from shm.admission import Verdict
from shm.errors import Code, InferError

MAX_SIGNATURES = 4096
Load = tuple[str, int, int]  # model, version, generation
Plans = Callable[[], list[Plan]]  # all that are bound, asked for after a change: none may slip in between


@final
class ModelTable:
    """Loaded versions. A reload replaces a version only when the new one is ready.

    `lock` also guards whether a plan is open and simple: a load must not open again what the control thread closes.
    """

    def __init__(
        self,
        loop: Loop,
        cache: ResponseCache | None = None,
        elsewhere: Elsewhere | None = None,
        device: str = "",
        before: Predecessor | None = None,
    ) -> None:
        """`device`: the UUID of the worker's GPU, "" on the CPU. `before`: the worker's process before this one."""
        self._loop = loop
        self._device = device
        self._cache = cache
        self._elsewhere = elsewhere  # the way to members in other workers
        self.lock = threading.Lock()
        self._versions: dict[str, dict[int, LoadedModel]] = {}
        self._signatures: dict[object, object] = {}
        self._pasts = Pasts(before)
        self._loading: set[Load] = set()
        self._unwanted: set[Load] = set()  # of those, the ones that are not to serve any more

    # --- loads that are under way ----------------------------------------------------------------------------------

    def begin(self, load: Load) -> None:
        """It is about to be loaded."""
        with self.lock:
            self._loading.add(load)

    def end(self, load: Load) -> None:
        """It serves, or never will."""
        with self.lock:
            self._loading.discard(load)
            self._unwanted.discard(load)

    def has_ended(self, load: Load) -> bool:
        """Is it under way no more?"""
        return load not in self._loading

    @property
    def is_loading(self) -> bool:
        """Is any load under way?"""
        return bool(self._loading)

    def give_up(self, load: Load) -> bool:
        """Let it not serve when it is ready. False: it is not under way, or serves already."""
        with self.lock:
            if load in self._loading:
                self._unwanted.add(load)
            return load in self._unwanted

    @property
    def instances(self) -> int:
        """Instances of all loaded versions."""
        with self.lock:
            return sum(len(m.instances) for versions in self._versions.values() for m in versions.values())

    def load(self, message: LoadInstances, blocks: list[memoryview]) -> LoadedModel:
        """Load all instances; the model serves nobody before `publish`. Raises what the backend raises."""
        config = message.config.with_data()
        with self.lock:
            old = self._versions.get(config.name, {}).get(message.version)
        files = resizing.files_of(config, message.version)  # before they are read
        if old is not None and resizing.possible(old, config, files):
            resizing.resize(old, config, blocks, self._loop)
            old.generation = message.generation
            return old
        model = LoadedModel(config, message.version, message.generation, self._device)
        model.files = files
        directory = config.versions.get(message.version)
        if directory is None:
            raise InferError(Code.NOT_FOUND, f"model '{config.name}' has no version {message.version}")
        try:
            self._loop.scheduler.admit(model)
            model.streams = Streams(config) if config.decoupled else None
            if config.ensemble is not None:
                model.load_ensemble(blocks[0])
                model.ensemble = self._ensemble(model)
            else:
                model.load(backends.find(config), directory, blocks)
            cache = self._cache if config.response_cache and blocks else None
            if blocks:
                blocks[0][statistics.CACHED] = cache is not None
            if cache is not None:
                model.keep_answers(Cached(cache, config.name, model.version, model.generation, blocks[0]))
        except BaseException:
            self._loop.scheduler.forget(model)
            model.close()
            raise
        trim()  # what reading the files took: it may be as much as the model
        with self.lock:
            self._versions.setdefault(config.name, {})
            if isinstance(model.queue, Sequences):
                model.queue.endings.past = self._pasts.of(config.name)
        return model

    def _ensemble(self, model: LoadedModel) -> Ensemble:
        submit, take_back = self._loop.submit, self._loop.take_back
        if not model.config.remote:
            return Ensemble(model, self, submit, take_back)
        assert self._elsewhere is not None
        return SpreadEnsemble(model, self, submit, take_back, self._elsewhere)

    def publish(self, model: LoadedModel, plans: Plans) -> None:
        """Serve with `model` from now on; what is queued for the one it replaces still runs there.

        Raises InferError UNAVAILABLE when its load was given up.
        """
        load = model.name, model.version, model.generation
        with self.lock:
            old = self._versions[model.name].get(model.version)
            unwanted = load in self._unwanted
            if not unwanted:
                self._loading.discard(load)
                self._versions[model.name][model.version] = model
                self._list_serving()
        if unwanted:
            if old is not model:
                self._loop.scheduler.forget(model)
                model.close()
            raise InferError(Code.UNAVAILABLE, f"model '{model.name}' was unloaded while it was loading")
        for plan in plans():
            if plan.model_name == model.name:
                self._settle(plan)
        self._forget(plans)
        if old is not None and old is not model:
            self._loop.retire(old, replaced=True)

    def unload(self, name: str, version: int, plans: Plans, generation: int = 0) -> bool:
        """Plans move to the version that is the latest now, or are closed; what is queued still runs.

        `generation`: only if that is the one that serves. Returns whether something did.
        """
        with self.lock:
            versions = self._versions.get(name, {})
            if version not in versions or generation not in (0, versions[version].generation):
                return False
            old = versions.pop(version)
            self._list_serving()
        for plan in plans():
            if plan.model_name == name:
                self._settle(plan)
        self._forget(plans)
        self._loop.retire(old)
        return True

    def _list_serving(self) -> None:
        models = [model for versions in self._versions.values() for model in versions.values()]
        self._loop.scheduler.serve(models)

    def bind(self, plan: Plan) -> None:
        """Give a new plan its model. It is among the plans that a load sees by now."""
        self._settle(plan)
        with self.lock:
            if plan.step and plan.model is not None and plan.closed is None:
                plan.pinned = plan.model
                plan.pinned.pins += 1

    def release(self, plan: Plan) -> None:
        """A plan has been dropped: a model that was there for it alone may go."""
        with self.lock:
            pinned, plan.pinned = plan.pinned, None
            if pinned is not None:
                pinned.pins -= 1

    def pin(self, steps: Iterable[Step]) -> list[LoadedModel]:
        """The model of each step of an ensemble, not closed before `unpin`. Raises InferError UNAVAILABLE."""
        found: list[LoadedModel] = []
        with self.lock:
            for step in steps:
                versions = self._versions.get(step.model_name, {})
                wanted = step.model_version
                model = versions.get(wanted if wanted > 0 else max(versions, default=0))
                if model is None:
                    which = f" version {wanted}" if wanted > 0 else ""
                    raise InferError(Code.UNAVAILABLE, f"model '{step.model_name}'{which} is not loaded")
                found.append(model)
            for model in found:
                model.pins += 1
        return found

    def unpin(self, models: Iterable[LoadedModel]) -> None:
        """An ensemble's run is over."""
        with self.lock:
            for model in models:
                model.pins -= 1

    def look_later(self) -> None:
        """An ensemble keeps something for a while: the control thread is to look after it, with or without traffic."""
        self._loop.ask_for_watch()

    def adopt(self, plan: Plan, model: LoadedModel) -> None:
        """Give a step's plan its model, which is pinned."""
        with self.lock:
            self._adopt(plan, model)

    def _adopt(self, plan: Plan, model: LoadedModel) -> None:
        if len(self._signatures) > MAX_SIGNATURES:
            self._signatures.clear()
        adopt(plan, model, self._signatures)

    def _forget(self, plans: Plans) -> None:
        """What ensembles have prepared for their next requests holds on to the members that there were."""
        with self.lock:
            models = [model for versions in self._versions.values() for model in versions.values()]
        for model in models:
            if model.ensemble is not None:
                model.ensemble.forget(plans())

    def close(self, plan: Plan, verdict: Verdict) -> None:
        """Let the plan take no request any more, whatever is loaded later. The first verdict stays."""
        with self.lock:
            if _provisional(plan):
                plan.close(verdict)

    def _settle(self, plan: Plan) -> None:
        with self.lock:  # until it is done: a load and a bind may settle the same plan at once
            versions = self._versions.get(plan.model_name, {})
            model = versions.get(plan.version or max(versions, default=0))
            if not _provisional(plan) or plan.pinned is not None:
                return
            if model is None or not _fits(plan, model):
                plan.close(not_loaded(plan.model_name) if model is None else changed(plan.model_name))
                plan.forget_bindings()
            elif plan.model is not model or plan.closed is not None:
                self._adopt(plan, model)


def changed(model: str) -> Verdict:
    """The plan was checked against a model that takes or gives something else. What clients know this by is the end."""
    return (
        Code.UNAVAILABLE,
        f"model '{model}' was reloaded with other inputs or outputs: prepare the plan again",
    )


def _provisional(plan: Plan) -> bool:
    """May a load change whether the plan takes requests?"""
    return plan.closed in (None, not_loaded(plan.model_name), changed(plan.model_name))


def _fits(plan: Plan, model: LoadedModel) -> bool:
    """Was it checked against a model like this one? The broker may have known the one that `model` has replaced.

    Steps of ensembles in this worker are not checked by the broker, and name no interface.
    """
    return not plan.interface or (plan.interface == model.config.interface and plan.rows <= model.config.max_batch_size)
