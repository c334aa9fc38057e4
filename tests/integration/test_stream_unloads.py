"""A decoupled model is unloaded while a request of it goes on: what was accepted is finished, and that shows."""

from __future__ import annotations

from pathlib import Path

import clientlib
from tests.fakes.broker import Broker, eventually
from tests.fakes.streaming import repeat, write_models


def test_it_is_unloading_until_the_last_response(tmp_path: Path) -> None:
    write_models(tmp_path / "models")
    (tmp_path / "run").mkdir(mode=0o700)
    arguments = ("--model-control-mode=explicit", "--load-model=repeat")
    with Broker(tmp_path / "models", tmp_path / "run", *arguments) as broker:
        broker.ready()
        with clientlib.connect(broker.directory) as client:
            stream = client.stream("repeat", repeat(20_000, delay_ms=20))
            next(stream)
            client.unload("repeat")
            for _ in range(10):
                next(stream)
                assert client.models()["repeat"].state == "UNLOADING"
            stream.close()
            eventually(lambda: client.models()["repeat"].state == "UNAVAILABLE", "it is unloaded")
