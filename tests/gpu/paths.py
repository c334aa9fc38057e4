"""What a request costs by where its tensors lie, 4 KiB to 256 MiB; medians and 99th percentiles in microseconds.

    python -m tests.gpu.paths mover paths.json      a copy on the GPU: bandwidth
    python -m tests.gpu.paths onnx ort.json         y = x + 1 by ONNX Runtime's CUDA provider

`region`: on the client's GPU memory. `host`: in a pool region, which is pinned. `alone`: the same copy in the
application's own process, on its own stream; `pinned`: with the copies from and to pinned memory of the host.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import clientlib
from shm.cuda import driver, sync
from tests.fakes.cuda_children import Child
from tests.gpu import kill
from tests.gpu.here import SIMULATED, broker, environment, report, skip

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB) if SIMULATED else (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
MOVED = 4 << 30  # bytes, about, for each figure
MODELS = {"mover": ("INPUT0", "OUTPUT0", 0.0), "onnx": ("x", "y", 1.0)}  # input, output, what is added
ONNX = """backend: "onnxruntime" max_batch_size: 0
instance_group [ { kind: KIND_GPU gpus: 0 } ]
"""


def write(root: Path) -> None:
    """`mover`, one for each size, and `onnx`."""
    from tests.fakes import models

    for size in SIZES:
        kill.write_mover(root, f"mover-{size}", size // 4)
    models.write_model(root, "onnx", models.add1(), config=ONNX)


def timed(work: Callable[[], Any], byte_size: int) -> dict[str, float]:
    """Medians and 99th percentiles of 20 to 500 turns, after some that do not count."""
    turns = max(20, min(500, (MOVED >> (6 if SIMULATED else 0)) // byte_size))
    for _ in range(min(20, turns)):
        work()
    took = []
    for _ in range(turns):
        began = time.perf_counter_ns()
        work()
        took.append((time.perf_counter_ns() - began) / 1000)
    p50 = statistics.median(took)
    p99 = sorted(took)[min(turns - 1, turns * 99 // 100)]
    return {"p50_us": round(p50, 1), "p99_us": round(p99, 1), "gb_per_s": round(byte_size / p50 / 1000, 2)}


class Application:
    """Run by `tests.fakes.cuda_children`."""

    def __init__(self, url: str) -> None:
        driver.devices("this step")
        self.client = clientlib.connect(url)

    def request(self, model: str, kind: str, byte_size: int) -> dict[str, float]:
        """Of `byte_size` bytes in and as many out."""
        given, made, more = MODELS[model]
        name = f"mover-{byte_size}" if model == "mover" else model
        shape = (1, byte_size // 4)
        create = self.client.alloc_cuda if kind == "region" else self.client.create_region
        region: Any = create("r", 2 * byte_size)
        ones = np.ones(shape, np.float32)
        if kind == "region":
            with driver.Context(0):
                driver.call("cuMemcpyHtoD", region.pointer, ones.ctypes.data, byte_size)
        else:
            region.array(shape, np.float32)[:] = ones
        inputs = {given: region.tensor(shape, "FP32")}
        outputs = {made: region.tensor(shape, "FP32", offset=byte_size)}
        with self.client.prepare(name, inputs, outputs) as plan:
            copied = plan.infer(timeout=30).copied_bytes
            figures = timed(lambda: plan.infer(timeout=30), byte_size)
            found = np.empty(shape, np.float32)
            if kind == "region":
                with driver.Context(0):
                    driver.call("cuMemcpyDtoH", found.ctypes.data, region.pointer + byte_size, byte_size)
            else:
                found[:] = region.array(shape, np.float32, byte_size)
        assert (found == 1 + more).all(), "the result is wrong"
        assert (copied == 0) == (kind == "region"), f"{copied} bytes were copied"
        del region
        self.client.unregister("r")
        return figures

    def alone(self, byte_size: int, pinned: bool) -> dict[str, float]:
        """No broker."""
        with driver.Context(0):
            stream = sync.Stream()
            source, target = (driver.call("cuMemAlloc", byte_size) for _ in range(2))
            host = np.ones(byte_size, np.uint8)
            driver.call("cuMemHostRegister", host.ctypes.data, byte_size, 1)

            def work() -> None:
                if pinned:
                    driver.call("cuMemcpyHtoDAsync", source, host.ctypes.data, byte_size, stream.handle)
                driver.call("cuMemcpyDtoDAsync", target, source, byte_size, stream.handle)
                if pinned:
                    driver.call("cuMemcpyDtoHAsync", host.ctypes.data, target, byte_size, stream.handle)
                stream.synchronize()

            try:
                return timed(work, byte_size)
            finally:
                driver.call("cuMemHostUnregister", host.ctypes.data)
                stream.close()
                for pointer in (source, target):
                    driver.call("cuMemFree", pointer)


def main(model: str, target: str) -> None:
    env = environment()
    with broker(env, write) as running:
        for row in running.status()["models"]:
            if row["name"].startswith(model) and row["state"] != "READY":
                skip(row["reason"])
        figures: dict[str, Any] = {}
        with Child(env, "tests.gpu.paths:Application", f"ipc://{running.directory}") as application:
            for size in SIZES:
                figures[str(size)] = {
                    "region": application.call("request", model, "region", size),
                    "host": application.call("request", model, "host", size),
                    "alone": application.call("alone", size, False),
                    "pinned": application.call("alone", size, True),
                }
                print(size, figures[str(size)], flush=True)
        report(target, {"model": model, "by_size": figures})


if __name__ == "__main__":
    main(*sys.argv[1:])
