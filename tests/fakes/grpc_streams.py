"""ModelStreamInfer's clients: tritonclient's own, and grpc's with plain messages."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
X = np.zeros((1, 4), np.float32)


def tensor(module: Any = triton) -> Any:
    given = module.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(X)
    return given


def request(number: int = 0, model: str = "add1", size: int = 16) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, id=str(number), raw_input_contents=[bytes(size)])
    message.inputs.add(name="x", datatype="FP32", shape=[size // 16, 4])
    return message


def open_stream(channel: Any, requests: Iterator[Any], **named: Any) -> Any:
    stream = channel.stream_stream(
        PATH,
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )
    return stream(requests, **named)


class Stream:
    """tritonclient's own stream; what it calls back with is in `results`."""

    def __init__(self, url: str, **named: Any) -> None:
        self.results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = triton.InferenceServerClient(url)
        self.client.start_stream(lambda result, error: self.results.put((result, error)), **named)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()

    def send(self, number: int, model: str = "add1", **named: Any) -> None:
        self.client.async_stream_infer(model, [tensor()], request_id=str(number), **named)

    def next(self) -> tuple[Any, Any]:
        return self.results.get(timeout=30)
