"""SEQPACKET sockets and the descriptors that travel over them: nothing a peer sends may leak or confuse."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import select
import socket
import struct

import pytest

from shm.errors import ProtocolError
from shm.messages import MAX_DATAGRAM
from shm.sockets import (
    MAX_FDS,
    SO_PEERPIDFD,
    DescriptorsLost,
    address,
    close_all,
    peer_credentials,
    peer_pidfd,
    receive,
    send,
    seqpacket,
)


@pytest.fixture
def pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.setblocking(False)
    for sock in (left, right):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
    with left, right:
        yield left, right


@pytest.fixture
def null():
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    yield fd
    os.close(fd)


def descriptors() -> set[str]:
    """By number. What other tests left may be closed at any time, so there may be fewer of them later, never others."""
    return set(os.listdir("/proc/self/fd"))


def send_with(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    """As a peer that does not use `send` would."""
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def test_a_datagram_travels_whole_and_in_order(pair):
    left, right = pair
    send(left, b"one")
    send(left, b"x" * MAX_DATAGRAM)
    assert receive(right) == (b"one", [])
    assert receive(right) == (b"x" * MAX_DATAGRAM, [])


def test_received_descriptors_are_the_same_file_and_close_on_exec(pair, null):
    left, right = pair
    os.set_inheritable(null, True)
    send(left, b"take", [null] * MAX_FDS)
    received = receive(right)
    assert received is not None
    data, fds = received
    try:
        assert data == b"take"
        assert len(fds) == MAX_FDS
        assert not any(os.get_inheritable(fd) for fd in fds)
        assert all(os.path.samestat(os.fstat(fd), os.fstat(null)) for fd in fds)
    finally:
        close_all(fds)


def test_nothing_there_raises_at_once_even_on_a_blocking_socket(pair):
    _, right = pair
    assert right.getblocking()
    with pytest.raises(BlockingIOError):
        receive(right)


def test_end_of_file(pair):
    left, right = pair
    left.close()
    assert receive(right) is None


def test_a_peer_that_closes_with_our_datagram_unread_is_end_of_file(pair):
    left, right = pair
    send(right, b"never read")
    left.close()
    assert receive(right) is None


def test_an_empty_datagram_is_end_of_file_and_its_descriptors_are_closed(pair, null):
    left, right = pair
    before = descriptors()
    left.send(b"")
    assert receive(right) is None
    send_with(left, b"", [null, null])
    assert receive(right) is None
    assert descriptors() <= before


@pytest.mark.parametrize("count", [MAX_FDS + 1, MAX_FDS + 2, 253])
def test_more_descriptors_than_fit_are_refused_and_closed(pair, null, count):
    left, right = pair
    before = descriptors()
    send_with(left, b"many", [null] * count)
    with pytest.raises(ProtocolError, match=f"at most {MAX_FDS} travel"):
        receive(right)
    assert descriptors() <= before
    send(left, b"next")
    assert receive(right) == (b"next", [])


@pytest.mark.parametrize("count", [254, 300])
def test_the_kernel_refuses_more_than_253_at_the_sender(pair, null, count):
    left, right = pair
    with pytest.raises(OSError, match="Invalid argument"):
        send(left, b"many", [null] * count)
    with pytest.raises(BlockingIOError):
        receive(right)


def test_a_datagram_that_is_too_long_is_refused_and_its_descriptors_closed(pair, null):
    left, right = pair
    before = descriptors()
    send_with(left, b"x" * (MAX_DATAGRAM + 1), [null] * 3)
    with pytest.raises(ProtocolError, match=f"longer than {MAX_DATAGRAM} bytes"):
        receive(right)
    assert descriptors() <= before


def test_a_datagram_larger_than_the_send_buffer_fails_at_the_sender(pair):
    left, _ = pair
    with pytest.raises(OSError, match="Message too long"):
        send(left, b"x" * (4 << 20))


def test_a_full_peer_raises_instead_of_waiting(pair):
    left, _ = pair

    def send_many() -> None:
        for _ in range(10_000):
            send(left, b"x" * 1024)

    with pytest.raises(BlockingIOError):
        send_many()


def test_a_receiver_out_of_descriptors_gets_an_error_and_keeps_none(pair, null):
    left, right = pair
    send(left, b"two", [null, null])
    free = os.dup(null)
    os.close(free)
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # not one more
        with pytest.raises(DescriptorsLost, match="RLIMIT_NOFILE") as raised:
            receive(right)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert descriptors() <= before
    assert raised.value.data == b"two"


def test_no_descriptor_leaks_whatever_a_peer_sends(pair, null):
    left, right = pair
    before = descriptors()
    for _ in range(1000):
        send(left, b"good", [null, null])
        send_with(left, b"many", [null] * (MAX_FDS + 1))
        send_with(left, b"", [null])
        send_with(left, b"x" * (MAX_DATAGRAM + 1), [null])
        received = receive(right)
        assert received is not None
        close_all(received[1])
        for _ in range(3):
            with contextlib.suppress(ProtocolError):
                assert receive(right) is None
    assert descriptors() <= before


@pytest.mark.parametrize("length", [107, 108, 400])
def test_a_socket_can_lie_at_a_path_of_any_length(tmp_path, length):
    directory = str(tmp_path)
    while len(directory) < length - 10:
        directory = os.path.join(directory, "d" * min(50, length - 9 - len(directory)))
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, "s").ljust(length, "s")
    assert len(path) == length
    before = descriptors()
    with seqpacket() as listener, seqpacket() as client:
        with address(path) as short:
            assert len(os.fsencode(short)) <= 107
            listener.bind(short)
        listener.listen()
        assert os.path.exists(path)
        with address(path) as short:
            client.connect(short)
        accepted, _ = listener.accept()
        with accepted:
            send(client, b"hello")
            assert receive(accepted) == (b"hello", [])
    assert descriptors() <= before


def test_a_long_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("d" * 120)
    with seqpacket() as listener, address("d" * 120 + "/sock") as short:
        listener.bind(short)
    assert os.path.exists("d" * 120 + "/sock")


def test_a_file_name_that_cannot_fit_is_named_in_the_error(tmp_path):
    before = descriptors()
    path = str(tmp_path / ("n" * 120))
    with pytest.raises(OSError, match="name of a socket file must be shorter") as caught, address(path):
        pass
    assert caught.value.filename == path
    assert descriptors() <= before


def test_a_missing_directory_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError), address(str(tmp_path / ("d" * 120) / "sock")):
        pass


@pytest.fixture
def connected(tmp_path):
    with seqpacket() as listener, seqpacket() as client:
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        client.connect(str(tmp_path / "sock"))
        accepted, _ = listener.accept()
        with accepted:
            yield accepted


def test_peer_credentials(connected):
    assert peer_credentials(connected) == (os.getpid(), os.getuid(), os.getgid())


def test_peer_pidfd_is_the_peers_quiet_while_it_lives_and_not_inherited(connected):
    fd = peer_pidfd(connected)
    try:
        assert not os.get_inheritable(fd)
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        assert poller.poll(0) == []
        with open(f"/proc/self/fdinfo/{fd}") as info:
            assert f"Pid:\t{os.getpid()}\n" in info.readlines()
    finally:
        os.close(fd)


class OtherKernel:
    """A connected socket on a kernel that answers SO_PEERPIDFD with an error."""

    def __init__(self, error: int) -> None:
        self.error = error

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        if option == SO_PEERPIDFD:
            raise OSError(self.error, os.strerror(self.error))
        return struct.pack("3i", os.getpid(), os.getuid(), os.getgid())


def test_a_kernel_without_peer_pidfds_opens_one_by_pid():
    fd = peer_pidfd(OtherKernel(errno.ENOPROTOOPT))
    try:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            assert f"Pid:\t{os.getpid()}\n" in info.readlines()
    finally:
        os.close(fd)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ESRCH])
def test_a_peer_that_is_gone_is_never_looked_up_by_its_pid(error):
    with pytest.raises(ProcessLookupError):
        peer_pidfd(OtherKernel(error))


def test_running_out_of_descriptors_is_not_taken_for_a_dead_peer():
    with pytest.raises(OSError, match="Too many open files"):
        peer_pidfd(OtherKernel(errno.EMFILE))
