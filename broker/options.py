"""The command line: our own options, and every flag of tritonserver, so that its start-up scripts work unchanged.

Used by `broker.__main__`. Parsing has no effect but the texts and exit status of a refused command line; which flags do
nothing (yet) is said by `Options.without_effect`, once, in the log.
"""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, final

from msgspec.structs import replace

from broker.cache_flags import cache_byte_size
from broker.flags import Given, UsageError, boolean, integer
from broker.gateway.options import GatewayOptions, LogOptions
from broker.gateway_flags import EFFECTIVE as GATEWAY_FLAGS
from broker.gateway_flags import gateway_options, is_metrics_setting
from broker.rate_limit_flags import rate_limit
from broker.repository.scheduling import Allowance
from broker.settings import TraceState
from broker.trace_flags import TraceOptions, trace_options
from broker.triton_flags import BOOLEAN, REPEATED, SINGLE

EFFECTIVE = GATEWAY_FLAGS | frozenset(
    {
        "backend-config",
        "cache-config",
        "disable-auto-complete-config",
        "exit-on-error",
        "exit-timeout-secs",
        "load-model",
        "log-error",
        "log-file",
        "log-format",
        "log-info",
        "log-verbose",
        "log-warning",
        "model-config-name",
        "model-control-mode",
        "model-load-retry-count",
        "model-load-thread-count",
        "model-namespacing",
        "model-repository",
        "model-store",
        "rate-limit",
        "rate-limit-resource",
        "repository-poll-secs",
        "response-cache-byte-size",
        "strict-model-config",
        "strict-readiness",
        "trace-config",
        "trace-count",
        "trace-file",
        "trace-level",
        "trace-log-frequency",
        "trace-rate",
    }
)
REFUSED = "model-namespacing"  # unless it is false
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@final
@dataclass(frozen=True, slots=True)
class Options:
    """What `serve` was asked to do. `triton`: every Triton flag that was given, by name, values as given.

    `rate_limit`: what there is of each resource that was named; None: no rate limiter.
    """

    model_repository: tuple[str, ...]
    directory: str | None
    region_memory: str
    cuda_region_memory: str
    cuda_peer_access: bool
    model_memory_limit: int
    allow_code_overrides: bool
    model_load_deaths: int
    model_load_timeout_s: int
    exit_timeout_secs: int
    exit_on_error: bool
    strict_model_config: bool
    model_config_name: str
    default_max_batch_size: int
    model_control_mode: str
    load_model: tuple[str, ...]
    repository_poll_secs: int
    model_load_threads: int
    model_load_retries: int
    strict_readiness: bool
    cache_byte_size: int
    rate_limit: tuple[Allowance, ...] | None
    log: LogOptions
    gateway: GatewayOptions
    trace: TraceOptions
    triton: dict[str, tuple[str, ...]]

    @property
    def without_effect(self) -> list[str]:
        """Triton's flags that were given and change nothing here."""
        flags = {f"--{name}" for name in self.triton if name not in EFFECTIVE}
        for name, known in (("backend-config", _sets_batch_size), ("metrics-config", is_metrics_setting)):
            flags |= {f"--{name}={setting}" for setting in self.triton.get(name, ()) if not known(setting)}
        if "rate-limit-resource" in self.triton and self.rate_limit is None:
            flags.add("--rate-limit-resource (without --rate-limit=execution_count)")
        if "repository-poll-secs" in self.triton and self.model_control_mode != "poll":
            flags.add("--repository-poll-secs (without --model-control-mode=poll)")
        return sorted(flags | self.trace.without_effect)

    @property
    def deprecated(self) -> str:
        """Triton's warning of a flag that was given in its old name, or ""."""
        if "strict-model-config" not in self.triton:
            return ""
        if "disable-auto-complete-config" in self.triton:
            before = str(Given(self.triton.items()).flag("strict-model-config", False))
            return (
                f"Warning: Overriding deprecated '--strict-model-config' from {before} to {self.strict_model_config} "
                "in favor of '--disable-auto-complete-config'!"
            )
        return (
            "Warning: '--strict-model-config' has been deprecated! Please use '--disable-auto-complete-config' instead."
        )


def region_memory_bytes(text: str, available: int, flag: str = "region-memory") -> int:
    """`--region-memory`, or another such `flag`: bytes, with K, M, G or T, or a percentage of `available` bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    if match is None or (match[2] == "%" and float(match[1]) > 100):
        raise UsageError(f"invalid value for --{flag}: {text} (expected bytes, e.g. 8G, or a percentage)")
    factor = available / 100 if match[2] == "%" else _UNITS[match[2].lower()]
    return int(float(match[1]) * factor)


def byte_size(name: str, text: str) -> int:
    """A number of bytes with an optional K, M, G or T."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise UsageError(f"invalid value for --{name}: {text} (expected bytes, e.g. 8G)")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_serve(arguments: Sequence[str]) -> Options:
    """The options of `serve`. Raises UsageError."""
    parsed = vars(_serve_parser().parse_args(arguments))
    given = Given((name, tuple(values)) for name, values in parsed.items() if values is not None)
    repositories = given.all("model-repository") + given.all("model-store")
    if not repositories:
        raise UsageError("--model-repository must be specified")
    _check(given)
    log, trace = _log_options(given), trace_options(given)
    return Options(
        model_repository=repositories,
        directory=given.text("directory", "") or None,
        region_memory=given.text("region-memory", "50%"),
        cuda_region_memory=given.text("cuda-region-memory", "100%"),
        cuda_peer_access=given.flag("cuda-peer-access", False),
        model_memory_limit=byte_size("model-memory-limit", given.text("model-memory-limit", "0")),
        allow_code_overrides=given.flag("allow-code-overrides", False),
        model_load_deaths=given.integer("model-load-deaths", 5),
        model_load_timeout_s=given.at_least(1, "model-load-timeout-secs", 600),
        exit_timeout_secs=max(0, given.integer("exit-timeout-secs", 30)),
        exit_on_error=given.flag("exit-on-error", True),
        strict_model_config=given.flag("strict-model-config", False)
        or given.flag("disable-auto-complete-config", False),
        model_config_name=given.text("model-config-name", ""),
        default_max_batch_size=_default_max_batch_size(given.all("backend-config")),
        model_control_mode=given.text("model-control-mode", "none"),
        load_model=given.all("load-model"),
        repository_poll_secs=max(0, given.integer("repository-poll-secs", 15)),
        model_load_threads=max(1, given.integer("model-load-thread-count", 4)),
        model_load_retries=max(0, given.integer("model-load-retry-count", 0)),
        strict_readiness=given.flag("strict-readiness", True),
        cache_byte_size=cache_byte_size(given),
        rate_limit=rate_limit(given),
        log=log,
        gateway=replace(gateway_options(given), log=log, trace=TraceState(trace.file, trace.settings).table()),
        trace=trace,
        triton={name: values for name, values in given.items() if name in BOOLEAN | REPEATED | SINGLE},
    )


def _check(given: Given) -> None:
    """What tritonserver refuses, it refuses here too, whether or not the flag has an effect."""
    for name in BOOLEAN:
        given.flag(name, True)
    mode = given.text("model-control-mode", "none")
    if "load-model" in given and mode != "explicit":
        raise UsageError("Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in given.all("load-model") and len(given.all("load-model")) > 1:
        raise UsageError("Error: Wildcard model name '*' must be the ONLY startup model if specified at all.")
    if given.flag(REFUSED, False):
        raise UsageError(
            f"--{REFUSED}=true is not supported: give models of the same name in two repositories other names"
        )
    if "/" in given.text("model-config-name", ""):
        raise UsageError("invalid argument for --model-config-name: it must be a plain name")
    if mode not in ("none", "poll", "explicit"):
        raise UsageError(f"invalid argument for --model-control-mode: {mode} (expected none, poll or explicit)")
    if given.text("log-format", "default") not in ("default", "ISO8601"):
        raise UsageError(f"invalid argument for --log-format, got: {given.text('log-format', '')}")
    region_memory_bytes(given.text("region-memory", "50%"), 0)
    region_memory_bytes(given.text("cuda-region-memory", "100%"), 0, "cuda-region-memory")


def _log_options(given: Given) -> LogOptions:
    verbose = given.text("log-verbose", "0")
    if verbose.lower() in ("true", "false"):
        verbose = str(int(boolean(verbose)))
    return LogOptions(
        log_file=given.text("log-file", ""),
        log_info=given.flag("log-info", True),
        log_warning=given.flag("log-warning", True),
        log_error=given.flag("log-error", True),
        log_verbose_level=integer("log-verbose", verbose),
        log_format=given.text("log-format", "default"),
    )


class Parser(argparse.ArgumentParser):
    """argparse that raises UsageError with Triton's words instead of exiting with status 2."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for everything it refuses."""
        if match := re.match(r"unrecognized arguments: (\S+)", message):
            given = match[1].partition("=")[0]
            near = difflib.get_close_matches(given, self._option_string_actions, n=1, cutoff=0.7)
            meant = f" (did you mean {near[0]}?)" if near and given.startswith("--") else ""
            message = f"Unexpected argument: {match[1]}{meant}"
        raise UsageError(f"{message}\n{self.format_usage()}".rstrip())


def _about_triton_flags() -> str:
    """Below the flags that have a help text."""
    shown = sorted((EFFECTIVE & (SINGLE | REPEATED | BOOLEAN)) - {"model-repository", "model-store", REFUSED})
    names = ", ".join(f"--{each}" for each in shown)
    text = (
        f"tritonserver's flags are taken as well. These do what they do there: {names}."
        f" --{REFUSED}=true is refused. The others have no effect, and are named at start."
        " docs/compatibility.md has what differs."
    )
    return textwrap.fill(text, 80, break_on_hyphens=False)


def _serve_parser() -> Parser:
    parser = Parser(
        prog="tensorbroker serve",
        allow_abbrev=True,  # as tritonserver: --log-warn is --log-warning
        description="Serve the models of a repository.",
        epilog=_about_triton_flags(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-repository", metavar="DIR", action="append", dest="model-repository", help="may be repeated")
    add("--model-store", metavar="DIR", action="append", dest="model-store", help="the same")
    add("--directory", metavar="DIR", action="append", help="run directory (default: $TENSORBROKER_DIR or per user)")
    text = "limit on registered regions and channels: bytes (8G) or a percentage of RAM or cgroup limit (default 50%%)"
    add("--region-memory", metavar="SIZE", action="append", dest="region-memory", help=text)
    text = "limit on the GPU memory that one user registers: bytes or a percentage of all GPUs' (default 100%%)"
    add("--cuda-region-memory", metavar="SIZE", action="append", dest="cuda-region-memory", help=text)
    text = "a model may read and write memory of another GPU than its own over the bus, where those can (default false)"
    add(
        "--cuda-peer-access",
        metavar="BOOL",
        action="append",
        dest="cuda-peer-access",
        nargs="?",
        const="true",
        help=text,
    )
    text = "deaths of a worker in a row while it loads a model, after which it comes back without it (default 5)"
    add("--model-load-deaths", metavar="N", action="append", dest="model-load-deaths", help=text)
    text = "how long a worker may take to load a model (default 600)"
    add("--model-load-timeout-secs", metavar="S", action="append", dest="model-load-timeout-secs", help=text)
    text = "memory that models may take: bytes (8G); those that clients had loaded go for others (default 0: no limit)"
    add("--model-memory-limit", metavar="BYTES", action="append", dest="model-memory-limit", help=text)
    text = "files that come with a load over HTTP, gRPC or ZeroMQ may be code, which runs as our user (default false)"
    add(
        "--allow-code-overrides",
        metavar="BOOL",
        action="append",
        dest="allow-code-overrides",
        nargs="?",
        const="true",
        help=text,
    )
    text = "gateway processes for HTTP, gRPC, ZeroMQ and metrics (default 1; 0: none, local clients only)"
    add("--gateways", metavar="N", action="append", help=text)
    text = "bytes of a gRPC message, compressed or not (default 268435456)"
    add("--grpc-max-input-size", metavar="BYTES", action="append", dest="grpc-max-input-size", help=text)
    text = "ZeroMQ on zmq.sock in the run directory (default true)"
    add("--allow-zmq", metavar="BOOL", action="append", dest="allow-zmq", nargs="?", const="true", help=text)
    for name in sorted(SINGLE | REPEATED | BOOLEAN):
        if name not in ("model-repository", "model-store"):
            optional = {"nargs": "?", "const": "true"} if name in BOOLEAN else {}
            add(f"--{name}", action="append", dest=name, help=argparse.SUPPRESS, **optional)  # type: ignore[arg-type]
    return parser


def _default_max_batch_size(settings: Sequence[str]) -> int:
    size = 4
    for setting in settings:
        if _sets_batch_size(setting):
            size = integer("backend-config default-max-batch-size", setting.partition("=")[2])
    return size


def _sets_batch_size(setting: str) -> bool:
    """Of --backend-config: is it the one that there is, and for a backend that it has a meaning for?"""
    backend, _, name = setting.partition("=")[0].rpartition(",")
    return name == "default-max-batch-size" and backend in ("", "onnxruntime")
