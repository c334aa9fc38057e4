"""Ensembles among the models that are known: who uses whom, in which order they load, what keeps one from serving.

Pure, on what `broker.catalogue` knows; used by `broker.models`. The rules themselves are in
`broker.repository.ensembles`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from msgspec.structs import replace

from broker.catalogue import UNAVAILABLE, UNLOADED, Catalogue
from broker.repository import ensembles
from broker.repository.config import ModelConfig, RemoteMember
from broker.repository.ensembles import members


def misfit(catalogue: Catalogue, config: ModelConfig, coming: Mapping[str, ModelConfig] = MappingProxyType({})) -> str:
    """Why an ensemble cannot be served with its members as they are (Triton's text), or "". `coming`: what is loaded
    with it.
    """
    configs: dict[str, ModelConfig] = {}
    failures: dict[str, str] = {}
    loaded: dict[str, tuple[int, ...]] = {}
    for name, model in catalogue.known.items():
        loaded[name] = tuple(number for number, version in model.versions.items() if version.generation)
        serving = catalogue.serving(name)
        if serving is not None:
            configs[name] = serving
        else:
            reasons = (version.reason for version in model.versions.values() if version.state == UNAVAILABLE)
            failed = (reason for reason in reasons if reason and not reason.startswith(UNLOADED))
            failures[name] = model.failure or next(failed, "")
    return ensembles.misfit(replace(config, worker=""), configs, failures, loaded, coming)


def as_members_are(catalogue: Catalogue, config: ModelConfig) -> ModelConfig:
    """The ensemble's configuration with what follows from its members.

    It is decoupled if one of them is, an output without class names of its own has those of the member's, and its
    worker is the one of most members: steps of the others go to theirs.
    """
    serving = {name: catalogue.serving(name) for name in catalogue.known}
    configs = {name: each for name, each in serving.items() if each is not None}
    labels = ensembles.labels(config, configs)
    config = replace(
        config,
        output=tuple(replace(each, labels=labels[each.name]) for each in config.output),
        worker=ensembles.workers_of(replace(config, worker=""), configs)[0],  # members may have moved
    )
    return ensembles.as_decoupled(replace(config, remote=_remote(catalogue, config)), configs)


def _remote(catalogue: Catalogue, config: ModelConfig) -> dict[int, RemoteMember]:
    """The members in other workers than the ensemble's, by the number of the step."""
    assert config.ensemble is not None
    found: dict[int, RemoteMember] = {}
    for at, step in enumerate(config.ensemble.step):
        name = step.model_name
        number = str(step.model_version) if step.model_version > 0 else ""
        keys = [worker.key for worker in catalogue.workers_for(name, number)]
        member, _ = catalogue.config(name, number)
        if config.worker not in keys:
            found[at] = RemoteMember(
                workers=tuple(sorted(keys)),
                config=member.as_remote,
                sequences=member.sequence_batching is not None or member.ensemble is not None,  # which may have some
                retry=retryable(catalogue, member),
            )
    return found


def ensembles_of(catalogue: Catalogue, member: str) -> list[str]:
    """Those that are loaded and use it."""
    found = []
    for name in catalogue.known:
        config = catalogue.serving(name)
        if config is not None and config.ensemble is not None and member in members(config.ensemble):
            found.append(name)
    return found


def all_ensembles_of(catalogue: Catalogue, member: str) -> set[str]:
    """The same, and those that use these in turn."""
    found: set[str] = set()
    todo = [member]
    while todo:
        new = set(ensembles_of(catalogue, todo.pop())) - found
        found |= new
        todo += new
    return found


class Serving(Protocol):
    """As much of the catalogue as `retryable` needs."""

    def serving(self, model: str) -> ModelConfig | None:
        """The configuration of the latest version that is ready."""


def retryable(catalogue: Serving, config: ModelConfig) -> bool:
    """May its requests run once more after a worker's death? Those of an ensemble as a whole, if every member's may."""
    if config.ensemble is None:
        return config.retryable
    serving = [catalogue.serving(name) for name in members(config.ensemble)]
    return config.retryable and all(member is not None and retryable(catalogue, member) for member in serving)


def with_members(config: ModelConfig, serving: Callable[[str], ModelConfig | None]) -> list[ModelConfig]:
    """`config`, then what serves of its members, and of theirs, each once."""
    found = {config.name: config}
    waiting = [config]
    while waiting:
        ensemble = waiting.pop().ensemble
        for name in members(ensemble) if ensemble is not None else ():
            if name not in found and (member := serving(name)) is not None:
                found[name] = member
                waiting.append(member)
    return list(found.values())


def members_first(configs: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    """The ensembles among `configs`, each after those of its members that are ensembles; cycles in any order."""
    ordered: dict[str, ModelConfig] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        config = configs.get(name)
        if name in seen or config is None or config.ensemble is None:
            return
        seen.add(name)
        for member in members(config.ensemble):
            visit(member)
        ordered[name] = config

    for name in configs:
        visit(name)
    return list(ordered.values())
