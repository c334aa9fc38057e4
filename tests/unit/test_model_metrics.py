"""What /metrics shows is up to a model's `metric_tags` and `model_metrics`, from the text to the words that are counted
in, and up to flags.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from broker.gateway.exposition import Config
from broker.gateway.metrics import MetricsServer
from broker.gateway.options import GatewayOptions
from broker.statistics_blocks import StatisticsBlocks
from broker.worker.counting import Counted
from shm import statistics as words
from shm.statistics import StatisticsPage
from tests.fakes import models
from tests.fakes.loading import config_of, reason_of
from tests.unit.test_exposition import document, families, model

FAMILY = "nv_inference_first_response_histogram_ms"
MS = 1_000_000


def controls(*buckets: float, family: str = FAMILY) -> str:
    options = "".join(f" buckets: {bucket}" for bucket in buckets)
    return (
        f'model_metrics {{ metric_control {{ metric_identifier {{ family: "{family}" }} '
        f"histogram_options {{{options} }} }} }}"
    )


@pytest.fixture
def blocks() -> Iterator[StatisticsBlocks]:
    made = StatisticsBlocks(StatisticsPage.create())
    yield made
    os.close(made.page.fd)


# --- the text -----------------------------------------------------------------------------------------------------


def test_what_is_said_reaches_the_configuration(tmp_path):
    config = config_of(tmp_path, models.add1(), f'{controls(0.5, 33, 40)} metric_tags {{ key: "team" value: "a" }}')
    assert config.first_response_buckets == (0.5, 33.0, 40.0)
    assert config.metric_tags == {"team": "a"}
    assert not [note for note in config.notes if "metric" in note]


def test_without_buckets_the_default_ones_stay(tmp_path):
    assert config_of(tmp_path, models.add1(), controls()).first_response_buckets == ()


def test_another_family_is_reported(tmp_path):
    (note,) = config_of(tmp_path, models.add1(), f"max_batch_size: 4 {controls(1, family='nv_x')}").notes
    assert note == f"model_metrics of 'nv_x' is ignored: only the buckets of {FAMILY} can be chosen"


@pytest.mark.parametrize(
    ("buckets", "says"),
    [
        ((2, 1), "must be ascending for m, got 1 after 2"),
        ((1, 1), "must be ascending for m, got 1 after 1"),
        ((0, 1), "must be numbers of milliseconds from 1e-06 to 1e+09 for m, got 0"),
        ((1, float("nan")), "must be numbers of milliseconds from 1e-06 to 1e+09 for m, got nan"),
        ((1, 1e10), "must be numbers of milliseconds from 1e-06 to 1e+09 for m, got 1e+10"),
        (tuple(range(1, 18)), "must be at most 16 for m, got 17"),
    ],
)
def test_buckets_that_cannot_be_counted_are_refused(tmp_path, buckets, says):
    reason = reason_of(tmp_path, models.add1(), controls(*buckets))
    assert f"model_metrics: the buckets of {FAMILY} {says}" in reason
    assert "config.pbtxt:1: model_metrics {" in reason


# --- what is counted ----------------------------------------------------------------------------------------------


def test_durations_are_counted_by_the_models_own_bounds_and_by_those_of_all(blocks):
    owner = ("m", 1)
    first, second = (blocks.page.block(number) for number in blocks.take(owner, 2))
    blocks.bound(owner, [33 * MS, 40 * MS])
    for ns in (33 * MS, 33 * MS + 1, 41 * MS):
        words.count_latency(first, ns, 2)
    words.count_hit_latency(second, 5_000)
    assert blocks.own_distribution("m", 1, 2) == {"counts": [3, 2, 2], "ns": 214 * MS + 5_002}
    assert sum(blocks.distribution("m", 1)["latency"]) == 7


def test_a_model_with_as_many_buckets_as_there_may_be(blocks):
    (number,) = blocks.take(("m", 1), 1)
    bounds = [at * MS for at in range(1, words.OWN_BUCKETS + 1)]
    blocks.bound(("m", 1), bounds)
    for ns in (*bounds, bounds[-1] + 1):
        words.count_latency(blocks.page.block(number), ns)
    assert blocks.own_distribution("m", 1, len(bounds))["counts"] == [1] * (words.OWN_BUCKETS + 1)


def test_instances_count_runs_in_place_and_batches(blocks):
    (number,) = blocks.take(("m", 1), 1)
    blocks.bound(("m", 1), [3 * MS])
    instance = Counted(blocks.page.block(number))
    instance.count_inline(1, 2 * MS)
    instance.count_batch(4, 4, queue_ns=0, input_ns=MS, infer_ns=2 * MS, output_ns=MS)
    instance.flush()
    assert blocks.own_distribution("m", 1, 1) == {"counts": [1, 4], "ns": 18 * MS}


def test_other_bounds_begin_anew_and_the_same_ones_go_on(blocks):
    (number,) = blocks.take(("m", 1), 1)
    for bounds, counts in (([MS], [0, 1]), ([MS], [0, 2]), ([MS, 5 * MS], [0, 1, 0]), ([2 * MS], [0, 1])):
        blocks.bound(("m", 1), bounds)
        words.count_latency(blocks.page.block(number), 3 * MS)
        assert blocks.own_distribution("m", 1, len(bounds))["counts"] == counts
    blocks.bound(("m", 1), [])
    words.count_latency(blocks.page.block(number), 3 * MS)
    assert blocks.own_distribution("m", 1, 0) == {"counts": [0], "ns": 0}


# --- what is shown ------------------------------------------------------------------------------------------------


def histogram(**changes: Any) -> dict[str, float]:
    found = families(document(model(**changes), model("other")), Config(histograms=True))[FAMILY]
    return {name.removeprefix(FAMILY): value for name, value in found[1].items() if "model=m" in name}


def test_the_histogram_has_the_models_own_buckets():
    own = {"buckets": (0.5, 33), "counts": [1, 3, 2], "ns": 250 * MS}
    assert histogram(first_response=own) == {
        "_bucket{le=0.5,model=m,version=3}": 1,
        "_bucket{le=33.0,model=m,version=3}": 4,
        "_bucket{le=+Inf,model=m,version=3}": 6,
        "_count{model=m,version=3}": 6,
        "_sum{model=m,version=3}": 250,
    }


def test_tags_are_labels_of_everything_that_triton_tells_of_the_model():
    row = model(tags={"team": 'a"b', "site": "x"})
    found = families(document(row, model("other")), Config(histograms=True, summaries=True))
    labels = '_site=x,_team=a"b'
    assert found["nv_inference_count"][1] == {
        f"nv_inference_count{{{labels},model=m,version=3}}": 12,
        "nv_inference_count{model=other,version=3}": 12,
    }
    for name, (_, samples) in found.items():
        of_model = [sample for sample in samples if "model=m" in sample]
        assert all((labels in sample) == name.startswith("nv_") for sample in of_model), name


@pytest.mark.parametrize(
    ("allowed", "names"), [(True, {"nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"}), (False, set())]
)
def test_metrics_of_gpus_can_be_left_out(allowed, names):
    class Service:
        async def metrics(self) -> dict[str, Any]:
            return document(model())

    async def scrape() -> str:
        server = MetricsServer(Service(), GatewayOptions(gpu_metrics=allowed, cpu_metrics=False))
        return (await server._make()).decode()

    text = asyncio.run(scrape())
    assert {name for name in re.findall(r"(?m)^# TYPE (\w+)", text) if name.startswith("nv_gpu_")} == names
