"""How streams end before their time: cancelled, left, too late, not read, their client or their worker dead."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import clientlib
from clientlib import InferError
from tests.fakes.broker import eventually
from tests.fakes.streaming import (  # noqa: F401 (fixtures)
    X,
    acts,
    client,
    indexes,
    on_loop,
    read_into,
    repeat,
    same,
    streaming,
    works,
)

pytestmark = pytest.mark.timeout(180)


def test_cancel_in_the_middle(client):
    stream = client.stream("repeat", repeat(100_000, 1))
    next(stream)
    assert stream.cancel()
    with pytest.raises(InferError, match="cancelled") as caught:
        list(stream)
    assert caught.value.code == "CANCELLED"
    assert list(stream) == []
    assert not stream.cancel()
    assert works(client)


@on_loop
async def test_cancel_in_the_middle_on_a_loop(client):
    stream = client.stream("repeat", repeat(100_000, 1))
    assert not stream.cancel()
    await anext(stream)
    assert stream.cancel()
    with pytest.raises(InferError, match="cancelled"):
        [_ async for _ in stream]
    assert [_ async for _ in stream] == []


@pytest.mark.parametrize("how", ["with", "close", "drop", "break"])
def test_who_leaves_early_gives_everything_back(client, how):
    for _ in range(150):  # a plan has 64 places
        stream = client.stream("repeat", repeat(1000, 1))
        if how == "with":
            with stream:
                next(stream)
            assert list(stream) == []
        elif how == "close":
            stream.close()
        elif how == "drop":
            next(stream)
            del stream
        else:
            for _ in stream:
                break
    assert works(client)


@pytest.mark.parametrize("how", ["with", "close", "drop"])
def test_who_leaves_early_on_a_loop_gives_everything_back(streaming, how):
    @on_loop
    async def test(client):
        plan = await client.prepare("repeat", await inputs_of(client))
        for _ in range(600):
            stream = plan.stream(timeout=20)
            if how == "with":
                async with stream:
                    await anext(stream)
            elif how == "close":
                await stream
                stream.close()
            else:
                await anext(stream)
                del stream
        assert len([_ async for _ in client.stream("square", {"IN": np.array([3], np.int32)})]) == 3

    test(streaming)


async def inputs_of(client: clientlib.AsyncClient) -> dict[str, clientlib.TensorRef]:
    region = await client.create_region("inputs", 1 << 16)
    refs, offset = {}, 0
    for name, array in repeat(1000, 1).items():
        datatype = "INT32" if name == "IN" else "UINT32"
        refs[name] = region.tensor(array.shape, datatype, offset)
        refs[name].array()[:] = array
        offset += 8192
    return refs


def test_the_deadline_is_for_all_of_it(client):
    client.stream("repeat", repeat(100_000, 1)).close()  # so that what the next one needs is there already
    stream = client.stream("repeat", repeat(100_000, 1), timeout=0.2)
    with pytest.raises(InferError, match="Request timeout expired") as caught:
        list(stream)
    assert caught.value.code == "UNAVAILABLE"
    assert list(stream) == []
    assert works(client)


@on_loop
async def test_the_deadline_is_for_all_of_it_on_a_loop(client):
    async with client.stream("repeat", repeat(100_000, 1)) as stream:  # what the next one needs is there then
        await anext(stream)
    stream = client.stream("repeat", repeat(100_000, 1), timeout=0.2)
    with pytest.raises(InferError, match="Request timeout expired"):
        [_ async for _ in stream]
    assert [_ async for _ in stream] == []
    assert len([_ async for _ in client.stream("repeat", repeat(1))]) == 1
    queued = client.stream("repeat", repeat(1), timeout=1e-6)
    with pytest.raises(InferError, match="timeout expired"):
        [_ async for _ in queued]


def test_unread_responses_hold_nobody_up(client):
    stream = client.stream("repeat", repeat(5000))
    for _ in range(300):  # which takes in what comes for the stream
        client.infer("add1", {"x": X}, timeout=20)
    assert len(list(stream)) == 5000


@on_loop
async def test_the_worker_waits_for_a_slow_reader(client):
    """Until its responses are all there, 100 MiB, of which never more than a fraction wait."""
    stream = client.stream("acts", acts(100, 1 << 20))
    most = index = 0
    async for result in stream:
        assert same(result, index, 1 << 20)
        index += 1
        for _ in range(20):
            await asyncio.sleep(0)  # the loop has time to take in more
        most = max(most, stream.unread_bytes)
    assert index == 100
    assert most < 40 << 20
    small = client.stream("repeat", repeat(2000))
    most = 0
    async for _ in small:
        for _ in range(5):
            await asyncio.sleep(0)
        most = max(most, small.unread_bytes)
    assert most < 1 << 20


@pytest.mark.parametrize("how", ["cancel", "close", "drop", "deadline"])
def test_what_waits_for_its_reader_ends_at_once(streaming, how, monkeypatch):
    monkeypatch.setattr("clientlib.async_lane.PAUSE_S", 3600.0)  # else it could end because the lane looks by itself

    @on_loop
    async def test(client):
        assert await indexes(client.stream("acts", acts(1))) == [0]  # what the next one needs is there then
        stream = client.stream("acts", acts(1000, 1 << 20), timeout=2 if how == "deadline" else None)
        await stream
        inflow = stream._source
        while not (inflow._is_held or inflow._ended):  # noqa: ASYNC110 (the lane does it)
            await asyncio.sleep(0.001)
        async with asyncio.timeout(30):
            if how == "cancel":
                assert stream.cancel()
            elif how == "close":
                stream.close()
            elif how == "drop":
                del stream
            while not inflow._ended:  # noqa: ASYNC110 (the lane does it)
                await asyncio.sleep(0.001)
        assert len([_ async for _ in client.stream("repeat", repeat(100))]) == 100

    test(streaming)


@on_loop
async def test_a_reader_who_is_too_slow_beside_others_gets_what_is_kept_and_is_told(client):
    stream = client.stream("acts", acts(1000, 1 << 20))
    assert same(await anext(stream), 0, 1 << 20)
    while not stream._source._inbox.deaf:
        assert await indexes(client.stream("acts", acts(1))) == [0]  # for which the lane looks
    assert stream.unread_bytes > 60 << 20
    seen: list[clientlib.InferResult] = []
    with pytest.raises(InferError, match="wait to be read") as caught:
        await read_into(seen, stream)
    assert caught.value.code == "UNAVAILABLE"
    assert 10 < len(seen) < 64
    assert all(same(result, 1 + i, 1 << 20) for i, result in enumerate(seen))
    assert [_ async for _ in client.stream("square", {"IN": np.zeros(1, np.int32)})] == []


@on_loop
async def test_cancelling_the_task_cancels_the_request(client):
    came = asyncio.Event()
    held: list[clientlib.AsyncStream] = []

    async def read() -> None:
        stream = client.stream("repeat", repeat(100_000, 1))
        held.append(stream)  # what is left of it shows that nobody had to collect it
        async for _ in stream:
            came.set()

    task = asyncio.create_task(read())
    await came.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not held[0].cancel() or [_ async for _ in held[0]] == []
    assert [_ async for _ in held[0]] == []
    early = asyncio.create_task(read())
    await asyncio.sleep(0)
    early.cancel()
    with pytest.raises(asyncio.CancelledError):
        await early
    assert len([_ async for _ in client.stream("repeat", repeat(3))]) == 3


def test_a_client_that_closes_in_the_middle(streaming):
    with clientlib.connect(streaming.directory) as client:
        stream = client.stream("repeat", repeat(100_000, 1))
        next(stream)
    with pytest.raises(InferError, match="closed"):
        list(stream)
    assert list(stream) == []


def test_a_forked_child_is_told_to_connect_again(client):
    stream = client.stream("repeat", repeat(100_000, 1))
    next(stream)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            next(stream)  # also of what came before
        except clientlib.ForkedError:
            stream.close()
            code = 0 if list(stream) == [] else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    next(stream)  # what the child did is nothing to the parent
    stream.close()
    assert works(client)


READER = """
import sys, numpy as np, clientlib
client = clientlib.connect(sys.argv[1])
stream = client.stream("acts", {"ACT": np.array([100_000, 4, 0, -1, -1], np.int32)})
for _ in range(100):
    next(stream)
print("reading", flush=True)
sys.stdin.read()
"""


def test_a_client_that_dies_in_the_middle(streaming, client):
    root = str(Path(__file__).parent.parent.parent)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(streaming.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=root,
    ) as reader:
        assert reader.stdout.readline() == b"reading\n"
        reader.send_signal(signal.SIGKILL)
        reader.wait()
    assert works(client)
    eventually(lambda: len(streaming.status()["sessions"]) <= 2, "the dead client's session is gone")
    assert works(client)


LEAVER = """
import sys, threading, numpy as np, clientlib
client = clientlib.connect(sys.argv[1])
def calls():
    while True:
        client.infer("add1", {"x": np.ones((1, 4), np.float32)})
        called.set()
for _ in range(4):
    called = threading.Event()
    threading.Thread(target=calls, daemon=True).start()
    assert called.wait(60)
"""


def test_a_process_that_ends_while_daemon_threads_call_ends_quietly(streaming):
    command = [sys.executable, "-c", LEAVER, str(streaming.directory)]
    root = str(Path(__file__).parent.parent.parent)
    end = subprocess.run(command, cwd=root, capture_output=True, timeout=120, check=False)
    assert (end.returncode, end.stdout, end.stderr) == (0, b"", b"")


def test_a_worker_that_dies_in_the_middle(client):
    stream = client.stream("acts", acts(10, death=3))
    seen: list[clientlib.InferResult] = []
    with pytest.raises(InferError, match="after its first response") as caught:
        seen.extend(stream)
    assert caught.value.code == "UNAVAILABLE"
    assert [same(result, i, 4) for i, result in enumerate(seen)] == [True] * len(seen)
    assert len(seen) <= 3
    assert list(stream) == []
    assert works(client)


@on_loop
async def test_a_worker_that_dies_in_the_middle_on_a_loop(client):
    stream = client.stream("acts", acts(10, death=3))
    with pytest.raises(InferError) as caught:
        [_ async for _ in stream]
    assert caught.value.code == "UNAVAILABLE"
    assert await indexes(client.stream("acts", acts(3), timeout=20)) == [0, 1, 2]
