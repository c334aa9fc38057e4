"""An application whose stream is behind: what it writes is there when a gate opens. Run by `tests.fakes.cuda_children`.

`Producer(url)` is a `User` (`tests.fakes.cuda_user`): the same regions and plans, and requests in an order of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import clientlib
from clientlib import cuda_order
from shm import messages
from shm.cuda import driver, sync
from shm.cuda import marks as cuda_marks
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_user import APART, User

LIMIT_S = 60.0  # for whatever this process waits for
LATER_S = 0.1  # enough for a request that does not wait to come back first


class Producer(User):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        with driver.Context(0):
            self.stream = sync.Stream()
        self.gate = threading.Event()
        self.callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self.gate.wait(LIMIT_S) and None)
        self.at_gate = driver.bindings().CUhostFn(ctypes.cast(self.callback, ctypes.c_void_p).value)
        self.kept: list[Any] = []
        self.pending: list[Any] = []

    def write_late(self, values: dict[str, float]) -> None:
        """The GPU writes them when the gate opens."""
        self.gate.clear()
        with driver.Context(0):
            driver.call("cuLaunchHostFunc", self.stream.handle, self.at_gate, 0)
        self.write_next(values)

    def write_next(self, values: dict[str, float]) -> None:
        """The GPU writes them after what its stream has to do before."""
        with driver.Context(0):
            for name, value in values.items():
                self.kept.append(np.full(self.dims, value, np.float32))
                self.stream.copy(self._on_gpu(name), self.kept[-1].ctypes.data, self.kept[-1].nbytes)

    def open_gate(self) -> None:
        self.gate.set()

    def open_later(self) -> None:
        threading.Timer(LATER_S, self.gate.set).start()

    def open_when_it_waits(self) -> None:
        """As soon as this process, which asks, is in a wait for its stream: the simulated driver counts its calls."""

        def waits() -> int:
            return CudaEnv(True, None, Path(os.environ["CUSIM_COUNTS"])).calls(os.getpid())["cuStreamSynchronize"]

        def open_it() -> None:
            until = time.monotonic() + LIMIT_S
            while waits() == before and time.monotonic() < until:
                self.gate.wait(0.005)
            self.gate.set()

        before = waits()
        threading.Thread(target=open_it, daemon=True).start()

    def events(self, count: int) -> None:
        """How many a ring has that is made from now on."""
        cuda_order.EVENTS = count  # type: ignore[misc]

    def destroy_events(self) -> None:
        """Of all rings, whatever requests they are in."""
        with driver.Context(0):
            for ring in self.client.native.orders._rings.values():
                if ring is not None:
                    ring.events.close()

    def _after(self, order: str) -> Any:
        """ "" : a request that says nothing."""
        if order == "none":
            return self.plan.after(None)
        return self.plan.after(self.stream, order) if order else self.plan

    def submit(self, order: str, timeout: float | None = None, output_slot: int = 0) -> None:
        self.pending.append(self._after(order).submit(timeout=timeout, output_slot=output_slot))

    def done(self) -> bool:
        return bool(self.pending[0].done())

    def result(self, wanted: str, slot: int = 0) -> float:
        """The first element that the oldest request wrote."""
        self.pending.pop(0).result(timeout=30)
        return self.read(wanted, slot)

    def read(self, wanted: str, slot: int = 0) -> float:
        with driver.Context(0):  # not by the default stream, which another one may hold up
            data = np.zeros(1, np.float32)
            copying = sync.Stream()
            copying.copy(data.ctypes.data, self._on_gpu(wanted) + slot * 4 * self.dims[-1], 4)
            copying.synchronize()
            copying.close()
        return float(data[0])

    def run(self, order: str, wanted: str) -> float:
        """One request, waited for."""
        self._after(order).infer(timeout=30)
        return self.read(wanted)

    def run_within(self, order: str, timeout: float) -> None:
        """One request that may take so long."""
        self._after(order).infer(timeout=timeout)

    def stream_within(self, url: str, timeout: float, on_loop: bool) -> int:
        """How many responses `square` has to a number on the GPU that is there late, and later than that."""
        where = {"IN": self.regions["r"].tensor((1,), "INT32")}
        if not on_loop:
            with self.client.prepare("square", where).stream(timeout) as responses:
                return len(list(responses))

        async def go() -> int:
            client = await clientlib.connect_async(url)
            region = await client.alloc_cuda("r", APART)
            plan = await client.prepare("square", {"IN": region.tensor((1,), "INT32")})
            async with plan.stream(timeout) as responses:
                return len([response async for response in responses])

        return asyncio.run(go())

    def run_many(self, count: int) -> list[float]:
        """Requests one after the other, each after a write of its number."""
        found = []
        for number in range(count):
            self.write_next({"INPUT0": number})
            found.append(self.run("event", "OUTPUT0"))
        return found

    def run_async(self, url: str, order: str, timeout: float | None = 30, late: bool = False) -> float:
        """The same as `run`, by a client for event loops, on memory of its own. `late`: the gate stays closed."""

        async def go() -> float:
            client = await clientlib.connect_async(url)
            region = await client.alloc_cuda("r", 4 * APART)
            names = ("INPUT0", "INPUT1", "OUTPUT0")
            tensors = {name: region.tensor((1, 4), "FP32", offset=at * APART) for at, name in enumerate(names)}
            plan = await client.prepare("add", {name: tensors.pop(name) for name in names[:2]}, tensors)
            self.regions["async"] = region
            self.dims = (1, 4)
            self.places = {name: ("async", at * APART) for at, name in enumerate(names)}
            with driver.Context(0):
                driver.call("cuMemsetD8Async", region.pointer, 0, 3 * APART, self.stream.handle)
                self.stream.synchronize()
            self.write_late({"INPUT0": 20, "INPUT1": 3})
            if not late:
                self.open_later()
            said: Any = plan.after(self.stream, order) if order else plan
            try:
                await said.infer(timeout=timeout)
                return self.read("OUTPUT0")
            finally:
                self.open_gate()
                await client.close()

        return asyncio.run(go())

    def cancel_async(self, url: str, count: int, rounds: int) -> list[Any]:
        """Per round, behind the gate: `count` waits on an event loop, cancelled together, then one with a deadline; how
        that ends, that the loop's own threads are free, and how many events there are for further waits.
        """

        async def go() -> list[Any]:
            client = await clientlib.connect_async(url)
            region = await client.alloc_cuda("r", 4 * APART)
            tensors = [region.tensor((1, 4), "FP32", offset=at * APART) for at in range(3)]
            plan = await client.prepare("add", {"INPUT0": tensors[0], "INPUT1": tensors[1]}, {"OUTPUT0": tensors[2]})
            self.regions["async"], self.dims, self.places = region, (1, 4), {"INPUT0": ("async", 0)}
            told = []
            try:
                self.write_late({"INPUT0": 1})
                for _ in range(rounds):
                    waits = [asyncio.ensure_future(plan.infer()) for _ in range(count)]
                    await asyncio.wait(waits, timeout=LATER_S)
                    for wait in waits:
                        wait.cancel()
                    ends = await asyncio.gather(*waits, return_exceptions=True)
                    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
                    try:
                        await plan.infer(timeout=0.05)
                        told.append("ran")
                    except clientlib.InferError as error:
                        told.append([error.message, await asyncio.to_thread(int), len(cuda_marks._spare[0])])
                return told
            finally:
                self.open_gate()
                await client.close()

        return asyncio.run(go())

    def forge(self, number: int) -> str:
        """How a request ends that names event `number` (from 1) of its plan's ring."""
        bound = self.plan._bind_any(0, (0, False, False))
        pending = clientlib.pending.Pending(self.plan, bound, 0, 0, 0, 0)
        assert bound.channel.submit(pending, bound.word, 0, 0, 0, 0, wait_event=number)
        pending.result(timeout=30)
        return "ran"

    def refused(self, stream: Any, order: str) -> None:
        self.plan.after(stream, order)

    def name_ring(self, name: str) -> None:
        """Ask for the same plan with events that lie in region `name`."""
        layout = self.plan.prepared.layout
        asked = messages.Prepare(
            model=self.plan.recipe.model,
            inputs=tuple(tensor.spec for tensor in layout.inputs),
            outputs=tuple(tensor.spec for tensor in layout.outputs),
            events=name,
        )
        self.client._run(lambda link: self.client.native.call(link, asked, 0))

    def rings(self) -> list[str]:
        """Names of the rings that the broker knows of this session."""
        assert "events" not in {region.kind for region in self.client.regions()}, "they are not the application's"
        return [ring.name for ring in self.client.native.orders._rings.values() if ring is not None]
