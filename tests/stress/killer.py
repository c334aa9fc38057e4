"""Kills the worker, in every phase of its life, and measures how soon it serves again."""

from __future__ import annotations

import contextlib
import os
import random
import select
import time
from typing import final

import numpy as np

from clientlib import Client, InferError
from tests.stress.broker import Broker, kill
from tests.stress.counters import Counters
from tests.stress.models import COLUMNS, QUICK, numbers

PATIENCE_S = 60.0  # for a worker to be there, and to serve


class NotServing(Exception):
    """No replacement came, or it does not answer."""


@final
class Canary:
    """A client that asks one question at a time: is the worker serving?"""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._nonce = 0
        self._client: Client | None = None
        self._connect()

    def _connect(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = self._broker.connect()
        region = self._client.create_region("canary", 256)
        self._x, self._y = (region.array((1, COLUMNS), np.float32, offset) for offset in (0, 128))
        self._plan = self._client.prepare(
            QUICK.name,
            inputs={"x": region.tensor((1, COLUMNS), "FP32")},
            outputs={"y": region.tensor((1, COLUMNS), "FP32", offset=128)},
        )

    def answered(self) -> bool:
        """Ask, and wait for the answer. False when the request ended with an error, as one that met two deaths may."""
        self._nonce += 1
        self._x[:] = numbers(self._nonce, 1)
        try:
            self._plan.submit().result(PATIENCE_S)
        except TimeoutError:
            raise NotServing(f"no answer for {PATIENCE_S:g} s") from None
        except InferError as error:
            if "are refused for another" in error.message:
                self._connect()
            elif "died" not in error.message:
                raise NotServing(str(error)) from None
            return False
        if not np.array_equal(self._y, QUICK.expected(self._x)):
            raise NotServing(f"wrong answer: {self._y.tolist()}")
        return True

    def close(self) -> None:
        assert self._client is not None
        self._client.close()


@final
class Killer:
    """Kills of `workers`, of `zygotes` (and with them their workers); `serving_s`: from a kill to the next answer."""

    def __init__(self, broker: Broker, counters: Counters, seed: int) -> None:
        self._broker = broker
        self._counters = counters
        self._random = random.Random(seed)
        self._canary = Canary(broker)
        self.workers = 0
        self.zygotes = 0
        self.serving_s: list[float] = []
        self.cold_s: list[float] = []

    def round(self) -> None:
        """One to three kills; returns when the worker serves again."""
        chance = self._random.random()
        time.sleep(self._random.uniform(0, 0.25 if chance < 0.08 else 0.03))
        last = self._kill(self._worker())
        if chance > 0.7:  # while the replacement starts, loads, or recovers
            for _ in range(1 if chance < 0.95 else 2):
                pid = self._worker(other_than=last)
                time.sleep(self._random.uniform(0, 0.04))
                last = self._kill(pid)
        self._measure(self.serving_s)

    def round_of_zygote(self) -> None:
        """Kill the zygote, and the worker with it: the next start is a cold one."""
        zygote, worker = self._broker.zygote, os.pidfd_open(self._worker())
        self._counters.killed_at_ns = time.monotonic_ns()
        if zygote is not None and kill(zygote):
            self.zygotes += 1
            select.select([worker], [], [], PATIENCE_S)  # what it still answers does not count
            self._measure(self.cold_s)
        os.close(worker)

    def close(self) -> None:
        self._canary.close()

    def _kill(self, pid: int) -> int:
        self._counters.killed_at_ns = time.monotonic_ns()
        if kill(pid):
            self.workers += 1
        return pid

    def _measure(self, into: list[float]) -> None:
        began = self._counters.killed_at_ns
        while not self._canary.answered():
            pass
        into.append((time.monotonic_ns() - began) / 1e9)

    def _worker(self, other_than: int = 0) -> int:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if pid := self._broker.worker(other_than=other_than):
                    return pid
            time.sleep(0.0005)
        raise NotServing(f"no worker process for {PATIENCE_S:g} s")
