"""One deadline for a whole call: preparing, binding, growing and waiting for others' turns are part of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import numpy as np
import pytest

import clientlib
from clientlib.async_session import AsyncSession
from clientlib.session import Call
from clientlib.sync_session import SyncSession
from shm import messages
from shm.errors import ConnectionLost, InferError
from tests.fakes.small_broker import MODELS, connect, doubling

TIMEOUT_S = 60.0
X = {"x": np.arange(3, dtype=np.float32)}  # "spread" answers more than is reserved at first


@pytest.fixture
def deadlines(monkeypatch, small_broker):
    """The deadlines (s) of all procedures and submissions from the first question to the broker on, and its time."""
    seen, asked_at = [], []
    for session in (SyncSession, AsyncSession):

        def drive(self, procedure, deadline, real=session.drive):
            seen.append(deadline)
            return real(self, procedure, deadline)

        monkeypatch.setattr(session, "drive", drive)

    def first_question(asked):
        asked_at.append(time.monotonic())
        del small_broker.answers["GetModel"]
        return messages.Models(models=(MODELS[asked.model],))

    small_broker.answers["GetModel"] = first_question

    def result():
        submitted = [each / 1e9 for each in small_broker.deadlines]
        # Connecting came before: three procedures.
        return [*seen[3:], *submitted], asked_at[0]

    return result


def all_in_time(deadlines):
    ends, asked_at = deadlines()
    assert len(ends) == 3 + 1 + 2  # prepare, bind, grow, bind again; submitted twice
    return max(ends) < asked_at + TIMEOUT_S


class TestThreads:
    def test_everything_shares_the_deadline(self, small_broker, deadlines):
        with connect(small_broker) as client:
            client.infer("spread", X, timeout=TIMEOUT_S)
            assert all_in_time(deadlines)

    def test_who_waits_for_anothers_connecting(self, client, small_broker):
        _, plan = doubling(client)
        small_broker.stop()
        other = threading.Thread(target=client.models)
        other.start()
        while not client._connecting.locked():
            pass
        with pytest.raises(InferError, match="connects to the broker") as caught:
            plan.infer(timeout=0.05)
        assert caught.value.code == "UNAVAILABLE"
        assert other.is_alive()
        small_broker.start()
        other.join(60)

    def test_who_waits_for_a_broker_that_reads_nothing(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        session = SyncSession(ours, "/run")
        call = Call(messages.GetModels())
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(b"fills it")
        lost = []

        def patient():
            try:
                session.call(call, time.monotonic() + TIMEOUT_S)
            except ConnectionLost as error:
                lost.append(error)

        other = threading.Thread(target=patient)
        other.start()
        while not session._session._waiting:
            pass
        for _ in range(3):
            with pytest.raises(InferError, match="no answer to GetModels"):
                session.call(call, time.monotonic() + 0.02)
        assert other.is_alive()
        session.close()
        other.join(60)
        assert len(lost) == 1
        theirs.close()

    def test_the_longest_one(self, client):
        assert client.infer("double", {"x": np.ones((1, 2), np.float32)}, timeout=1e9)["y"].tolist() == [[2, 2]]


class TestLoops:
    @pytest.fixture
    def run(self, small_broker):
        """`run(test)` runs `test(client)` on an event loop of its own."""

        def run(test):
            async def main():
                client = await clientlib.connect_async(f"ipc://{small_broker.directory}")
                try:
                    async with asyncio.timeout(60):
                        await test(client)
                finally:
                    await client.close()

            asyncio.run(main())

        return run

    def test_everything_shares_the_deadline(self, run, deadlines):
        async def test(client):
            await client.infer("spread", X, timeout=TIMEOUT_S)
            assert all_in_time(deadlines)

        run(test)

    @pytest.mark.parametrize("question", ["GetModel", "OpenChannel"])
    def test_who_waits_for_anothers_question(self, run, small_broker, question):
        async def test(client):
            region = await client.create_region("r", 4096)
            x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", 2048)
            plan = await client.prepare("double", {"x": x}, {"y": y})
            small_broker.answers[question] = lambda asked: None

            def infer(timeout=None):
                if question == "OpenChannel":
                    return plan.infer(timeout)
                return client.infer("double", {"x": np.ones((1, 2), np.float32)}, timeout=timeout)

            other = asyncio.create_task(infer())
            await asyncio.sleep(0)
            with pytest.raises(InferError, match="timeout expired while another task") as caught:
                await infer(timeout=0.02)
            assert caught.value.code == "UNAVAILABLE"
            assert not other.done()
            other.cancel()
            await asyncio.wait([other])
            del small_broker.answers[question]
            await infer(timeout=TIMEOUT_S)

        run(test)

    def test_who_waits_for_anothers_connecting(self, run, small_broker):
        async def test(client):
            small_broker.stop()
            other = asyncio.create_task(client.models())
            while not client._reach._connecting.locked():  # noqa: ASYNC110 (the other task locks it)
                await asyncio.sleep(0)
            with pytest.raises(InferError, match="connects to the broker"):
                await client.infer("double", X, timeout=0.05)
            assert not other.done()
            small_broker.start()
            await other

        run(test)
