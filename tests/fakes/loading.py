"""Loading one model directory in this process, for tests of what the loader makes of it."""

from __future__ import annotations

from pathlib import Path

from broker.repository.config import LoadFailure, ModelConfig
from broker.repository.loader.load import load
from broker.repository.protocol import LoadRequest
from broker.repository.scan import scan
from tests.fakes import models


def run(root: Path, name: str = "m", **options) -> ModelConfig | LoadFailure:
    return load(scan([str(root)]).models[name], LoadRequest(repositories=(str(root),), **options))


def config_of(root: Path, model, config: str | None = None, **options) -> ModelConfig:
    models.write_model(root, "m", model, config=config)
    result = run(root, **options)
    assert isinstance(result, ModelConfig), result.reason
    return result


def reason_of(root: Path, model, config: str | None = None, **options) -> str:
    models.write_model(root, "m", model, config=config)
    result = run(root, **options)
    assert isinstance(result, LoadFailure), result
    assert result.name == "m"
    assert "Traceback" not in result.reason
    return result.reason
