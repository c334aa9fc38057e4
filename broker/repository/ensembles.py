"""Does an ensemble fit its members? Pure: configurations in, Triton's text of the first broken rule out.

For whoever loads an ensemble: it is loaded after its members, whose completed configurations are needed here. What an
ensemble's own text can tell (steps, maps, tensors that nobody writes) the loader has checked before
(`loader.validate_ensemble`). Texts are Triton's (core, ensemble_utils.cc and model_repository_manager.cc) where it
has one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, final

from broker.repository.config import ModelConfig, TensorConfig
from broker.repository.placement import placed
from broker.repository.scheduling import Ensemble, Step
from shm.errors import Code, InferError


@final
class _Tensor(NamedTuple):
    """What one model says about an ensemble's tensor. `dims` without batch dimension, `full` with it."""

    model: str
    datatype: str
    dims: tuple[int, ...]
    full: tuple[int, ...]


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
    """Triton's text of why an ensemble cannot be served with its members as they are, or "".

    `configs`: model → its configuration, of every model that serves (or would). `failures`: model → why it does not, ""
    if it was unloaded. `loaded`: model → its versions that serve; None: all that it has. `coming`: those that are about
    to be loaded.
    """
    assert config.ensemble is not None
    known = {**coming, **configs, config.name: config}
    if problem := cycle(
        config.name, {name: each.ensemble for name, each in known.items() if each.ensemble is not None}
    ):
        return problem
    wanted = members(config.ensemble)
    if absent := [name for name in wanted if name not in configs and name not in failures and name != config.name]:
        return f"ensemble {config.name} contains models that are not available or ambiguous: {', '.join(absent)}"
    if loaded is None:
        loaded = {name: tuple(each.versions) for name, each in configs.items()}
    try:
        check_available(config, loaded, failures)
        check_members(config, configs)
    except InferError as error:
        return error.message
    return ""


def check_available(config: ModelConfig, loaded: Mapping[str, tuple[int, ...]], failures: Mapping[str, str]) -> None:
    """Raise InferError INVALID_ARG if a member has no version that serves, or not the one that a step asks for.

    `loaded`: model → its versions that serve. `failures`: model → why it could not be loaded.
    """
    assert config.ensemble is not None
    for step in config.ensemble.step:
        versions = loaded.get(step.model_name, ())
        start = f"ensemble '{config.name}' depends on '{step.model_name}'"
        if not versions:
            why = failures.get(step.model_name, "")
            more = f" Model '{step.model_name}' loading failed with error: {why}" if why else ""
            raise InferError(Code.INVALID_ARG, f"{start} which has no loaded version.{more}")
        if step.model_version != -1 and step.model_version not in versions:
            raise InferError(Code.INVALID_ARG, f"{start} whose required version {step.model_version} is not loaded.")


def check_members(config: ModelConfig, configs: Mapping[str, ModelConfig]) -> None:
    """Raise InferError INVALID_ARG if tensors or batch sizes do not fit.

    `configs`: the completed configuration of every member; `check_available` has been asked before.
    """
    assert config.ensemble is not None
    known = {tensor.name: _own(config, tensor) for tensor in (*config.input, *config.output)}
    for step in config.ensemble.step:
        member = configs[step.model_name]
        if 0 < member.max_batch_size < config.max_batch_size:
            raise InferError(
                Code.INVALID_ARG,
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
                f"{member.name} which only allows maximum batch size to be {member.max_batch_size}",
            )
        _check_inputs(config.name, step, member, known)
        _check_outputs(config.name, step, member, known)
    _check_responses(config, config.ensemble, configs)
    if config.response_cache and is_decoupled(config, configs):
        raise InferError(
            Code.INVALID_ARG,
            f"Response Cache does not currently support model {config.name} with 'decoupled' transaction policy. "
            "Please disable the response cache.",
        )


def _check_inputs(ensemble: str, step: Step, member: ModelConfig, known: dict[str, _Tensor]) -> None:
    names = {tensor.name for tensor in member.input}
    for name, tensor in step.input_map.items():
        if name not in names:
            raise InferError(
                Code.INVALID_ARG,
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{member.name}",
            )
    for given in member.input:
        if given.name in step.input_map:
            _compare(ensemble, step.input_map[given.name], _stated(member, given), known)
        elif not given.optional:
            raise InferError(
                Code.INVALID_ARG,
                f"in ensemble {ensemble}, input {given.name} in model {member.name} is not mapped to any ensemble "
                "tensors",
            )


def _check_outputs(ensemble: str, step: Step, member: ModelConfig, known: dict[str, _Tensor]) -> None:
    outputs = {tensor.name: tensor for tensor in member.output}
    for name, tensor in step.output_map.items():
        if name not in outputs:
            raise InferError(
                Code.INVALID_ARG,
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} in "
                f"model {member.name}",
            )
        _compare(ensemble, tensor, _stated(member, outputs[name]), known)


def _compare(ensemble: str, name: str, other: _Tensor, known: dict[str, _Tensor]) -> None:
    """A variable size fits any; whether it really does is seen when the ensemble runs."""
    first = known.setdefault(name, other)
    start = f"in ensemble {ensemble}, ensemble tensor {name}: "
    if first.datatype != other.datatype:
        raise InferError(
            Code.INVALID_ARG,
            f"{start}inconsistent data type: {_triton(first.datatype)} is inferred from model {first.model} while "
            f"{_triton(other.datatype)} is inferred from model {other.model}",
        )
    if not (_fits(first.dims, other.dims) or _fits(first.full, other.full)):
        raise InferError(
            Code.INVALID_ARG,
            f"{start}inconsistent shape: {_text(first.full)} is inferred from model {first.model} while "
            f"{_text(other.full)} is inferred from model {other.model}",
        )


def is_decoupled(config: ModelConfig, configs: Mapping[str, ModelConfig]) -> bool:
    """Does a request for the ensemble have any number of responses? Its own configuration need not say so."""
    names = members(config.ensemble) if config.ensemble is not None else ()
    return config.decoupled or any(configs[name].decoupled for name in names if name in configs)


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
            known[at] = most | {at} if configs[step.model_name].decoupled else most
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
    return _tensor(config, tensor.datatype, dims)


def _stated(config: ModelConfig, tensor: TensorConfig) -> _Tensor:
    """As a member's clients see it: its reshape is its own."""
    return _tensor(config, tensor.datatype, tensor.dims)


def _tensor(config: ModelConfig, datatype: str, dims: tuple[int, ...]) -> _Tensor:
    return _Tensor(config.name, datatype, dims, (-1, *dims) if config.max_batch_size else dims)


def _fits(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _triton(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _text(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"
