"""Does a model see what its client had enqueued before it sent the request? With a real broker.

    python -m tests.gpu.race race.json

A client enqueues many copies of old data and one of new, and asks at once for a copy of the last bytes. In any order
that `plan.after` knows, and in none said, the answer must be new. With `after(None)`, which waits for nothing, it must
be old at least once: else this step sees nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import clientlib
from shm.cuda import driver, sync
from tests.fakes.cuda_children import Child
from tests.gpu import kill
from tests.gpu.here import SIMULATED, broker, environment, report

SIZE = 1 << 20 if SIMULATED else 256 << 20
COPIES = 8 if SIMULATED else 64  # some milliseconds of either
ROUNDS = 10 if SIMULATED else 50
LAST = SIZE - 256  # where the four numbers lie that the model copies
WAYS = ("event", "synchronize", "unsaid", "nothing")


class Writer:
    """Run by `tests.fakes.cuda_children`."""

    def __init__(self, url: str) -> None:
        driver.devices("this step")
        self.client = clientlib.connect(url)
        self.region: Any = self.client.alloc_cuda("r", SIZE + 256)
        inputs = {"INPUT0": self.region.tensor((1, 4), "FP32", offset=LAST)}
        plan = self.client.prepare("mover", inputs, {"OUTPUT0": self.region.tensor((1, 4), "FP32", offset=SIZE)})
        with driver.Context(0):
            self.stream, self.own = sync.Stream(), sync.Stream()
            self.sources = [int(driver.call("cuMemAlloc", SIZE)) for _ in range(2)]
        self.plans: dict[str, Any] = {
            "event": plan.after(self.stream),
            "synchronize": plan.after(self.stream, "synchronize"),
            "unsaid": plan,
            "nothing": plan.after(None),
        }

    def _copy(self, to: int, source: int, byte_size: int) -> None:
        """Complete, whatever other streams do."""
        self.own.copy(to, source, byte_size)
        self.own.synchronize()

    def turn(self, value: float, way: str) -> float:
        """Old data is 0, new is `value`: what the model saw."""
        target: int = self.region.pointer
        with driver.Context(0):
            old, new = np.zeros(4, np.float32), np.full(4, value, np.float32)
            for place, numbers in zip((target, *self.sources), (old, old, new), strict=True):
                self._copy(place + LAST, numbers.ctypes.data, numbers.nbytes)
            for source in (*self.sources[:1] * COPIES, self.sources[1]):
                self.stream.copy(target, source, SIZE)
            self.plans[way].infer(timeout=30)
            seen = np.zeros(4, np.float32)
            self._copy(seen.ctypes.data, target + SIZE, seen.nbytes)
            self.stream.synchronize()
        return float(seen[0])


def write(root: Path) -> None:
    kill.write_mover(root, "mover", 4)


def main(target: str) -> int:
    stale = dict.fromkeys(WAYS, 0)
    with (
        broker(environment(), write) as running,
        Child(environment(CUSIM_DELAY_US=1000), "tests.gpu.race:Writer", f"ipc://{running.directory}") as writer,
    ):
        for way in WAYS:
            for number in range(1, ROUNDS + 1):
                stale[way] += writer.call("turn", float(number), way) != number
    report(target, {"rounds": ROUNDS, "stale": stale})
    blind = not stale.pop("nothing")
    if blind:
        print("nothing was ever stale, not even without an order: this step is blind")
    return int(blind or any(stale.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
