"""What the broker tells a gateway at start: JSON on its standard input. Plain data, known to both processes."""

from __future__ import annotations

import msgspec

MAX_INPUT_SIZE = 64 << 20  # bytes, Triton's default of --http-max-input-size


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one gateway process. Ports 0: that service is off. Unix sockets and ZeroMQ: gateway 0 alone."""

    index: int = 0
    gateways: int = 1  # more than one: TCP ports are shared by SO_REUSEPORT
    directory: str  # the run directory: http.sock, grpc.sock, zmq.sock
    broker_uid: int
    server_name: str = "triton"  # --id
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    http_max_input_size: int = MAX_INPUT_SIZE
    http_header_forward_pattern: str = ""
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    grpc_header_forward_pattern: str = ""
    grpc_compression: str = "none"  # --grpc-infer-response-compression-level
    grpc_ssl: tuple[str, str, str] = ("", "", "")  # certificate, key, root certificate (mutual TLS) files
    grpc_channel_options: tuple[tuple[str, int], ...] = ()  # keepalive and connection age, in grpc's own names
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 8002
    zmq: bool = True
    allow_client_shm: bool = True
    http_restricted: dict[str, tuple[str, str]] = {}  # category → header name (lower case), value
    grpc_restricted: dict[str, tuple[str, str]] = {}  # category → metadata key (lower case), value
    log_verbose: int = 0
