"""Does any sequence see another's state? `python -m tests.stress.sequences`

A thousand sequences at once share the 64 slots of a model that adds up what it is sent; every answer of every step is
checked against the sequence's own sum. Afterwards nothing arrives, and the worker's CPU time is taken for a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clientlib
from tests.stress.broker import Broker, running
from tests.stress.counters import rows_of

SLOTS, INSTANCES = 32, 2
STRATEGIES = {"direct": "direct { }", "oldest": f"oldest {{ max_candidate_sequences: {SLOTS} }}"}
IDLE_SHARE = 0.02  # of a core
CONFIG = """
backend: "onnxruntime"
max_batch_size: {slots}
input {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }}
output [
  {{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }},
  {{ name: "seen" data_type: TYPE_UINT64 dims: [ 1 ] }}
]
instance_group {{ count: {instances} kind: KIND_CPU }}
sequence_batching {{
  max_sequence_idle_microseconds: 600000000
  {strategy}
  control_input [ {{ name: "id" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }} }} ]
  state {{ input_name: "state" output_name: "next" data_type: TYPE_FP32 dims: [ 1 ] }}
}}
"""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--sequences", type=int, default=1000, help="at the same time")
    parser.add_argument("--steps", type=int, default=100, help="of each, with each strategy")
    parser.add_argument("--output", type=Path, default=Path("bench/results/stress_sequences.json"))
    return parser.parse_args(arguments)


def write_repository(root: Path) -> Path:
    from onnx import TensorProto, helper  # only the process that writes the files needs it

    from tests.fakes.models import build, tensor, write_model

    node, dims = helper.make_node, ["batch", 1]
    model = build(
        [node("Add", ["x", "state"], ["y"]), node("Identity", ["y"], ["next"]), node("Identity", ["id"], ["seen"])],
        [tensor("x", dims), tensor("state", dims), tensor("id", dims, TensorProto.UINT64)],
        [tensor("y", dims), tensor("next", dims), tensor("seen", dims, TensorProto.UINT64)],
    )
    for name, strategy in STRATEGIES.items():
        write_model(root, name, model, config=CONFIG.format(slots=SLOTS, instances=INSTANCES, strategy=strategy))
    return root


async def _sequence(plan: clientlib.AsyncPlan, x: Any, number: int, steps: int) -> list[str]:
    """Walk one sequence; returns what was wrong."""
    total, bad = 0, []
    for step in range(steps):
        value = random.randrange(1000)
        total += value  # exact in FP32 below 2^24
        x[number] = value
        result = await plan.infer(
            input_slot=number,
            output_slot=number,
            sequence_id=number + 1,
            sequence_start=step == 0,
            sequence_end=step == steps - 1,
        )
        came, seen = float(result["y"][0, 0]), int(result["seen"][0, 0])
        if (came, seen) != (total, number + 1):
            bad.append(f"sequence {number + 1}, step {step}: {came} of sequence {seen}, expected {total}")
    return bad


async def _all(directory: str, model: str, sequences: int, steps: int) -> list[str]:
    # Those that wait for a slot of the model wait in slots of the channel.
    async with await clientlib.connect_async(f"ipc://{directory}", slots=1024) as client:
        region = await client.create_region("r", 4096 * (3 * sequences * 64 // 4096 + 1))
        x = region.array((sequences, 16), "FP32")
        plan = await client.prepare(
            model,
            inputs={"x": region.tensor((1, 1), "FP32", stride=64)},
            outputs={
                "y": region.tensor((1, 1), "FP32", offset=64 * sequences, stride=64),
                "seen": region.tensor((1, 1), "UINT64", offset=128 * sequences, stride=64),
            },
            slots=sequences,
        )
        found = await asyncio.gather(*(_sequence(plan, x[:, 0], number, steps) for number in range(sequences)))
    return [text for bad in found for text in bad]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _idle_share(broker: Broker) -> float:
    worker = broker.worker()
    assert worker is not None
    time.sleep(1)  # what looks for the next request a while has stopped
    before, began = _cpu_s(worker), time.monotonic()
    time.sleep(2)
    return (_cpu_s(worker) - before) / (time.monotonic() - began)


def run(wanted: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"bad": []}
    with running(write_repository(scratch / "models"), scratch / "run") as broker:
        broker.connect().close()
        for model in STRATEGIES:
            began = time.monotonic()
            bad = asyncio.run(_all(broker.directory, model, wanted.sequences, wanted.steps))
            took, steps = time.monotonic() - began, wanted.sequences * wanted.steps
            idle = _idle_share(broker)
            results[model] = {
                "sequences": wanted.sequences,
                "steps": steps,
                "wrong": len(bad),
                "steps_per_s": round(steps / took),
                "idle_share_of_a_core": round(idle, 4),
            }
            results["bad"] += bad[:5]
            if idle > IDLE_SHARE:
                results["bad"].append(f"{model}: the idle worker uses {idle:.1%} of a core")
        if (exit_code := broker.stop()) != 0:
            results["bad"].append(f"the broker's exit code was {exit_code}")
        if results["bad"]:
            print(broker.log_tail(), file=sys.stderr)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    wanted = options(arguments)
    with tempfile.TemporaryDirectory(prefix="tensorbroker-stress-") as scratch:
        results = run(wanted, Path(scratch))
    wanted.output.parent.mkdir(parents=True, exist_ok=True)
    wanted.output.write_text(json.dumps(results, indent=2))
    for model in STRATEGIES:
        print(f"{model}:")
        print("\n".join(rows_of(results[model])))
    print(f"written to {wanted.output}")
    print("\n".join(f"BAD: {text}" for text in results["bad"]) or "all hold")
    return 1 if results["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
