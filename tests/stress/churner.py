"""`python -m tests.stress.churner DIRECTORY CYCLES REQUESTS`: registers, unregisters and infers in every way there is.

Says "warm" when everything that is made once has been made, and goes on at a line on stdin; then "done", the same.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections import deque

import numpy as np
import posix_ipc

import clientlib
from clientlib import Client, InferError, Plan
from tests.stress.broker import die_with_parent
from tests.stress.models import COLUMNS, QUICK, numbers

SIZE = 4096
PLACES = 32
SHAPE = (1, COLUMNS)


def plan_in(client: Client, region: clientlib.Region, slots: int = 1) -> Plan:
    return client.prepare(
        QUICK.name,
        inputs={"x": region.tensor(SHAPE, "FP32")},
        outputs={"y": region.tensor(SHAPE, "FP32", offset=SIZE // 2)},
        slots=slots,
    )


def register(client: Client, other: Client, key: str, number: int) -> None:
    """One region, registered and unregistered; some of them used meanwhile."""
    kind = number % 10
    if kind == 1:
        region = client.register_system_shm("churn", key=key, byte_size=SIZE)
    else:
        region = client.create_region("churn", SIZE)
    if kind == 2:
        other.open_region(region.share(), "opened")
        other.unregister("opened")
    if kind in (3, 1):
        x = region.array(SHAPE, np.float32)
        x[:] = numbers(number, 1)
        assert np.array_equal(plan_in(client, region).infer()["y"], QUICK.expected(x))
    client.unregister("churn")


def infer(client: Client, plan: Plan, count: int) -> None:
    """Pipelined through a plan; every 20th with arrays, every 100th refused, every 50th with a deadline."""
    outstanding: deque[clientlib.Pending] = deque()
    for number in range(count):
        if number % 20 == 0:
            x = numbers(number, 1 + number % 3)
            assert np.array_equal(client.infer(QUICK.name, {"x": x})["y"], QUICK.expected(x))
        elif number % 100 == 7:
            try:
                client.infer(QUICK.name, {"x": np.zeros((1, COLUMNS + 1), np.float32)})
            except InferError:
                continue
            raise AssertionError("an input of the wrong shape was accepted")
        else:
            if len(outstanding) == PLACES:
                outstanding.popleft().result()
            place = number % PLACES
            timeout = 10.0 if number % 50 == 3 else None
            outstanding.append(plan.submit(timeout, input_slot=place, output_slot=place))
    while outstanding:
        outstanding.popleft().result()


async def infer_awaited(directory: str, count: int) -> None:
    """A client of its own on a loop of its own, both gone afterwards."""
    async with await clientlib.connect_async(f"ipc://{directory}") as client:
        for _ in range(count // 100):
            await asyncio.gather(*(client.infer(QUICK.name, {"x": numbers(k, 1)}) for k in range(100)))


def main(directory: str, cycles: str, requests: str) -> None:
    die_with_parent()
    client, other = clientlib.connect(f"ipc://{directory}"), clientlib.connect(f"ipc://{directory}")
    plan = plan_in(client, client.create_region("places", SIZE * 2), PLACES)
    key = f"/tensorbroker-churn-{os.getpid()}"
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=SIZE)
    os.close(memory.fd)

    def work(cycles: int, requests: int) -> None:
        for number in range(cycles):
            register(client, other, key, number)
        infer(client, plan, requests - requests // 10)
        for _ in range(5):
            asyncio.run(infer_awaited(directory, requests // 50))
        gc.collect()  # loops and tasks are cycles

    try:
        work(int(cycles) // 20, int(requests) // 20)
        print("warm", flush=True)
        sys.stdin.readline()
        work(int(cycles), int(requests))
        print("done", flush=True)
        sys.stdin.readline()
    finally:
        posix_ipc.unlink_shared_memory(key)
    client.close()
    other.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
