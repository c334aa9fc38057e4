"""Triton's tables at start: backends, models, options. Logged by `broker.server` once the start-up load has ended."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from importlib.metadata import entry_points

from broker.gateway.options import EXTENSIONS, SERVER_VERSION
from broker.options import Options
from broker.tables import ascii_table

BACKENDS = "tensorbroker.backends"  # entry points
_MODES = {"none": "MODE_NONE", "poll": "MODE_POLL", "explicit": "MODE_EXPLICIT"}


def backend_table(used: Iterable[str], options: Options) -> str:
    """The backends that models use, where each comes from, and what the command line says of it."""
    installed = {entry.name: entry.value for entry in entry_points(group=BACKENDS)}
    rows = [(name, _path(installed.get(name, "")), _config(name, options)) for name in sorted(set(used))]
    return ascii_table(("Backend", "Path", "Config"), rows)


def option_table(options: Options) -> str:
    """What this server is and how it was told to be."""
    explicit = enumerate(options.load_model if options.model_control_mode == "explicit" else ())
    rows = [
        ("server_id", options.gateway.server_name),
        ("server_version", SERVER_VERSION),
        ("server_extensions", " ".join(EXTENSIONS)),
        *((f"model_repository_path[{index}]", path) for index, path in enumerate(options.model_repository)),
        ("model_control_mode", _MODES[options.model_control_mode]),
        *((f"startup_models_{index}", name) for index, name in explicit),
        ("strict_model_config", int(options.strict_model_config)),
        ("model_config_name", options.model_config_name),
        ("rate_limit", "OFF" if options.rate_limit is None else "EXEC_COUNT"),
        ("strict_readiness", int(options.strict_readiness)),
        ("exit_timeout", options.exit_timeout_secs),
        ("cache_enabled", int(options.cache_byte_size > 0)),
    ]
    return ascii_table(("Option", "Value"), rows)


def _path(module: str) -> str:
    """Where a backend's module lies; found without importing it."""
    try:
        spec = importlib.util.find_spec(module.partition(":")[0]) if module else None
    except (ImportError, ValueError):
        return module
    return (spec and spec.origin) or module


def _config(backend: str, options: Options) -> str:
    settings = {"auto-complete-config": str(not options.strict_model_config).lower()}
    for argument in options.triton.get("backend-config", ()):
        name, _, assignment = argument.rpartition(",") if "," in argument.partition("=")[0] else ("", "", argument)
        if name in ("", backend):
            key, _, value = assignment.partition("=")
            settings[key] = value
    settings.setdefault("default-max-batch-size", str(options.default_max_batch_size))
    return json.dumps({"cmdline": settings}, separators=(",", ":"))
