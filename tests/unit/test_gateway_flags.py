"""What tritonserver's flags of the front ends mean for a gateway, and what is refused."""

import socket

import pytest

from broker.flags import UsageError
from broker.gateway.options import header_pattern
from broker.gateways import CannotServe, check_ports
from broker.options import parse_serve
from broker.startup_tables import backend_table, option_table


def gateway(*flags):
    return parse_serve(["--model-repository=/m", *flags]).gateway


def test_defaults_are_tritons_but_for_loopback_and_shared_memory():
    options = gateway()
    assert (options.http_address, options.http_port) == ("127.0.0.1", 8000)
    assert (options.grpc_address, options.grpc_port) == ("127.0.0.1", 8001)
    assert (options.metrics_address, options.metrics_port) == ("127.0.0.1", 8002)
    assert options.gateways == 1
    assert not options.http_reuse_port
    assert options.allow_client_shm
    assert options.zmq
    assert options.server_name == "triton"
    assert options.http_max_input_size == 67108864
    assert options.grpc_max_input_size == 268435456
    assert dict(options.grpc_channel_options) == {
        "grpc.keepalive_time_ms": 7200000,
        "grpc.keepalive_timeout_ms": 20000,
        "grpc.keepalive_permit_without_calls": 0,
        "grpc.http2.max_pings_without_data": 2,
        "grpc.http2.min_ping_interval_without_data_ms": 300000,
        "grpc.http2.max_ping_strikes": 2,
    }


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--id=mine", "server_name", "mine"),
        ("--allow-http=false", "http_port", 0),
        ("--allow-grpc=false", "grpc_port", 0),
        ("--allow-metrics=false", "metrics_port", 0),
        ("--http-address=0.0.0.0", "metrics_address", "0.0.0.0"),
        ("--http-port=9", "http_port", 9),
        ("--reuse-http-port=true", "http_reuse_port", True),
        ("--reuse-grpc-port=1", "grpc_reuse_port", True),
        ("--gateways=2", "grpc_reuse_port", True),
        ("--allow-client-shm=false", "allow_client_shm", False),
        ("--allow-zmq=off", "zmq", False),
        ("--http-max-input-size=10", "http_max_input_size", 10),
        ("--grpc-max-input-size=10", "grpc_max_input_size", 10),
        ("--http-header-forward-pattern=x-.*", "http_header_forward_pattern", "x-.*"),
        ("--grpc-header-forward-pattern=x-.*", "grpc_header_forward_pattern", "x-.*"),
        ("--grpc-header-forward-pattern=(?-i)X-.*", "grpc_header_forward_pattern", "(?-i)X-.*"),
        ("--grpc-infer-response-compression-level=HIGH", "grpc_compression", "high"),
        ("--metrics-config=histogram_latencies=true", "metrics_config", {"histogram_latencies": "true"}),
    ],
)
def test_a_flag_reaches_the_gateway(flag, field, value):
    assert getattr(gateway(flag), field) == value


def test_a_connections_age_is_limited_only_when_it_is_given():
    options = dict(gateway("--grpc-max-connection-age=5000", "--grpc-keepalive-time=1000").grpc_channel_options)
    assert options["grpc.max_connection_age_ms"] == 5000
    assert options["grpc.keepalive_time_ms"] == 1000
    assert "grpc.max_connection_age_grace_ms" not in options


def test_restricted_apis():
    options = gateway(
        "--http-restricted-api=health,metadata:Admin-Key=a=b",
        "--http-restricted-api=shared-memory:k=v",
        "--grpc-restricted-protocol=inference:infer-key=secret",
    )
    assert options.http_restricted == {
        "health": ("admin-key", "a=b"),
        "metadata": ("admin-key", "a=b"),
        "shared-memory": ("k", "v"),
    }
    assert options.grpc_restricted == {"inference": ("triton-grpc-protocol-infer-key", "secret")}


def test_tls_needs_its_files():
    files = ("--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r")
    assert gateway(*files).grpc_ssl == ("", "", "")
    assert gateway("--grpc-use-ssl", *files).grpc_ssl == ("c", "k", "")
    assert gateway("--grpc-use-ssl-mutual", *files).grpc_ssl == ("c", "k", "r")
    with pytest.raises(UsageError, match="--grpc-use-ssl requires --grpc-server-cert and --grpc-server-key"):
        gateway("--grpc-use-ssl", "--grpc-server-cert=c")
    with pytest.raises(UsageError, match="--grpc-use-ssl-mutual requires --grpc-root-cert"):
        gateway("--grpc-use-ssl-mutual", *files[:2])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--http-restricted-api=magic:k=v"], "unknown restricted api 'magic' "),
        (["--grpc-restricted-protocol=magic:k=v"], "unknown restricted protocol 'magic' "),
        (
            ["--http-restricted-api=health:k=v", "--http-restricted-api=health:k=v"],
            "restricted api 'health' can not be specified in multiple config groups",
        ),
        (
            ["--grpc-restricted-protocol=health,health:k=v"],
            "restricted protocol 'health' can not be specified in multiple config groups",
        ),
        (
            ["--http-restricted-api=health"],
            "--http-restricted-api option format is '<config name>:<setting>=<value>'. Got health",
        ),
        (["--metrics-config=x"], "--metrics-config option format is <setting>=<value>. Got x"),
        (["--metrics-config=counter_latencies=maybe"], "invalid value for bool option: maybe"),
        (["--grpc-infer-response-compression-level=x"], "invalid argument for --grpc_infer_response_compression_level"),
        (["--http-port=8001"], "The server cannot listen to HTTP requests and GRPC requests at the same address"),
        (["--http-port=65536"], "invalid value for --http-port: 65536"),
        (["--http-header-forward-pattern=(("], "invalid value for --http-header-forward-pattern: (( (no regular"),
        (["--gateways=-1"], "invalid value for --gateways: -1"),
        (["--gateways=many"], "invalid value for --gateways: many"),
        (["--metrics-interval-ms=0"], "invalid value for --metrics-interval-ms: 0"),
        (["--http-max-input-size=-1"], "Error: --http-max-input-size must be greater than 0."),
        (["--grpc-max-input-size=0"], "Error: --grpc-max-input-size must be greater than 0."),
        (["--allow-zmq=maybe"], "invalid value for bool option: maybe"),
    ],
)
def test_refusals(flags, text):
    with pytest.raises(UsageError) as refusal:
        gateway(*flags)
    assert str(refusal.value).startswith(text)


def test_equal_ports_are_no_collision_where_a_service_is_off_or_elsewhere():
    assert gateway("--http-port=8001", "--allow-grpc=false").http_port == 8001
    assert gateway("--http-port=8001", "--grpc-address=127.0.0.2").http_port == 8001


# --- ports --------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_tritons_text():
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        others = ("--allow-grpc=false", "--allow-metrics=false")
        for flags in ((), ("--gateways=2",)):  # whoever shares its ports with its own shares them with nobody else
            with pytest.raises(
                CannotServe, match=rf"Socket '127\.0\.0\.1:{port}' already in use \(another by --http-port\)$"
            ):
                check_ports(gateway(f"--http-port={port}", *others, *flags))
        check_ports(gateway(f"--http-port={port}", "--reuse-http-port=true", *others))
        check_ports(gateway(f"--http-port={port}", "--gateways=0", *others))
    check_ports(gateway(f"--http-port={port}", *others))


def test_an_address_that_is_not_ours():
    with pytest.raises(CannotServe, match=r"cannot listen on 192\.0\.2\.1:8001: Cannot assign requested address"):
        check_ports(gateway("--allow-http=false", "--allow-metrics=false", "--grpc-address=192.0.2.1"))


# --- tables -------------------------------------------------------------------------------------------------------


def test_start_up_tables():
    options = parse_serve(
        [
            "--model-repository=/a",
            "--model-repository=/b",
            "--model-control-mode=explicit",
            "--load-model=m",
            "--strict-readiness=false",
            "--backend-config=onnxruntime,x=1",
            "--backend-config=python,y=2",
        ]
    )
    rows = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("|") for line in option_table(options).splitlines())
        if len(cells) == 4
    }
    assert rows["server_id"] == "triton"
    assert rows["server_version"] == "2.73.0"
    assert rows["server_extensions"].startswith("classification sequence model_repository ")
    assert rows["model_repository_path[1]"] == "/b"
    assert rows["model_control_mode"] == "MODE_EXPLICIT"
    assert rows["startup_models_0"] == "m"
    assert rows["strict_readiness"] == "0"
    assert rows["exit_timeout"] == "30"
    lines = backend_table({"onnxruntime"}, options).splitlines()
    assert lines[1].split("|")[1].strip() == "Backend"
    assert "backends/onnxruntime.py" in lines[3]
    assert '"x":"1"' in lines[3]
    assert "y" not in lines[3].rpartition("{")[2]


def test_which_headers_a_pattern_means():
    assert header_pattern("my_.*").search("MY_HEADER")
    assert header_pattern("(?-i)MY_.*").search("MY_HEADER")
    assert not header_pattern("(?-i)MY_.*").search("my_header")
