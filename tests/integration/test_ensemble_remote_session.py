"""A worker's own session: what it sends in which order, what becomes of the answers, and how it ends."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from broker.worker.ensembles.remote.session import WINDOW, StepSession
from shm import messages, sockets
from shm.admission import Request
from shm.errors import Code, InferError
from shm.layout import CODE_MASK, WAITING
from tests.fakes.broker import eventually
from tests.fakes.channel import PLAN, Plan, Twin, take

pytestmark = pytest.mark.timeout(60)
STOPPING = (Code.UNAVAILABLE, "it is stopping")


class Peer:
    """The broker's end."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.session = StepSession(lambda: self.asked.put(None))
        self.answers: queue.SimpleQueue[tuple[Any, list[int]]] = queue.SimpleQueue()
        self._sock, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(30)
        self._theirs.setblocking(False)

    def connect(self) -> None:
        self.session.need()
        self.asked.get(timeout=30)
        self.session.connected(self._theirs)
        assert isinstance(self.receive(), messages.Hello)

    def call(self, message: messages.Message, fds: tuple[int, ...] = ()) -> None:
        self.session.call(message, lambda reply, fds: self.answers.put((reply, fds)), fds)

    def receive(self) -> Any:
        received = sockets.receive(self._sock)
        if received is None:
            return None
        sockets.close_all(received[1])
        return messages.decode_request(received[0])

    def reply(self, request: messages.Message, reply: messages.Message, fds: tuple[int, ...] = ()) -> None:
        data = messages.encode(reply.__class__(**{**_fields(reply), "id": request.id}))
        sockets.send(self._sock, data, fds)

    def quiet(self) -> bool:
        self._sock.setblocking(False)
        try:
            self._sock.recv(1)
        except BlockingIOError:
            return True
        finally:
            self._sock.settimeout(30)
        return False

    def close(self) -> None:
        try:
            self.session.close(STOPPING)
            while self.receive() is not None:
                pass
        finally:
            self._sock.close()


def _fields(message: messages.Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


class Sends:
    """A step whose plan is known."""

    def __init__(self) -> None:
        self.step = Request(None, 0, (1, 0, 9, *[0] * 10), None, 0)  # type: ignore[arg-type]
        self.ident = 0
        self.ended: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()

    def word(self) -> int:
        return PLAN

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        self.ended.put(entry)

    def fail(self, verdict: Any) -> None:
        assert verdict == STOPPING, "what the test's end finds still in line"


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def test_calls_go_in_their_order_and_answers_come_in_any(peer):
    for index in range(3):
        peer.call(messages.Release(index=index, generation=1))
    peer.connect()
    asked = [peer.receive() for _ in range(3)]
    assert [each.index for each in asked] == [0, 1, 2]
    peer.reply(asked[2], messages.Done())
    peer.reply(asked[0], messages.Failure(code="NOT_FOUND", message="no such plan"))
    assert isinstance(peer.answers.get(timeout=30)[0], messages.Done)
    refused, _ = peer.answers.get(timeout=30)
    assert isinstance(refused, InferError)
    assert (refused.code, refused.message) == ("NOT_FOUND", "no such plan")


def test_no_more_calls_than_a_window_wait_for_their_answers(peer):
    peer.connect()
    hello_and = WINDOW - 1  # Hello has no answer yet
    for index in range(WINDOW + 5):
        peer.call(messages.Release(index=index, generation=1))
    first = [peer.receive() for _ in range(hello_and)]
    assert peer.quiet()
    peer.reply(first[0], messages.Done())
    assert peer.receive().index == hello_and


def test_descriptors_are_closed_when_they_have_been_sent(peer):
    peer.connect()
    read, write = os.pipe()
    peer.call(messages.RegisterPool(name="r", byte_size=1), (write,))
    assert isinstance(peer.receive(), messages.RegisterPool)
    assert os.read(read, 1) == b"", "nobody has the other end any more"
    os.close(read)


def test_a_message_that_is_too_long_is_refused_here(peer):
    peer.connect()
    spec = messages.TensorSpec(name="x" * 250, region="r", datatype="FP32", shape=(1,) * 60)
    plan = messages.Prepare(model="m", inputs=(spec,) * 400, outputs=())
    peer.call(messages.PrepareStep(plan=plan))
    refused, _ = peer.answers.get(timeout=30)
    assert isinstance(refused, InferError)
    assert "use fewer tensors" in refused.message


def test_a_step_opens_its_channel_and_is_rung_for_when_it_has_ended(peer):
    peer.connect()
    sends = Sends()
    lane = peer.session.lane("cpu/other")
    assert peer.session.lane("cpu/other") is lane
    lane.submit(sends)
    asked = peer.receive()
    assert (type(asked), asked.worker) == (messages.OpenChannel, "cpu/other")
    with Twin(4) as twin:
        worker = twin.worker({PLAN: Plan()})
        fds = twin.memory_fd, twin.bell_fd, twin.pipe_read
        peer.reply(asked, messages.ChannelInfo(channel=1, worker="cpu/other", slots=4), fds)
        eventually(worker.pending)
        (request,) = take(worker)
        assert request.request_id == 9
        worker.complete((request,))
        worker.ring()
        assert sends.ended.get(timeout=30)[2] & CODE_MASK == 0


def test_a_step_elsewhere_does_not_keep_those_in_another_worker_from_being_rung_for(peer):
    peer.connect()
    with Twin(4) as slow, Twin(4) as quick:
        for number, twin in enumerate((slow, quick)):
            peer.session.lane(f"cpu/{number}").submit(Sends())
            fds = twin.memory_fd, twin.bell_fd, twin.pipe_read
            peer.reply(peer.receive(), messages.ChannelInfo(channel=number, worker=f"cpu/{number}", slots=4), fds)
            words = twin.client()._words
            eventually(lambda words=words: words[WAITING] != 0, f"worker {number} is asked to ring")


def test_the_end_hangs_up_and_refuses_what_comes_all_the_same(peer):
    peer.connect()
    peer.session.close(STOPPING)
    assert peer.receive() is None
    failed: list[Any] = []

    class Late:
        step, ident = None, 0

        def fail(self, verdict: Any) -> None:
            failed.append(verdict)

    peer.session.lane("cpu/other").submit(Late())  # type: ignore[arg-type]
    assert failed == [STOPPING]
