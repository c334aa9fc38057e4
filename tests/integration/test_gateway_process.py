"""Gateways as an operator meets them: start, readiness, ports, signals, deaths, and what is left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes import models
from tests.fakes.broker import LIMIT_S, alive, command, eventually
from tests.fakes.gateways import Gateway
from tests.fakes.processes import children, name_of
from tests.faults import unruly
from tests.faults.unruly_backend import ACTS

pytestmark = pytest.mark.timeout(180)
READY = "/v2/health/ready"
SHIM = Path(__file__).parents[2] / "deploy" / "tritonserver"


@pytest.fixture(scope="module")
def shared(repository, tmp_path_factory):
    with Gateway(repository, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


def gateway_pids(broker):
    return [row["pid"] for row in broker.gateways()]


def test_it_serves_when_it_says_that_it_is_ready(shared):
    assert shared.get(READY) == (200, b"")
    assert shared.get("/v2/health/live") == (200, b"")
    assert shared.get("/metrics", "metrics")[0] == 200
    with socket.create_connection(("127.0.0.1", shared.ports["grpc"]), timeout=LIMIT_S):
        pass


def test_the_log_has_tritons_tables_and_lines_in_order(shared):
    log = shared.log()
    ports = shared.ports
    expected = [
        "| Backend ",
        "| Model ",
        "| Option ",
        f"Started GRPCInferenceService at 127.0.0.1:{ports['grpc']}",
        f"Started HTTPService at 127.0.0.1:{ports['http']}",
        f"Started Metrics Service at 127.0.0.1:{ports['metrics']}",
        "Started session service at",
    ]
    places = [log.index(text) for text in expected]
    assert places == sorted(places)
    assert log.index("successfully loaded 'add1' version 1") < places[0]
    for line in log.splitlines():
        assert re.match(r"[IWE]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ \w+\.py:\d+\] |[+|]", line), line
    assert "without effect" not in log


def test_the_gateway_is_a_child_that_nobody_else_can_look_into(shared):
    (pid,) = gateway_pids(shared)
    assert pid in children(shared.pid)
    assert name_of(pid) == "tb-gateway"
    limits = Path(f"/proc/{pid}/limits").read_text()
    soft, hard = re.search(r"Max open files +(\d+) +(\d+)", limits).groups()
    assert soft == hard
    sockets = {name for name in os.listdir(shared.directory) if stat.S_ISSOCK((shared.directory / name).stat().st_mode)}
    assert {"http.sock", "grpc.sock", "zmq.sock"} <= sockets
    for signal_number in (signal.SIGTERM, signal.SIGINT):  # of a terminal, or of an init system to all of its cgroup
        os.kill(pid, signal_number)
    assert shared.get(READY)[0] == 200
    assert gateway_pids(shared) == [pid]


def test_a_killed_gateway_is_replaced_on_the_same_addresses(shared):
    for _ in range(2):
        (pid,) = gateway_pids(shared)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: shared.get(READY)[0] == 200, "serves again")
        assert gateway_pids(shared) != [pid]
    assert shared.process.poll() is None
    assert shared.gateways()[0]["restarts"] >= 2
    assert "killed by SIGKILL" in shared.log()


def test_a_port_in_use_ends_it_with_tritons_text(repository, tmp_path, shared):
    for service in ("http", "grpc", "metrics"):
        taken = shared.ports[service]
        with Gateway(repository, tmp_path / service, f"--{service}-port={taken}") as broker:
            assert broker.process.wait(LIMIT_S) == 1
            assert f"Socket '127.0.0.1:{taken}' already in use " in broker.log()
            assert re.search(r"^E\d{4} .*already in use", broker.log(), re.MULTILINE)
            assert os.listdir(broker.directory) == []
    assert shared.get(READY)[0] == 200


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--grpc-use-ssl", "--grpc-server-cert=/none", "--grpc-server-key=/none"), "cannot read '/none'"),
        (("--http-address=no-such-host.invalid",), "cannot listen on no-such-host.invalid:"),
        (("--metrics-config=summary_quantiles=x",), "invalid --metrics-config"),
    ],
)
def test_what_cannot_be_done_ends_it_with_one_line(repository, tmp_path, flags, text):
    with Gateway(repository, tmp_path / "run", *flags) as broker:
        assert broker.process.wait(LIMIT_S) == 1
        errors = re.findall(r"^E\d{4} .*", broker.log(), re.MULTILINE)
        assert [text in error for error in errors] == [True]
        assert "Traceback" not in broker.log()
        assert "Exception" not in broker.log()


SLOW = """
import os, time

def load(context):
    until = time.monotonic() + 60
    while not os.path.exists(os.path.join(context.directory, "go")) and time.monotonic() < until:
        time.sleep(0.005)
    return Model()

class Model:
    def bind(self, inputs, outputs):
        raise NotImplementedError

    def close(self):
        pass
"""


@pytest.fixture
def slow(tmp_path):
    """A repository whose load ends when there is a file `go` in the version's directory; that directory."""
    tensors = 'input {name: "x" data_type: TYPE_FP32 dims: 1} output {name: "y" data_type: TYPE_FP32 dims: 1}'
    directory = models.write_model(tmp_path / "repository", "slow", config=f'backend: "slow" {tensors}')
    (directory / "backend.py").write_text(SLOW)
    (directory / "1").mkdir(exist_ok=True)
    return directory / "1"


def loading(broker):
    """Wait until its gateway has begun, and the model is being loaded."""
    eventually(lambda: "tb-gateway" in {name_of(pid) for pid in children(broker.pid)}, "a gateway has begun")
    eventually(lambda: "loading: slow:1" in broker.log(), "the load has begun")


def test_nobody_listens_before_the_models_are_loaded(slow, tmp_path):
    with Gateway(tmp_path / "repository", tmp_path / "run") as broker:
        loading(broker)
        for service in ("http", "metrics", "grpc"):
            assert broker.get(READY, service)[0] == 0
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", broker.ports[service]), timeout=LIMIT_S)
        (slow / "go").touch()
        assert broker.ready().get(READY)[0] == 200


def test_sigterm_while_it_loads_ends_the_gateway_too(slow, tmp_path):
    with Gateway(tmp_path / "repository", tmp_path / "run") as broker:
        loading(broker)
        family = broker.descendants()
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(LIMIT_S) == 0
        assert not any(alive(pid) for pid in family)


def test_a_broken_model_makes_it_not_ready(tmp_path):
    repository = models.write_repository(tmp_path / "repository", {"add1": models.add1()})
    broken = repository / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"not a model")
    with Gateway(repository, tmp_path / "run", "--exit-on-error=false") as broker:
        broker.ready()
        assert broker.get(READY)[0] == 400
        assert broker.get("/v2/health/live")[0] == 200
        assert broker.get("/v2/models/add1/ready")[0] == 200
    with Gateway(repository, tmp_path / "lax", "--exit-on-error=false", "--strict-readiness=false") as broker:
        assert broker.ready().get(READY)[0] == 200


def test_sigterm_ends_everything_with_status_0(repository, tmp_path):
    with Gateway(repository, tmp_path / "run") as broker:
        family = broker.ready().descendants()
        assert "tb-gateway" in {name_of(pid) for pid in family}
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(LIMIT_S) == 0
        assert not any(alive(pid) for pid in family)
        assert os.listdir(broker.directory) == []
        log = broker.log()
        assert "Signal (15) received." in log
        assert "Timeout 30: Found 0 model versions that have in-flight inferences" in log
        assert broker.get(READY)[0] == 0
        assert not re.search(r"^E\d{4}", log, re.MULTILINE), log


def unruly_request(tag, act, seconds=0.0):
    """Path and document of a request."""
    inputs = [
        {"name": "act", "datatype": "INT64", "shape": [1], "data": [list(ACTS).index(act)]},
        {"name": "x", "datatype": "FP32", "shape": [4], "data": [tag, seconds, 0, 0]},
    ]
    return "/v2/models/unruly/infer", {"inputs": inputs}


def test_sigterm_loses_no_request_that_was_accepted(tmp_path):
    repository = unruly.write(tmp_path / "repository")
    with Gateway(repository, tmp_path / "run") as broker, contextlib.ExitStack() as stack:
        broker.ready()
        assert broker.post(*unruly_request(0, "add"))[0] == 200
        asked = []
        for tag in range(1, 7):  # some wait in the worker, some in the gateway
            connection = http.client.HTTPConnection("127.0.0.1", broker.ports["http"], timeout=LIMIT_S)
            stack.callback(connection.close)
            path, document = unruly_request(tag, "wait")
            connection.request("POST", path, json.dumps(document))
            asked.append(connection)
        assert broker.get(READY)[0] == 200, "it has read what came before"
        broker.process.send_signal(signal.SIGTERM)
        refused = eventually(lambda: [each for each in [broker.get(READY)] if each[0] != 200])
        unruly.let_go(repository, "unruly")
        answers = [connection.getresponse() for connection in asked]
        assert [answer.status for answer in answers] == [200] * 6
        assert [json.load(answer)["outputs"][0]["data"][0] for answer in answers] == [2, 3, 4, 5, 6, 7]
        assert broker.process.wait(LIMIT_S) == 0
        assert refused == [(503, b'{"error":"Server exiting"}')]
        assert "model versions that have in-flight inferences" in broker.log()


def test_what_takes_longer_than_the_exit_timeout_ends_with_status_1(tmp_path):
    repository = unruly.write(tmp_path / "repository")
    with Gateway(repository, tmp_path / "run", "--exit-timeout-secs=1") as broker, ThreadPoolExecutor() as threads:
        broker.ready()
        running = threads.submit(broker.post, *unruly_request(7, "nap", 30.0))
        eventually(lambda: unruly.runs(repository, "unruly", 7))
        family = broker.descendants()
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(LIMIT_S) == 1
        assert running.result()[0] in (0, 503)
        assert "failed to stop server: Internal - Exit timeout expired. Exiting immediately." in broker.log()
        assert not any(alive(pid) for pid in family)
        assert os.listdir(broker.directory) == []


def test_a_killed_broker_takes_its_gateway_along_and_the_next_one_has_the_addresses(repository, tmp_path):
    with Gateway(repository, tmp_path / "run") as broker:
        broker.ready()
        pids = gateway_pids(broker)
        broker.process.kill()
        broker.process.wait()
        eventually(lambda: not any(alive(pid) for pid in pids), "the gateway ends with its broker")
        assert {"http.sock", "grpc.sock", "zmq.sock"} <= set(os.listdir(broker.directory))
        ports = [f"--{service}-port={port}" for service, port in broker.ports.items()]
    with Gateway(repository, tmp_path / "run", *ports) as broker:
        broker.ports = {flag[2:].partition("-")[0]: int(flag.partition("=")[2]) for flag in ports}
        assert broker.ready().get(READY)[0] == 200
        assert "http.sock" in os.listdir(broker.directory)


def test_two_gateways_share_the_ports(repository, tmp_path):
    with Gateway(repository, tmp_path / "run", gateways=2) as broker:
        broker.ready()
        eventually(lambda: [row["state"] for row in broker.gateways()] == ["serving", "serving"])
        first, second = gateway_pids(broker)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: gateway_pids(broker)[0] not in (first, None))
        eventually(lambda: all(row["state"] == "serving" for row in broker.gateways()))
        assert gateway_pids(broker)[1] == second
        assert [broker.get(READY)[0] for _ in range(20)] == [200] * 20
        assert broker.get("/metrics", "metrics")[0] == 200
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(LIMIT_S) == 0


def test_services_that_are_off_are_off(repository, tmp_path):
    flags = ("--allow-grpc=false", "--allow-metrics=false", "--allow-zmq=false")
    with Gateway(repository, tmp_path / "run", *flags) as broker:
        assert broker.ready().get(READY)[0] == 200
        assert broker.get("/metrics", "metrics")[0] == 0
        assert set(os.listdir(broker.directory)) == {"broker.lock", "broker.sock", "http.sock"}
        assert "GRPC" not in broker.log()


def test_a_missing_package_is_named_with_the_extra_that_has_it(repository, tmp_path, monkeypatch):
    hidden = tmp_path / "hidden" / "aiohttp"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'aiohttp'\", name='aiohttp')\n")
    monkeypatch.setenv("PYTHONPATH", str(hidden.parent))
    with Gateway(repository, tmp_path / "run") as broker:
        assert broker.process.wait(LIMIT_S) == 1
        log = broker.log()
        assert "package 'aiohttp', which is not installed: pip install 'tensorbroker[gateway]'" in log
        assert "--gateways=0" in log
        assert "Traceback" not in log


def test_a_log_file_that_cannot_be_written_is_refused(repository, tmp_path):
    log_file = tmp_path / "none" / "log"
    flags = ("--model-repository", str(repository), "--directory", str(tmp_path / "run"), "--gateways=0")
    answer = command("serve", *flags, f"--log-file={log_file}")
    assert answer.returncode == 1
    assert f"cannot write --log-file {log_file}: No such file or directory" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_log_file_has_the_gateways_lines_too(repository, tmp_path):
    log_file = tmp_path / "log"
    with Gateway(repository, tmp_path / "run", f"--log-file={log_file}", "--log-format=ISO8601") as broker:
        broker.ready()
        assert re.search(
            r"^\d{4}-\d\d-\d\dT[\d:]+Z I \d+ server\.py:\d+\] \"Started HTTPService", log_file.read_text(), re.M
        )
        assert broker.log() == ""


def test_log_settings_reach_every_gateway_that_runs_or_will(repository, tmp_path):
    with Gateway(repository, tmp_path / "run", gateways=2) as broker:
        broker.ready()
        eventually(lambda: all(row["state"] == "serving" for row in broker.gateways()))
        status, settings = broker.post("/v2/logging", {"log_error": False, "log_format": "ISO8601"})
        assert (status, settings["log_error"], settings["log_format"]) == (200, False, "ISO8601")
        assert broker.get("/v2/logging")[0] == 200
        for pid in gateway_pids(broker):
            os.kill(pid, signal.SIGKILL)  # an error of the broker's
        eventually(lambda: broker.log().count("serves again") == 2)
        eventually(lambda: all(row["state"] == "serving" for row in broker.gateways()))
        assert "killed by SIGKILL" not in broker.log()
        assert re.search(r"^\d{4}-\d\d-\d\dT.* I .*gateway \d serves again", broker.log(), re.MULTILINE)
        assert json.loads(broker.get("/v2/logging")[1])["log_format"] == "ISO8601"
        assert broker.post("/v2/logging", {"log_file": "/x"})[0] == 501


def test_the_shim_is_called_as_tritonserver_is(repository, tmp_path):
    flags = ("--model-repository", str(repository), "--directory", str(tmp_path / "run"), "--nonsense")
    environment = {**os.environ, "TENSORBROKER": "echo"}
    shown = subprocess.run([SHIM, *flags], env=environment, capture_output=True, text=True, timeout=30, check=True)
    assert shown.stdout.split() == ["serve", *flags]
    assert os.access(SHIM, os.X_OK)
