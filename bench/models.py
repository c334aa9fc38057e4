"""The models that are measured, and a repository of them for the broker.

Identity does nothing, so that all that is left is the way there and back. Head reads the first kilobyte of its input,
whatever its size: with it the cost of a request must not depend on the payload. The networks are true topologies with
constant weights that ship with the package `onnx`: good for speed, useless for results.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from examples.assets import fetch

HEAD_ROW = 256
HEAD_HIDDEN = 16
NETWORKS = ("squeezenet", "resnet50")
NETWORK_ROW = (3, 224, 224)


@dataclass(frozen=True, slots=True)
class Model:
    """An FP32 model [batch, …] → [batch, …] and how it is served; `threads` are the runtime's, here and in the worker.

    `group`: of the worker, "" for the one that most models share. `source` names the graph, which several models may
    serve in different ways. `row` and `output_row` are the shapes without the batch dimension; identity and head take
    any row of one dimension. `steps`: an ensemble of so many of the model `source`, each on what the one before wrote.
    """

    name: str
    source: str
    proto: onnx.ModelProto
    row: tuple[int, ...]
    output_row: tuple[int, ...]
    threads: int = 1
    max_batch_size: int = 1
    queue_delay_us: int = 0
    instances: int = 1
    group: str = ""
    steps: int = 0

    @property
    def input(self) -> str:
        return self.proto.graph.input[0].name

    @property
    def output(self) -> str:
        return self.proto.graph.output[0].name

    @property
    def config(self) -> str:
        """config.pbtxt, without what the broker completes from the file."""
        if self.steps:
            return self._ensemble()
        threads = f'key: "intra_op_thread_count" value {{ string_value: "{self.threads}" }}'
        lines = [f"max_batch_size: {self.max_batch_size}", f"parameters {{ {threads} }}"]
        if self.group:
            lines.append(f'parameters {{ key: "worker_group" value {{ string_value: "{self.group}" }} }}')
        if self.max_batch_size > 1:
            lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {self.queue_delay_us} }}")
        if self.instances > 1:
            lines.append(f"instance_group {{ count: {self.instances} kind: KIND_CPU }}")
        return "\n".join(lines) + "\n"

    def _ensemble(self) -> str:
        tensors = [self.input, *(f"t{at}" for at in range(1, self.steps)), self.output]
        lines = [f'platform: "ensemble" max_batch_size: {self.max_batch_size}']
        for kind, name in (("input", self.input), ("output", self.output)):
            lines.append(f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}')
        steps = []
        for at in range(self.steps):
            steps.append(
                f'{{ model_name: "{self.source}" model_version: -1'
                f' input_map {{ key: "{self.input}" value: "{tensors[at]}" }}'
                f' output_map {{ key: "{self.output}" value: "{tensors[at + 1]}" }} }}'
            )
        return "\n".join([*lines, f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"]) + "\n"


def write_repository(root: Path, models: Iterable[Model]) -> Path:
    """A repository in Triton's layout."""
    for model in models:
        version = root / model.name / "1"
        version.mkdir(parents=True)
        if not model.steps:
            onnx.save(model.proto, version / "model.onnx")
        (root / model.name / "config.pbtxt").write_text(model.config)
    return root


def identity(elements: int, name: str = "identity", max_batch_size: int = 1) -> Model:
    """y = x, one copy by the runtime."""
    proto = _build([helper.make_node("Identity", ["x"], ["y"])], "n", "n", {})
    return Model(name, "identity", proto, (elements,), (elements,), max_batch_size=max_batch_size)


def chain(steps: int) -> Model:
    """An ensemble of identities, served as `identity` is."""
    return replace(identity(0), name=f"chain_{steps}", steps=steps)


def head(elements: int) -> Model:
    """Two small matrix products on the first 256 elements of each row."""
    ones = np.ones((HEAD_ROW, HEAD_HIDDEN), np.float32)
    constants = {
        "start": np.array([0], np.int64),
        "end": np.array([HEAD_ROW], np.int64),
        "axis": np.array([1], np.int64),
        "narrow": ones / HEAD_ROW,
        "widen": np.ascontiguousarray(ones.T) / HEAD_HIDDEN,
    }
    nodes = [
        helper.make_node("Slice", ["x", "start", "end", "axis"], ["first"]),
        helper.make_node("MatMul", ["first", "narrow"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "widen"], ["y"]),
    ]
    return Model("head", "head", _build(nodes, "n", HEAD_ROW, constants), (elements,), (HEAD_ROW,))


def network(source: str, threads: int, max_batch_size: int, queue_delay_us: int, instances: int = 1) -> Model:
    """One of `NETWORKS`, made batchable: the files are exported for one image. `threads` are those of one instance.

    Each has a worker of its own, as is good for models that want all cores.
    """
    proto = onnx.load(fetch(source))
    _make_batchable(proto)
    output_row = tuple(dim.dim_value for dim in proto.graph.output[0].type.tensor_type.shape.dim)[1:]
    name = f"{source}_{max_batch_size}" + (f"_by_{instances}" if instances > 1 else "")
    sizes = (threads, max_batch_size, queue_delay_us, instances)
    return Model(name, source, proto, NETWORK_ROW, output_row, *sizes, group=name)


def _build(
    nodes: list[onnx.NodeProto], elements: int | str, output_elements: int | str, constants: dict[str, np.ndarray]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", elements])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", output_elements])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _make_batchable(proto: onnx.ModelProto) -> None:
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]  # old files list their weights, too
    del graph.input[:]
    graph.input.extend(inputs)
    proto.ir_version = max(proto.ir_version, 4)  # before that every initializer had to be an input
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    shapes = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    for tensor in graph.initializer:
        if tensor.name in shapes:
            fixed = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.array([-1, *fixed[1:]], np.int64), tensor.name))
