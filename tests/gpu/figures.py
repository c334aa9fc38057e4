"""What opening and closing another process's GPU memory costs, by size; medians in microseconds.

python -m tests.gpu.figures figures.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shm.cuda import driver, handles
from tests.conformance.cuda_table import Peer

SIZES = (64, 2 << 20, 64 << 20, 1 << 30)
TIMES = 20


def _micros(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter_ns()
    result = work()
    return (time.perf_counter_ns() - begin) / 1000, result


def measure(handle: bytes) -> dict[str, float]:
    """First open, then the medians of opening, opening what is open, and closing."""
    opens, again, closes = [], [], []
    for _ in range(TIMES):
        took, pointer = _micros(lambda: handles.open_legacy(handle))
        opens.append(took)
        took, _ = _micros(lambda: handles.open_legacy(handle))
        again.append(took)
        handles.close_legacy(pointer)
        took, _ = _micros(lambda: handles.close_legacy(pointer))  # noqa: B023
        closes.append(took)
    return {
        "first_open_us": round(opens[0], 1),
        "open_us": round(statistics.median(opens[1:]), 1),
        "open_again_us": round(statistics.median(again), 1),
        "close_us": round(statistics.median(closes), 1),
    }


def main(target: str) -> None:
    device = driver.devices("figures")[0]
    figures: dict[str, Any] = {"device": device.name, "open": {}}
    with driver.Context(device.ordinal):
        peer = Peer("exporter")
        for size in SIZES:
            if size < device.total_memory // 4:
                figures["open"][str(size)] = measure(peer.ask(b"A%d" % size))
        peer.end()
        stream = driver.call("cuStreamCreate", 1)
        event = driver.call("cuEventCreate", 6)
        for name, work in {
            "event_record_us": lambda: driver.call("cuEventRecord", event, stream),
            "stream_wait_us": lambda: driver.call("cuStreamWaitEvent", stream, event, 0),
            "synchronize_us": lambda: driver.call("cuStreamSynchronize", stream),
        }.items():
            figures[name] = round(statistics.median(_micros(work)[0] for _ in range(200)), 2)
    Path(target).write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
