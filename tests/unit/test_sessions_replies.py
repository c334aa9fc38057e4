"""Sessions whose clients are behind with reading, or never read. Real sockets, one process, one loop."""

import asyncio
import contextlib

import pytest

from shm.messages import Status
from tests.unit.test_sessions import session_test, until


@session_test
async def test_a_client_that_does_not_read_is_asked_nothing_more_and_hung_up(service, sessions, connect):
    client = connect()
    session = await client.greet()
    service.reply = Status(status={"filler": "x" * 60000})
    number = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("broker.sessions.STALL_TIMEOUT_S", 0.2)
        while sessions.get(session) is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                client.send({"type": "ListRegions", "id": number})
                number += 1
            await asyncio.sleep(0)
    assert len(service.asked) < 20  # what the kernel's buffer takes, and one
    await until(lambda: service.ended == [session])


@session_test
async def test_many_requests_at_once_with_large_replies_are_all_answered(service, sessions, connect):
    client = connect()
    session = await client.greet()
    service.reply = Status(status={"filler": "x" * 60000})
    numbers = iter(range(2, 202))
    for number in numbers:
        try:
            client.send({"type": "ListRegions", "id": number})
        except BlockingIOError:
            break
        await asyncio.sleep(0)
    else:
        number = 202
    sent = list(range(2, number))
    assert len(sent) > 8  # 480 kB of replies, which is more than the broker holds for a client
    assert [(await client.receive())["id"] for _ in sent] == sent
    assert sessions.get(session) is not None


@session_test
async def test_replies_wait_for_a_slow_reader(service, sessions, connect):
    client = connect()
    await client.greet()
    service.reply = Status(status={"filler": "x" * 60000})
    for number in range(2, 8):
        client.send({"type": "ListRegions", "id": number})
    await until(lambda: len(service.asked) > 1)
    assert [(await client.receive())["id"] for _ in range(6)] == list(range(2, 8))
