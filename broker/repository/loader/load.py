"""One model directory in, one `ModelConfig` or one reason out.

Called by the process's main loop, model by model. The order of the steps is Triton's: text, backend, auto-completion,
defaults, validation, comparison with the model file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace
from tritonclient.grpc import model_config_pb2

from broker.repository.config import LoadFailure, ModelConfig, file_stamp
from broker.repository.loader import pbtxt
from broker.repository.loader.backend import (
    CUSTOM_BACKEND,
    ENSEMBLE,
    MAX_LISTED,
    MODEL_FILES,
    NO_BACKEND,
    fill_backend,
    instead,
    overshadowed,
)
from broker.repository.loader.complete import compare, complete
from broker.repository.loader.convert import to_model_config
from broker.repository.loader.failure import ModelError
from broker.repository.loader.files import named, read_file
from broker.repository.loader.grants import verdicts
from broker.repository.loader.normalise import normalise
from broker.repository.loader.onnx_file import Signature, read_model, read_signature
from broker.repository.loader.origins import DEFAULT, FILE, MODEL, OVERRIDE, Origins
from broker.repository.loader.own_code import check_code
from broker.repository.loader.padding import with_padding
from broker.repository.loader.parameters import check_parameters
from broker.repository.loader.support import ignored, ignored_files
from broker.repository.loader.validate import validate
from broker.repository.loader.validate_ensemble import check_mapped_once, validate_ensemble
from broker.repository.loader.where import located
from broker.repository.loader.zero_copy import Verdict, policy
from broker.repository.protocol import LoadRequest
from broker.repository.scan import ModelDirectory, Versions, list_versions, misnamed, why_no_version


class ReadVersion(NamedTuple):
    """What the model file of one version says."""

    number: int
    path: str
    signature: Signature
    policy: Mapping[str, Verdict]
    stamp: str


def load(model: ModelDirectory, request: LoadRequest) -> ModelConfig | LoadFailure:
    """Configure one model. Whatever its files contain, the answer is a value."""
    versions: tuple[int, ...] = ()
    cause = 0
    if model.name in request.overrides:
        model = replace(model, links=False)
    try:
        return _load(model, request)
    except ModelError as error:
        reason, versions, cause = located_in(error, model, request), error.versions, error.cause
    except OSError as error:
        reason = f"{error.filename or model.path}: {error.strerror or error}"
    except MemoryError:
        reason = "the model's files need more memory than the loader can get"
    except Exception as error:  # a parser's own exception on a file that nobody foresaw
        reason = f"its files cannot be understood: {type(error).__name__}: {error}"
    if not os.path.lexists(os.path.join(model.path, "config.pbtxt")):
        reason = "\n    ".join((reason, *misnamed(model.path)))
    return LoadFailure(name=model.name, reason=reason, versions=versions, cause=cause)


def located_in(error: ModelError, model: ModelDirectory, request: LoadRequest) -> str:
    """The text of `error` with its place in the configuration's file."""
    reason = str(error)
    if model.name in request.overrides or reason.startswith(os.path.join(model.path, CUSTOM_BACKEND)):
        return reason  # not about that file's text
    try:
        path = config_path(model, request.config_name)
        text = read_file(path, pbtxt.MAX_CONFIG, "").decode()
        if unfilled := [each for each in pbtxt.placeholders(text) if each in reason.partition("\n")[0]]:
            reason = reason.partition("\n")[0] + pbtxt.template_advice(unfilled)  # no other edit will do
        return located(reason, path, text, model.name, error.field, error.value)
    except (ModelError, UnicodeDecodeError):
        return reason


def _load(model: ModelDirectory, request: LoadRequest) -> ModelConfig:
    origins = Origins()
    parsed = _read_config(model, request, origins)
    config, notes = parsed.config, [*parsed.notes]
    versions, none_served = served_versions(config, model, notes)
    newest_first = dict(reversed(versions.items()))
    find_backend(config, model, versions, none_served)
    notes += [*ignored(config), *ignored_files((model.path, *versions.values())), *overshadowed(config, model)]
    _check_file_name(config, model, versions)
    with _about(versions):
        check_code(model)
    notes += check_parameters(config)
    written = frozenset(text.name for text in config.input)
    origins.mark(config, MODEL)
    read: list[ReadVersion] = []
    completed = False
    try:
        if none_served:
            raise ModelError(none_served, "version_policy")
        if config.backend == "onnxruntime":
            number, path = next(iter(newest_first.items()))
            with _about(versions, number):
                read.append(read_version(config, model, number, path))
    except ModelError:
        if config.input and config.output:
            # As in Triton, what is wrong with the text is said before what is missing beside it.
            _finish(config, model, request, origins, (), [])
        raise
    if read and not request.strict:
        with _about(versions, read[0].number):
            notes += complete(config, read[0].signature, parsed.states_max_batch_size, request.default_max_batch_size)
        completed = config.max_batch_size > 0 and not parsed.states_max_batch_size
        origins.mark(config, MODEL)
    _finish(config, model, request, origins, read, notes)
    if read:
        with _about(versions, read[0].number):
            compare(config, read[0].signature, read[0].path, written)
        _read_older(config, model, list(newest_first.items())[1:], versions, read, notes)
    final = to_model_config(
        config,
        model,
        versions,
        [version.signature for version in read],
        verdicts(config, [(version.number, version.policy) for version in read]),
        notes,
        stamps={version.number: version.stamp for version in read},
        max_batch_size_completed=completed,
        origins=origins if request.explain else None,
    )
    return with_padding(final)


def find_backend(
    config: model_config_pb2.ModelConfig, model: ModelDirectory, versions: Mapping[int, str], none_served: str
) -> None:
    """Fill it in, and what follows from it. `versions`, `none_served`: of `served_versions`. Raises ModelError."""
    # Where the policy chooses none of the versions, those that are there show what the model is made for.
    paths = list(versions.values()) or list(list_versions(model).paths.values())
    try:
        fill_backend(config, model, paths[::-1])
    except ModelError as error:
        if not none_served:
            if str(error).startswith(NO_BACKEND):
                error.versions = tuple(versions)
            raise
        is_empty = not any(field.name != "name" for field, _ in config.ListFields())
        raise ModelError(none_served if is_empty else f"{error}\n    {none_served}") from error


@contextlib.contextmanager
def _about(versions: Collection[int], cause: int = 0) -> Iterator[None]:
    """What fails is what the configuration needs to be served, not its text: in Triton that shows when it is loaded.

    `cause`: the version that is looked at. As in Triton, none is served then.
    """
    try:
        yield
    except ModelError as error:
        error.versions, error.cause = tuple(versions), cause
        raise


def _finish(
    config: model_config_pb2.ModelConfig,
    model: ModelDirectory,
    request: LoadRequest,
    origins: Origins,
    read: Sequence[ReadVersion],
    notes: list[str],
) -> None:
    """Defaults and rules, once the model file has said what it can."""
    if config.platform == ENSEMBLE:
        validate_ensemble(config)
    check_directory_name(config, model)
    on_cpu = config.backend in request.on_cpu and bool(request.gpus)
    if normalise(config, request.gpus, on_cpu=on_cpu) and config.backend == "onnxruntime":
        notes.append("its instances are on the CPU: the onnxruntime that is installed uses no GPU")
    origins.mark(config, DEFAULT)
    tensors = [tensor for version in read for tensor in (*version.signature.inputs, *version.signature.outputs)]
    scalars = frozenset(tensor.name for tensor in tensors if tensor.shape == ())
    validate(config, model, request.gpus, scalars, request.no_gpus)


def check_directory_name(config: model_config_pb2.ModelConfig, model: ModelDirectory) -> None:
    """Raise ModelError if the text names another model."""
    if config.name != model.name:
        raise ModelError(
            f"unexpected directory name '{model.name}' for model '{config.name}', directory name must equal model name"
            f"\n    fix: leave 'name' out of config.pbtxt, or name: \"{model.name}\""
        )


def _read_older(
    config: model_config_pb2.ModelConfig,
    model: ModelDirectory,
    older: Sequence[tuple[int, str]],
    versions: dict[int, str],
    read: list[ReadVersion],
    notes: list[str],
) -> None:
    """Compare the other versions, too; those that do not fit leave `versions`."""
    for number, path in older:
        try:
            version = read_version(config, model, number, path)
            compare(config, version.signature, version.path)
        except ModelError as error:
            # Unlike Triton, where none is served then: what can be served does not depend on it.
            notes.append(f"version {number} is not served: {error}")
            del versions[number]
        else:
            read.append(version)


def _read_config(model: ModelDirectory, request: LoadRequest, origins: Origins) -> pbtxt.Parsed:
    path, origin, data = config_path(model, request.config_name), FILE, b""
    if model.name in request.overrides:
        parsed, origin = pbtxt.parse_override(request.overrides[model.name]), OVERRIDE
    elif os.path.lexists(path):
        data = read_file(path, pbtxt.MAX_CONFIG, "1 MiB")
        parsed = pbtxt.parse(data, path)
    elif request.strict:
        raise ModelError(f"{path}: does not exist, and auto-completion is disabled (--disable-auto-complete-config)")
    else:
        parsed = pbtxt.Parsed(model_config_pb2.ModelConfig(), False, misnamed(model.path))
    config = parsed.config
    origins.mark(config, origin)
    if parsed.states_max_batch_size and not config.max_batch_size:
        origins.state("max_batch_size", origin)
    config.name = config.name or model.name
    origins.mark(config, DEFAULT)
    check_mapped_once(config, data.decode("utf-8-sig"))
    return parsed


def config_path(model: ModelDirectory, config_name: str) -> str:
    """`configs/<config_name>.pbtxt` where the model has one, else config.pbtxt."""
    default = os.path.join(model.path, "config.pbtxt")
    if not config_name:
        return default
    if "/" in config_name or "\0" in config_name:
        raise ModelError(f"--model-config-name {config_name!r} must be a plain name")
    path = os.path.join(model.path, "configs", f"{config_name}.pbtxt")
    return path if os.path.lexists(path) else default


def served_versions(
    config: model_config_pb2.ModelConfig, model: ModelDirectory, notes: list[str]
) -> tuple[dict[int, str], str]:
    """Version number → directory, ascending, after the version policy; and why there is none, or ""."""
    found = list_versions(model)
    notes += found.ignored
    policy = config.version_policy
    chosen = dict(found.paths)
    match policy.WhichOneof("policy_choice"):
        case "all":
            pass
        case "specific":
            for version in policy.specific.versions:
                if version not in chosen:
                    notes.append(
                        f"version {version} is specified for model '{model.name}', but the version directory is not "
                        "present"
                    )
            chosen = {version: path for version, path in chosen.items() if version in policy.specific.versions}
        case _:
            count = max(1, policy.latest.num_versions)
            chosen = dict(list(chosen.items())[-count:])
    if not chosen:
        return {}, f"failed to load '{model.name}', no version is available: {_why_none(model, policy, found)}"
    return chosen, ""


def _why_none(model: ModelDirectory, policy: model_config_pb2.ModelVersionPolicy, found: Versions) -> str:
    if found.paths:
        wanted = list(policy.specific.versions)
        fix = f"\n    fix: version_policy {{ specific {{ versions: [ {max(found.paths)} ] }} }}"
        if len(wanted) == 1:
            fix += f", or put the model's files into {os.path.join(model.path, str(wanted[0]))}"
        asks = f"version {_numbers(wanted)}, which is not there" if wanted else "no version"
        there = f"{model.path} has version {_numbers(found.paths)}"
        return "; ".join((f"version_policy asks for {asks}", there, *found.broken)) + fix
    if found.broken:
        return "; ".join(found.broken)
    return (
        f"{model.path} needs a directory named by a number, such as {os.path.join(model.path, '1')} (present: "
        f"none{_no_numbers(found)}){why_no_version(model.path)}"
    )


def _numbers(versions: Iterable[int]) -> str:
    numbers = sorted(versions, reverse=True)
    more = f" and {len(numbers) - MAX_LISTED} more" if len(numbers) > MAX_LISTED else ""
    return ", ".join(map(str, numbers[:MAX_LISTED])) + more


def _no_numbers(found: Versions) -> str:
    names = ", ".join(map(repr, found.no_numbers[:MAX_LISTED]))
    return f"; version directories are numbers, unlike {names}" if names else ""


def _check_file_name(config: model_config_pb2.ModelConfig, model: ModelDirectory, versions: Mapping[int, str]) -> None:
    name = config.default_model_filename
    if name in MODEL_FILES:  # wherever it lies: whoever sent a configuration did not choose it
        model = replace(model, links=True)
    if name and any(named(model, directory, name) is None for directory in (*versions.values(), model.path)):
        raise ModelError(f"default_model_filename {name!r} must stay within the version directory")


def read_version(
    config: model_config_pb2.ModelConfig, model: ModelDirectory, number: int, directory: str
) -> ReadVersion:
    """What the file of one version says. Raises ModelError."""
    path = os.path.join(directory, config.default_model_filename)
    if not os.path.lexists(path):
        raise ModelError(f"unable to find '{path}' for model '{config.name}'{instead(directory, path)}")
    stamp = file_stamp(path)
    graph = read_model(path)
    if file_stamp(path) != stamp:
        raise ModelError(f"{path}: was written while it was read: load the model again when it is complete")
    # Before the signature: reading that one may drop large initializers from the graph.
    sent = frozenset(text.name for text in config.input)
    found = policy(graph, sent)
    return ReadVersion(number, path, read_signature(graph, path, sent), found, stamp)
