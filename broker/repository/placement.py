"""Which workers a model's instances run in, by what its configuration says. Pure.

A worker is named by its key, "device/group": the device is "cpu" or "gpu" and the ordinal of a GPU as the broker sees
it, the group that of the model (`ModelConfig.worker_groups`). Used by `broker.version_life`, which loads models there,
and by `broker.repository.ensembles`.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from broker.repository.config import InstanceGroup, ModelConfig

CPU = "cpu"
DEFAULT = f"{CPU}/default"


def gpu_of(worker: str) -> int | None:
    """The ordinal of the GPU that a worker with this key is for; None: it is on the CPU."""
    device = worker.partition("/")[0]
    return None if device == CPU else int(device.removeprefix("gpu"))


def placed(config: ModelConfig) -> dict[str, ModelConfig]:
    """By worker, what it is given of `config`: its instances, with one GPU each at most. An ensemble has one worker."""
    if config.ensemble is not None:
        return {config.worker or f"{CPU}/{config.worker_groups[0]}": config}
    groups: dict[str, list[InstanceGroup]] = {}
    names = config.worker_groups
    for at, group in enumerate(config.instance_group):
        name = names[min(at, len(names) - 1)]
        for device, instances in _by_device(group):
            groups.setdefault(f"{device}/{name}", []).append(instances)
    if not groups:
        return {f"{CPU}/{names[0]}": config}
    return {key: replace(config, instance_group=tuple(each)) for key, each in groups.items()}


def _by_device(group: InstanceGroup) -> Iterable[tuple[str, InstanceGroup]]:
    if group.kind != "KIND_GPU":
        yield CPU, group
        return
    for gpu in group.gpus:
        yield f"gpu{gpu}", replace(group, gpus=(gpu,))
