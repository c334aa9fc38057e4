"""`tensorbroker status` against whatever may answer on the socket; replies packed by hand."""

import array
import contextlib
import os
import socket
import subprocess
import sys
import threading

import msgpack
import pytest

from broker.commands import NoAnswer, ask_status, human
from shm import sockets

WELCOME = {"type": "Welcome", "id": 1, "protocol": 1, "epoch": "e", "session": 1, "version": "0"}
DOCUMENT = {
    "broker": {"version": "0.1", "pid": 7, "uptime_s": 12.3, "directory": "/run/x"},
    "quotas": {"memory_used": 1, "memory_limit": 2, "regions": 0, "sessions": 3, "sessions_limit": 4},
    "counters": {"sessions_refused": 5, "protocol_errors": 6},
    "workers": [{"key": "cpu/default", "state": "ready", "pid": None, "restarts": 1}],
    "models": [{"name": "m", "version": "1", "state": "READY", "workers": ["cpu/default", "gpu0/default"]}],
    "sessions": [],
    "regions": [],
}


@contextlib.contextmanager
def answering(path, *replies):
    """A socket in `path` that answers each request with the next of `replies`, then hangs up."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path / "broker.sock"))
    listener.listen()

    def serve():
        connection, _ = listener.accept()
        with connection:
            for reply in replies:
                connection.recv(65536)
                data, fd = reply if isinstance(reply, tuple) else (reply, None)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd is not None else []
                connection.sendmsg([data if isinstance(data, bytes) else msgpack.packb(data)], rights)
            connection.recv(65536)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join(60)
    listener.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("replies", "text"),
    [
        ([{"type": "Starting", "done": 3, "total": 7}], "starting: 3 of 7 models"),
        ([{"type": "Failure", "id": 1, "code": "UNSUPPORTED", "message": "protocol 2"}], "UNSUPPORTED: protocol 2"),
        ([WELCOME, {"type": "Goodbye", "reason": "shutting down"}], "the broker hung up: shutting down"),
        ([WELCOME], "the broker hung up"),
        ([b"\xc1"], "does not answer: .*not a message of protocol 1"),
    ],
)
def test_no_document(tmp_path, replies, text):
    with answering(tmp_path, *replies), pytest.raises(NoAnswer, match=text):
        ask_status(str(tmp_path))


def test_nobody_is_there(tmp_path):
    with pytest.raises(NoAnswer, match=f"no broker is running in {tmp_path}"):
        ask_status(str(tmp_path))
    with sockets.seqpacket() as dead:
        dead.bind(str(tmp_path / "broker.sock"))
    with pytest.raises(NoAnswer, match="no broker is running"):
        ask_status(str(tmp_path))


def test_the_document_comes_plain_or_in_a_memfd(tmp_path):
    status = {"type": "Status", "id": 2, "status": DOCUMENT}
    with answering(tmp_path, WELCOME, status):
        assert ask_status(str(tmp_path)) == DOCUMENT
    os.unlink(tmp_path / "broker.sock")
    memory = os.memfd_create("reply")
    data = msgpack.packb(status)
    os.write(memory, data)
    with answering(tmp_path, WELCOME, ({"type": "Large", "id": 2, "byte_size": len(data)}, memory)):
        assert ask_status(str(tmp_path)) == DOCUMENT
    os.close(memory)


def test_tables_for_people():
    text = human(DOCUMENT)
    assert "tensorbroker 0.1, pid 7, up 12 s, in /run/x" in text
    assert "cpu/default, gpu0/default" in text
    assert "session |" not in text  # no sessions, no table
    heavy = {"key": "cpu/default", "pid": 7, "memory_bytes": 100 << 20}
    table = human({**DOCUMENT, "workers": [heavy, {**heavy, "memory_bytes": 1 << 19}, DOCUMENT["workers"][0]]})
    assert " memory " in table
    assert "100 MiB |" in table
    assert "0.5 MiB |" in table
    stopped = {"key": "cpu/default", "state": "ready", "silent_s": 12.4}
    assert "ready, but silent for 12 s" in human({**DOCUMENT, "workers": [stopped]})
    gpu = {"ordinal": 0, "name": "H200", "uuid": "GPU-1", "total_memory": 5}
    dead = {"key": "cpu/default", "last_death": "killed by SIGKILL", "last_death_age_s": 12.4}
    assert "killed by SIGKILL, 12 s ago" in human({**DOCUMENT, "workers": [dead]})
    del dead["last_death_age_s"]  # as a broker of an older version has it
    assert "killed by SIGKILL" in human({**DOCUMENT, "workers": [dead]})
    assert "GPU 0: H200, GPU-1, 5 bytes\n" in human({**DOCUMENT, "cuda": {"reason": "", "gpus": [gpu]}})
    assert "no GPU: no driver\n" in human({**DOCUMENT, "cuda": {"reason": "no driver", "gpus": []}})


def test_of_a_session_with_many_regions_the_first_are_shown():
    sizes = {1: 10, 2: 12, 3: 1}
    regions = [
        {"name": f"r{session}.{at}.", "session": session, "byte_size": 3 << 20}
        for at in range(12)
        for session, count in sizes.items()
        if at < count
    ]
    rows = [
        line.split("|")
        for line in human({**DOCUMENT, "regions": regions}).splitlines()
        if "r1.0." in line or "more" in line or "r2." in line or "r3." in line
    ]
    assert [row[1].strip() for row in rows] == [
        "r1.0.",
        *(f"r2.{at}." for at in range(10)),
        "… and 2 more, 6.0 MiB",
        "r3.0.",
    ]
    assert rows[-2][5].strip() == "2", "whose they are"
    assert human({**DOCUMENT, "regions": regions}).count("r1.") == 10


def test_a_reader_that_has_seen_enough(tmp_path):
    (tmp_path / "models").mkdir()
    command = [sys.executable, "-m", "broker", "check", str(tmp_path / "models")]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")
