"""The streams: each a client with a connection of its own and one sequence, over shared memory or over gRPC."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc.aio as triton

import clientlib
from examples.voice.audio import Samples, windows
from examples.voice.model import CONTEXT, NAME, WINDOW

SECONDS = 30.0  # for one answer; a broker that takes longer is in trouble


@dataclass(slots=True)
class Stream:
    """`number` is the sequence's id; what came back is in `probabilities`, with how long each took in `latencies`."""

    number: int
    transport: str  # "native" or "grpc"
    begin: float  # where in the recording, in seconds
    samples: Samples
    probabilities: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    async def play(self, address: str) -> None:
        """Sends every window, the next one as soon as an answer is there. Raises InferError, or tritonclient's."""
        steps = list(windows(self.samples))
        if self.transport == "native":
            await self._over_shared_memory(address, steps)
        else:
            await self._over_grpc(address, steps)

    async def _over_shared_memory(self, address: str, steps: list[Samples]) -> None:
        async with await clientlib.connect_async(address) as client:
            region = await client.create_region("window", 4 * (CONTEXT + WINDOW))
            window = region.array((CONTEXT + WINDOW,), np.float32)
            plan = await client.prepare(NAME, {"input": region.tensor((1, CONTEXT + WINDOW), "FP32")})
            for step, samples in enumerate(steps):
                window[:] = samples
                began = time.monotonic()
                result = await plan.infer(
                    SECONDS,
                    sequence_id=self.number,
                    sequence_start=step == 0,
                    sequence_end=step == len(steps) - 1,
                )
                self._keep(float(result["output"][0, 0]), began)

    async def _over_grpc(self, address: str, steps: list[Samples]) -> None:
        async with triton.InferenceServerClient(address) as client:
            given = triton.InferInput("input", [1, CONTEXT + WINDOW], "FP32")
            for step, samples in enumerate(steps):
                given.set_data_from_numpy(samples[None])
                began = time.monotonic()
                result = await client.infer(
                    NAME,
                    [given],
                    client_timeout=SECONDS,
                    sequence_id=self.number,
                    sequence_start=step == 0,
                    sequence_end=step == len(steps) - 1,
                )
                self._keep(float(result.as_numpy("output")[0, 0]), began)

    def _keep(self, probability: float, began: float) -> None:
        self.probabilities.append(probability)
        self.latencies.append(time.monotonic() - began)
