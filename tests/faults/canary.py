"""The honest client that runs while others attack: it knows every answer, and counts those it does not get.

Its requests alternate between a model on the worker that is under attack and one on another worker, and between a
prepared plan on its own region and arrays. `run` is the function of a `tests.faults.lab.Child`.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

import clientlib
from tests.faults import child

SHAPE = (4, 64)
PERIOD_S = 0.02
PATIENCE_S = 50.0  # longer than a worker is away, and still an answer within `nursery.LIMIT_S`
REGION = "canary's own"


class _Side:
    """Requests to one worker, with all that has become of them."""

    def __init__(self, client: clientlib.Client, model: str, region: clientlib.Region, offset: int) -> None:
        self.client, self.model = client, model
        self.ok = self.wrong = 0
        self.errors: Counter[str] = Counter()
        self.texts: list[str] = []
        size = int(np.prod(SHAPE)) * 4
        self.source = region.array(SHAPE, "FP32", offset)
        self.target = region.array(SHAPE, "FP32", offset + size)
        self.plan = client.prepare(
            model,
            inputs={"x": region.tensor(SHAPE, "FP32", offset)},
            outputs={"y": region.tensor(SHAPE, "FP32", offset + size)},
        )

    def ask(self, number: int) -> None:
        x = np.arange(self.source.size, dtype=np.float32).reshape(SHAPE) + number % 10_000
        try:
            if number & 2:
                self.target[:] = -1.0
                self.source[:] = x
                self.plan.infer(timeout=PATIENCE_S)
                y = self.target
            else:
                y = self.client.infer(self.model, {"x": x}, timeout=PATIENCE_S)["y"]
        except clientlib.InferError as error:
            self.errors[error.code] += 1
            self.texts = [*self.texts[-4:], str(error)]
        else:
            self.ok += 1
            self.wrong += not np.array_equal(y, x + 1)

    def report(self) -> dict[str, Any]:
        return {"ok": self.ok, "wrong": self.wrong, "errors": dict(self.errors), "texts": self.texts}


def run(models: dict[str, str]) -> dict[str, Any]:
    """Ask until told to stop; `models` names the model to ask, by worker. Answers "report" with its counts so far."""
    client = clientlib.connect(timeout=PATIENCE_S)
    region = client.create_region(REGION, 8192)
    sides = {worker: _Side(client, model, region, 4096 * i) for i, (worker, model) in enumerate(models.items())}
    for number in range(4):  # every kind of request once, so that nothing it needs is new after the first report
        for side in sides.values():
            side.ask(number)
    due = time.monotonic()
    while True:
        for side in sides.values():
            number += 1
            side.ask(number // len(sides))
            due = max(due + PERIOD_S, time.monotonic() - 1.0)
            order = child.hear(max(0.0, due - time.monotonic()))
            if order == "report":
                child.say({worker: side.report() for worker, side in sides.items()})
            elif order == "stop":
                client.close()
                return {worker: side.report() for worker, side in sides.items()}
