"""`python -m bench.load URL`: one client process that makes load as it is told, line by line on standard input.

← an `Order` in JSON         → "ready" once everything is prepared and warm
← any line                   → an `Outcome` in JSON, after `seconds` of load
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque

import msgspec

import clientlib
from clientlib.async_plans import AsyncPlan

WARM_UP_S = 0.05


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Load on one model: FP32 rows of these shapes, `in_flight` at any time; `awaited`: on an event loop."""

    model: str
    input: str
    output: str
    row: tuple[int, ...]
    output_row: tuple[int, ...]
    in_flight: int
    seconds: float
    awaited: bool = False

    def sizes(self) -> tuple[int, int]:
        """Bytes of one input and one output row."""
        sizes = []
        for shape in (self.row, self.output_row):
            elements = 1
            for dim in shape:
                elements *= dim
            sizes.append(4 * elements)
        return sizes[0], sizes[1]

    def tensors(
        self, region: clientlib.Region | clientlib.AsyncRegion
    ) -> tuple[dict[str, clientlib.TensorRef], dict[str, clientlib.TensorRef]]:
        """All inputs, one after the other, then all outputs: neighbouring positions are adjacent rows."""
        outputs_at = self.in_flight * self.sizes()[0]
        return (
            {self.input: region.tensor((1, *self.row), "FP32")},
            {self.output: region.tensor((1, *self.output_row), "FP32", offset=outputs_at)},
        )

    @property
    def byte_size(self) -> int:
        return self.in_flight * sum(self.sizes())


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended well, and how long they took from the first to the last."""

    requests: int
    seconds: float


def pipelined(plan: clientlib.Plan, in_flight: int, seconds: float) -> Outcome:
    """As soon as the oldest has ended, its positions are used for a new request."""
    submit = plan.submit
    began = time.perf_counter()
    end = began + seconds
    pending = deque(submit(input_slot=at, output_slot=at) for at in range(in_flight))
    done = 0
    while time.perf_counter() < end:
        for at in range(in_flight):
            pending.popleft().result()
            pending.append(submit(input_slot=at, output_slot=at))
        done += in_flight
    for last in pending:
        last.result()
    return Outcome(requests=done + in_flight, seconds=time.perf_counter() - began)


async def awaited(plan: AsyncPlan, in_flight: int, seconds: float) -> Outcome:
    """`in_flight` tasks, each awaiting one request after the other."""
    began = time.perf_counter()
    end = began + seconds

    async def task(at: int) -> int:
        done = 0
        while time.perf_counter() < end:
            await plan.infer(input_slot=at, output_slot=at)
            done += 1
        return done

    done = await asyncio.gather(*(task(at) for at in range(in_flight)))
    return Outcome(requests=sum(done), seconds=time.perf_counter() - began)


def say(text: str) -> None:
    print(text, flush=True)


def obey(client: clientlib.Client, order: Order) -> None:
    """One order, from a thread."""
    region = client.create_region("load", order.byte_size)
    plan = client.prepare(order.model, *order.tensors(region), slots=order.in_flight)
    pipelined(plan, order.in_flight, WARM_UP_S)
    say("ready")
    sys.stdin.readline()
    say(msgspec.json.encode(pipelined(plan, order.in_flight, order.seconds)).decode())
    client.unregister("load")


async def obey_awaited(url: str, order: Order) -> None:
    """One order, on an event loop, which does nothing else while it waits for the word."""
    client = await clientlib.connect_async(url)
    region = await client.create_region("load", order.byte_size)
    plan = await client.prepare(order.model, *order.tensors(region), slots=order.in_flight)
    await awaited(plan, order.in_flight, WARM_UP_S)
    say("ready")
    sys.stdin.readline()
    say(msgspec.json.encode(await awaited(plan, order.in_flight, order.seconds)).decode())
    await client.close()


def main(url: str) -> None:
    client = clientlib.connect(url)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        if order.awaited:
            asyncio.run(obey_awaited(url, order))
        else:
            obey(client, order)
    client.close()


if __name__ == "__main__":
    main(sys.argv[1])
