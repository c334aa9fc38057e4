"""What does not fit between an ensemble and its members, for the operator: the line, both sides, and the edit.

Used by `tensorbroker check` and `explain`; a wire has the first problem's text alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple, final

from broker.repository.config import ModelConfig
from broker.repository.ensembles import Problem, problems, triton_type
from broker.repository.pbtxt_lines import Field, fields
from shm.mismatch import INDENT, dims_text, side_by_side

MOST_PROBLEMS = 16  # that are shown of one ensemble
_MOST = 120  # characters of the line that are shown
_MAX_CONFIG = 1 << 20  # bytes, as the loader takes them


@final
class _Source(NamedTuple):
    """The ensemble's config.pbtxt. `lines` are those of its text, none if it cannot be read."""

    path: str
    lines: tuple[str, ...]
    fields: tuple[Field, ...]


def advice(
    config: ModelConfig,
    configs: Mapping[str, ModelConfig],
    failures: Mapping[str, str],
    models: Collection[str],
    config_name: str = "",
) -> str:
    """Every reason why an ensemble cannot be served with its members, each with its place and fix; "" if there is none.

    `configs`, `failures` as in `problems`; `models`: every name in the repositories, for one that is misspelt;
    `config_name`: `--model-config-name`. Reads the configuration's text.
    """
    found = tuple(problems(config, configs, failures))[:MOST_PROBLEMS]
    if not found:
        return ""
    source = _source(config.directory, config_name)
    said: list[str] = []
    for at, problem in enumerate(found):
        before = found[at - 1] if at else None
        if before is not None and before.text == problem.text:  # one text of Triton's is about several steps
            said[-1] += f"{INDENT}{_place(problem, source)}{_fix(problem, config, configs, models)}"
        elif not _follows(problem, found[:at]):
            said.append(f"{problem.text}{INDENT}{_place(problem, source)}{_fix(problem, config, configs, models)}")
    return "\nalso: ".join(said)


def _follows(problem: Problem, before: Sequence[Problem]) -> bool:
    """Does it end with the edit for one of those before it?"""
    if problem.field == "max_batch_size":
        return any(each.field == problem.field for each in before)
    # An input of the member that is not mapped, in a step that maps one that the member does not have.
    wrong_keys = (each for each in before if each.field == "input_map" and each.sides is None)
    return problem.field == "model_name" and any(each.step == problem.step for each in wrong_keys)


def _source(directory: str, config_name: str) -> _Source:
    path = os.path.join(directory, "config.pbtxt")
    if config_name and os.path.exists(named := os.path.join(directory, "configs", f"{config_name}.pbtxt")):
        path = named
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CONFIG)
    except (OSError, ValueError):
        return _Source(path, (), ())
    return _Source(path, tuple(text.split("\n")), tuple(fields(text)))


def _place(problem: Problem, source: _Source) -> str:
    """path:line: the line."""
    line = _line(problem, source.fields)
    if not line:
        return f"in {source.path}"
    return f"{source.path}:{line}: {source.lines[line - 1].strip()[:_MOST]}"


def _line(problem: Problem, found: Sequence[Field]) -> int:
    """0 if it is not to be found."""
    step = f"ensemble_scheduling[0].step[{problem.step}]"
    if problem.field in ("input_map", "output_map"):
        entries = (each for each in found if each.path.startswith(f"{step}.{problem.field}["))
        return next((each.line for each in entries if each.path.endswith(".key[0]") and each.value == problem.key), 0)
    paths = [f"{problem.field}[0]"] if problem.step < 0 or problem.field == "max_batch_size" else []
    if problem.step >= 0:
        paths += [f"{step}.{problem.field}[0]", step]
    lines = {each.path: each.line for each in reversed(found)}
    return next((lines[path] for path in paths if path in lines), 0)


def _fix(problem: Problem, config: ModelConfig, configs: Mapping[str, ModelConfig], models: Collection[str]) -> str:
    """Lines to append: both sides where there are two, and the edit."""
    if problem.sides is not None:
        return _two_sides(problem, config)
    fix = _edit(problem, config, configs, models)
    return f"{INDENT}fix: {fix}" if fix else ""


def _two_sides(problem: Problem, config: ModelConfig) -> str:
    assert problem.sides is not None
    first, other = problem.sides
    columns = [f"{'ensemble' if first.model == config.name else 'model'} {first.model}", "", f"model {other.model}"]
    columns[1] = f"step {problem.step}, {problem.field}"
    mapped = f'{{ key: "{problem.key}" value: "{problem.tensor}" }}'
    rows = [
        ("tensor", first.name, mapped, other.name),
        ("data_type", triton_type(first.datatype), "", triton_type(other.datatype)),
        ("dims", dims_text(first.dims), "", dims_text(other.dims)),
    ]
    return side_by_side(columns, rows, _sides_fix(problem, config))


def _sides_fix(problem: Problem, config: ModelConfig) -> str:
    assert problem.sides is not None
    first, other = problem.sides
    own = next((each for each in (*config.input, *config.output) if each.name == problem.tensor), None)
    if own is None or first.model != config.name:
        return f"map another tensor in this step, or put a step between {first.model} and {other.model} that converts"
    edits = [f"data_type: {triton_type(other.datatype)}"] if first.datatype != other.datatype else []
    if len(first.dims) != len(other.dims) or any(
        here != there and -1 not in (here, there) for here, there in zip(first.dims, other.dims, strict=True)
    ):
        edits.append(
            f"{'dims' if own.reshape is None else 'reshape, so that the steps get dims'}: {dims_text(other.dims)}"
        )
    kind = "input" if own in config.input else "output"
    return f"{', '.join(edits)} for {kind} '{own.name}' of {config.name}"


def _edit(problem: Problem, config: ModelConfig, configs: Mapping[str, ModelConfig], models: Collection[str]) -> str:
    if problem.field == "max_batch_size":
        return f"max_batch_size: {_largest_batch(config, configs)}, as far as all its members go"
    if problem.field == "response_cache":
        return "leave 'response_cache' out"
    if problem.step < 0:
        return ""
    assert config.ensemble is not None
    step = config.ensemble.step[problem.step]
    if problem.field == "model_version":
        return f"model_version: -1 (the newest that serves), or one that serves: {problem.key}"
    if problem.field == "model_name":
        if step.model_name in configs and problem.key:
            return f'input_map {{ key: "{problem.key}" value: the ensemble\'s tensor for it }} in this step'
        if not problem.key:
            return ""
        others = [name for name in models if name not in (config.name, step.model_name)]
        near = get_close_matches(step.model_name, others, n=1, cutoff=0.4)
        return f'model_name: "{near[0]}"' if near else f"the repository has {', '.join(sorted(others)) or 'no others'}"
    return _map_edit(problem, config, configs[step.model_name])


def _map_edit(problem: Problem, config: ModelConfig, member: ModelConfig) -> str:
    """For a key of a step's map that its model does not have."""
    assert config.ensemble is not None
    step = config.ensemble.step[problem.step]
    taken = step.input_map if problem.field == "input_map" else step.output_map
    names = [each.name for each in (member.input if problem.field == "input_map" else member.output)]
    free = [name for name in names if name not in taken]
    if problem.tensor in names:
        return f'{problem.field} {{ key: "{problem.tensor}" value: "{problem.key}" }}: the key is the model\'s tensor'
    folded = {name.lower(): name for name in free}
    near = [folded[name] for name in get_close_matches(problem.key.lower(), folded, n=1, cutoff=0.5)]
    if meant := near or (free if len(free) == 1 else []):
        return f'key: "{meant[0]}"'
    return f"leave this entry out; the {problem.field.partition('_')[0]}s of {member.name} are {', '.join(names)}"


def _largest_batch(config: ModelConfig, configs: Mapping[str, ModelConfig]) -> int:
    assert config.ensemble is not None
    sizes = [configs[step.model_name].max_batch_size for step in config.ensemble.step]
    return min(size for size in sizes if size > 0)
