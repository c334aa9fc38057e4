"""Honest clients that call with plain arrays: threads on one client, and coroutines on an event loop."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import sys
import threading
import time
from collections import deque
from typing import Any, final

import numpy as np

import clientlib
from clientlib import InferError
from tests.stress.counters import Counters, Tally
from tests.stress.judge import Judge
from tests.stress.models import COLUMNS, ONCE, QUICK, SLOW, Served, numbers
from tests.stress.plan_client import ENDED, LOST_S, RUNNING, SHORT_S

KEPT = 4  # results that are looked at again later: nobody may write to an array that the application holds
Array = Any


class Work:
    """What one thread or coroutine asks for, and what it keeps."""

    def __init__(self, judge: Judge, seed: int) -> None:
        self.random = random.Random(seed)
        self.judge = judge
        self.since = 0.0  # when the request in flight was made; 0: none
        self._nonce = seed
        self._kept: deque[tuple[Served, Array, Array]] = deque()

    def next(self) -> tuple[Served, Array, float | None]:
        self._nonce += 1
        served = self.random.choices((QUICK, SLOW, ONCE), (80, 12, 8))[0]
        timeout = self.random.uniform(*SHORT_S) if self.random.random() < 0.03 else None
        self.judge.tally.add("submitted")
        self.since = time.monotonic()
        return served, numbers(self._nonce, self.random.randint(1, 3)), timeout

    def answered(self, served: Served, given: Array, got: Array) -> None:
        self.judge.answer(served, given, got)
        self._kept.append((served, given, got))
        if len(self._kept) > KEPT:
            self.look_again()

    def look_again(self) -> None:
        served, given, got = self._kept.popleft()
        if not np.array_equal(served.expected(given), got):
            self.judge.report("late_writes", f"a result of {served.name} changed to {got.tolist()}")

    def finish(self) -> None:
        while self._kept:
            self.look_again()


def watch(works: list[Work], judge: Judge) -> None:
    """Exit when a request has not ended in time: nobody else could, everybody waits."""
    now = time.monotonic()
    late = [now - work.since for work in works if work.since and now - work.since > LOST_S]
    if late:
        judge.tally.add("lost", len(late))
        print(f"lost: {len(late)} calls, up to {max(late):.1f} s after they were made", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)


class Account:
    """Adds what the channels of a client counted; call it before the client is dropped."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def __call__(self, client: Any) -> None:
        for lane in client.native.link.lanes.all() if client.native.link else []:
            self._tally.add("lost_wakeups", lane.channel.lost_wakeups)
            self._tally.add("duplicated", lane.channel.strays)


@final
class ThreadClient:
    """`threads` threads that call `infer` on the same client."""

    def __init__(self, directory: str, counters: Counters, tally: Tally, seed: int, threads: int = 3) -> None:
        self._url = f"ipc://{directory}"
        self._counters = counters
        self._judge = Judge(counters, tally)
        self._account = Account(tally)
        self._works = [Work(self._judge, seed + number * 1000) for number in range(threads)]

    def run(self) -> None:
        while not self._counters.stopping:
            self._judge.renew = False
            client = clientlib.connect(self._url)
            threads = [threading.Thread(target=self._work, args=(work, client), daemon=True) for work in self._works]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.05)
                watch(self._works, self._judge)
            self._account(client)
            client.close()
            self._judge.tally.add("reconnects", not self._counters.stopping)

    def _work(self, work: Work, client: clientlib.Client) -> None:
        try:
            while not (self._counters.stopping or self._judge.renew):
                self._call(work, client)
            work.finish()
        except BaseException as error:
            self._judge.wrong(f"a thread ended with {type(error).__name__}: {error}")
            raise

    def _call(self, work: Work, client: clientlib.Client) -> None:
        served, given, timeout = work.next()
        deadline_ns = time.monotonic_ns() + int(timeout * 1e9) if timeout else 0
        try:
            result = client.infer(served.name, {"x": given}, timeout=timeout)
        except InferError as error:
            self._judge.error(served, error, deadline_ns=deadline_ns)
        else:
            work.answered(served, given, result["y"])
        finally:
            work.since = 0.0


@final
class LoopClient:
    """An event loop: most coroutines call with arrays, some through a plan with positions of their own."""

    def __init__(
        self, directory: str, counters: Counters, tally: Tally, seed: int, arrays: int = 48, planned: int = 16
    ) -> None:
        self._url = f"ipc://{directory}"
        self._counters = counters
        self._judge = Judge(counters, tally)
        self._account = Account(tally)
        self._arrays = [Work(self._judge, seed + number * 1000) for number in range(arrays)]
        self._planned = [Work(self._judge, seed + (arrays + number) * 1000) for number in range(planned)]

    def run(self) -> None:
        while not self._counters.stopping:
            self._judge.renew = False
            asyncio.run(self._serve())
            self._judge.tally.add("reconnects", not self._counters.stopping)

    async def _serve(self) -> None:
        client = await clientlib.connect_async(self._url)
        region = await client.create_region("places", 2 * len(self._planned) * 4 * COLUMNS)
        shape, outputs = (1, COLUMNS), len(self._planned) * 4 * COLUMNS
        plan = await client.prepare(
            QUICK.name,
            inputs={"x": region.tensor(shape, "FP32")},
            outputs={"y": region.tensor(shape, "FP32", offset=outputs)},
            slots=len(self._planned),
        )
        tasks = [asyncio.create_task(self._call_with_arrays(work, client)) for work in self._arrays]
        for place, work in enumerate(self._planned):
            x = region.array(shape, np.float32, place * 4 * COLUMNS)
            y = region.array(shape, np.float32, outputs + place * 4 * COLUMNS)
            tasks.append(asyncio.create_task(self._call_by_plan(work, plan, place, x, y)))
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=0.5)
            watch([*self._arrays, *self._planned], self._judge)
        for task in tasks:
            if (error := task.exception()) is not None:
                self._judge.wrong(f"a coroutine ended with {type(error).__name__}: {error}")
        self._account(client)
        await client.close()

    def _going(self) -> bool:
        return not (self._counters.stopping or self._judge.renew)

    async def _call_with_arrays(self, work: Work, client: clientlib.AsyncClient) -> None:
        while self._going():
            served, given, timeout = work.next()
            deadline_ns = time.monotonic_ns() + int(timeout * 1e9) if timeout else 0
            call = asyncio.ensure_future(client.infer(served.name, {"x": given}, timeout=timeout))
            cancelled = work.random.random() < 0.02
            if cancelled:
                asyncio.get_running_loop().call_later(work.random.uniform(0, 0.003), call.cancel)
            try:
                result = await call
            except InferError as error:
                self._judge.error(served, error, deadline_ns=deadline_ns)
            except asyncio.CancelledError:
                assert cancelled
                self._judge.tally.add("cancelled")
            else:
                work.answered(served, given, result["y"])
            work.since = 0.0
        work.finish()

    async def _call_by_plan(self, work: Work, plan: Any, place: int, x: Array, y: Array) -> None:
        y[:] = ENDED
        while self._going():
            _, given, timeout = work.next()
            if not (y == ENDED).all():
                self._judge.report("late_writes", f"position {place} of the loop's plan: {y.tolist()}")
            x[:] = given = given[:1]
            y[:] = RUNNING
            deadline_ns = time.monotonic_ns() + int(timeout * 1e9) if timeout else 0
            pending = None
            cancelled = False
            try:
                pending = await plan.submit(timeout, input_slot=place, output_slot=place)
                cancelled = work.random.random() < 0.03 and pending.cancel()
                result = await pending
            except InferError as error:
                self._judge.error(QUICK, error, deadline_ns=deadline_ns, cancelled=cancelled)
            else:
                self._judge.answer(QUICK, given, result["y"])
            # After an answer that came at the deadline the position is in use until the real end.
            while not (pending is None or pending.done()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            y[:] = ENDED
            work.since = 0.0
