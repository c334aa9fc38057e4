"""`python -m bench.kserve_client`: one client process that calls an identity model as it is told, line by line.

← an `Order` in JSON    → "ready" once everything is prepared and one answer was right
← any line              → an `Outcome` in JSON, after `seconds` of calls back to back
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

import clientlib
from bench.measure import sample, spread

Call = Callable[[], object]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`client`: "http" or "grpc" (tritonclient), "native" or "zmq" (clientlib). `core` None: any."""

    client: str
    address: str
    model: str
    elements: int
    shm: bool
    seconds: float
    core: int | None = None
    checked: bool = True  # does the server answer with the input?


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds, and calls per second."""

    p50: float
    p90: float
    p99: float
    rate: float


@contextlib.contextmanager
def tritonclient_call(order: Order) -> Iterator[Call]:
    if order.client == "http":
        import tritonclient.http as triton
    else:
        import tritonclient.grpc as triton
    import tritonclient.utils.shared_memory as memory

    data = np.arange(order.elements, dtype=np.float32).reshape(1, -1)
    tensor = triton.InferInput("x", list(data.shape), "FP32")
    output = triton.InferRequestedOutput("y")
    with contextlib.ExitStack() as stack:
        client = triton.InferenceServerClient(order.address)
        stack.callback(client.close)
        regions = {}
        if order.shm:
            for name in ("x", "y"):
                key = f"/bench_{name}_{os.getpid()}"
                regions[name] = memory.create_shared_memory_region(key[1:], key, data.nbytes)
                stack.callback(memory.destroy_shared_memory_region, regions[name])
                if order.checked:
                    client.register_system_shared_memory(key[1:], key, data.nbytes)
                    stack.callback(client.unregister_system_shared_memory, key[1:])
            memory.set_shared_memory_region(regions["x"], [data])
            tensor.set_shared_memory(f"bench_x_{os.getpid()}", data.nbytes)
            output.set_shared_memory(f"bench_y_{os.getpid()}", data.nbytes)

        def call() -> object:
            if not order.shm:
                tensor.set_data_from_numpy(data)
                return client.infer(order.model, [tensor], outputs=[output]).as_numpy("y")
            return client.infer(order.model, [tensor], outputs=[output])

        answer = call()
        if order.checked:
            if order.shm:
                answer = memory.get_contents_as_numpy(regions["y"], np.float32, data.shape).copy()
            assert np.array_equal(answer, data), "a wrong answer"
        yield call


@contextlib.contextmanager
def clientlib_call(order: Order) -> Iterator[Call]:
    data = np.arange(order.elements, dtype=np.float32).reshape(1, -1)
    with clientlib.connect(order.address) as client:
        region = client.create_region("bench", 2 * data.nbytes)
        places = [region.tensor(data.shape, "FP32", offset=at * data.nbytes) for at in (0, 1)]
        region.array(data.shape, np.float32)[...] = data
        plan = client.prepare(order.model, {"x": places[0]}, {"y": places[1]})
        assert np.array_equal(plan.infer()["y"], data), "a wrong answer"
        yield plan.infer


def main() -> None:
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        os.sched_setaffinity(0, CORES if order.core is None else {order.core})
        make = tritonclient_call if order.client in ("http", "grpc") else clientlib_call
        with make(order) as call:
            print("ready", flush=True)
            sys.stdin.readline()
            outcome = spread(sample(call, order.seconds))
            print(msgspec.json.encode(Outcome(**outcome._asdict())).decode(), flush=True)


if __name__ == "__main__":
    CORES = os.sched_getaffinity(0)
    main()
