"""GPU memory that cannot be used is refused with the reason, on every way to a broker: simulated, not run on hardware.

Two GPUs that do not reach each other.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc.service_pb2 import CudaSharedMemoryRegisterRequest
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.fakes import models
from tests.fakes.cuda import ROOT, CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.gateways import Gateway
from tests.integration.test_cuda_served import IDENTITY

pytestmark = pytest.mark.timeout(120)
SIZE = 4096


@pytest.fixture(scope="module")
def env(cuda_sim: CudaEnv) -> CudaEnv:
    return cuda_sim.with_settings(CUSIM_DEVICES=2, CUSIM_PEER=0)


@pytest.fixture(scope="module")
def broker(env: CudaEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("refusals")
    models.write_model(directory / "repository", "on_cpu", config=IDENTITY % "KIND_CPU")
    (directory / "run").mkdir()

    def before() -> None:
        os.environ.update(env.environ, PYTHONPATH=str(ROOT))

    with Gateway(directory / "repository", directory / "run", "--allow-client-shm=true", before=before) as running:
        yield running.ready()


@pytest.fixture
def application(env: CudaEnv) -> Iterator[Child]:
    with Child(env, "tests.fakes.cuda_triton:TritonUser", "simulated") as child:
        yield child


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_the_reason_of_a_refusal_is_beside_tritons_text(broker: Gateway, application: Child, transport: str) -> None:
    handle = application.call("create", "g", SIZE, 0)
    for given, device, size, why in (
        (handle, 0, 1 << 19, f"the allocation has {SIZE} bytes"),
        (handle, 1, SIZE, "cuIpcOpenMemHandle failed with CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)"),
        (handle, 2, SIZE, "the broker's GPUs are 0 to 1, it is said to be on 2"),
        (bytes(64), 0, SIZE, "cuIpcOpenMemHandle failed with CUDA_ERROR_INVALID_VALUE (1)"),
    ):
        assert refused_with(broker, transport, given, device, size) == f"region 'g': {why}"


def refused_with(broker: Gateway, transport: str, handle: bytes, device: int, byte_size: int) -> str:
    """What a refused registration says beside its text."""
    address = f"127.0.0.1:{broker.ports[transport]}"
    if transport == "grpc":
        with grpc.insecure_channel(address) as channel:
            asked = CudaSharedMemoryRegisterRequest(name="g", raw_handle=handle, device_id=device, byte_size=byte_size)
            with pytest.raises(grpc.RpcError) as raised:
                GRPCInferenceServiceStub(channel).CudaSharedMemoryRegister(asked, timeout=30)
        assert "invalid args" in raised.value.details()
        return str(dict(raised.value.trailing_metadata())["tensorbroker-detail"])
    body = {"raw_handle": {"b64": base64.b64encode(handle).decode()}, "device_id": device, "byte_size": byte_size}
    asked_http = urllib.request.Request(
        f"http://{address}/v2/cudasharedmemory/region/g/register", json.dumps(body).encode(), method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked_http, timeout=30)
    assert refused.value.code == 400
    assert json.load(refused.value)["error"].endswith("invalid args")
    return str(refused.value.headers["Tensorbroker-Detail"])
