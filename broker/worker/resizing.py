"""A reload that changes nothing, or nothing but how many instances a model has: it goes on, with more or with fewer.

Called by `broker.worker.models` when a version is loaded that is loaded already. As in Triton, instances that both
configurations have are neither dropped nor made again, and what is queued stays queued. Everything else about the model
must be the same, its files included, and its queue must not depend on how many instances there are, as one of sequences
does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from broker.repository.config import InstanceGroup, ModelConfig, file_stamp
from broker.worker import backends
from broker.worker.model import Instance, LoadedModel, instance_count
from broker.worker.warm_up import warm_up

if TYPE_CHECKING:
    from broker.worker.loop import Loop

Files: TypeAlias = tuple[tuple[str, str], ...] | None  # path and stamp of each
MAX_FILES = 10_000


def files_of(config: ModelConfig, version: int) -> Files:
    """What a version is loaded from, its backend's code included; None: too much to compare."""
    found = [(path, file_stamp(path)) for path in [os.path.join(config.directory, "backend.py")]]
    walk = os.walk(config.versions.get(version, ""), followlinks=True)  # of a loop of links there is no end
    for directories, (directory, below, names) in enumerate(walk):
        below[:] = [name for name in below if name != "__pycache__"]
        found += [(path, file_stamp(path)) for path in (os.path.join(directory, name) for name in names)]
        if len(found) + directories > MAX_FILES:
            return None
    return tuple(sorted(found))


def possible(model: LoadedModel, config: ModelConfig, files: Files) -> bool:
    """Is `config` that of the loaded model, but for the number of instances, and are its `files` the same?"""
    old, batching = model.config, config.dynamic_batching
    if config.ensemble is not None or files != model.files or files is None or _rest(old) != _rest(config):
        return False
    if _groups(old) == _groups(config):
        return True
    if config.sequence_batching or config.decoupled or model.claims or (batching and batching.preserve_ordering):
        return False
    kind = _kind(config)
    return kind is not None and kind == _kind(old)


def resize(model: LoadedModel, config: ModelConfig, blocks: list[memoryview], loop: Loop) -> None:
    """Load what is missing, then let what is too much go when it has nothing to do.

    Raises what a backend raises; the model is as it was then.
    """
    count, scheduler = instance_count(config.instance_group), loop.scheduler
    names = _names(config)
    added: list[Instance] = []
    missing, before = scheduler.reserve(model, count)
    try:
        for index in missing:
            group, name = names[index]
            directory = config.versions[model.version]
            context = backends.Context(config, model.version, directory, group, name, model.device)
            runtime = backends.load_instance(backends.find(config), context)
            added.append(Instance(model, name, runtime, blocks[index], index))
            warm_up(config, runtime, model.shape)
    except BaseException:
        for instance in added:
            instance.close()
        scheduler.resize(model, (), before)
        raise
    model.config = config
    scheduler.resize(model, added, count)
    scheduler.close_retired()  # those that have nothing to do are gone when the load has ended, as in Triton
    loop.ask_for_watch()  # which ends with the last instance that is too much


def _rest(config: ModelConfig) -> ModelConfig:
    return replace(config, instance_group=(), json="", notes=(), origins={}, explanation="")


def _groups(config: ModelConfig) -> list[InstanceGroup]:
    return [replace(group, name="") for group in config.instance_group]


def _kind(config: ModelConfig) -> InstanceGroup | None:
    """What its instances are, if they are all alike. Names and groups are not part of it, as in Triton."""
    kinds = [replace(group, name="", count=1) for group in config.instance_group if group.count]
    return kinds[0] if kinds and kinds.count(kinds[0]) == len(kinds) else None


def _names(config: ModelConfig) -> list[tuple[InstanceGroup, str]]:
    return [(group, f"{group.name}_{number}") for group in config.instance_group for number in range(group.count)]
