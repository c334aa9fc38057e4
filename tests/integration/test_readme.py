"""The README's way to call a model runs, block by block in one process, against a model of the shape it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.fakes import models
from tests.fakes.gateways import Gateway, url_of

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


def blocks_of(chapter: str) -> list[str]:
    text = (ROOT / "README.md").read_text().partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_script(script: str, directory: Path) -> str:
    """In a process of its own, whose default broker is that of `directory`; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "TENSORBROKER_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = models.write_repository(tmp_path_factory.mktemp("models"), {"yolo": yolo()})
    with Gateway(repository, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.mark.parametrize("transport", ["native", "zmq", "grpc", "http"])
def test_a_model_is_called(broker: Gateway, transport: str) -> None:
    """With another URL the same code runs over another transport; only that nothing is copied is not so there."""
    blocks = blocks_of("Call a model")
    assert len(blocks) >= 4
    script = "\n".join([*blocks, "assert float(ring[7].mean()) == 0.5 and float(result['output0'].max()) == 0.5"])
    if transport != "native":
        url = url_of(broker, transport)
        assert script.count("clientlib.connect()") == 2  # one of them in a comment
        script = script.replace("clientlib.connect()", f"clientlib.connect({url!r})")
        script = script.replace("clientlib.connect_async()", f"clientlib.connect_async({url!r})")
        script = script.replace("assert result.copied_bytes == 0\n", "")
    assert "(1, 84, 8400)" in run_script(script, broker.directory)


def test_tritons_clients(broker: Gateway) -> None:
    (block,) = blocks_of("Use Triton's clients")
    frame = "import numpy\nframe = numpy.full((1, 3, 640, 640), 0.25, numpy.float32)\n"
    name = f"readme{os.getpid()}"
    block = block.replace("localhost:8000", f"127.0.0.1:{broker.ports['http']}").replace("/cam0", f"/{name}")
    run_script(frame + block + "assert boxes.shape == (1, 84, 8400) and (boxes == 0.25).all()\n", broker.directory)
    assert not os.path.exists(f"/dev/shm/{name}")


def test_from_another_host(broker: Gateway) -> None:
    (block,) = blocks_of("From another host, or without shared memory")
    body = []
    for line in block.strip().splitlines():
        (url,) = re.findall(r'"(\S+?://\S+?)"', line)
        body += [line.replace(url, url_of(broker, re.split(r"[+:]", url)[0])), "await use(client)"]
    assert len(body) == 6
    script = """
        import asyncio, inspect, numpy, clientlib

        async def use(client):
            found = client.infer("yolo", {"images": numpy.full((1, 3, 640, 640), 0.125, numpy.float32)})
            found = await found if inspect.isawaitable(found) else found
            assert (found["output0"] == 0.125).all()
            closed = client.close()
            if inspect.isawaitable(closed):
                await closed

        async def main():
        BODY
        asyncio.run(main())
        """
    run_script(textwrap.dedent(script).replace("BODY", textwrap.indent("\n".join(body), "    ")), broker.directory)
