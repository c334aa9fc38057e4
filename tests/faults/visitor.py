"""The canary of the network front ends: an unmodified tritonclient that knows every answer.

Its requests alternate between HTTP and gRPC, between the worker under attack and another one, and between tensors in
the message and in its own system region. `run` is the function of a `tests.faults.lab.Child`.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as triton_shm
from tritonclient.utils import InferenceServerException

from tests.faults import child

SHAPE = (4, 64)
SIZE = 4 * 64 * 4
PERIOD_S = 0.02
REGION, KEY = "visitors-own", "/visitors-own"


class Door:
    """One of tritonclient's two clients: the same methods over either wire."""

    def __init__(self, kind: str, http: int, grpc: int) -> None:
        self.module: Any = triton_http if kind == "http" else triton_grpc
        self.client = self.module.InferenceServerClient(f"127.0.0.1:{http if kind == 'http' else grpc}")

    def tensors(
        self, shape: tuple[int, ...], region: str, x: int, y: int, room: int, names: tuple[str, str] = ("x", "y")
    ) -> tuple[Any, Any]:
        """An input at offset `x` and an output at `y` of a region; `room`: bytes of the output."""
        given = self.module.InferInput(names[0], shape, "FP32")
        given.set_shared_memory(region, int(np.prod(shape)) * 4, x)
        wanted = self.module.InferRequestedOutput(names[1])
        wanted.set_shared_memory(region, room, y)
        return given, wanted

    def infer(self, region: str, x: int, y: int, shape: tuple[int, ...] = (1, 4), model: str = "add1") -> None:
        """Of a model with one FP32 input and output of one shape, both in `region`."""
        given, wanted = self.tensors(shape, region, x, y, int(np.prod(shape)) * 4)
        self.client.infer(model, [given], outputs=[wanted])

    def inline(self, x: np.ndarray, model: str = "add1") -> np.ndarray:
        given = self.module.InferInput("x", x.shape, "FP32")
        given.set_data_from_numpy(x)
        y: np.ndarray = self.client.infer(model, [given]).as_numpy("y")
        return y

    def close(self) -> None:
        self.client.close()


def outcome(function: Any, *arguments: Any, **named: Any) -> list[str]:
    """[status, message] of what tritonclient raises, ["LOST", ""] for a connection that broke, ["OK", ""]."""
    try:
        function(*arguments, **named)
    except InferenceServerException as error:
        status = str(error.status()).removeprefix("StatusCode.")
        return ["LOST" if status == "None" else status, str(error.message())]
    except Exception as error:  # geventhttpclient's have no common class
        return ["LOST", type(error).__name__]
    return ["OK", ""]


class _Side:
    def __init__(self, model: str, offset: int) -> None:
        self.model, self.offset = model, offset
        self.ok = self.wrong = 0
        self.errors: Counter[str] = Counter()
        self.texts: list[str] = []

    def ask(self, door: Door, memory: Any, number: int) -> None:
        x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + number % 10_000
        found: list[np.ndarray] = []

        def ask() -> None:
            if number & 4:
                triton_shm.set_shared_memory_region(memory, [x, np.full(SHAPE, -1, np.float32)], self.offset)
                door.infer(REGION, self.offset, self.offset + SIZE, SHAPE, self.model)
                found.append(triton_shm.get_contents_as_numpy(memory, np.float32, SHAPE, self.offset + SIZE))
            else:
                found.append(door.inline(x, self.model))

        code, text = outcome(ask)
        if code != "OK":
            self.errors[code] += 1
            self.texts = [*self.texts[-4:], f"{code}: {text}"]
        else:
            self.ok += 1
            self.wrong += not np.array_equal(found[0], x + 1)

    def report(self) -> dict[str, Any]:
        return {"ok": self.ok, "wrong": self.wrong, "errors": dict(self.errors), "texts": self.texts}


def run(http: int, grpc: int, models: dict[str, str]) -> None:
    """Ask until killed; answers "report" with its counts so far, by worker."""
    doors = [Door("http", http, grpc), Door("grpc", http, grpc)]
    memory = triton_shm.create_shared_memory_region(REGION, KEY, 4 * SIZE)
    doors[0].client.register_system_shared_memory(REGION, KEY, 4 * SIZE)
    sides = {worker: _Side(model, 2 * SIZE * i) for i, (worker, model) in enumerate(models.items())}
    for number in range(17):  # every kind of request once, so that nothing it needs is new after the first report
        for side in sides.values():
            side.ask(doors[number // 2 % 2], memory, number)
    due = time.monotonic()
    while True:
        for side in sides.values():
            side.ask(doors[number // 2 % 2], memory, number)
            number += 1
            due = max(due + PERIOD_S, time.monotonic() - 1.0)
            if child.hear(max(0.0, due - time.monotonic())) == "report":
                child.say({worker: side.report() for worker, side in sides.items()})
