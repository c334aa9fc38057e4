"""A decoupled model that does as its request says; tests of streams copy it into model directories as backend.py.

ACT: INT32 [5] = count, size, delay in ms, index of the response that is an error, index before which the process dies
(-1: none). Response i: INDEX INT32 [1] = i; Y UINT8 [size] = i, i+1, … mod 251; T BYTES [2] = "response i", size times
"é" if i is even, not there if it is odd.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

from shm.errors import Code, InferError

CONFIG = """
backend: "own"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "ACT" data_type: TYPE_INT32 dims: [ 5 ] }
output [
  { name: "INDEX" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "Y" data_type: TYPE_UINT8 dims: [ -1 ] },
  { name: "T" data_type: TYPE_STRING dims: [ -1 ] }
]
"""


def load(context: Any) -> Model:
    """As every backend."""
    return Model()


class Model:
    """One instance."""

    def execute(self, streams: list[Any]) -> None:
        """Answer each in a thread of its own."""
        for stream in streams:
            threading.Thread(target=answer, args=(stream,), daemon=True).start()

    def bind(self, inputs: Any, outputs: Any) -> Any:
        """Never called."""
        raise NotImplementedError

    def close(self) -> None:
        """It holds nothing."""


def response(index: int, size: int) -> dict[str, Any]:
    """What the model sends, also for who compares."""
    outputs = {
        "INDEX": np.array([index], np.int32),
        "Y": ((np.arange(size) + index) % 251).astype(np.uint8),
    }
    if index % 2 == 0:
        outputs["T"] = np.array([f"response {index}".encode(), "é".encode() * size], object)
    return outputs


def answer(stream: Any) -> None:
    """Send what its request asks for."""
    count, size, delay_ms, error, death = stream.inputs["ACT"].tolist()
    for index in range(count):
        if index == death:
            os._exit(3)
        time.sleep(delay_ms / 1000)
        if index == error:
            stream.send(error=InferError(Code.INVALID_ARG, f"response {index} is none"), final=index == count - 1)
        else:
            stream.send(response(index, size), final=index == count - 1)
    if not count:
        stream.send(final=True)
