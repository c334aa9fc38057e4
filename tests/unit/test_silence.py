"""Clients avoid a worker that does not respond, and come back when it does."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from broker import silence
from broker.worker.messages import Acknowledged
from broker.worker_process import WorkerProcess
from shm.layout import AWAY
from tests.fakes.channel import Twin
from tests.fakes.workers import record_of


@pytest.fixture
def twin() -> Iterator[Twin]:
    with Twin() as twin:
        yield twin


def test_clients_read_in_their_channels_that_it_is_away(twin: Twin) -> None:
    process: Any = SimpleNamespace(pid=1, owes_s=0.0, shunned=False, suspected=False)
    client = twin.client()

    def look(owes_s: float) -> bool:
        process.owes_s = owes_s
        silence.look("cpu/left", process, [record_of(twin)], 1.0)
        assert not client.replaced, "it may go on with the sequences that it has"
        return client.away

    assert [look(owes_s) for owes_s in (0.0, 0.9, 1.1)] == [False, False, False]
    assert look(0.0) is False, "the answer was there: the broker had only not looked"
    assert [look(owes_s) for owes_s in (1.1, 1.4, 9.0)] == [False, True, True]
    assert look(0.0) is False
    assert [look(owes_s) for owes_s in (1.1, 1.4)] == [False, True], "and again"


def test_for_how_long_it_has_not_responded_is_told() -> None:
    process: Any = SimpleNamespace(pid=1, owes_s=9.0, shunned=False, suspected=False)

    def look(owes_s: float) -> float:
        process.owes_s = owes_s
        return silence.look("cpu/left", process, [], 1.0)

    assert [look(owes_s) for owes_s in (0.5, 1.5, 2.5, 3.5, 0.0)] == [0, 0, 2.5, 3.5, 0]


def test_nothing_is_written_where_nothing_has_changed(twin: Twin) -> None:
    """The worker's process may write that word itself, and that of a dead one is the coroner's."""
    process: Any = SimpleNamespace(pid=1, owes_s=0.0, shunned=False, suspected=False)
    client = twin.client()
    client._words[AWAY] = 1
    silence.look("cpu/left", process, [record_of(twin)], 1.0)
    assert client.away


def test_one_channel_that_cannot_be_written_keeps_nobody_else_from_being_told(twin: Twin) -> None:
    """It ended the watch over all workers."""
    process: Any = SimpleNamespace(pid=1, owes_s=9.0, shunned=False, suspected=True)
    full = os.open("/dev/full", os.O_WRONLY)
    other: Any = SimpleNamespace(memory=full)
    client = twin.client()
    silence.look("cpu/left", process, [other, record_of(twin)], 1.0)
    os.close(full)
    assert client.away


def test_an_answer_counts_although_the_next_one_is_owed_by_the_time_it_is_seen() -> None:
    """The watch asks as soon as there is an answer, and whoever waits for that has its turn later."""

    async def ask() -> tuple[bool, bool]:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.setblocking(False)
        process = WorkerProcess(
            here, os.getpid(), os.pidfd_open(os.getpid()), 1, on_exit=lambda _: None, on_notice=lambda _: None
        )
        try:
            asked = asyncio.ensure_future(process.answers(60))
            await asyncio.sleep(0)
            process._take(Acknowledged(id=1))
            process.ping()
            return await asked, process.answered
        finally:
            loop = asyncio.get_running_loop()
            loop.remove_reader(here)
            loop.remove_reader(process.pidfd)
            process.close()
            here.close()
            there.close()

    assert asyncio.run(ask()) == (True, False)
