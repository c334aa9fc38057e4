"""`tensorbroker explain MODEL`: a model's final configuration, where each value comes from, and where it runs.

Of a repository: runs the loader process, for an ensemble once more for its members: which workers its steps run in
follows from them. Of a running broker: asks it for what it serves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import msgspec

from broker.commands import NoAnswer, ask_config, with_gpus
from broker.ensemble_members import retryable
from broker.repository.check import check
from broker.repository.config import LoadFailure, ModelConfig
from broker.repository.ensemble_advice import advice
from broker.repository.ensembles import as_decoupled, members, workers_of
from broker.repository.scan import misplaced, scan
from broker.repository.scheduling import Step
from broker.tables import printable
from shm.errors import Code, InferError


def explain_served(directory: str, model: str, *, as_json: bool = False) -> int:
    """As `explain`, of what the broker in `directory` serves, the latest version. Returns 1 if that is nothing."""
    try:
        answer = ask_config(directory, model)
        result, *_ = found = [msgspec.msgpack.decode(each, type=ModelConfig) for each in answer.whole]
    except (NoAnswer, ValueError) as error:  # ValueError: what is no configuration, of another version of the broker
        print(printable(f"{error}\n(--model-repository DIR explains a model in a repository)"), file=sys.stderr)
        return 1
    configs = {each.name: each for each in found}
    missing = [name for name in _of(result) if name not in configs]
    problem = f"its members are not ready: {', '.join(missing)}" if missing else ""
    served = f"version {answer.version}, as the broker in {directory} serves it"
    return _print(result, _Members(configs, problem, served), as_json)


def explain(
    repositories: Sequence[str],
    model: str,
    *,
    as_json: bool = False,
    config_name: str = "",
    override: str | None = None,
) -> int:
    """Print the final configuration of one model, the origin of each value, and how every input is read.

    As text it is a config.pbtxt that changes nothing. `override`: a configuration in place of the model's own, as a
    load may bring it; None: none. Returns 1 when the model cannot be served.
    """
    overrides = {} if override is None else {model: override}
    try:
        found = scan(repositories)
        known = sorted({*found.models, *found.failures})
        if model not in known:
            reasons = (*found.errors.values(), *filter(None, map(misplaced, repositories)))
            raise InferError(
                Code.NOT_FOUND,
                "\n".join((f"no model '{model}' in the repository; there are: {', '.join(known) or 'none'}", *reasons)),
            )
        result = next(
            result
            for result in check(
                repositories,
                models=(model,),
                explain=True,
                config_name=config_name,
                overrides=overrides,
                on=with_gpus,
            )
            if result.name == model
        )
        if isinstance(result, LoadFailure):
            raise InferError(Code.INVALID_ARG, "\nalso: ".join((result.reason, *result.further)))
        others = _Members()
        if result.ensemble is not None:
            others = _members_of(result, repositories, known, config_name)
            result = as_decoupled(result, others.configs)
    except InferError as error:
        print(printable(error.message), file=sys.stderr)
        return 1
    return _print(result, others, as_json)


def _print(result: ModelConfig, others: _Members, as_json: bool) -> int:
    print(json.dumps(_explanation(result, others), indent=2) if as_json else _explained(result, others))
    return 1 if others.problem else 0


@final
class _Members(NamedTuple):
    """What an ensemble's members are, and members' members. `problem`: why it cannot be served with them, or "".

    `served`: which version a running broker serves so, or "".
    """

    configs: Mapping[str, ModelConfig] = {}
    problem: str = ""
    served: str = ""

    def serving(self, model: str) -> ModelConfig | None:
        """As `broker.ensemble_members.Serving`."""
        return self.configs.get(model)


def _members_of(ensemble: ModelConfig, repositories: Sequence[str], known: Sequence[str], config_name: str) -> _Members:
    configs: dict[str, ModelConfig] = {ensemble.name: ensemble}
    failures: dict[str, str] = {}
    wanted = [*_of(ensemble)]
    while wanted := [name for name in wanted if name in known and name not in configs and name not in failures]:
        results = check(repositories, models=wanted, config_name=config_name, on=with_gpus)
        failures |= {each.name: each.reason for each in results if isinstance(each, LoadFailure)}
        new = {each.name: each for each in results if isinstance(each, ModelConfig)}
        configs |= new
        wanted = [name for config in new.values() for name in _of(config)]
    return _Members(configs, advice(ensemble, configs, failures, known, config_name))


def _of(config: ModelConfig) -> tuple[str, ...]:
    return () if config.ensemble is None else members(config.ensemble)


def _workers(result: ModelConfig, others: _Members) -> tuple[str, ...]:
    """The workers of a model that can be served: a circle of ensembles has no end to follow."""
    return () if others.problem else workers_of(result, others.configs)


def _steps(result: ModelConfig, others: _Members) -> list[tuple[Step, tuple[str, ...]]]:
    """The steps of an ensemble that can be served, and the workers of each."""
    assert result.ensemble is not None
    configs = others.configs
    return [(step, workers_of(configs[step.model_name], configs)) for step in result.ensemble.step]


def _explained(result: ModelConfig, others: _Members) -> str:
    """config.pbtxt text; everything that is not configuration as comments."""
    workers, problem = _workers(result, others), others.problem
    again = not problem and retryable(others, result)
    about = [
        f"{result.name} in {result.directory}",
        *filter(None, (others.served,)),
        "origin of each value: file (config.pbtxt), model (the model's own files), default, override (came with the "
        "load)",
    ]
    if problem:
        about.append(f"cannot be served: {problem}")
    elif result.ensemble is None:
        about.append(f"workers: {', '.join(workers)}")
    else:
        about.append(f"worker: {workers[0]}, that of most of its steps' models; it sends the others their steps")
        for number, (step, keys) in enumerate(_steps(result, others)):
            version = f" version {step.model_version}" if step.model_version > 0 else ""
            about.append(f"step {number}, {step.model_name}{version}: {', '.join(keys)}")
    about += [
        f"versions: {', '.join(map(str, result.versions))}",
        f"retried after a worker's death: {'yes' if again else 'no'}",
        *(f"input {tensor.name}: {tensor.zero_copy_reason}" for tensor in result.input),
        *(f"note: {note}" for note in result.notes),
    ]
    comments = "\n".join(f"# {line}" for text in about for line in text.splitlines())
    return printable(f"{comments}\n\n{result.explanation}")


def _explanation(result: ModelConfig, others: _Members) -> dict[str, Any]:
    workers, problem = _workers(result, others), others.problem
    document = {
        "config": json.loads(result.json),
        "worker": ",".join(result.worker_groups if result.ensemble is None else workers),
        "versions": {str(version): path for version, path in result.versions.items()},
        "inputs": {
            tensor.name: {"zero_copy": tensor.zero_copy, "reason": tensor.zero_copy_reason} for tensor in result.input
        },
        "retried_after_worker_death": not problem and retryable(others, result),
        "notes": list(result.notes),
        "origins": result.origins,
    }
    if problem:
        document["cannot_be_served"] = problem
    elif result.ensemble is not None:
        document["steps"] = [
            {"model": step.model_name, "version": step.model_version, "workers": list(keys)}
            for step, keys in _steps(result, others)
        ]
    return document
