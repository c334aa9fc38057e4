"""The README's way to call a model runs, block by block in one process, against a model of the shape it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.fakes import models
from tests.fakes.gateways import Gateway

ROOT = Path(__file__).parent.parent.parent


def yolo() -> onnx.ModelProto:
    """Inputs and outputs of a YOLOv8 export: the mean of each image, in every element of its output."""
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[1, 2, 3], keepdims=1),
        helper.make_node("Squeeze", ["mean", "last"], ["flat"]),
        helper.make_node("Mul", ["flat", "ones"], ["output0"]),
    ]
    last = helper.make_tensor("last", TensorProto.INT64, [1], [3])
    ones = helper.make_tensor("ones", TensorProto.FLOAT, [1, 84, 8400], [1.0] * (84 * 8400))
    graph = helper.make_graph(
        nodes,
        "yolo",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 640, 640])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, ["batch", 84, 8400])],
        [last, ones],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("transport", ["native", "zmq", "grpc", "http"])
def test_the_readme_runs(tmp_path: Path, transport: str) -> None:
    """With another URL the same code runs over another transport; only that nothing is copied is not so there."""
    chapter = (ROOT / "README.md").read_text().partition("\n## Call a model\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", chapter, re.DOTALL)
    assert len(blocks) >= 4
    script = "\n".join([*blocks, "assert float(ring[7].mean()) == 0.5 and float(result['output0'].max()) == 0.5"])
    repository = models.write_repository(tmp_path / "models", {"yolo": yolo()})
    run = tmp_path / "run"
    run.mkdir()
    with Gateway(repository, run) as broker:
        broker.ready()
        if transport != "native":
            place = str(run) if transport == "zmq" else f"127.0.0.1:{broker.ports[transport]}"
            url = f"zmq+ipc://{place}" if transport == "zmq" else f"{transport}://{place}"
            assert script.count("clientlib.connect()") == 2  # one of them in a comment
            script = script.replace("clientlib.connect()", f"clientlib.connect({url!r})")
            script = script.replace("clientlib.connect_async()", f"clientlib.connect_async({url!r})")
            script = script.replace("assert result.copied_bytes == 0\n", "")
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env={**os.environ, "TENSORBROKER_DIR": str(run)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "(1, 84, 8400)" in done.stdout
