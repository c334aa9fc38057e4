"""What the broker tells a gateway at start: JSON on its standard input. Plain data, known to both processes."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Category = Literal[
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
]  # what the restricted-API settings name
SERVER_VERSION = "2.73.0"  # the Triton whose protocol this is
EXTENSIONS: tuple[str, ...] = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)  # of the server's metadata, in Triton's order
SOCKETS = ("http.sock", "grpc.sock", "zmq.sock")  # in the run directory
MAX_INPUT_SIZE = 64 << 20  # bytes, Triton's default of --http-max-input-size
GRPC_MAX_INPUT_SIZE = 256 << 20  # bytes of a message; `broker.gateway.grpc.limits` says why


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process logs, and what: Triton's log settings, in its order."""

    log_file: str = ""  # "": stderr
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"  # or "ISO8601"


TraceSetting = dict[str, str | list[str]]  # all of Triton's trace settings but the file, by its names


class TraceTable(msgspec.Struct, frozen=True, kw_only=True):
    """What is traced: `settings` by model, "" of all others. `file` "": none. `began`: when the broker did, in ns of
    the clock that files have; what a gateway finds that is younger was written by the one that it replaces.
    """

    file: str = ""
    began: int = 0
    settings: dict[str, TraceSetting] = {}


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one gateway process. Ports 0: that service is off. Unix sockets and ZeroMQ: gateway 0 alone."""

    index: int = 0
    gateways: int = 1
    directory: str = ""  # the run directory: http.sock, grpc.sock, zmq.sock
    broker_uid: int = -1
    server_name: str = "triton"  # --id
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    http_reuse_port: bool = False  # SO_REUSEPORT: several gateways share the port
    http_max_input_size: int = MAX_INPUT_SIZE
    http_header_forward_pattern: str = ""
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    grpc_reuse_port: bool = False
    grpc_max_input_size: int = GRPC_MAX_INPUT_SIZE
    grpc_header_forward_pattern: str = ""
    grpc_compression: str = "none"  # --grpc-infer-response-compression-level
    grpc_ssl: tuple[str, str, str] = ("", "", "")  # certificate, key, root certificate (mutual TLS) files
    grpc_channel_options: tuple[tuple[str, int], ...] = ()  # keepalive and connection age, in grpc's own names
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 8002
    metrics_interval_ms: int = 2000
    metrics_config: dict[str, str] = {}  # --metrics-config: "histogram_latencies" → "true", …
    gpu_metrics: bool = True
    cpu_metrics: bool = True
    zmq: bool = True
    allow_client_shm: bool = True
    http_restricted: dict[str, tuple[str, str]] = {}  # category → header name (lower case), value
    grpc_restricted: dict[str, tuple[str, str]] = {}  # category → metadata key (lower case, with its prefix), value
    log: LogOptions = LogOptions()
    trace: TraceTable = TraceTable()


def header_pattern(text: str) -> re.Pattern[str]:
    """--http-header-forward-pattern and its like: any case, unless it begins with "(?-i)". Raises re.error."""
    sensitive = text.removeprefix("(?-i)")  # of RE2, which Triton uses
    return re.compile(sensitive, re.IGNORECASE if sensitive == text else 0)
