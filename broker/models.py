"""The truth about models: which versions there are, in which state, on which worker.

Made by the composition root. Sessions and plans look models up here, and load and unload them; configurations come from
loader processes (`broker.loading`), instances run in workers (`broker.workers`). Texts are Triton's where it has one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

from msgspec.structs import replace

from broker.loading import results
from broker.logical_worker import Worker
from broker.repository.config import LoadFailure, ModelConfig, TensorConfig
from broker.repository.protocol import LoadRequest, Plan
from broker.repository.scan import check_model_name, check_traversal, scan
from broker.tables import ascii_table
from broker.workers import Workers
from shm.errors import Code, InferError
from shm.message_values import IndexEntry
from shm.messages import ModelMetadata, TensorMetadata

LOADING, READY, UNLOADING, UNAVAILABLE = "LOADING", "READY", "UNLOADING", "UNAVAILABLE"
NOT_EXPLICIT = (
    "explicit model load / unload is not allowed if polling is enabled: start the broker with "
    "--model-control-mode=explicit"
)

_log = logging.getLogger(__name__)


@final
@dataclass(slots=True)
class _Version:
    """What serves now; `generation` 0 means that nothing does. `state` and `reason` are Triton's."""

    state: str = LOADING
    reason: str = ""
    generation: int = 0
    config: ModelConfig | None = None
    worker: Worker | None = None
    load_s: float = 0.0  # of the latest load that succeeded


@final
@dataclass(slots=True)
class _Model:
    """`failure`: why the latest attempt to configure it failed. Loads and unloads take turns."""

    versions: dict[int, _Version] = field(default_factory=dict)
    failure: str = ""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@final
class Models:
    """All models of the repositories in `request`.

    `control_mode` "none": all are loaded at start and nothing changes later; "explicit": those in `startup_models` are
    ("*": all), and `load` and `unload` work.
    """

    __slots__ = ("_explicit", "_generations", "_models", "_request", "_startup", "_workers")

    def __init__(
        self,
        workers: Workers,
        request: LoadRequest,
        *,
        control_mode: str = "none",
        startup_models: tuple[str, ...] = (),
    ) -> None:
        self._workers = workers
        self._request = request
        self._explicit = control_mode == "explicit"
        self._startup = startup_models if self._explicit else ("*",)
        self._models: dict[str, _Model] = {}
        self._generations = itertools.count(1)
        workers.on_model_lost = self._lost

    # --- loading ---------------------------------------------------------------------------------------------------

    async def start(self, report: Callable[[int, int], None]) -> None:
        """Load what there is at start. `report(done, total)` as it goes. A model that fails is UNAVAILABLE.

        Raises InferError INTERNAL when the models cannot even be listed.
        """
        if not self._startup:
            report(0, 0)
            return
        names = () if "*" in self._startup else self._startup
        done, total = 0, 0

        async def load(config: ModelConfig) -> None:
            nonlocal done
            await self._serve(config)
            done += 1
            report(done, total)

        loads: list[asyncio.Task[None]] = []
        async for result in results(replace(self._request, models=names)):
            match result:
                case Plan():
                    total = len(result.models)
                    report(done, total)
                case LoadFailure():
                    self._failed(result)
                    done += 1
                    report(done, total)
                case ModelConfig():
                    loads.append(asyncio.create_task(load(result)))  # while the loader reads the next one
        await asyncio.gather(*loads)

    async def load(self, model: str) -> None:
        """Read one model's directory again and load what is there; what is loaded serves until then.

        Raises InferError with Triton's texts.
        """
        self._need_explicit()
        check_traversal(model)
        polled = f"failed to load '{model}', failed to poll from model repository"
        try:
            check_model_name(model)
        except InferError as error:  # no directory of that name is looked at
            raise InferError(Code.INTERNAL, f"{polled}: {error.message}") from None
        found = [result async for result in results(replace(self._request, models=(model,)))]
        result = found[-1]
        if isinstance(result, LoadFailure):
            if result.reason.startswith(polled):  # no such model: nothing to remember
                raise InferError(Code.INTERNAL, result.reason)
            self._failed(result)
            raise InferError(Code.INTERNAL, f"{polled}: {result.reason}")
        assert isinstance(result, ModelConfig), "a result for every model"
        failures = await self._serve(result)
        if not result.versions:
            raise InferError(Code.INTERNAL, f"failed to load '{model}', no version is available")
        if failures:
            parts = (f"version {number} is at UNAVAILABLE state: {why};\n" for number, why in failures.items())
            raise InferError(Code.INVALID_ARG, f"load failed for model '{model}': {''.join(parts)}")

    async def unload(self, model: str) -> None:
        """Stop serving all versions of a model. One that is not known is no error, as in Triton."""
        self._need_explicit()
        known = self._models.get(model)
        if known is not None:
            async with known.turn:
                known.failure = ""
                await asyncio.gather(
                    *(self._unload(model, number, known.versions[number]) for number in known.versions)
                )

    async def _serve(self, config: ModelConfig) -> dict[int, str]:
        """Load every version of `config`, then unload the others. Returns why versions failed."""
        for note in config.notes:
            _log.warning("model '%s': %s", config.name, note)
        model = self._models.setdefault(config.name, _Model())
        async with model.turn:
            model.failure = "" if config.versions else "Not loaded: No model version was found"
            reasons = await asyncio.gather(*(self._load(model, config, number) for number in config.versions))
            gone = [number for number in model.versions if number not in config.versions]
            await asyncio.gather(*(self._unload(config.name, number, model.versions[number]) for number in gone))
        return {number: reason for number, reason in zip(config.versions, reasons, strict=True) if reason}

    async def _load(self, model: _Model, config: ModelConfig, number: int) -> str:
        """One version. Returns why it failed, "" if it did not."""
        version = model.versions.setdefault(number, _Version())
        serving = version.state == READY
        if not serving:
            version.state, version.reason = LOADING, ""
        _log.info("loading: %s:%d", config.name, number)
        generation, began = next(self._generations), time.monotonic()
        try:
            instances = sum(group.count for group in config.instance_group)
            worker = self._workers.start(f"cpu/{config.worker_group}")
            blocks = self._blocks((config.name, number), instances, worker.key)
            await worker.load(config, number, generation, blocks)
        except InferError as error:
            _log.error("failed to load '%s' version %d: %s", config.name, number, error.message)
            if not serving:
                version.state, version.reason = UNAVAILABLE, error.message
            return error.message
        previous, version.worker = version.worker, worker
        version.config, version.generation, version.state, version.reason = config, generation, READY, ""
        version.load_s = time.monotonic() - began
        if previous is not None and previous is not worker:
            await previous.unload(config.name, number)
        _log.info("successfully loaded '%s' version %d", config.name, number)
        return ""

    async def _unload(self, model: str, number: int, version: _Version) -> None:
        if version.state != READY or version.worker is None:
            return
        version.state, version.reason, version.generation = UNLOADING, "", 0
        try:
            await version.worker.unload(model, number)
            _log.info("successfully unloaded '%s' version %d", model, number)
        except InferError as error:
            _log.error("failed to unload '%s' version %d: %s", model, number, error.message)
        version.state, version.reason = UNAVAILABLE, "unloaded"

    def _blocks(self, owner: tuple[str, int], count: int, worker: str) -> tuple[int, ...]:
        """Statistics blocks, if need be those of versions that do not serve any more."""
        blocks = self._workers.blocks
        for name, number, version in self._versions():
            if blocks.has_room(owner, count, worker):
                break
            if not version.generation and version.state != LOADING:
                self._workers.give_back((name, number))
        return blocks.take(owner, count, worker)

    def _need_explicit(self) -> None:
        if not self._explicit:
            raise InferError(Code.UNAVAILABLE, NOT_EXPLICIT)

    def _failed(self, failure: LoadFailure) -> None:
        start = f"failed to load '{failure.name}'"  # some reasons say it themselves, as Triton's do
        _log.error("%s", failure.reason if failure.reason.startswith(start) else f"{start}: {failure.reason}")
        self._models.setdefault(failure.name, _Model()).failure = failure.reason

    def _lost(self, model: str, number: int, generation: int, reason: str) -> None:
        """A worker had to come back without it."""
        version = self._models[model].versions[number] if model in self._models else None
        if version is not None and version.generation == generation:
            _log.error("failed to load '%s' version %d: %s", model, number, reason)
            version.state, version.reason, version.generation = UNAVAILABLE, reason, 0

    # --- looking up ------------------------------------------------------------------------------------------------

    def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """What clients may know; without `version` of the highest that is ready. Raises InferError as Triton does."""
        number, found = self._ready(model, version)
        return self._metadata(model, number, found)

    def config(self, model: str, version: str = "") -> tuple[ModelConfig, int]:
        """The configuration that serves and the version's number. Raises as `metadata`."""
        number, found = self._ready(model, version)
        assert found.config is not None
        return found.config, number

    def worker_for(self, model: str, version: str = "") -> Worker:
        """The worker that serves it. Raises as `metadata`."""
        _, found = self._ready(model, version)
        assert found.worker is not None
        return found.worker

    async def index(self, *, ready: bool = False) -> list[IndexEntry]:
        """Triton's repository index: what was ever loaded by version, the rest of the repositories by name."""
        found = await asyncio.to_thread(scan, self._request.repositories)
        known = [IndexEntry(name=m.name, version=m.version, state=m.state, reason=m.reason) for m in self.all()]
        if ready:
            return [entry for entry in known if entry.state == READY]
        rest = {*found.models, *found.failures} - {entry.name for entry in known}
        return sorted((*known, *(IndexEntry(name=name) for name in rest)), key=lambda entry: entry.name)

    def all(self) -> list[ModelMetadata]:
        """Every version that is known, and a model without any (version "") with the reason."""
        rows: list[ModelMetadata] = []
        for name, model in sorted(self._models.items()):
            rows += [self._metadata(name, number, version) for number, version in sorted(model.versions.items())]
            if not model.versions:
                rows.append(ModelMetadata(name=name, version="", state=UNAVAILABLE, reason=model.failure))
        return rows

    def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        """Triton's `model_stats` of the versions that are ready; of a named version whatever its state."""
        if model and model not in self._models:
            raise InferError(Code.INVALID_ARG, f"requested model '{model}' is not available")
        wanted = _version_number(version) if version else None
        if wanted is not None and (not model or wanted not in self._models[model].versions):
            raise InferError(Code.INVALID_ARG, f"requested model version is not available for model '{model}'")
        return [
            self._workers.blocks.model_stats(name, number)
            for name, number, found in self._versions()
            if model in ("", name) and (number == wanted or (wanted is None and found.state == READY))
        ]

    def load_seconds(self, model: str, version: int) -> float:
        """How long the latest load of a known version took that succeeded."""
        return self._models[model].versions[version].load_s

    def backends(self) -> set[str]:
        """Those of the models that were loaded."""
        return {version.config.backend for _, _, version in self._versions() if version.config is not None}

    def table(self) -> str:
        """Triton's table of models at start."""
        rows = []
        for row in self.all():
            status = row.state if not row.reason else f"{row.state}: {row.reason}"
            rows.append((row.name, row.version or "-", row.reason if row.reason.startswith("Not loaded") else status))
        return ascii_table(("Model", "Version", "Status"), rows)

    def _versions(self) -> Iterator[tuple[str, int, _Version]]:
        for name, model in sorted(self._models.items()):
            for number, version in sorted(model.versions.items()):
                yield name, number, version

    def _ready(self, name: str, version: str) -> tuple[int, _Version]:
        model = self._models.get(name)
        unknown = f"Request for unknown model: '{name}'"
        if model is None:
            raise InferError(Code.INVALID_ARG, f"{unknown} is not found")
        if not version:
            ready = [number for number, found in model.versions.items() if found.generation]
            if not ready:
                reasons = [found.reason for found in model.versions.values() if found.reason]
                why = model.failure or "; ".join(reasons)
                raise InferError(Code.NOT_FOUND, f"{unknown} has no available versions{why and f': {why}'}")
            return max(ready), model.versions[max(ready)]
        number = _version_number(version)
        found = model.versions.get(number)
        if found is None:
            raise InferError(Code.NOT_FOUND, f"{unknown} version {number} is not found")
        if not found.generation:
            why = f": {found.reason}" if found.reason else f": it is {found.state}"
            raise InferError(Code.UNAVAILABLE, f"{unknown} version {number} is not at ready state{why}")
        return number, found

    def _metadata(self, name: str, number: int, version: _Version) -> ModelMetadata:
        state, reason, worker = version.state, version.reason, version.worker
        if state == READY and worker is not None and worker.state != "ready":
            # Requests are accepted all the same, and wait: only what is shown tells.
            state = UNAVAILABLE if worker.state == "stopped" else LOADING
            reason = f"worker '{worker.key}' is {worker.state}, its last process: {worker.last_death}"
        config = version.config
        ready = (str(n) for n, found in sorted(self._models[name].versions.items()) if found.generation)
        row = ModelMetadata(name=name, version=str(number), versions=tuple(ready), state=state, reason=reason)
        if config is None:
            return row
        batched = config.max_batch_size > 0
        return replace(
            row,
            platform=config.platform or config.backend,
            max_batch_size=config.max_batch_size,
            inputs=tuple(tensor_metadata(tensor, batched) for tensor in config.input),
            outputs=tuple(tensor_metadata(tensor, batched) for tensor in config.output),
            workers=(worker.key,) if worker is not None else (),
            decoupled=config.decoupled,
            max_batch_size_completed=config.max_batch_size_completed,
        )


def tensor_metadata(tensor: TensorConfig, batched: bool) -> TensorMetadata:
    """A tensor as clients see it. The batch dimension has the same symbol everywhere: all batches are equal."""
    open_ended = tuple(f"?{tensor.name}:{axis}" if dim < 0 else "" for axis, dim in enumerate(tensor.dims))
    symbols = tensor.symbols if len(tensor.symbols) == len(tensor.dims) else open_ended
    return TensorMetadata(
        name=tensor.name,
        datatype=tensor.datatype,
        shape=(-1, *tensor.dims) if batched else tensor.dims,
        symbols=("*batch", *symbols) if batched else symbols,
        optional=tensor.optional,
        zero_copy=tensor.zero_copy,
        zero_copy_reason=tensor.zero_copy_reason,
        file_shape=tensor.file_shape,
    )


def _version_number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or int(text) == 0:
        raise InferError(
            Code.INVALID_ARG,
            f"failed to get model version from specified version string '{text}' (details: stol), version should be "
            "an integral value > 0",
        )
    return int(text)
