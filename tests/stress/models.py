"""The models of the stress runs: each computes something else, exactly, so that no answer can pass for another's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

COLUMNS = 16
LOOPS = 1500  # of the slow model: a few milliseconds
HIGHEST = 1 << 20  # inputs stay below: everything is exact in FP32
Array = npt.NDArray[Any]


class Served(NamedTuple):
    """`ordered`: one instance and one queue, so that the answers of a channel come in the order of its requests."""

    name: str
    expected: Callable[[Array], Array]
    config: str
    retryable: bool = True
    ordered: bool = False


QUICK = Served("quick", lambda x: 3 * x + 1, "max_batch_size: 16\ndynamic_batching { }\n", ordered=True)
SLOW = Served(
    "slow",
    lambda x: x + LOOPS,
    "max_batch_size: 8\ninstance_group [ { count: 2, kind: KIND_CPU } ]\n"
    "dynamic_batching { max_queue_delay_microseconds: 500 }\n",
)
ONCE = Served(
    "once", lambda x: 2 * x, 'max_batch_size: 4\nparameters { key: "retry" value { string_value: "false" } }\n', False
)
BY_NAME = {model.name: model for model in (QUICK, SLOW, ONCE)}


def numbers(nonce: int, rows: int) -> Array:
    """The input of request `nonce`."""
    first = nonce * COLUMNS % HIGHEST
    return np.arange(first, first + rows * COLUMNS, dtype=np.float32).reshape(rows, COLUMNS)


def write_repository(root: Path) -> Path:
    from onnx import TensorProto, helper  # only the process that writes the files needs it

    from tests.fakes.models import build, tensor, write_model

    node, dims = helper.make_node, ["batch", COLUMNS]
    io = [tensor("x", dims)], [tensor("y", dims)]
    three, two, one = (np.full(1, value, np.float32) for value in (3, 2, 1))
    quick = build(
        [node("Mul", ["x", "three"], ["m"]), node("Add", ["m", "one"], ["y"])], *io, {"three": three, "one": one}
    )
    once = build([node("Mul", ["x", "two"], ["y"])], *io, {"two": two})
    body = helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("Add", ["before", "one"], ["after"])],
        "body",
        [tensor("i", [], TensorProto.INT64), tensor("go", [], TensorProto.BOOL), tensor("before", dims)],
        [tensor("go_on", [], TensorProto.BOOL), tensor("after", dims)],
    )
    constants = {"loops": np.array(LOOPS, np.int64), "true": np.array(True), "one": one}
    slow = build([node("Loop", ["loops", "true", "x"], ["y"], body=body)], *io, constants)
    for served, model in ((QUICK, quick), (SLOW, slow), (ONCE, once)):
        write_model(root, served.name, model, config=served.config)
    return root
