"""The worker's end of its link: what comes without its descriptors is refused, and the next message is read."""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from broker.worker import messages
from broker.worker.link import Link, refusal
from broker.worker.link_log import Attributed, LinkLog
from shm import sockets
from shm.errors import Code, InferError

ATTACH = messages.AttachChannel(id=7, channel=1, session=1, slots=1)


@pytest.fixture
def broker() -> Iterator[tuple[socket.socket, Link]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, Link(theirs)


@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_message_that_lost_its_descriptors_is_refused_by_its_number(broker, room):
    ours, link = broker
    null = os.open(os.devnull, os.O_RDONLY)
    before = set(os.listdir("/proc/self/fd"))
    sockets.send(ours, messages.encode(ATTACH), [null] * 4)
    sockets.send(ours, messages.encode(messages.DetachChannel(id=8, channel=1)))
    free = [os.dup(null) for _ in range(room + 1)]
    sockets.close_all(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))
        received = link.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert received == (messages.DetachChannel(id=8, channel=1), [])
    answer = sockets.receive(ours)
    assert answer is not None
    refused = messages.decode_to_broker(answer[0])
    assert isinstance(refused, messages.Refused)
    assert (refused.id, refused.code) == (7, "UNAVAILABLE")
    assert "RLIMIT_NOFILE" in refused.message
    assert set(os.listdir("/proc/self/fd")) <= before
    sockets.send(ours, messages.encode(ATTACH), [null] * 4)
    received = link.receive()
    assert received is not None
    assert len(received[1]) == 4
    sockets.close_all([null, *received[1]])


@pytest.mark.parametrize("text", ["a file named \udc80", "x" * 100_000, "\U0001f600" * 100_000])
def test_whatever_a_model_raises_and_logs_reaches_the_broker(broker, text):
    ours, link = broker
    logger = logging.Logger("worker")
    logger.addHandler(LinkLog(link.send))
    logger.error("%s", text)
    for error in (ValueError(text), InferError(Code.NOT_FOUND, text)):
        link.send(refusal(3, error))
    for _ in range(3):
        datagram = sockets.receive(ours)
        assert datagram is not None
        messages.decode_to_broker(datagram[0])


def test_whose_message_it_is_shows_in_the_log():
    def told(logger: str) -> str:
        return Attributed("cpu/left").format(logging.LogRecord(logger, logging.ERROR, "", 0, "of %s", ("m",), None))

    assert told("broker.worker.tracebacks") == "of m"
    assert told("brokers") == "worker 'cpu/left', logger 'brokers': of m"
    assert told("root") == "worker 'cpu/left', logger 'root': of m"
