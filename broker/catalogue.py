"""What is known of models: which versions there are, in which state, on which worker.

`broker.models` writes it; sessions, plans, status and metrics look models up here. Texts are Triton's where it has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

from msgspec.structs import replace

from broker.logical_worker import Worker
from broker.repository.config import SHARED, ModelConfig, TensorConfig
from broker.statistics_blocks import StatisticsBlocks
from broker.tables import ascii_table
from shm.errors import Code, InferError, no_version
from shm.messages import ModelMetadata, TensorMetadata

LOADING, READY, UNLOADING, UNAVAILABLE = "LOADING", "READY", "UNLOADING", "UNAVAILABLE"
NOT_REPLACED = "a later load failed"  # begins the reason of a version that is READY all the same
UNLOADED = "unloaded"  # Triton's reason; begins that of a version that was unloaded for another one


@final
@dataclass(slots=True)
class Version:
    """What serves now; `generation` 0 means that nothing does. `state` and `reason` are Triton's.

    `workers`: one per device and group that it has instances on; all have loaded it.

    `files`: the private repository of an override that it was loaded from, "" for the broker's repositories.
    """

    state: str = LOADING
    reason: str = ""
    generation: int = 0
    config: ModelConfig | None = None
    workers: tuple[Worker, ...] = ()
    load_s: float = 0.0  # of the latest load that succeeded
    files: str = ""

    def load_failed(self, reason: str) -> None:
        """What serves goes on, and says that it is not what there was to load."""
        if self.generation:
            self.reason = f"{NOT_REPLACED}: {reason}"
        else:
            self.state, self.reason = UNAVAILABLE, reason

    def lose_workers(self, model: str, number: int, reason: str) -> bool:
        """Go on without those that do not serve it any more. False: they all do."""
        left = tuple(worker for worker in self.workers if worker.serves(model, number))
        if not self.generation or left == self.workers:
            return False
        if left:
            self.workers = left
        else:
            self.state, self.reason, self.generation = UNAVAILABLE, reason, 0
        return True


@final
@dataclass(slots=True)
class Model:
    """`failure`: why the latest attempt to configure it failed."""

    versions: dict[int, Version] = field(default_factory=dict)
    failure: str = ""


class Catalogue:
    """All models that were ever loaded, or failed to be, by name."""

    __slots__ = ("_blocks", "known")

    def __init__(self, blocks: StatisticsBlocks) -> None:
        self.known: dict[str, Model] = {}
        self._blocks = blocks

    def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """What clients may know; without `version` of the highest that is ready. Raises InferError as Triton does."""
        number, found = self._ready(model, version)
        return self._metadata(model, number, found)

    def config(self, model: str, version: str = "") -> tuple[ModelConfig, int]:
        """The configuration that serves and the version's number. Raises as `metadata`."""
        number, found = self._ready(model, version)
        assert found.config is not None
        return found.config, number

    def serving(self, model: str) -> ModelConfig | None:
        """The configuration of the highest version that is ready, if there is one."""
        versions = self.known[model].versions if model in self.known else {}
        ready = [number for number, version in versions.items() if version.generation]
        return versions[max(ready)].config if ready else None

    def workers_for(self, model: str, version: str = "") -> tuple[Worker, ...]:
        """The workers that serve it: those that are up first, of these the least busy. Raises as `metadata`."""
        _, found = self._ready(model, version)
        if len(found.workers) < 2:
            return found.workers
        return tuple(sorted(found.workers, key=lambda worker: (worker.state != "ready", self._blocks.load(worker.key))))

    def all(self) -> list[ModelMetadata]:
        """Every version that is known, and a model without any (version "") with the reason."""
        rows: list[ModelMetadata] = []
        for name, model in sorted(self.known.items()):
            rows += [self._metadata(name, number, version) for number, version in sorted(model.versions.items())]
            if not model.versions:
                rows.append(ModelMetadata(name=name, version="", state=UNAVAILABLE, reason=model.failure))
        return rows

    def statistics(self, model: str = "", version: str = "") -> list[dict[str, Any]]:
        """Triton's `model_stats` of the versions that are ready; of a named version whatever its state."""
        if model and model not in self.known:
            raise InferError(Code.INVALID_ARG, f"requested model '{model}' is not available")
        wanted = _version_number(version) if version else None
        if wanted is not None and (not model or wanted not in self.known[model].versions):
            raise InferError(Code.INVALID_ARG, f"requested model version is not available for model '{model}'")
        return [
            self._blocks.model_stats(name, number)
            for name, number, found in self.versions()
            if model in ("", name) and (number == wanted or (wanted is None and found.state == READY))
        ]

    def in_flight(self) -> dict[tuple[str, int], int]:
        """How many requests wait or run, of the versions that have any, whatever their state."""
        counts = {
            (name, number): self._blocks.in_flight(
                name, number, found.config is not None and found.config.ensemble is not None
            )
            for name, number, found in self.versions()
        }
        return {version: count for version, count in counts.items() if count}

    def load_seconds(self, model: str, version: int) -> float:
        """How long the latest load of a known version took that succeeded."""
        return self.known[model].versions[version].load_s

    def configured(self, model: str, version: int) -> ModelConfig | None:
        """With which configuration a known version serves, or served last; None: it never did."""
        return self.known[model].versions[version].config

    def backends(self) -> set[str]:
        """Those of the models that were loaded."""
        return {version.config.backend for _, _, version in self.versions() if version.config is not None}

    def table(self) -> str:
        """Triton's table of models at start."""
        rows = []
        for row in self.all():
            status = row.state if not row.reason else f"{row.state}: {row.reason}"
            rows.append((row.name, row.version or "-", row.reason if row.reason.startswith("Not loaded") else status))
        return ascii_table(("Model", "Version", "Status"), rows)

    def versions(self) -> Iterator[tuple[str, int, Version]]:
        """Every one that is known, by name and number."""
        for name, model in sorted(self.known.items()):
            for number, version in sorted(model.versions.items()):
                yield name, number, version

    def _ready(self, name: str, version: str) -> tuple[int, Version]:
        model = self.known.get(name)
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

    def _metadata(self, name: str, number: int, version: Version) -> ModelMetadata:
        state, reason = version.state, version.reason
        if state == READY and version.workers and all(worker.state != "ready" for worker in version.workers):
            # Requests are accepted all the same, and wait: only what is shown tells.
            worker = version.workers[0]
            state = UNAVAILABLE if worker.state == "stopped" else LOADING
            reason = worker.describe()
        config = version.config
        ready = (str(n) for n, found in sorted(self.known[name].versions.items()) if found.generation)
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
            workers=tuple(worker.key for worker in version.workers),
            decoupled=config.decoupled,
            max_batch_size_completed=config.max_batch_size_completed,
            correlation=_correlation(config),
            reads_parameters=self._reads_parameters(config),
        )

    def _reads_parameters(self, config: ModelConfig) -> bool:
        """May its code, or that of a member, look at them?"""
        if config.ensemble is None:
            return config.backend not in SHARED
        serving = (self.serving(step.model_name) for step in config.ensemble.step)
        return any(self._reads_parameters(member) for member in serving if member is not None)


def _correlation(config: ModelConfig) -> TensorMetadata | None:
    controls = config.sequence_batching.control_input if config.sequence_batching is not None else ()
    for control in controls:
        if control.kind == "CONTROL_SEQUENCE_CORRID":
            tensor = TensorConfig(name=control.name, datatype=control.datatype, dims=(1,))
            return tensor_metadata(tensor, config.max_batch_size > 0)
    return None


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
        raise no_version(text)
    return int(text)
