"""A repository whose ensembles have members in several worker groups, and what they compute.

    scale    y = 3 x                        group "default"   FP32 [batch, n]
    shift    y = x + 1                      group "other"     FP32 [batch, n]
    twice    y = 2 x                        group "other"     FP32 [batch, n]
    found    y = positions that are not 0   group "other"     FP32 [n] -> INT64 [1, count]: known after the run
    rows     y = table[index]               group "default"   INT64 [1, count] -> FP32 [1, count, 4]
    text     y = x                          group "other"     BYTES
    words    y = x                          group "default"   BYTES
    sums     a sequence's running sum       group "other"     INT32 [1]
    ints     y = x                          group "default"   INT32 [1]
    slow     y = x + 1, held by a gate      group "other"     FP32 [4]
    once     the same, never runs twice     group "other"     FP32 [4]
    fatal    y = x, dies on a negative      group "other"     FP32 [4]

"chain", "first", "last", "fan", "nested", "limited", "unknown", "texts", "summing" and "with_slow", "with_once",
"with_fatal" are ensembles of these; "there" is one in group "other", and "relay" has it as a member elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from tests.fakes import models
from tests.fakes.lone_worker import Gate

OTHER = 'parameters { key: "worker_group" value { string_value: "other" } }'
SEQUENCE = """backend: "sequence"
sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } control_input [
  { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
  { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } } ] }"""
FATAL = """
import os

def load(context):
    return Model()

class Model:
    def bind(self, inputs, outputs):
        return Binding(inputs[0].memory.view("<f4"), outputs[0].memory.view("<f4"))

    def close(self):
        pass

class Binding:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def run(self):
        if (self.x < 0).any():
            os._exit(9)
        self.y[:] = self.x

    def results(self):
        return []
"""


def tensors(kind: str, *described: str) -> str:
    """`name TYPE dims` each."""
    parts = (each.split() for each in described)
    return "\n".join(f'{kind} {{ name: "{n}" data_type: TYPE_{t} dims: [ {d} ] }}' for n, t, d in parts)


def step(model: str, inputs: str, outputs: str) -> str:
    """Maps as `member=ensemble`, blanks between."""

    def maps(kind: str, text: str) -> str:
        pairs = (pair.split("=") for pair in text.split())
        return " ".join(f'{kind} {{ key: "{own}" value: "{tensor}" }}' for own, tensor in pairs)

    return f'{{ model_name: "{model}" model_version: -1 {maps("input_map", inputs)} {maps("output_map", outputs)} }}'


def ensemble(root: Path, name: str, inputs: list[str], outputs: list[str], *steps: str, batch: int = 4, more: str = ""):
    text = f"""platform: "ensemble" max_batch_size: {batch}
{tensors("input", *inputs)}
{tensors("output", *outputs)}
ensemble_scheduling {{ step [ {", ".join(steps)} ] {more} }}
"""
    models.write_model(root, name, config=text)


def times(number: float):
    nodes = [helper.make_node("Mul", ["x", "by"], ["y"])]
    shape = ["batch", "n"]
    by = {"by": np.full(1, number, np.float32)}
    return models.build(nodes, [models.tensor("x", shape)], [models.tensor("y", shape)], by)


def write(root: Path) -> None:
    """Members and ensembles; `Gate` files of "slow" lie beside it."""
    _write_members(root)
    _write_ensembles(root)


def _write_members(root: Path) -> None:
    batched = "max_batch_size: 4 dynamic_batching { }"
    models.write_model(root, "scale", times(3), config=batched)
    models.write_model(root, "shift", models.add1(), config=f"{batched} {OTHER}")
    models.write_model(root, "twice", times(2), config=f"{batched} {OTHER}")
    models.write_model(root, "found", models.nonzero(), config=f"max_batch_size: 0 {OTHER}")
    models.write_model(root, "rows", models.gather(), config="max_batch_size: 0")
    models.write_model(root, "text", models.identity(TensorProto.STRING), config=f"max_batch_size: 4 {OTHER}")
    models.write_model(root, "words", models.identity(TensorProto.STRING), config="max_batch_size: 4")
    int32 = tensors("input", "INPUT INT32 1") + tensors("output", "OUTPUT INT32 1")
    models.write_model(root, "sums", config=f"max_batch_size: 4 {int32} {SEQUENCE} {OTHER}")
    fp32 = tensors("input", "x FP32 4") + tensors("output", "y FP32 4")
    gate = f"""max_batch_size: 4 backend: "gate" {fp32} {OTHER}
parameters {{ key: "gate" value {{ string_value: "{root / "slow"}/gate" }} }}
parameters {{ key: "told" value {{ string_value: "{root / "slow"}/told" }} }}"""
    models.write_model(root, "slow", config=gate)
    models.write_model(root, "once", config=f'{gate} parameters {{ key: "retry" value {{ string_value: "false" }} }}')
    (root / "once" / "backend.py").write_text(Gate.BACKEND)
    models.write_model(root, "fatal", config=f'max_batch_size: 4 backend: "fatal" {fp32} {OTHER}')
    (root / "fatal" / "backend.py").write_text(FATAL)
    models.write_model(
        root,
        "ints",
        config=f'max_batch_size: 4 backend: "identity" {int32.replace("PUT", "PUT0")}',
    )


def _write_ensembles(root: Path) -> None:
    one = (["IN FP32 -1"], ["OUT FP32 -1"])
    ensemble(
        root, "chain", *one, step("scale", "x=IN", "y=a"), step("shift", "x=a", "y=b"), step("scale", "x=b", "y=OUT")
    )
    ensemble(root, "first", *one, step("shift", "x=IN", "y=a"), step("scale", "x=a", "y=OUT"))
    ensemble(root, "last", *one, step("scale", "x=IN", "y=a"), step("shift", "x=a", "y=OUT"))
    steps = (step("shift", "x=IN", "y=a"), step("scale", "x=a", "y=b"), step("twice", "x=b", "y=OUT"))
    ensemble(root, "there", *one, *steps)
    ensemble(root, "relay", *one, step("scale", "x=IN", "y=a"), step("there", "IN=a", "OUT=OUT"))
    fan = (
        step("scale", "x=IN", "y=a"),
        step("shift", "x=IN", "y=b"),
        step("shift", "x=a", "y=c"),
        step("scale", "x=c", "y=d"),
    )
    ensemble(root, "fan", ["IN FP32 -1"], ["a FP32 -1", "b FP32 -1", "c FP32 -1", "d FP32 -1"], *fan)
    ensemble(
        root,
        "nested",
        *one,
        step("last", "IN=IN", "OUT=a"),
        step("scale", "x=a", "y=b"),
        step("first", "IN=b", "OUT=OUT"),
    )
    limited = (step("scale", "x=IN", "y=a"), step("shift", "x=a", "y=OUT"))
    ensemble(root, "limited", *one, *limited, more="max_inflight_requests: 2")
    steps = (step("found", "x=IN", "y=where"), step("rows", "index=where", "y=OUT"))
    ensemble(root, "unknown", ["IN FP32 -1"], ["where INT64 1,-1", "OUT FP32 1,-1,4"], *steps, batch=0)
    steps = (step("words", "x=IN", "y=a"), step("text", "x=a", "y=b"), step("words", "x=b", "y=OUT"))
    ensemble(root, "texts", ["IN STRING -1"], ["OUT STRING -1"], *steps)
    steps = (step("ints", "INPUT0=IN", "OUTPUT0=a"), step("sums", "INPUT=a", "OUTPUT=OUT"))
    ensemble(root, "summing", ["IN INT32 1"], ["OUT INT32 1"], *steps)
    four = (["IN FP32 4"], ["OUT FP32 4"])
    for name in ("slow", "once", "fatal"):
        ensemble(root, f"with_{name}", *four, step("scale", "x=IN", "y=a"), step(name, "x=a", "y=OUT"))
