"""The run directory: found by rule, safe, held by one broker, given back."""

import os
import socket
import stat

import pytest

from broker.run_directory import AlreadyRunning, RunDirectory, RunDirectoryError
from shm import sockets


def test_claim_creates_a_private_directory_and_socket(tmp_path):
    path = str(tmp_path / "deeper" / "run")
    run = RunDirectory.claim(path)
    listener = run.listen()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(run.socket_path).st_mode) == 0o600
    assert (tmp_path / "deeper" / "run" / "broker.lock").read_text() == f"{os.getpid()}\n"
    listener.close()
    run.release()
    assert os.listdir(path) == []


@pytest.mark.parametrize("path", ["run", "run/", "./run", "new/run/"])
def test_paths_relative_to_where_serve_was_started(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    try:
        run = RunDirectory.claim(path)
    finally:
        os.umask(before)
    assert run.path == str(tmp_path / path)
    assert stat.S_IMODE(os.stat(run.path).st_mode) == 0o700
    run.release()


def test_second_claim_names_the_holder(tmp_path):
    run = RunDirectory.claim(str(tmp_path))
    with pytest.raises(AlreadyRunning, match=rf"already running \(pid {os.getpid()}\)"):
        RunDirectory.claim(str(tmp_path))
    run.release()
    RunDirectory.claim(str(tmp_path)).release()


def test_stale_socket_is_replaced(tmp_path):
    with sockets.seqpacket() as dead:
        dead.bind(str(tmp_path / "broker.sock"))
    run = RunDirectory.claim(str(tmp_path))
    with run.listen(), sockets.seqpacket() as client:
        client.connect(run.socket_path)
    run.release()


def test_live_socket_survives_even_when_its_lock_file_was_cleaned_away(tmp_path):
    first = RunDirectory.claim(str(tmp_path))
    listener = first.listen()
    os.unlink(tmp_path / "broker.lock")
    second = RunDirectory.claim(str(tmp_path))
    with pytest.raises(AlreadyRunning, match=str(os.getpid())):
        second.listen()
    second.release()
    with sockets.seqpacket() as client:
        client.connect(first.socket_path)
    listener.close()
    first.release()


def test_release_leaves_a_successors_files(tmp_path):
    first = RunDirectory.claim(str(tmp_path))
    first.listen().close()
    os.unlink(tmp_path / "broker.lock")
    second = RunDirectory.claim(str(tmp_path))
    with second.listen():
        first.release()
        assert sorted(os.listdir(tmp_path)) == ["broker.lock", "broker.sock"]
    second.release()


def test_paths_longer_than_sun_path(tmp_path):
    run = RunDirectory.claim(str(tmp_path / ("d" * 120)))
    with run.listen(), sockets.seqpacket() as client, sockets.address(run.socket_path) as address:
        client.connect(address)
    run.release()


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_directories_others_can_write_are_refused(tmp_path, mode):
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(RunDirectoryError, match="chmod 700"):
        RunDirectory.claim(str(path))


def test_symlinks_and_files_are_refused(tmp_path):
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(RunDirectoryError, match="symlink or not a directory"):
            RunDirectory.claim(str(tmp_path / name))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directories_of_others_are_refused(tmp_path):
    path = tmp_path / "run"
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(RunDirectoryError, match="belongs to uid 12345"):
        RunDirectory.claim(str(path))


def test_something_else_in_the_sockets_place_is_refused(tmp_path):
    run = RunDirectory.claim(str(tmp_path))
    (tmp_path / "broker.sock").write_text("precious")
    with pytest.raises(RunDirectoryError, match="not a socket"):
        run.listen()
    assert (tmp_path / "broker.sock").read_text() == "precious"
    run.release()


def test_a_stream_socket_that_is_alive_is_not_replaced(tmp_path):
    run = RunDirectory.claim(str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(run.socket_path)
        other.listen()
        with pytest.raises(RunDirectoryError):
            run.listen()
        assert os.path.exists(run.socket_path)
    run.release()
