"""The models that the rows attack, and the two workers that serve them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.fakes import models

SAME, OTHER = "cpu/default", "cpu/other"
OTHER_GROUP = 'parameters { key: "worker_group" value { string_value: "other" } }\n'


def slow() -> onnx.ModelProto:
    """y = x + count, one addition at a time, about 1 µs each: count INT64 [1], x and y FP32 [4]. Not batched."""
    body = helper.make_graph(
        [helper.make_node("Add", ["before", "one"], ["after"]), helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [
            models.tensor("turn", [], TensorProto.INT64),
            models.tensor("go", [], TensorProto.BOOL),
            models.tensor("before", [4]),
        ],
        [models.tensor("on", [], TensorProto.BOOL), models.tensor("after", [4])],
    )
    return models.build(
        [helper.make_node("Loop", ["count", "yes", "x"], ["y"], body=body)],
        [models.tensor("count", [1], TensorProto.INT64), models.tensor("x", [4])],
        [models.tensor("y", [4])],
        {"one": np.ones(1, np.float32), "yes": np.array(True)},
    )


def write(root: Path) -> Path:
    """add1, matmul, two_input, gather, topk, nonzero, unique, slow, identities; `other` is add1 elsewhere."""
    builders = (models.add1, models.matmul, models.two_input, models.gather, models.topk)
    models.write_repository(root, {builder.__name__: builder() for builder in builders})
    for name, element in (("string", TensorProto.STRING), ("fp16", TensorProto.FLOAT16), ("fp64", TensorProto.DOUBLE)):
        models.write_model(root, f"identity_{name}", models.identity(element))
    for name, model in (("nonzero", models.nonzero()), ("unique", models.unique()), ("slow", slow())):
        models.write_model(root, name, model, config=models.NONZERO_CONFIG)
    models.write_model(root, "other", models.add1(), config=OTHER_GROUP)
    return root
