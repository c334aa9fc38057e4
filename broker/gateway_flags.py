"""The flags that concern the network front ends: from tritonserver's words to `GatewayOptions`.

Used by `broker.options`. Texts of refusals are Triton's where it has one. Two defaults differ from Triton's: listeners
are on 127.0.0.1 instead of all addresses, and clients of this host may use shared memory.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import get_args

from broker.flags import Given, UsageError, boolean
from broker.gateway.options import GRPC_MAX_INPUT_SIZE, MAX_INPUT_SIZE, Category, GatewayOptions, header_pattern
from broker.triton_flags import names

MAX_GATEWAYS = 64
CATEGORIES = frozenset(get_args(Category))
LEVELS = ("none", "low", "medium", "high")
METADATA_PREFIX = "triton-grpc-protocol-"  # of the metadata that opens a restricted gRPC protocol

EFFECTIVE = names(
    """
    allow-client-shm id
    allow-http http-port http-address reuse-http-port http-max-input-size http-header-forward-pattern
    http-restricted-api
    allow-grpc grpc-port grpc-address reuse-grpc-port grpc-header-forward-pattern grpc-restricted-protocol
    grpc-infer-response-compression-level
    grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert grpc-server-key grpc-root-cert
    grpc-keepalive-time grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
    grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
    grpc-max-connection-age-grace
    allow-metrics metrics-port metrics-address metrics-interval-ms metrics-config allow-gpu-metrics allow-cpu-metrics
    """
)
# flag → grpc's own name, and Triton's default, which is given even where it is grpc's too; 0: none
_CHANNEL_OPTIONS = {
    "grpc-keepalive-time": ("grpc.keepalive_time_ms", 7_200_000),
    "grpc-keepalive-timeout": ("grpc.keepalive_timeout_ms", 20_000),
    "grpc-http2-max-pings-without-data": ("grpc.http2.max_pings_without_data", 2),
    "grpc-http2-min-recv-ping-interval-without-data": ("grpc.http2.min_ping_interval_without_data_ms", 300_000),
    "grpc-http2-max-ping-strikes": ("grpc.http2.max_ping_strikes", 2),
    "grpc-max-connection-age": ("grpc.max_connection_age_ms", 0),
    "grpc-max-connection-age-grace": ("grpc.max_connection_age_grace_ms", 0),
}


def gateway_options(given: Given) -> GatewayOptions:
    """What every gateway is told; its index, run directory and owner are filled in when it is started.

    Raises UsageError.
    """
    gateways = given.integer("gateways", 1)
    if not 0 <= gateways <= MAX_GATEWAYS:
        raise UsageError(f"invalid value for --gateways: {gateways} (expected 0 to {MAX_GATEWAYS})")
    http_address = given.text("http-address", "127.0.0.1")
    options = GatewayOptions(
        gateways=gateways,
        server_name=given.text("id", "triton"),
        http_address=http_address,
        http_port=given.port("http-port", 8000) if given.flag("allow-http", True) else 0,
        http_reuse_port=gateways > 1 or given.flag("reuse-http-port", False),
        http_max_input_size=_max_input_size(given, "http", MAX_INPUT_SIZE),
        http_header_forward_pattern=_pattern(given, "http-header-forward-pattern"),
        http_restricted=_restricted(given, "http-restricted-api", "api", ""),
        grpc_address=given.text("grpc-address", "127.0.0.1"),
        grpc_port=given.port("grpc-port", 8001) if given.flag("allow-grpc", True) else 0,
        grpc_reuse_port=gateways > 1 or given.flag("reuse-grpc-port", False),
        grpc_max_input_size=_max_input_size(given, "grpc", GRPC_MAX_INPUT_SIZE),
        grpc_header_forward_pattern=_pattern(given, "grpc-header-forward-pattern"),
        grpc_compression=_compression(given.text("grpc-infer-response-compression-level", "none")),
        grpc_ssl=_ssl(given),
        grpc_channel_options=_channel_options(given),
        grpc_restricted=_restricted(given, "grpc-restricted-protocol", "protocol", METADATA_PREFIX),
        metrics_address=given.text("metrics-address", http_address),
        metrics_port=given.port("metrics-port", 8002) if given.flag("allow-metrics", True) else 0,
        metrics_interval_ms=_positive(given, "metrics-interval-ms", 2000),
        metrics_config=_metrics_config(given.all("metrics-config")),
        gpu_metrics=given.flag("allow-gpu-metrics", True),
        cpu_metrics=given.flag("allow-cpu-metrics", True),
        zmq=given.flag("allow-zmq", True),
        allow_client_shm=given.flag("allow-client-shm", True),
    )
    _check_collisions(options)
    return options


def listeners(options: GatewayOptions) -> list[tuple[str, str, int, bool]]:
    """The TCP services that are on: name as Triton's logs have it, address, port, and whether others may share it."""
    every = [
        ("HTTP", options.http_address, options.http_port, options.http_reuse_port),
        ("GRPC", options.grpc_address, options.grpc_port, options.grpc_reuse_port),
        ("Metrics", options.metrics_address, options.metrics_port, False),
    ]
    return [listener for listener in every if listener[2] and options.gateways]


def _check_collisions(options: GatewayOptions) -> None:
    for (one, address, port, _), (other, other_address, other_port, _) in combinations(listeners(options), 2):
        if (address, port) == (other_address, other_port):
            raise UsageError(
                f"The server cannot listen to {one} requests and {other} requests at the same address and port: "
                f"{address}:{port}"
            )


def _restricted(given: Given, flag: str, kind: str, prefix: str) -> dict[str, tuple[str, str]]:
    """`category[,category]:key=value`, repeatable → category: (header, value)."""
    found: dict[str, tuple[str, str]] = {}
    for argument in given.all(flag):
        names, _, assignment = argument.partition(":")
        key, _, value = assignment.partition("=")
        if not names or not key or not value:
            raise UsageError(f"--{flag} option format is '<config name>:<setting>=<value>'. Got {argument}")
        for name in names.split(","):
            if name not in CATEGORIES:
                raise UsageError(f"unknown restricted {kind} '{name}' ")
            if name in found:
                raise UsageError(f"restricted {kind} '{name}' can not be specified in multiple config groups")
            found[name] = (f"{prefix}{key.lower()}", value)
    return found


def _metrics_config(arguments: tuple[str, ...]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if not name or not value or "," in name:
            raise UsageError(f"--metrics-config option format is <setting>=<value>. Got {argument}")
        if name.endswith("_latencies"):
            boolean(value)
        settings[name] = value
    return settings


def is_metrics_setting(argument: str) -> bool:
    """Has this setting of --metrics-config an effect?"""
    name = argument.partition("=")[0]
    return name in ("counter_latencies", "histogram_latencies", "summary_latencies", "summary_quantiles")


def _max_input_size(given: Given, protocol: str, default: int) -> int:
    size = given.integer(f"{protocol}-max-input-size", default)
    if size <= 0:
        raise UsageError(f"Error: --{protocol}-max-input-size must be greater than 0.")
    return size


def _pattern(given: Given, name: str) -> str:
    pattern = given.text(name, "")
    try:
        header_pattern(pattern)
    except re.error as error:
        raise UsageError(f"invalid value for --{name}: {pattern} (no regular expression: {error})") from None
    return pattern


def _compression(level: str) -> str:
    if level.lower() not in LEVELS:
        raise UsageError(f"invalid argument for --grpc_infer_response_compression_level: {level}")
    return level.lower()


def _ssl(given: Given) -> tuple[str, str, str]:
    mutual = given.flag("grpc-use-ssl-mutual", False)
    if not mutual and not given.flag("grpc-use-ssl", False):
        return "", "", ""
    files = (given.text("grpc-server-cert", ""), given.text("grpc-server-key", ""))
    if not all(files):
        raise UsageError("--grpc-use-ssl requires --grpc-server-cert and --grpc-server-key")
    root = given.text("grpc-root-cert", "")
    if mutual and not root:
        raise UsageError("--grpc-use-ssl-mutual requires --grpc-root-cert")
    return *files, root if mutual else ""


def _channel_options(given: Given) -> tuple[tuple[str, int], ...]:
    """A connection's age is unlimited unless it is given."""
    options = [("grpc.keepalive_permit_without_calls", int(given.flag("grpc-keepalive-permit-without-calls", False)))]
    for flag, (name, default) in _CHANNEL_OPTIONS.items():
        if default or flag in given:
            options.append((name, given.integer(flag, default)))
    return tuple(options)


def _positive(given: Given, name: str, default: int) -> int:
    number = given.integer(name, default)
    if number <= 0:
        raise UsageError(f"invalid value for --{name}: {number} (expected a positive number)")
    return number
