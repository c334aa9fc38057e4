"""Models of every scheduler for the rows about overload, sequences and answers that are kept."""

from __future__ import annotations

from pathlib import Path

from onnx import TensorProto, helper

from tests.fakes import models
from tests.faults import repository

CACHE_FLAG = "--cache-config=local,size=1048576"
DELAY_MS, SLOWLY_MS = 20, 400
QUEUE = 8  # of the model "bounded"
LIMIT_US = 100_000  # a request may wait in the queue of the model "impatient"
SLOTS = 2  # of the model "sums"
IDLE_S = 0.5
_TENSORS = (
    'input { name: "INPUT0" data_type: TYPE_FP32 dims: 1 }\noutput { name: "OUTPUT0" data_type: TYPE_FP32 dims: 1 }\n'
)
_DELAY = 'parameters {{ key: "execute_delay_ms" value {{ string_value: "{}" }} }}\n'
_BUSY = f'backend: "identity"\nmax_batch_size: 4\n{_TENSORS}{_DELAY.format(DELAY_MS)}'
_SUMS = f"""backend: "sequence"
max_batch_size: {SLOTS}
input {{ name: "INPUT" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "OUTPUT" data_type: TYPE_INT32 dims: 1 }}
sequence_batching {{
  max_sequence_idle_microseconds: {int(IDLE_S * 1e6)}
  control_input {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} }}
  control_input {{ name: "READY" control {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }} }}
}}
{_DELAY.format(1)}"""
_CHAIN = """platform: "ensemble"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling { step [
  { model_name: "busy" model_version: -1 input_map { key: "INPUT0" value: "IN" }
    output_map { key: "OUTPUT0" value: "middle" } },
  { model_name: "busy" model_version: -1 input_map { key: "INPUT0" value: "middle" }
    output_map { key: "OUTPUT0" value: "OUT" } } ] }
"""
_PATIENCE = (
    "default_queue_policy {{ default_timeout_microseconds: {} timeout_action: {} allow_timeout_override: true }}"
)


def write(root: Path) -> Path:
    """The lab's models; slowly, singly; busy, bounded, impatient, levels; sums; chain; kept; expand, flags."""
    repository.write(root)
    instance = "instance_group { count: 1 kind: KIND_CPU }\n"
    for name, batching in (
        ("busy", "dynamic_batching { }"),
        ("bounded", f"dynamic_batching {{ default_queue_policy {{ max_queue_size: {QUEUE} }} }}"),
        ("impatient", f"dynamic_batching {{ {_PATIENCE.format(LIMIT_US, 'REJECT')} }}"),
        ("levels", "dynamic_batching { priority_levels: 2 default_priority_level: 2 }"),
    ):
        models.write_model(root, name, config=f"{_BUSY}{instance}{batching}\n")
    slowly = f'backend: "identity"\nmax_batch_size: 1\n{_TENSORS}{_DELAY.format(SLOWLY_MS)}{instance}'
    models.write_model(root, "slowly", config=slowly)
    singly = f'backend: "identity"\nmax_batch_size: 1\n{_TENSORS}{_DELAY.format(DELAY_MS)}{instance}'
    models.write_model(root, "singly", config=singly)
    models.write_model(root, "sums", config=f"{_SUMS}{instance}")
    models.write_model(root, "chain", config=_CHAIN)
    models.write_model(root, "kept", models.add1(), config="max_batch_size: 4\nresponse_cache { enable: true }\n")
    expand = [helper.make_node("Expand", ["x", "shape"], ["y"])]
    inputs = [models.tensor("x", [1]), models.tensor("shape", ["rank"], TensorProto.INT64)]
    outputs = [models.tensor("y", None)]
    config = "max_batch_size: 0\n" + "".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] }}\n'
        for kind, name, datatype, dims in (
            ("input", "x", "FP32", "1"), ("input", "shape", "INT64", "2"), ("output", "y", "FP32", "-1, -1"),
        )
    )  # fmt: skip
    models.write_model(root, "expand", models.build(expand, inputs, outputs), config=config)
    flags = [helper.make_node("Not", ["x"], ["y"])]
    sides = (
        [models.tensor("x", ["batch", "n"], TensorProto.BOOL)],
        [models.tensor("y", ["batch", "n"], TensorProto.BOOL)],
    )
    models.write_model(root, "flags", models.build(flags, *sides))
    return root
