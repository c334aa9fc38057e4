"""The four ways to a broker with GPU memory, with one form for what is asked and what comes back.

Runs in children of `tests.faults.gpu_lab`: an application that exports memory, and whatever it says natively, over
HTTP, gRPC and ZeroMQ. Of tritonclient only the protobuf messages: it would refuse or tidy up.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc as grpc_package
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

import clientlib
from shm.cuda import driver, handles
from shm.errors import Code
from tests.fakes.broker import HandClient
from tests.fakes.zmq_gateway import HandZmqClient
from tests.faults import raw
from tests.faults.front_doors import Answer, ask_grpc, ask_http

KINDS = ("native", "http", "grpc", "zmq")
SIZE, APART = 4096, 1024  # bytes of a region; inputs lie at 0 and 16, outputs at APART
INPUTS = {"add": ("INPUT0", "INPUT1"), "broken": ("INPUT0", "INPUT1")}
OK, REFUSED = ("RegionInfo", 200, "OK", "done"), ("INVALID_ARG", 400, "INVALID_ARGUMENT")
NOWHERE = "GPU-00000000-0000-0000-0000-0000000000%02x"
Places = dict[str, Any]


class Memory:
    """What this process has on GPU `ordinal`: `size` bytes at `pointer`."""

    def __init__(self, size: int = SIZE, ordinal: int = 0) -> None:
        driver.devices("the test")
        self.size, self.ordinal = size, ordinal
        with driver.Context(ordinal):
            self.pointer = int(driver.call("cuMemAlloc", size))
            self.handle = handles.export_legacy(self.pointer)

    def put(self, numbers: list[float], offset: int = 0) -> None:
        data = np.array(numbers, np.float32)
        with driver.Context(self.ordinal):
            driver.call("cuMemcpyHtoD", self.pointer + offset, data.ctypes.data, data.nbytes)

    def get(self, offset: int = APART, count: int = 4) -> list[float]:
        data = np.empty(count, np.float32)
        with driver.Context(self.ordinal):
            driver.call("cuMemcpyDtoH", data.ctypes.data, self.pointer + offset, data.nbytes)
        return [float(number) for number in data]

    def free(self) -> None:
        with driver.Context(self.ordinal):
            driver.call("cuMemFree", self.pointer)


def uuid(ordinal: int) -> str:
    known = driver.devices("the test")
    return known[ordinal].uuid if 0 <= ordinal < len(known) else NOWHERE % (ordinal & 0xFF)


class Native:
    """A session by hand."""

    def __init__(self, _: Places) -> None:
        self.client: HandClient = raw.session()
        self.channels: dict[str, raw.Channel] = {}

    def register(self, name: str, handle: bytes, device: int = 0, byte_size: int = SIZE, **window: int) -> Answer:
        """`window`: `offset` and `allocation_size`, which only native clients say."""
        whole = {"allocation_size": byte_size, "offset": 0, "byte_size": byte_size} | window
        memory = {"kind": "legacy", "device": uuid(device), "handle": handle, **whole}
        return raw.outcome(self.client.ask("RegisterCuda", name=name, memory=memory))

    def unregister(self, name: str) -> Answer:
        return raw.outcome(self.client.ask("Unregister", name=name))

    def infer(self, model: str, name: str, count: int = 4, at: int = 0, to: int = APART) -> Answer:
        def tensor(which: str, offset: int) -> dict[str, Any]:
            spec = {"name": which, "datatype": "FP32", "shape": [count], "offset": offset, "region": name}
            return spec | {"stride": 0, "byte_size": 4 * count}

        names = INPUTS.get(model, ("INPUT0",))
        inputs = [tensor(which, at + 4 * count * index) for index, which in enumerate(names)]
        reply = self.client.ask("Prepare", model=model, inputs=inputs, outputs=[tensor("OUTPUT0", to)])
        if reply["type"] == "Failure":
            return raw.outcome(reply)
        if reply["worker"] not in self.channels:
            self.channels[reply["worker"]] = raw.Channel(self.client, reply["worker"])
        channel = self.channels[reply["worker"]]
        code, text = channel.wait(channel.submit(reply["index"], reply["generation"]))
        return [Code(int(code)).name if code.isdigit() else code, text]

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.client.socket.close()


class Http:
    def __init__(self, places: Places) -> None:
        self.port = places["http"]

    def register(self, name: str, handle: bytes | str, device: int = 0, byte_size: int = SIZE) -> Answer:
        """A text is sent as it is, not in base64."""
        text = handle if isinstance(handle, str) else base64.b64encode(handle).decode()
        document = {"raw_handle": {"b64": text}, "device_id": device, "byte_size": byte_size}
        return ask_http(self.port, "POST", f"/v2/cudasharedmemory/region/{name}/register", document)

    def unregister(self, name: str) -> Answer:
        return ask_http(self.port, "POST", f"/v2/cudasharedmemory/region/{name}/unregister")

    def infer(self, model: str, name: str, count: int = 4, at: int = 0, to: int = APART) -> Answer:
        def tensor(which: str, offset: int) -> dict[str, Any]:
            place = {"shared_memory_region": name, "shared_memory_offset": offset}
            return {"name": which, "parameters": place | {"shared_memory_byte_size": 4 * count}}

        names = INPUTS.get(model, ("INPUT0",))
        inputs = [
            tensor(which, at + 4 * count * index) | {"datatype": "FP32", "shape": [count]}
            for index, which in enumerate(names)
        ]
        document = {"inputs": inputs, "outputs": [tensor("OUTPUT0", to)]}
        status, text = ask_http(self.port, "POST", f"/v2/models/{model}/infer", document)
        return ["OK", ""] if status == 200 else [status, text]

    def close(self) -> None:
        """A connection per request."""


class Grpc:
    def __init__(self, places: Places) -> None:
        self.channel = grpc_package.insecure_channel(f"127.0.0.1:{places['grpc']}")
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def register(self, name: str, handle: bytes, device: int = 0, byte_size: int = SIZE) -> Answer:
        message = service_pb2.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=handle, device_id=device, byte_size=byte_size
        )
        return ask_grpc(self.stub, "CudaSharedMemoryRegister", message)

    def unregister(self, name: str) -> Answer:
        message = service_pb2.CudaSharedMemoryUnregisterRequest(name=name)
        return ask_grpc(self.stub, "CudaSharedMemoryUnregister", message)

    def infer(self, model: str, name: str, count: int = 4, at: int = 0, to: int = APART) -> Answer:
        request = service_pb2.ModelInferRequest(model_name=model)

        def place(tensor: Any, offset: int) -> None:
            tensor.parameters["shared_memory_region"].string_param = name
            tensor.parameters["shared_memory_offset"].int64_param = offset
            tensor.parameters["shared_memory_byte_size"].int64_param = 4 * count

        for index, which in enumerate(INPUTS.get(model, ("INPUT0",))):
            place(request.inputs.add(name=which, datatype="FP32", shape=[count]), at + 4 * count * index)
        place(request.outputs.add(name="OUTPUT0"), to)
        code, text = ask_grpc(self.stub, "ModelInfer", request)
        return ["OK", ""] if code == "OK" else [code, text]

    def close(self) -> None:
        self.channel.close()


class Zmq:
    def __init__(self, _: Places) -> None:
        self.client = HandZmqClient(Path(os.environ["TENSORBROKER_DIR"]))
        self.client.hello()

    def register(self, name: str, handle: bytes, device: int = 0, byte_size: int = SIZE) -> Answer:
        return self._said(
            self.client.ask("register_cuda", name=name, handle=handle, device=device, byte_size=byte_size)
        )

    def unregister(self, name: str) -> Answer:
        return self._said(self.client.ask("unregister", name=name))

    def infer(self, model: str, name: str, count: int = 4, at: int = 0, to: int = APART) -> Answer:
        def tensor(which: str, offset: int) -> dict[str, Any]:
            return {"name": which, "region": name, "offset": offset, "byte_size": 4 * count}

        inputs = [
            tensor(which, at + 4 * count * index) | {"datatype": "FP32", "shape": [count]}
            for index, which in enumerate(INPUTS.get(model, ("INPUT0",)))
        ]
        code, text = self._said(self.client.ask("infer", model=model, inputs=inputs, outputs=[tensor("OUTPUT0", to)]))
        return ["OK", ""] if code == "result" else [code, text]

    def _said(self, reply: dict[str, Any]) -> Answer:
        return [reply["code"], reply["message"]] if reply["type"] == "error" else [reply["type"], ""]

    def close(self) -> None:
        self.client.ask("goodbye")
        self.client.close()


Door = Native | Http | Grpc | Zmq


@contextlib.contextmanager
def door(kind: str, **places: int) -> Iterator[Door]:
    """One of them, open."""
    made: Door = {"native": Native, "http": Http, "grpc": Grpc, "zmq": Zmq}[kind](places)
    try:
        yield made
    finally:
        made.close()


def round_trip(through: Door, model: str, name: str, memory: Memory, value: float = 1.0) -> list[Any]:
    """[code, text, result] of a request on `memory`, which is registered as `name`."""
    memory.put([value] * 8)
    memory.put([-9] * 4, APART)
    return [*through.infer(model, name), memory.get()]


def walk_through(**places: int) -> None:
    """Every door and every model once that ends well."""
    near, far = Memory(), Memory(ordinal=1)
    for kind in KINDS:
        with door(kind, **places) as through:
            assert through.register("near", near.handle)[0] in OK
            assert through.register("far", far.handle, 1)[0] in OK
            for model, name, memory, result in (
                ("add", "near", near, 2), ("mover", "near", near, 1), ("copies", "near", near, 1),
                ("far", "far", far, 1), ("copies", "far", far, 1),
            ):  # fmt: skip
                found = round_trip(through, model, name, memory)
                assert found == ["OK", "", [result] * 4], (kind, model, found)
                assert through.infer(model, name, 4, 4, APART + 4)[0] == "OK"  # not aligned: an instance's own memory
            for name in ("near", "far"):
                assert through.unregister(name)[0] in (*OK, "Done"), kind
    with clientlib.connect() as client:
        for model in ("add", "mover", "far"):
            given = {name: np.ones(4, np.float32) for name in INPUTS.get(model, ("INPUT0",))}
            client.infer(model, given, timeout=40)  # what an instance keeps for memory of the host
