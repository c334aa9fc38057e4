"""A served model whose answers are kept and which is warmed up: through every front end, in statistics and /metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clientlib
from tests.fakes import models
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway, url_of

CACHED = """max_batch_size: 8
dynamic_batching {}
response_cache { enable: true }
model_warmup {
  name: "one" batch_size: 4 count: 3
  inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 random_data: true } }
}
"""
BROKEN = """max_batch_size: 8
model_warmup { name: "half" batch_size: 1 inputs { key: "a" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = tmp_path_factory.mktemp("repository")
    models.write_model(repository, "kept", models.add1(), config=CACHED)
    models.write_model(repository, "plain", models.add1())
    models.write_model(repository, "broken", models.two_input(), config=BROKEN)
    flags = ("--cache-config=local,size=1000000", "--exit-on-error=false", "--strict-readiness=false")
    with Gateway(repository, tmp_path_factory.mktemp("run"), *flags) as broker:
        yield broker.ready()


def statistics(served: Gateway, model: str = "kept") -> dict[str, Any]:
    status, body = served.get(f"/v2/models/{model}/stats")
    assert status == 200
    return json.loads(body)["model_stats"][0]


def test_one_answer_serves_every_front_end(served):
    x = np.arange(4, dtype=np.float32).reshape(1, 4) + 0.25
    before = statistics(served)
    for transport in ("native", "http", "grpc"):
        with clientlib.connect(url_of(served, transport)) as client:
            assert np.array_equal(client.infer("kept", {"x": x})["y"], x + 1)

    def counted() -> dict[str, int]:
        now = statistics(served)
        parts = now["inference_stats"]
        found = {name: parts[name]["count"] - before["inference_stats"][name]["count"] for name in parts}
        return {**found, "inferences": now["inference_count"] - before["inference_count"]}

    wanted = {
        "success": 3,
        "fail": 0,
        "queue": 3,
        "compute_input": 1,
        "compute_infer": 1,
        "compute_output": 1,
        "cache_hit": 2,
        "cache_miss": 1,
        "inferences": 1,
    }
    eventually(lambda: counted() == wanted, "all are counted, and each as what it was")
    assert statistics(served)["inference_stats"]["cache_hit"]["ns"] > 0


def test_a_model_without_it_runs_every_request(served):
    x = np.ones((1, 4), np.float32)
    with clientlib.connect(url_of(served, "native")) as client:
        for _ in range(3):
            assert np.array_equal(client.infer("plain", {"x": x})["y"], x + 1)
    eventually(lambda: statistics(served, "plain")["execution_count"] == 3, "all are counted")
    assert statistics(served, "plain")["inference_stats"]["cache_miss"] == {"count": 0, "ns": 0}


def test_metrics_show_the_cache_and_models_whose_answers_are_kept(served):
    status, body = served.get("/metrics", "metrics")
    assert status == 200
    text = body.decode()
    assert 'nv_cache_num_hits_per_model{model="kept",version="1"}' in text
    assert 'nv_cache_num_hits_per_model{model="plain"' not in text
    assert "\nnv_cache_num_lookups " in text


def test_a_model_that_cannot_be_warmed_up_is_not_served(served):
    with clientlib.connect(url_of(served, "native")) as client, pytest.raises(clientlib.InferError):
        client.infer("broken", {"x": np.ones((1, 4), np.float32)})
    assert "failed to load 'broken' version 1: failed to run warmup sample 'half': " in served.log()
