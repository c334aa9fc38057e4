"""Which backend serves a model, and which file of a version directory it reads.

Called by `load` after the configuration text was parsed. Looks at names only and imports no backend.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points

from tritonclient.grpc import model_config_pb2

from broker.repository.loader.failure import ModelError
from broker.repository.scan import ModelDirectory, broken_link

_PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
MODEL_FILES = {  # in Triton's order of looking
    "model.onnx": "onnxruntime",
    "model.plan": "tensorrt",
    "model.pt": "pytorch",
    "model.pt2": "pytorch",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.xml": "openvino",
    "model.py": "python",
}
_DEFAULT_FILES = {
    "onnxruntime": "model.onnx",
    "tensorrt": "model.plan",
    "pytorch": "model.pt",
    "openvino": "model.xml",
    "python": "model.py",
}
_DEFAULT_PLATFORMS = {
    "onnxruntime": "onnxruntime_onnx",
    "tensorrt": "tensorrt_plan",
    "pytorch": "pytorch_libtorch",
}
ENSEMBLE = "ensemble"
_KNOWN_PLATFORMS = (
    f"Known platforms are: {', '.join(_PLATFORMS)}, {ENSEMBLE} (or leave 'platform' out and set 'backend')"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
CUSTOM_BACKEND = "backend.py"
NO_BACKEND = "Invalid argument: unable to find backend library"  # Triton says it when it loads a version
_TRITONS = frozenset(("dali", "fil", "openvino", "python", "pytorch", "tensorflow", "tensorrtllm", "vllm"))  # not here
_NO_PYTHON = (
    "Python models (model.py) are not supported yet: docs/backends.md shows how the same code becomes backend.py"
)
MAX_LISTED = 8  # names of files in an error


def fill_backend(config: model_config_pb2.ModelConfig, model: ModelDirectory, version_paths: Sequence[str]) -> None:
    """Set `backend`, `platform` and `default_model_filename`. Raises ModelError when nothing says which backend."""
    if is_ensemble(config):
        config.platform, config.backend = ENSEMBLE, ""
        return
    if config.platform:
        if config.platform not in _PLATFORMS:
            meant = _meant(config.platform)
            if config.backend or (guessed := _by_files(config.default_model_filename, version_paths)):
                pair = f"{config.platform}, {config.backend or guessed}"
                raise ModelError(
                    f"unexpected 'platform' and 'backend' pair, got:{pair}. {_KNOWN_PLATFORMS}{meant}", "platform"
                )
            raise ModelError(
                f"unexpected platform type '{config.platform}' for {model.name}; {_KNOWN_PLATFORMS}{meant}", "platform"
            )
        if config.backend and config.backend != _PLATFORMS[config.platform]:
            raise ModelError(
                f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}\n    fix: leave "
                f'one of them out; platform: "{config.platform}" goes with backend: "{_PLATFORMS[config.platform]}"'
            )
        config.backend = _PLATFORMS[config.platform]
    custom = _custom_backend(model)
    if not config.backend:
        config.backend = model.name if custom else _detect(config.default_model_filename, model, version_paths)
    if not config.platform:
        config.platform = _DEFAULT_PLATFORMS.get(config.backend, "")
    if not config.default_model_filename:
        config.default_model_filename = _default_file(config.backend, version_paths)
    _check_runtime(config)
    _check_supported(config.backend, model.name, custom)


def _meant(platform: str) -> str:
    """The platform that `platform` resembles, as a line to add, or ""."""
    begun = [known for known in (*_PLATFORMS, ENSEMBLE) if platform.lower() in known]
    near = begun or get_close_matches(platform.lower(), (*_PLATFORMS, ENSEMBLE), n=1, cutoff=0.6)
    return f"\n    did you mean '{near[0]}'?" if near else ""


def overshadowed(config: model_config_pb2.ModelConfig, model: ModelDirectory) -> tuple[str, ...]:
    """A note where a model's own code is used although its configuration, filled in, names an installed backend."""
    if not config.backend or config.backend not in _installed() or not _custom_backend(model):
        return ()
    return (
        f"its own {CUSTOM_BACKEND} is used, not the installed backend '{config.backend}' that its configuration names: "
        f"remove {CUSTOM_BACKEND}, or give 'backend' another name",
    )


def is_ensemble(config: model_config_pb2.ModelConfig) -> bool:
    """Raises ModelError where platform, backend and `ensemble_scheduling` contradict each other."""
    scheduled = config.HasField("ensemble_scheduling")
    if config.platform == ENSEMBLE and config.backend not in ("", ENSEMBLE):
        raise ModelError(
            f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend type, got: "
            f"{config.platform}, {config.backend}"
        )
    ensemble = (
        ENSEMBLE in (config.platform, config.backend) or (scheduled and not config.platform and not config.backend)
    ) and config.platform in ("", ENSEMBLE)
    if ensemble and not scheduled:
        raise ModelError(f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble")
    if scheduled and not ensemble:
        raise ModelError(f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble")
    return ensemble


def _custom_backend(model: ModelDirectory) -> bool:
    path = os.path.join(model.path, CUSTOM_BACKEND)
    if why := broken_link(path):
        raise ModelError(why)
    return os.path.isfile(path)


def _detect(filename: str, model: ModelDirectory, version_paths: Sequence[str]) -> str:
    if backend := _by_files(filename, version_paths):
        return backend
    _, dot, suffix = model.name.rpartition(".")
    if dot and suffix:
        return suffix
    raise ModelError(
        f"Invalid model name: Could not determine backend for model '{model.name}' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'. "
        f"{_found(version_paths) or 'there is no version directory'}. Give the model file one of the names "
        f"{', '.join(MODEL_FILES)}, or put its own name into config.pbtxt as 'default_model_filename', or set "
        "'backend' there"
    )


def _by_files(filename: str, version_paths: Sequence[str]) -> str:
    """The backend of the file that the text names, or else of one that is there, or ""."""
    if backend := MODEL_FILES.get(f"model{os.path.splitext(filename)[1]}"):
        return backend
    for path in version_paths:
        for name, backend in MODEL_FILES.items():
            if os.path.lexists(os.path.join(path, name)):
                return backend
    return ""


def _found(version_paths: Sequence[str]) -> str:
    """What lies where a model file is expected, in words."""
    parts = []
    for path in version_paths:
        names = sorted(os.listdir(path))
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        parts.append(f"{path} has {', '.join(map(repr, names[:MAX_LISTED]))}{more}" if names else f"{path} is empty")
    return "; ".join(parts)


def instead(directory: str, path: str) -> str:
    """What is there in place of the model file `path`, and how that one is served, if it is plain which."""
    suffix = os.path.splitext(path)[1]
    same = [name for name in os.listdir(directory) if os.path.splitext(name)[1] == suffix and not name.startswith(".")]
    fix = f'\n    fix: default_model_filename: "{same[0]}"' if len(same) == 1 else ""
    return f"\n    {_found([directory])}{fix}"


def _default_file(backend: str, version_paths: Sequence[str]) -> str:
    for name, owner in MODEL_FILES.items():
        if owner == backend and any(os.path.lexists(os.path.join(path, name)) for path in version_paths):
            return name
    return _DEFAULT_FILES.get(backend, f"model.{backend}")


def _check_runtime(config: model_config_pb2.ModelConfig) -> None:
    """`runtime` names Triton's library of a backend. Here a backend is a Python module, so its usual names will do."""
    runtime = config.runtime
    if not runtime:
        return
    if "/" in runtime or ".." in runtime:
        raise ModelError(f"backend library name '{runtime}' escapes backend directory")
    if runtime not in (f"libtriton_{config.backend}.so", "model.py"):
        raise ModelError(
            f"unable to find backend library '{runtime}' for model '{config.name}', try specifying runtime on the "
            f"model configuration: 'libtriton_{config.backend}.so', or leave it out"
        )


def _installed() -> list[str]:
    # Entry points are the register that the worker itself uses, so what passes here can be loaded there.
    return sorted({entry.name for entry in entry_points(group="tensorbroker.backends")})


def _check_supported(backend: str, model: str, custom: bool) -> None:
    if not _NAME.fullmatch(backend):
        raise ModelError(f"invalid backend name {backend!r} for model '{model}': use letters, digits, _ . -")
    supported = _installed()
    if not custom and backend not in supported:
        near = () if backend in _TRITONS else get_close_matches(backend, supported, n=1, cutoff=0.5)
        known = "not there yet" if backend in _TRITONS else "not installed"
        raise ModelError(
            f"{NO_BACKEND} for backend '{backend}', try specifying runtime on the model configuration. "
            + (
                _NO_PYTHON
                if backend == "python"
                else f"Model '{model}' needs backend '{backend}', which is {known}; installed are: "
                f"{', '.join(supported) or 'none'}. A backend of your own is an entry point of the group "
                f"'tensorbroker.backends', or {CUSTOM_BACKEND} beside config.pbtxt"
            )
            + (f"\n    did you mean '{near[0]}'?" if near else "")
        )
