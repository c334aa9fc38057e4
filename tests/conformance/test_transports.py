"""One application, every transport: models, arrays and errors are the same, with a real broker and gateway.

`connect` makes clients of the transport and the kind that a test is run for (`conftest.py`). Plans and regions are in
`test_transport_plans.py`; what only the native transport has (no copies) is in `test_client.py`.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import logging
import os
import re
import subprocess
import sys

import numpy as np
import posix_ipc
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import clientlib
from broker.gpus import driver_is_there
from shm.errors import InferError
from tests.fakes.gateways import url_of

pytestmark = pytest.mark.timeout(180)


NO_VERSION = (
    f"failed to get model version from specified version string '{'9' * 64}…' (details: stol), version should be an "
    "integral value > 0"
)


def vector(*values):
    return np.array([values], np.float32)


class TestModels:
    def test_what_is_known_of_them(self, client):
        found = client.models()
        assert {"add1", "two_input", "identity_string"} <= set(found)
        assert (found["add1"].state, found["add1"].max_batch_size) == ("READY", 4)
        model = client.model("two_input")
        assert [(each.name, each.datatype, each.shape) for each in model.inputs] == [
            ("a", "FP32", (-1, -1)),
            ("b", "FP32", (-1, -1)),
        ]
        assert {each.name for each in model.outputs} == {"total", "difference"}
        assert (model.name, model.max_batch_size, model.metadata.version) == ("two_input", 4, "1")
        assert client.model("add1", 1).metadata.version == "1"

    def test_a_model_is_called(self, client):
        model = client.model("two_input")
        out = model({"a": vector(1, 2), "b": vector(3, 4)})
        assert {name: array.tolist() for name, array in out.items()} == {"total": [[4, 6]], "difference": [[-2, -2]]}
        assert list(model({"a": vector(1), "b": vector(2)}, outputs=["difference"])) == ["difference"]

    def test_control_and_statistics(self, client):
        client.infer("add1", {"x": vector(1)})
        (stats,) = client.statistics("add1")
        assert (stats["name"], stats["version"]) == ("add1", "1")
        assert {"success", "fail", "queue", "compute_infer"} <= set(stats["inference_stats"])
        assert {each["name"] for each in client.statistics()} >= {"add1", "matmul"}
        client.unload("matmul")
        with pytest.raises(InferError, match="matmul") as caught:
            client.infer("matmul", {"x": vector(1, 2, 3, 4)})
        assert caught.value.code in ("NOT_FOUND", "UNAVAILABLE")
        client.load("matmul")
        assert client.infer("matmul", {"x": vector(1, 0, 0, 0)})["y"].shape == (1, 4)
        with pytest.raises(InferError, match="nosuch"):
            client.load("nosuch")


class TestArrays:
    @pytest.mark.parametrize("shape", [(1, 3), (4, 1), (2, 0), (1, 300_000)])
    def test_numpy_in_numpy_out(self, client, shape):
        x = np.random.default_rng(1).random(shape, np.float32)
        y = client.infer("add1", {"x": x})["y"]
        np.testing.assert_array_equal(y, x + 1)
        y[:] = 7  # the result is the application's
        assert (y == 7).all()

    def test_views_that_are_not_contiguous(self, client):
        x = np.arange(32, dtype=np.float32).reshape(4, 8)
        for view in (x[::2, ::2], x.T[:4, :3], x[:, ::-1], np.asfortranarray(x), x.astype(">f4")):
            np.testing.assert_array_equal(client.infer("add1", {"x": view})["y"], view + 1)

    @pytest.mark.parametrize(("model", "dtype"), [("identity_fp16", np.float16), ("identity_bf16", "bfloat16")])
    def test_other_datatypes(self, client, model, dtype):
        if dtype == "bfloat16":
            dtype = pytest.importorskip("ml_dtypes").bfloat16
        x = np.array([[0, -1.5, np.inf, 3]], np.float32).astype(dtype)
        y = client.infer(model, {"x": x})["y"]
        assert y.dtype == x.dtype
        assert y.tobytes() == x.tobytes()

    def test_strings(self, client):
        values = np.array([[b"", b"a\0\0", "ümlaut", b"\xc3\xa4" * 500]], object)
        y = client.infer("identity_string", {"x": values})["y"]
        assert y.tolist() == [[b"", b"a\0\0", "ümlaut".encode(), b"\xc3\xa4" * 500]]

    def test_results_whose_shape_only_the_run_tells(self, client):
        for x in ([0, 1, 1, 0, 0, 0, 0, 1], [1] * 8, [0] * 8):
            array = np.array(x, np.float32)
            np.testing.assert_array_equal(client.infer("nonzero", {"x": array})["y"], np.stack(np.nonzero(array)))

    def test_many_at_once(self, broker, transport):
        async def run():
            async with await clientlib.connect_async(url_of(broker, transport)) as client:
                asked = (client.infer("add1", {"x": vector(k)}, timeout=60) for k in range(100))
                return [float(result["y"][0, 0]) for result in await asyncio.gather(*asked)]

        assert asyncio.run(run()) == [k + 1 for k in range(100)]


def test_a_name_that_urls_quote(client):
    assert client.infer("add+1", {"x": vector(1)})["y"].tolist() == [[2]]
    assert client.model("add+1").name == "add+1"


def test_tritons_client_quotes_names(broker):
    key = f"/tb-test-{os.getpid()}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096)
    memory.close_fd()
    try:
        with triton.InferenceServerClient(f"127.0.0.1:{broker.ports['http']}") as client:
            client.register_system_shared_memory("cam 0+1 %41", key, 64)
            (region,) = client.get_system_shared_memory_status("cam 0+1 %41")
            assert (region["name"], region["byte_size"]) == ("cam 0+1 %41", 64)
            x = triton.InferInput("x", [1, 4], "FP32")
            x.set_shared_memory("cam 0+1 %41", 16)
            assert client.infer("add+1", [x]).as_numpy("y").tolist() == [[1] * 4]
            client.unregister_system_shared_memory("cam 0+1 %41")
            assert client.get_system_shared_memory_status() == []
    finally:
        posix_ipc.unlink_shared_memory(key)


@pytest.mark.skipif(driver_is_there(), reason="there may be a GPU")
def test_tritons_client_hears_why_there_is_no_cuda(broker):
    """Triton's two texts for it, and the reason."""
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{broker.ports['grpc']}") as client:
        for size, words in (
            (1, "region: invalid args: "),
            (64, "CUDA shared memory region: 'g', GPUs not supported: "),
        ):
            with pytest.raises(InferenceServerException) as caught:
                client.register_cuda_shared_memory("g", base64.b64encode(bytes(size)), 0, 64)
            assert f"{words}CUDA is not available: NVIDIA's driver library" in str(caught.value)


class TestErrors:
    @pytest.mark.parametrize(
        ("model", "inputs", "text"),
        [
            ("nosuch", {"x": vector(1)}, "Request for unknown model: 'nosuch' is not found"),
            (
                "add1",
                {"x": vector(1).astype(np.float64)},
                "inference input 'x' data-type is 'FP64', but model 'add1' expects 'FP32'",
            ),
            (
                "matmul",
                {"x": vector(1, 2, 3, 4, 5)},
                "unexpected shape for input 'x' for model 'matmul'. Expected [-1,4]",
            ),
            ("add1", {"x": np.zeros((5, 2), np.float32)}, "inference request batch-size must be <= 4 for 'add1'"),
            ("add1", {}, "expected 1 inputs but got 0 inputs for model 'add1'."),
            ("two_input", {"a": vector(1), "c": vector(1)}, "'c'"),
            ("add1", {"x": [1.0]}, "input 'x' must be a numpy array or a tensor in a region, got list"),
        ],
    )
    def test_of_requests(self, client, model, inputs, text):
        with pytest.raises(InferError) as caught:
            client.infer(model, inputs)
        assert caught.value.code == "INVALID_ARG"
        assert text in caught.value.message
        assert not caught.value.message.startswith("[request id")
        assert client.infer("add1", {"x": vector(1)})["y"].tolist() == [[2]]

    @pytest.mark.parametrize(
        ("model", "inputs", "texts"),
        [
            ("add1", {"x": vector(1).astype(np.float64)}, ["data_type  FP32", "fix: send 'x' as FP32"]),
            ("matmul", {"x": vector(1, 2, 3)}, ["config.pbtxt  model file", "[batch,4]", "fix: send shape"]),
            ("add1", {"x": np.zeros((5, 2), np.float32)}, ["auto-completion", "fix: send at most 4 rows"]),
            ("add1", {"x": np.float32(1)}, ["has no shape", "request"]),
            ("vector", {"x": np.zeros((3, 4), np.float32)}, ["fix: one value per row: shape [1,1] to [4,1]"]),
            ("two_input", {"a": vector(1), "b": np.zeros((2, 1), np.float32)}, ["'a' has 1 rows, 'b' 2"]),
            ("add1", {"x": vector(1), "y": vector(1)}, ["got 2 inputs", "the model does not have ['y']: it has ['x']"]),
            ("sums", {"INPUT": np.zeros(1, np.int32)}, ["client.prepare(", "plan.infer(sequence_id=1"]),
        ],
    )
    def test_they_say_what_native_ones_say(self, broker, client, model, inputs, texts):
        with clientlib.connect(f"ipc://{broker.directory}") as native, pytest.raises(InferError) as expected:
            native.infer(model, inputs)
        for text in texts:
            assert text in expected.value.message
        for _ in range(2):
            with pytest.raises(InferError) as caught:
                client.infer(model, inputs)
            assert (caught.value.code, caught.value.message) == (expected.value.code, expected.value.message)

    def test_they_say_what_native_ones_say_of_places(self, broker, client):
        with clientlib.connect(f"ipc://{broker.directory}") as native:
            for shape, datatype in (((1, 5), "FP32"), ((1, 1, 4), "FP32"), ((1, 4), "INT32"), ((2, 4), "FP32")):
                said = []
                for each in (native, client):
                    region = each.create_region("r", 4096)
                    x, y = region.tensor((1, 4), "FP32"), region.tensor(shape, datatype, 1024)
                    for attempt in (each.prepare, each.infer):
                        with pytest.raises(InferError) as caught:
                            attempt("add1", {"x": x}, {"y": y})
                        said.append((caught.value.code, caught.value.message))
                    each.unregister("r")
                assert said[1:] == said[:1] * 3

    def test_a_version_that_is_not_there(self, client):
        with pytest.raises(InferError, match="Request for unknown model: 'add1' version 9 is not found") as caught:
            client.infer("add1", {"x": vector(1)}, version=9)
        assert caught.value.code == "NOT_FOUND"

    @pytest.mark.parametrize("version", ["one", "1/infer", "-1", "1.0", "ü"])
    def test_a_version_that_is_no_number(self, client, version):
        text = f"failed to get model version from specified version string '{version}' (details: stol), version should"
        for ask in (client.model, client.statistics, lambda *of: client.infer(of[0], {"x": vector(1)}, version=of[1])):
            with pytest.raises(InferError, match=re.escape(text)) as caught:
                ask("add1", version)
            assert caught.value.code == "INVALID_ARG"

    def test_a_version_that_is_none_is_quoted_in_short(self, client):
        with pytest.raises(InferError) as caught:
            client.infer("add1", {"x": vector(1)}, version="9" * 4000)
        assert (caught.value.code, caught.value.message) == ("INVALID_ARG", NO_VERSION)

    @pytest.mark.parametrize("action", ["", "/config", "/stats", "/ready", "/infer"])
    def test_a_version_of_5000_digits(self, broker, action):
        body = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1]}]}' if action == "/infer" else None
        connection = http.client.HTTPConnection("127.0.0.1", broker.ports["http"])
        try:
            connection.request("POST" if body else "GET", f"/v2/models/add1/versions/{'9' * 5000}{action}", body)
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())) == (400, {"error": NO_VERSION})
        finally:
            connection.close()

    @pytest.mark.parametrize(
        ("x", "y", "text"),
        [
            ({"offset": 4096}, {"offset": 64}, "Invalid offset"),
            ({"offset": 4093}, {"offset": 64}, "Invalid offset [+] byte size"),
            ({}, {}, "overlap"),
            ({}, {"offset": 15}, "overlap"),
            ({"byte_size": 8}, {"offset": 64}, "Expected 16, got 8"),
            ({}, {"offset": 64, "byte_size": 12}, "at least 16"),
            ({"shape": (1, 4, 1)}, {"offset": 64}, "unexpected shape for input 'x' for model 'add1'"),
            ({"datatype": "INT32"}, {"offset": 64}, "data-type is 'INT32', but model 'add1' expects 'FP32'"),
            ({}, {"offset": 64, "datatype": "INT32"}, "data-type is 'INT32', but model 'add1' gives 'FP32'"),
        ],
    )
    def test_of_places(self, client, x, y, text):
        region = client.create_region("r", 4096)
        x, y = {"shape": (1, 4), "datatype": "FP32", **x}, {"shape": (1, 4), "datatype": "FP32", **y}
        with pytest.raises(InferError, match=text) as caught:
            client.prepare("add1", {"x": region.tensor(**x)}, {"y": region.tensor(**y)})
        assert caught.value.code == "INVALID_ARG"

    def test_of_names(self, client):
        region = client.create_region("r", 4096)
        x = region.tensor((1, 4), "FP32")
        with pytest.raises(InferError, match="unexpected inference output 'z' for model 'add1'"):
            client.prepare("add1", {"x": x}, {"z": region.tensor((1, 4), "FP32", 64)})
        with pytest.raises(InferError, match="unexpected inference output 'z' for model 'add1'"):
            client.infer("add1", {"x": vector(1)}, outputs=["z"])
        with pytest.raises(InferError, match="'x'"):
            client.prepare("add1", {})

    def test_what_no_transport_carries(self, client):
        with pytest.raises(InferError, match="'mine' must be a bool") as caught:
            client.infer("add1", {"x": vector(1)}, parameters={"mine": [1]})
        assert caught.value.code == "INVALID_ARG"
        with pytest.raises(InferError, match="cannot register 'gpu'") as caught:
            client.register_cuda_shm("gpu", object())
        assert caught.value.code in ("UNSUPPORTED", "INVALID_ARG")  # by whether this machine has a GPU
        if caught.value.code == "UNSUPPORTED":
            with pytest.raises(InferError, match="cannot allocate 'gpu'"):
                client.alloc_cuda("gpu", 64)


class TestProcess:
    FORKS = """
import os, signal, sys
import numpy as np
import clientlib

url, x = sys.argv[1], np.ones((1, 4), np.float32)
client = clientlib.connect(url)
region = client.create_region("r", 4096)
region.array((1, 4), np.float32)[:] = 1
plan = client.prepare("add1", {"x": region.tensor((1, 4), "FP32")}, {"y": region.tensor((1, 4), "FP32", 64)})
plan.infer(timeout=30)
pending = plan.submit()
if url.startswith("grpc"):  # a child that was forked during a call may be ended by a check of gRPC's own
    pending.result(30)
calls = [plan.infer, plan.submit, client.models, lambda: client.infer("add1", {"x": x}), region.share,
         lambda: region.array((1,), np.float32), pending.result, pending.done]
if (pid := os.fork()) == 0:
    signal.alarm(60)
    for call in calls:
        try:
            call()
            os._exit(2)
        except clientlib.ForkedError:
            pass
    client.close()
    with clientlib.connect(url) as fresh:
        print(fresh.infer("add1", {"x": x})["y"].tolist(), flush=True)
    os._exit(0)
assert (status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) == 0, status
print(pending.result(30)["y"].tolist(), plan.infer(timeout=30)["y"].tolist())
client.close()
"""

    def test_after_fork_everything_says_connect_again(self, broker, transport):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", self.FORKS, url_of(broker, transport)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "GRPC_VERBOSITY": "ERROR"},  # it reports forks
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split("\n") == ["[[2.0, 2.0, 2.0, 2.0]]", " ".join(["[[2.0, 2.0, 2.0, 2.0]]"] * 2), ""]

    def test_what_the_transport_means_is_said_once(self, connect, transport, caplog):
        with caplog.at_level(logging.INFO, logger="clientlib"):
            client = connect()
            for _ in range(3):
                client.infer("add1", {"x": vector(1)})
        said = [record.getMessage() for record in caplog.records if record.name == "clientlib"]
        if transport != "native":
            (line,) = said
            assert "by " in line
            assert "copied" in line or "travel" in line
        else:
            assert said == []
