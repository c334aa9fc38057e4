"""Small real models, and repositories of them, for every test that needs something to load or to run.

Batchable ones have the first dimension `batch` on all tensors; each builder's docstring gives the signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FP32 = TensorProto.FLOAT
_OPSET = 17  # what the oldest supported runtime reads

Dims = Sequence[int | str | None]


def tensor(name: str, dims: Dims | None, element: int = FP32) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, dims)


def build(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Mapping[str, np.ndarray] | None = None,
    *,
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    """A model of these parts; `domains` are further operator domains, at version 1."""
    constants = [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()]
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), constants)
    opsets = [helper.make_opsetid("", _OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def add1() -> onnx.ModelProto:
    """y = x + 1. x, y: FP32 [batch, n]. Zero-copy."""
    return build(
        [helper.make_node("Add", ["x", "one"], ["y"])],
        [tensor("x", ["batch", "n"])],
        [tensor("y", ["batch", "n"])],
        {"one": np.ones(1, np.float32)},
    )


MATMUL_WEIGHTS = np.arange(16, dtype=np.float32).reshape(4, 4)


def matmul() -> onnx.ModelProto:
    """y = x @ MATMUL_WEIGHTS. x, y: FP32 [batch, 4]. Zero-copy."""
    return build(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [tensor("x", ["batch", 4])],
        [tensor("y", ["batch", 4])],
        {"w": MATMUL_WEIGHTS},
    )


def identity(element: int = FP32, dims: Dims = ("batch", "n")) -> onnx.ModelProto:
    """y = x, of any element type: FP16, BF16, BYTES (TensorProto.STRING), integers, …"""
    return build(
        [helper.make_node("Identity", ["x"], ["y"])], [tensor("x", dims, element)], [tensor("y", dims, element)]
    )


def fixed_batch(batch: int = 2) -> onnx.ModelProto:
    """y = x + 1. x, y: FP32 [batch, 4] with a fixed batch: cannot be batched."""
    return build(
        [helper.make_node("Add", ["x", "one"], ["y"])],
        [tensor("x", [batch, 4])],
        [tensor("y", [batch, 4])],
        {"one": np.ones(1, np.float32)},
    )


def two_input() -> onnx.ModelProto:
    """total = a + b, difference = a - b. All FP32 [batch, n]."""
    return build(
        [helper.make_node("Add", ["a", "b"], ["total"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
        [tensor("a", ["batch", "n"]), tensor("b", ["batch", "n"])],
        [tensor("total", ["batch", "n"]), tensor("difference", ["batch", "n"])],
    )


GATHER_ROWS = 64


def gather() -> onnx.ModelProto:
    """y = table[index]: 64 rows, row r is [r, r, r, r]. index: INT64 [batch, n], y: FP32 [batch, n, 4]. Copied."""
    table = np.repeat(np.arange(GATHER_ROWS, dtype=np.float32)[:, None], 4, axis=1)
    return build(
        [helper.make_node("Gather", ["table", "index"], ["y"])],
        [tensor("index", ["batch", "n"], TensorProto.INT64)],
        [tensor("y", ["batch", "n", 4])],
        {"table": table},
    )


def nonzero() -> onnx.ModelProto:
    """Positions of the non-zero elements. x: FP32 [n], y: INT64 [1, count], count known after the run. Copied."""
    return build(
        [helper.make_node("NonZero", ["x"], ["y"])], [tensor("x", ["n"])], [tensor("y", [1, None], TensorProto.INT64)]
    )


NONZERO_CONFIG = "max_batch_size: 0\n"


def topk(k: int = 2) -> onnx.ModelProto:
    """The k largest. x: FP32 [batch, n], values: FP32 [batch, k], indices: INT64 [batch, k]. Copied."""
    return build(
        [helper.make_node("TopK", ["x", "k"], ["values", "indices"])],
        [tensor("x", ["batch", "n"])],
        [tensor("values", ["batch", k]), tensor("indices", ["batch", k], TensorProto.INT64)],
        {"k": np.array([k], np.int64)},
    )


def unique() -> onnx.ModelProto:
    """The distinct values in order. x: FP32 [n], y: FP32 [count], count known after the run. Copied."""
    return build([helper.make_node("Unique", ["x"], ["y"])], [tensor("x", ["n"])], [tensor("y", [None])])


def write_model(
    root: Path,
    name: str,
    model: onnx.ModelProto | bytes | None = None,
    *,
    version: int | str = 1,
    config: str | bytes | None = None,
    filename: str = "model.onnx",
) -> Path:
    """Write `root/name/version/filename`, and `root/name/config.pbtxt` if there is a text. Returns `root/name`."""
    directory = root / name
    (directory / str(version)).mkdir(parents=True, exist_ok=True)
    if model is not None:
        data = model if isinstance(model, bytes) else model.SerializeToString()
        (directory / str(version) / filename).write_bytes(data)
    if config is not None:
        (directory / "config.pbtxt").write_bytes(config if isinstance(config, bytes) else config.encode())
    return directory


def write_repository(root: Path, models: Mapping[str, onnx.ModelProto], version: int | str = 1) -> Path:
    """A repository in Triton's layout with `models` by name, without configuration texts. Returns `root`."""
    for name, model in models.items():
        write_model(root, name, model, version=version)
    return root


def write_samples(root: Path) -> Path:
    """A repository with one model of every kind above, named like its builder. Returns `root`."""
    write_repository(
        root,
        {
            "add1": add1(),
            "matmul": matmul(),
            "identity": identity(),
            "identity_fp16": identity(TensorProto.FLOAT16),
            "identity_bf16": identity(TensorProto.BFLOAT16),
            "identity_string": identity(TensorProto.STRING),
            "fixed_batch": fixed_batch(),
            "two_input": two_input(),
            "gather": gather(),
            "topk": topk(),
        },
    )
    write_model(root, "nonzero", nonzero(), config=NONZERO_CONFIG)
    write_model(root, "unique", unique(), config=NONZERO_CONFIG)
    return root
