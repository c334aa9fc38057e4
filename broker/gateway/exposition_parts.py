"""What several parts of the exposition are made of. Used by `broker.gateway.exposition` and `exposition_cache`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

Row = Mapping[str, Any]

MODEL = ("model", "version")


class PlainCounter(GaugeMetricFamily):
    """A counter whose name stays as it is: the client library would append `_total`."""


def labels_of(row: Row) -> tuple[str, str]:
    """The values of MODEL."""
    return row["name"], row["version"]


def tagged(families: Sequence[Metric], models: Sequence[Row]) -> Sequence[Metric]:
    """With the labels `_KEY` of models' `metric_tags`, as in Triton. Changes the families."""
    tags = {
        labels_of(row): {f"_{key}": value for key, value in row["tags"].items()} for row in models if row.get("tags")
    }
    for family in families if tags else ():
        family.samples = [
            sample._replace(labels={**sample.labels, **tags.get(_model_of(sample.labels), {})})
            for sample in family.samples
        ]
    return families


def _model_of(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get("model", ""), labels.get("version", "")


def counter(name: str, documentation: str, models: Sequence[Row], value: Callable[[Row], float]) -> Metric:
    """One of Triton's counters, per model."""
    family = PlainCounter(name, documentation, labels=MODEL)
    for row in models:
        family.add_metric(labels_of(row), value(row))
    return family
