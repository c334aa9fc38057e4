"""/metrics of a running broker: what was done by each way in shows, and goes on over a gateway's death."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from prometheus_client.parser import text_string_to_metric_families

import clientlib
from shm.gateway_counters import COPIES
from tests.fakes.broker import command, eventually
from tests.fakes.gateways import Gateway, free_ports
from tests.fakes.zmq_gateway import HandZmqClient

X = np.arange(8, dtype=np.float32).reshape(2, 4)
MODEL = "{model=add1,version=1}"
COPIED = "tensorbroker_copied_bytes_total{{model=,reason={},version=}}"


class Served(Gateway):
    def metrics(self, path: str = "/metrics") -> dict[str, float]:
        """Value by `name{labels}`; the parser's `_total` taken off Triton's names."""
        status, body = self.get(path, "metrics")
        assert status == 200, body
        found = {}
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[f"{name}{{{labels}}}" if labels else name] = sample.value
        return found

    def http(self, model: str = "add1") -> None:
        with triton_http.InferenceServerClient(f"127.0.0.1:{self.ports['http']}") as client:
            tensor = triton_http.InferInput("x", X.shape, "FP32")
            tensor.set_data_from_numpy(X)
            assert np.array_equal(client.infer(model, [tensor]).as_numpy("y"), X + 1)

    def grpc(self) -> None:
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{self.ports['grpc']}") as client:
            tensor = triton_grpc.InferInput("x", X.shape, "FP32")
            tensor.set_data_from_numpy(X)
            assert np.array_equal(client.infer("add1", [tensor]).as_numpy("y"), X + 1)

    def native(self) -> None:
        with clientlib.connect(f"ipc://{self.directory}") as client:
            assert np.array_equal(client.infer("add1", {"x": X})["y"], X + 1)

    def zmq(self) -> None:
        tensor = {"name": "x", "datatype": "FP32", "shape": X.shape, "data": X.tobytes()}
        with HandZmqClient(self.directory) as client:
            client.hello()
            reply = client.ask("infer", model="add1", inputs=[tensor])
            assert reply["outputs"][0]["data"] == (X + 1).tobytes()


@pytest.fixture(scope="module")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--metrics-config=summary_latencies=true", "--metrics-config=histogram_latencies=true")
    with Served(repository, tmp_path_factory.mktemp("run"), *flags) as served:
        served.ready()
        yield served


def grew(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def settled(served: Served, before: dict[str, float], expected: dict[str, float]) -> dict[str, float]:
    """What grew, once `expected` is in it as it says."""
    now: dict[str, float] = {}

    def as_expected() -> bool:
        now.clear()
        now.update(grew(before, served.metrics()))
        return expected.items() <= now.items()

    try:
        eventually(as_expected)
    except AssertionError:
        assert {name: now.get(name, 0) for name in expected} == expected
        raise
    return now


def test_requests_count_once_by_the_way_they_came(served: Served) -> None:
    before = served.metrics()
    for _ in range(2):
        served.http()
    served.grpc()
    for _ in range(3):
        served.native()

    # Of several processes, each of which counts a little after it has answered; what ran inline, when it pauses.
    now = settled(
        served,
        before,
        {
            f"nv_inference_request_success{MODEL}": 6,
            "tensorbroker_requests_total{transport=http}": 2,
            "tensorbroker_requests_total{transport=grpc}": 1,
            "tensorbroker_requests_total{transport=native}": 3,
            f"nv_inference_count{MODEL}": 12,
            f"nv_inference_exec_count{MODEL}": 6,
            f"tensorbroker_request_duration_seconds_count{MODEL}": 6,
            "tensorbroker_gateway_duration_seconds_count{transport=http}": 2,
            "tensorbroker_batch_size_bucket{le=2.0,model=add1,version=1}": 6,
            f"tensorbroker_batch_size_sum{MODEL}": 12,
            f"nv_inference_first_response_histogram_ms_count{MODEL}": 6,
            f"nv_inference_request_summary_us_count{MODEL}": 6,
        },
    )
    assert not any(name.startswith("nv_inference_request_failure") for name in now)


def test_every_copied_byte_is_counted(served: Served) -> None:
    def copies(ask: Callable[[], None], **expected: int) -> None:
        before = served.metrics()
        ask()
        now = settled(served, before, {COPIED.format(reason): count for reason, count in expected.items()})
        assert {reason for reason in COPIES if COPIED.format(reason) in now} == expected.keys()

    def in_pieces() -> None:
        names = {"name": "x", "datatype": "FP32", "shape": X.shape, "parameters": {"binary_data_size": X.nbytes}}
        head = json.dumps({"inputs": [names]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        connection = http.client.HTTPConnection("127.0.0.1", served.ports["http"], timeout=30)
        body = iter((head, X.tobytes()))
        connection.request("POST", "/v2/models/add1/infer", body, headers, encode_chunked=True)
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["outputs"][0]["data"][0]) == (200, 1)
        connection.close()

    def stream() -> None:
        answers: Queue[Any] = Queue()
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{served.ports['grpc']}") as client:
            client.start_stream(lambda result, error: answers.put(error or result))
            tensor = triton_grpc.InferInput("x", X.shape, "FP32")
            tensor.set_data_from_numpy(X)
            client.async_stream_infer("add1", [tensor])
            assert np.array_equal(answers.get(timeout=30).as_numpy("y"), X + 1)

    once = {"inline_input": X.nbytes, "response": X.nbytes}
    for ask in (served.http, served.grpc, served.zmq):
        copies(ask, **once)
    copies(stream, inline_input=X.nbytes, response=2 * X.nbytes)
    copies(in_pieces, request=X.nbytes, inline_input=X.nbytes)  # JSON out is no copy
    copies(served.native)


def test_zeromq_counts_too(served: Served) -> None:
    before = served.metrics()
    served.zmq()
    settled(served, before, {"tensorbroker_requests_total{transport=zmq}": 1})


def test_counters_outlive_the_gateway_that_counted(served: Served) -> None:
    earlier = served.metrics()
    served.http()
    count = "tensorbroker_requests_total{transport=http}"
    settled(served, earlier, {count: 1})
    before = served.metrics()
    (row,) = served.gateways()
    os.kill(int(str(row["pid"])), signal.SIGKILL)
    eventually(lambda: served.get("/v2/health/ready")[0] == 200 and served.get("/", "metrics")[0] == 200)
    after = served.metrics()
    assert grew(before, after)["tensorbroker_gateway_restarts_total{gateway=0}"] == 1
    for name in ("http", "grpc", "zmq", "native"):
        assert after[of_it := f"tensorbroker_requests_total{{transport={name}}}"] == before[of_it]
    served.http()
    settled(served, before, {count: 1})


def test_failures_of_a_front_end_count_there(served: Served) -> None:
    before = served.metrics()
    with pytest.raises(triton_http.InferenceServerException):
        served.http("no such model")
    counts = ("failed_requests", "requests")
    settled(served, before, {f"tensorbroker_{name}_total{{transport=http}}": 1 for name in counts})


def test_regions_show_while_they_are_there(served: Served) -> None:
    with clientlib.connect(f"ipc://{served.directory}") as client:
        before = served.metrics()
        region = client.create_region("shown", 8192)
        client.open_region(region.share())
        now = grew(before, served.metrics())
        assert now["tensorbroker_region_bytes{kind=pool}"] == 8192
        assert now["tensorbroker_regions{kind=pool}"] == 1
        client.unregister("shown")
        eventually(lambda: "tensorbroker_regions{kind=pool}" not in grew(before, served.metrics()), "it is gone")
    assert served.metrics()["tensorbroker_region_limit_bytes"] > 0


def test_any_other_path_is_empty(served: Served) -> None:
    for path in ("/", "/v2", "/metric", "/metrics/x", "//metrics"):
        assert served.get(path, "metrics") == (200, b"")
    assert served.get("/metrics/", "metrics")[1].startswith(b"# HELP ")
    assert served.get("/metrics?name=x", "metrics")[1].startswith(b"# HELP ")


def test_many_scrapes_at_a_time_and_slow_ones_do_no_harm(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.ports["metrics"])) as slow, ThreadPoolExecutor(16) as pool:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost")
        found = list(pool.map(lambda _: served.get("/metrics", "metrics"), range(64)))
        assert [status for status, _ in found] == [200] * 64


def test_the_hosts_numbers_can_be_left_out(repository: Path, tmp_path: Path) -> None:
    with Served(repository, tmp_path / "run", "--allow-cpu-metrics=false") as served:
        served.ready()
        assert not [name for name in served.metrics() if name.startswith("nv_cpu")]


def test_a_setting_that_cannot_be_followed_ends_the_start(repository: Path, tmp_path: Path) -> None:
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]
    answer = command(
        "serve",
        f"--model-repository={repository}",
        f"--directory={tmp_path / 'run'}",
        "--metrics-config=summary_quantiles=9:0.1",
        *ports,
    )
    assert answer.returncode == 1
    assert "invalid --metrics-config" in answer.stderr


def test_a_model_has_buckets_and_labels_of_its_own_and_a_load_changes_them(repository: Path, tmp_path: Path) -> None:
    family = "nv_inference_first_response_histogram_ms"
    flags = ("--metrics-config=histogram_latencies=true", "--model-control-mode=explicit", "--load-model=add1")

    def config(bounds: list[float]) -> str:
        control = {"metric_identifier": {"family": family}, "histogram_options": {"buckets": bounds}}
        return json.dumps({"model_metrics": {"metric_control": [control]}, "metric_tags": {"team": "a"}})

    def buckets(served: Served) -> dict[str, float]:
        return {name: value for name, value in served.metrics().items() if name.startswith(f"{family}_bucket")}

    def named(bound: str) -> str:
        return f"{family}_bucket{{_team=a,le={bound},model=add1,version=1}}"

    with Served(repository, tmp_path / "run", *flags) as served:
        served.ready()
        with clientlib.connect(f"ipc://{served.directory}") as client:
            client.load("add1", config=config([1e-6, 1e8]))
            for _ in range(3):
                client.infer("add1", {"x": X})
            counted = {named("1e-06"): 0, named("100000000.0"): 3, named("+Inf"): 3}
            eventually(lambda: buckets(served) == counted)
            client.load("add1", config=config([1e8]))
            assert buckets(served) == {named("100000000.0"): 0, named("+Inf"): 0}
            client.infer("add1", {"x": X})
            eventually(lambda: buckets(served) == {named("100000000.0"): 1, named("+Inf"): 1})
