"""The session protocol without I/O, and how a client finds its broker."""

from __future__ import annotations

import os

import pytest
from msgspec import structs

from clientlib import address
from clientlib.session import Call, Session
from shm import messages
from shm.errors import InferError, ProtocolError
from shm.messages import ModelMetadata


class Waiter:
    def __init__(self):
        self.answer = None
        self.error = None

    def answered(self, answer):
        self.answer = answer

    def failed(self, error):
        self.error = error


def open_fd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class TestSession:
    def ask(self, session: Session, call: Call) -> tuple[int, Waiter]:
        waiter = Waiter()
        number, data = session.request(call, waiter)
        assert messages.decode_request(data).id == number
        return number, waiter

    def test_replies_find_their_request_in_any_order(self):
        session = Session("/run")
        first, one = self.ask(session, Call(messages.ShareRegion(name="r")))
        second, two = self.ask(session, Call(messages.GetModels()))
        session.receive(messages.encode(messages.Models(id=second, models=())), [])
        session.receive(messages.encode(messages.Token(id=first, token="t")), [])
        assert one.answer[0].token == "t"
        assert two.answer[0].models == ()

    def test_failure_is_the_error_of_its_request(self):
        session = Session("/run")
        number, waiter = self.ask(session, Call(messages.GetModels()))
        session.receive(messages.encode(messages.Failure(id=number, code="NOT_FOUND", message="no")), [])
        assert (waiter.error.code, waiter.error.message) == ("NOT_FOUND", "no")

    @pytest.mark.parametrize("count", [0, 2])
    def test_descriptors_must_be_as_many_as_the_reply_has(self, count):
        session = Session("/run")
        number, waiter = self.ask(session, Call(messages.OpenRegion(name="r", token="t"), expects=1))
        info = messages.RegionInfo(id=number, name="r", kind="pool", region=1, generation=1, byte_size=1)
        fds = [open_fd() for _ in range(count)]
        session.receive(messages.encode(info), fds)
        assert isinstance(waiter.error, ProtocolError)
        assert not any(is_open(fd) for fd in fds)

    def test_a_late_reply_is_dropped_with_its_descriptors(self):
        session = Session("/run")
        number, waiter = self.ask(session, Call(messages.OpenRegion(name="r", token="t"), expects=1))
        session.forget(number)
        fd = open_fd()
        info = messages.RegionInfo(id=number, name="r", kind="pool", region=1, generation=1, byte_size=1)
        session.receive(messages.encode(info), [fd])
        assert waiter.answer is None
        assert not is_open(fd)

    def test_what_a_late_reply_gave_is_given_back(self):
        session = Session("/run")
        for call, reply in (
            (messages.OpenChannel(worker="w", slots=4), messages.ChannelInfo(channel=7, worker="w", slots=4)),
            (
                messages.Prepare(model="m", inputs=(), outputs=()),
                messages.Prepared(index=3, generation=2, worker="w", model_version="1", rows=1),
            ),
            (
                messages.RegisterPool(name="r", byte_size=64),
                messages.RegionInfo(name="r", kind="pool", region=1, generation=1, byte_size=64),
            ),
            (messages.GetModels(), messages.Models(models=())),
        ):
            number, _ = self.ask(session, Call(call))
            session.forget(number)
            session.receive(messages.encode(structs.replace(reply, id=number)), [])
        assert not session.unanswered
        sent = []

        def full(data: bytes) -> None:
            raise BlockingIOError

        with pytest.raises(BlockingIOError):
            session.give_back(full)
        session.give_back(sent.append)
        session.give_back(sent.append)
        close, release, unregister = map(messages.decode_request, sent)
        assert isinstance(close, messages.CloseChannel)
        assert isinstance(release, messages.Release)
        assert isinstance(unregister, messages.Unregister)
        assert (close.channel, release.index, release.generation, unregister.name) == (7, 3, 2, "r")

    @pytest.mark.parametrize("wanted", [True, False])
    def test_a_late_reply_may_be_wanted_all_the_same(self, wanted):
        session = Session("/run")
        came = []

        def late(answer):
            came.append(answer)
            return wanted

        ask = Call(messages.OpenChannel(worker="w", slots=4), expects=1, late=late)
        number, _ = self.ask(session, ask)
        session.forget(number)
        info = messages.ChannelInfo(id=number, channel=7, worker="w", slots=4)
        fd = open_fd()
        session.receive(messages.encode(info), [fd])
        assert came == [(info, [fd])]
        assert is_open(fd)
        os.close(fd)
        sent = []
        session.give_back(sent.append)
        assert len(sent) == (not wanted)

    def test_garbage_is_a_protocol_error_and_leaks_nothing(self):
        fd = open_fd()
        with pytest.raises(ProtocolError):
            Session("/run").receive(b"\xc1garbage", [fd])
        assert not is_open(fd)

    def test_a_large_reply_comes_in_a_memfd(self):
        session = Session("/run")
        number, waiter = self.ask(session, Call(messages.GetModels()))
        models = tuple(ModelMetadata(name=f"{n:08}" * 100, version="1") for n in range(200))
        data = messages.encode(messages.Models(id=number, models=models))
        assert len(data) > messages.MAX_DATAGRAM
        fd = os.memfd_create("large")
        os.write(fd, data)
        session.receive(messages.encode(messages.Large(byte_size=len(data))), [fd])
        assert waiter.answer[0].models == models
        assert not is_open(fd)

    def test_a_large_reply_that_ends_early_is_refused(self):
        fd = os.memfd_create("large")
        with pytest.raises(ProtocolError, match="ends after 0"):
            Session("/run").receive(messages.encode(messages.Large(byte_size=10)), [fd])
        assert not is_open(fd)

    def test_the_end_tells_everybody_why(self):
        session = Session("/run")
        _, waiter = self.ask(session, Call(messages.GetModels()))
        session.receive(messages.encode(messages.Goodbye(reason="a rule was broken")), [])
        session.end()
        assert waiter.error.code == "UNAVAILABLE"
        assert "a rule was broken" in waiter.error.message
        with pytest.raises(InferError, match="a rule was broken"):
            session.request(Call(messages.GetModels()), Waiter())

    @pytest.mark.parametrize(
        "message",
        [
            messages.RegisterPool(name="", byte_size=1),
            messages.RegisterPool(name="r", byte_size=-1),
            messages.ShareRegion(name="r" * 300),
            messages.GetModel(model=3),  # type: ignore[arg-type]
        ],
    )
    def test_what_the_broker_would_hang_up_on_is_refused_here(self, message):
        with pytest.raises(InferError, match=type(message).__name__) as caught:
            Session("/run").request(Call(message), Waiter())
        assert caught.value.code == "INVALID_ARG"

    def test_late_while_starting_says_how_far(self):
        session = Session("/run")
        session.receive(messages.encode(messages.Starting(done=3, total=7)), [])
        late = session.late(Call(messages.Hello(protocol=1)), 1.0)
        assert (late.code, late.message) == ("UNAVAILABLE", "starting: 3 of 7 models")
        session.receive(messages.encode(messages.Starting(done=3, total=7, waits_for="model 'm' takes long")), [])
        late = session.late(Call(messages.Hello(protocol=1)), 1.0)
        assert late.message == "starting: 3 of 7 models; model 'm' takes long"


class TestAddress:
    def test_the_default_place(self, monkeypatch):
        monkeypatch.setenv("TENSORBROKER_DIR", "/run/there")
        assert address.directory_of(None) == "/run/there"
        monkeypatch.delenv("TENSORBROKER_DIR")
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
        assert address.directory_of(None) == "/run/user/1/tensorbroker"
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        assert str(os.getuid()) in address.directory_of(None)

    def test_urls(self):
        assert address.directory_of("ipc:///run/x/") == "/run/x"
        for url in ("", "run/x", "ipc://relative", "ftp://host", "host:8001"):
            with pytest.raises(InferError, match="ipc://") as caught:
                address.directory_of(url)
            assert caught.value.code == "INVALID_ARG"

    def test_nobody_there(self, tmp_path):
        with pytest.raises(address.Absent) as caught:
            address.dial(str(tmp_path))
        assert str(tmp_path / "broker.sock") in caught.value.error.message
        assert "tensorbroker serve" in caught.value.error.message
