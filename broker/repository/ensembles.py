"""Does an ensemble fit its members? Pure: configurations in, the broken rules with Triton's texts out.

For whoever loads an ensemble: it is loaded after its members, whose completed configurations are needed here. What an
ensemble's own text can tell (steps, maps, tensors that nobody writes) the loader has checked before
(`loader.validate_ensemble`). Texts are Triton's (core, ensemble_utils.cc and model_repository_manager.cc) where it
has one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, final

from msgspec.structs import replace

from broker.repository.config import ModelConfig, TensorConfig
from broker.repository.placement import placed
from broker.repository.scheduling import Ensemble, Step
from shm.errors import Code, InferError

_NOT_DECOUPLED = "model_transaction_policy is ignored: none of the ensemble's members is decoupled"


@final
class _Tensor(NamedTuple):
    """What one model says about an ensemble's tensor. `dims` without batch dimension, `full` with it."""

    model: str
    name: str
    datatype: str
    dims: tuple[int, ...]
    full: tuple[int, ...]


@final
class Problem(NamedTuple):
    """One rule that is broken: `text` in Triton's words, and what it is about.

    `step`: index of the step, -1: none; `field`: which of its fields, or of the configuration's; `key`: which entry of
    that map. `tensor`: the ensemble's, of which `sides` are the two statements that do not fit.
    """

    text: str
    step: int = -1
    field: str = ""
    key: str = ""
    tensor: str = ""
    sides: tuple[_Tensor, _Tensor] | None = None


def members(ensemble: Ensemble) -> tuple[str, ...]:
    """The models of the steps, each once, in the order of their first step."""
    return tuple(dict.fromkeys(step.model_name for step in ensemble.step))


def labels(config: ModelConfig, configs: Mapping[str, ModelConfig]) -> dict[str, bytes]:
    """Class names of each output: its own label file's, else those of the output of the step that writes it.

    `configs`: the configuration of every member.
    """
    assert config.ensemble is not None
    found = {
        tensor: output.labels
        for step in config.ensemble.step
        for output in configs[step.model_name].output
        if (tensor := step.output_map.get(output.name)) is not None
    }
    return {output.name: output.labels or found.get(output.name, b"") for output in config.output}


def cycle(name: str, ensembles: Mapping[str, Ensemble]) -> str:
    """Triton's text if the ensemble `name` is a member of itself through others, else "".

    `ensembles`: every ensemble known, by model name; a member that is not among them is a plain model, or missing.
    """
    path: list[str] = []
    finished: set[str] = set()

    def visit(model: str) -> str:
        if model in path:
            return f"circular dependency between ensembles: {model} -> ... -> {path[-1]} -> {model}"
        if model in finished or model not in ensembles:
            return ""
        path.append(model)
        found = next(filter(None, map(visit, members(ensembles[model]))), "")
        path.pop()
        finished.add(model)
        return found

    return visit(name)


def misfit(
    config: ModelConfig,
    configs: Mapping[str, ModelConfig],
    failures: Mapping[str, str],
    loaded: Mapping[str, tuple[int, ...]] | None = None,
    coming: Mapping[str, ModelConfig] = MappingProxyType({}),
) -> str:
    """Triton's text of why an ensemble cannot be served with its members as they are, or ""; as `problems`."""
    return next((problem.text for problem in problems(config, configs, failures, loaded, coming)), "")


def problems(
    config: ModelConfig,
    configs: Mapping[str, ModelConfig],
    failures: Mapping[str, str],
    loaded: Mapping[str, tuple[int, ...]] | None = None,
    coming: Mapping[str, ModelConfig] = MappingProxyType({}),
) -> Iterator[Problem]:
    """Why an ensemble cannot be served with its members as they are, in the order in which Triton looks.

    `configs`: model → its configuration, of every model that serves (or would). `failures`: model → why it does not, ""
    if it was unloaded. `loaded`: model → its versions that serve; None: all that it has. `coming`: those that are about
    to be loaded.
    """
    assert config.ensemble is not None
    steps = config.ensemble.step
    known = {**coming, **configs, config.name: config}
    ensembles = {name: each.ensemble for name, each in known.items() if each.ensemble is not None}
    if text := cycle(config.name, ensembles):
        inner = (at for at, step in enumerate(steps) if step.model_name in (*text.split(" -> "), config.name))
        yield Problem(text, next(inner, -1), "model_name")
        return
    wanted = members(config.ensemble)
    if absent := [name for name in wanted if name not in configs and name not in failures and name != config.name]:
        text = f"ensemble {config.name} contains models that are not available or ambiguous: {', '.join(absent)}"
        for at, step in enumerate(steps):
            if step.model_name in absent:
                yield Problem(text, at, "model_name", step.model_name)
        return
    if loaded is None:
        loaded = {name: tuple(each.versions) for name, each in configs.items()}
    unavailable = list(unavailable_members(config, loaded, failures))
    yield from unavailable
    if not unavailable:
        yield from unfit_members(config, configs)


def unavailable_members(
    config: ModelConfig, loaded: Mapping[str, tuple[int, ...]], failures: Mapping[str, str]
) -> Iterator[Problem]:
    """Members that have no version that serves, or not the one that a step asks for.

    `loaded`: model → its versions that serve. `failures`: model → why it could not be loaded.
    """
    assert config.ensemble is not None
    for at, step in enumerate(config.ensemble.step):
        versions = loaded.get(step.model_name, ())
        start = f"ensemble '{config.name}' depends on '{step.model_name}'"
        if not versions:
            why = failures.get(step.model_name, "")
            more = f" Model '{step.model_name}' loading failed with error: {why}" if why else ""
            yield Problem(f"{start} which has no loaded version.{more}", at, "model_name")
        elif step.model_version != -1 and step.model_version not in versions:
            text = f"{start} whose required version {step.model_version} is not loaded."
            yield Problem(text, at, "model_version", ", ".join(map(str, versions)))


def unfit_members(config: ModelConfig, configs: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    """Tensors and batch sizes that do not fit, and what follows from decoupled members.

    `configs`: the completed configuration of every member, all of which are available.
    """
    assert config.ensemble is not None
    known = {tensor.name: _own(config, tensor) for tensor in (*config.input, *config.output)}
    for at, step in enumerate(config.ensemble.step):
        member = configs[step.model_name]
        if 0 < member.max_batch_size < config.max_batch_size:
            yield Problem(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
                f"{member.name} which only allows maximum batch size to be {member.max_batch_size}",
                at,
                "max_batch_size",
            )
        yield from _unfit_inputs(config.name, at, step, member, known)
        yield from _unfit_outputs(config.name, at, step, member, known)
    try:
        _check_responses(config, config.ensemble, configs)
    except InferError as error:
        yield Problem(error.message)
    if config.response_cache and is_decoupled(config, configs):
        yield Problem(
            f"Response Cache does not currently support model {config.name} with 'decoupled' transaction policy. "
            "Please disable the response cache.",
            field="response_cache",
        )


def _unfit_inputs(
    ensemble: str, at: int, step: Step, member: ModelConfig, known: dict[str, _Tensor]
) -> Iterator[Problem]:
    names = {tensor.name for tensor in member.input}
    for name, tensor in step.input_map.items():
        if name not in names:
            text = (
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{member.name}"
            )
            yield Problem(text, at, "input_map", name, tensor)
    for given in member.input:
        if given.name in step.input_map:
            place = Problem("", at, "input_map", given.name, step.input_map[given.name])
            yield from _compared(ensemble, place, _stated(member, given), known)
        elif not given.optional:
            text = (
                f"in ensemble {ensemble}, input {given.name} in model {member.name} is not mapped to any ensemble "
                "tensors"
            )
            yield Problem(text, at, "model_name", given.name)


def _unfit_outputs(
    ensemble: str, at: int, step: Step, member: ModelConfig, known: dict[str, _Tensor]
) -> Iterator[Problem]:
    outputs = {tensor.name: tensor for tensor in member.output}
    for name, tensor in step.output_map.items():
        place = Problem("", at, "output_map", name, tensor)
        if name in outputs:
            yield from _compared(ensemble, place, _stated(member, outputs[name]), known)
        else:
            text = (
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} in "
                f"model {member.name}"
            )
            yield place._replace(text=text)


def _compared(ensemble: str, place: Problem, other: _Tensor, known: dict[str, _Tensor]) -> Iterator[Problem]:
    """A variable size fits any; whether it really does is seen when the ensemble runs."""
    first = known.setdefault(place.tensor, other)
    start = f"in ensemble {ensemble}, ensemble tensor {place.tensor}: "
    if first.datatype != other.datatype:
        known[place.tensor] = other  # what else reads it is compared with the members
        text = (
            f"{start}inconsistent data type: {triton_type(first.datatype)} is inferred from model {first.model} while "
            f"{triton_type(other.datatype)} is inferred from model {other.model}"
        )
        yield place._replace(text=text, sides=(first, other))
    elif not (_fits(first.dims, other.dims) or _fits(first.full, other.full)):
        known[place.tensor] = other
        text = (
            f"{start}inconsistent shape: {_text(first.full)} is inferred from model {first.model} while "
            f"{_text(other.full)} is inferred from model {other.model}"
        )
        yield place._replace(text=text, sides=(first, other))


def is_decoupled(config: ModelConfig, configs: Mapping[str, ModelConfig]) -> bool:
    """Does a request have any number of responses? Of an ensemble, if a member's do, whatever it says itself.

    `configs`: at least those of an ensemble's members, and of these.
    """
    if config.ensemble is None:
        return config.decoupled
    seen = set(todo := [*members(config.ensemble)])
    while todo:
        member = configs.get(todo.pop())
        if member is None:
            continue
        if member.ensemble is None:
            if member.decoupled:
                return True
            continue
        todo += (new := set(members(member.ensemble)) - seen)
        seen |= new
    return False


def as_decoupled(config: ModelConfig, configs: Mapping[str, ModelConfig]) -> ModelConfig:
    """An ensemble decoupled as its members are, as in Triton, with a note if it says more. `configs` as above."""
    decoupled = is_decoupled(config, configs)
    if decoupled == config.decoupled:
        return config
    stated = {**json.loads(config.json), "model_transaction_policy": {"decoupled": decoupled}}
    notes = config.notes if decoupled else (*config.notes, _NOT_DECOUPLED)
    return replace(config, decoupled=decoupled, json=json.dumps(stated), notes=notes)


def _check_responses(config: ModelConfig, ensemble: Ensemble, configs: Mapping[str, ModelConfig]) -> None:
    """A step may read what follows from one response of one decoupled member, or of one after the other: of two side by
    side, nothing says which response of the one belongs to which of the other. So it is with the ensemble's outputs,
    which Triton calls a step of the ensemble itself.
    """
    writer = {tensor: at for at, step in enumerate(ensemble.step) for tensor in step.output_map.values()}
    known: dict[int, frozenset[int]] = {}

    def behind(tensors: Collection[str], reader: str) -> frozenset[int]:
        """The decoupled steps that these tensors follow from."""
        found = [written(writer[tensor]) for tensor in tensors if tensor in writer]
        most = max(found, key=len, default=frozenset())
        if any(not each <= most for each in found):
            raise InferError(
                Code.INVALID_ARG,
                f"in ensemble {config.name}, step of model '{reader}' receives inputs originated from different "
                f"decoupled models: of {', '.join(map(repr, tensors))}, which response belongs to which is not defined",
            )
        return most

    def written(at: int) -> frozenset[int]:
        if at not in known:
            step = ensemble.step[at]
            most = behind(step.input_map.values(), step.model_name)
            known[at] = most | {at} if is_decoupled(configs[step.model_name], configs) else most
        return known[at]

    for at in range(len(ensemble.step)):
        written(at)
    behind([tensor.name for tensor in config.output], config.name)


def workers_of(config: ModelConfig, configs: Mapping[str, ModelConfig]) -> tuple[str, ...]:
    """The keys of a model's workers. An ensemble has one, that of most of its members; of several, the first member's.

    `configs`: at least those of an ensemble's members, which are no circle.
    """
    if config.ensemble is None or config.worker:
        return tuple(placed(config))
    found = [key for name in members(config.ensemble) if name in configs for key in workers_of(configs[name], configs)]
    return (max(found, key=found.count),) if found else tuple(placed(config))


def _own(config: ModelConfig, tensor: TensorConfig) -> _Tensor:
    """As the ensemble states it: what a reshape makes of it is what steps get."""
    dims = tensor.dims if tensor.reshape is None else tensor.reshape
    return _tensor(config, tensor, dims)


def _stated(config: ModelConfig, tensor: TensorConfig) -> _Tensor:
    """As a member's clients see it: its reshape is its own."""
    return _tensor(config, tensor, tensor.dims)


def _tensor(config: ModelConfig, tensor: TensorConfig, dims: tuple[int, ...]) -> _Tensor:
    return _Tensor(config.name, tensor.name, tensor.datatype, dims, (-1, *dims) if config.max_batch_size else dims)


def _fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def triton_type(datatype: str) -> str:
    """As config.pbtxt spells it."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _text(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"
