"""The model repository of the example: a public voice detector with sequence batching and implicit state.

A step of a stream is one window of 512 samples at 16 kHz, with the 64 samples before it. The broker keeps the state
between steps and feeds it to the next one, so a client sends audio only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NAME = "voice"
RATE = 16_000
WINDOW = 512
CONTEXT = 64
SLOTS = 32  # streams whose state one instance holds; more of them wait for one that ends

CONFIG = f"""\
platform: "onnxruntime_onnx"
max_batch_size: 16
input {{ name: "input" data_type: TYPE_FP32 dims: [ {CONTEXT + WINDOW} ] }}
output {{ name: "output" data_type: TYPE_FP32 dims: [ 1 ] }}
sequence_batching {{
  max_sequence_idle_microseconds: 5000000
  oldest {{ max_candidate_sequences: {SLOTS} max_queue_delay_microseconds: 1000 }}
  state {{ input_name: "state_in" output_name: "state_out" data_type: TYPE_FP32 dims: [ 2, 128 ] }}
}}
"""


def write_repository(root: Path, original: Path) -> None:
    """Writes `<root>/voice/1/model.onnx` and its `config.pbtxt`."""
    version = root / NAME / "1"
    version.mkdir(parents=True)
    onnx.save_model(with_batch_first(onnx.load_model(original)), version / "model.onnx")
    (root / NAME / "config.pbtxt").write_text(CONFIG)


def with_batch_first(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its state as [batch, 2, 128], which batches need, and the sampling rate as a constant.

    In the original, the state is [2, batch, 128], and the rate (`sr`) is an input.
    """
    graph = model.graph
    state = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2, 128]) for name in _STATES]
    inputs = [tensor for tensor in graph.input if tensor.name == "input"]
    outputs = [tensor for tensor in graph.output if tensor.name == "output"]
    nodes = [
        helper.make_node("Transpose", ["state_in"], ["state"], perm=[1, 0, 2]),
        *graph.node,
        helper.make_node("Transpose", ["stateN"], ["state_out"], perm=[1, 0, 2]),
    ]
    rate = numpy_helper.from_array(np.array(RATE, np.int64), "sr")
    changed = helper.make_graph(
        nodes, graph.name, [*inputs, state[0]], [*outputs, state[1]], [*graph.initializer, rate]
    )
    return helper.make_model(changed, opset_imports=model.opset_import, ir_version=model.ir_version)


_STATES = ("state_in", "state_out")
