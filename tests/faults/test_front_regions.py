"""Rows R-07, R-09, R-10, R-17, R-21, B-08, B-09, C-07, T-02 with unmodified tritonclient, over HTTP and over gRPC."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

from tests.fakes.zmq_gateway import HandZmqClient
from tests.faults import child, raw
from tests.faults.front_doors import FrontDoors
from tests.faults.lab import SAME, scaled
from tests.faults.visited import VisitedLab
from tests.faults.visitor import Door, outcome

STRANGER = 4321
SIZE = 4096
KINDS = ("http", "grpc")
X = np.arange(4, dtype=np.float32)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of other uids")


@pytest.fixture(scope="module")
def shared_doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VisitedLab]:
    with VisitedLab(tmp_path_factory.mktemp("visited")) as lab:
        yield lab


@pytest.fixture
def doors(shared_doors: VisitedLab) -> Iterator[VisitedLab]:
    yield shared_doors
    shared_doors.end_offenders()


def _offend(lab: VisitedLab, function: Any, **arguments: Any) -> Any:
    return lab.offend(function, http=lab.http, grpc=lab.grpc, **arguments)


def _both(http: int, grpc: int) -> dict[str, Door]:
    return {kind: Door(kind, http, grpc) for kind in KINDS}


# --- offsets -------------------------------------------------------------------------------------------------


def _register_at(http: int, grpc: int, offsets: list[int]) -> dict[str, Any]:
    found = {}
    for kind, door in _both(http, grpc).items():
        for offset in offsets:
            with raw.named_memory(3 * SIZE) as key:
                memory = os.open(f"/dev/shm{key}", os.O_RDWR)
                os.pwrite(memory, X.tobytes(), offset)
                told = outcome(door.client.register_system_shared_memory, "odd", key, SIZE, offset)
                ran = outcome(door.infer, "odd", 0, 18)
                right = os.pread(memory, 16, offset + 18) == (X + 1).tobytes()
                rest = os.pread(memory, 3 * SIZE, 0)
                untouched = not any(rest[:offset]) and not any(rest[offset + 34 :])
                os.close(memory)
                door.client.unregister_system_shared_memory("odd")
                found[f"{kind} {offset}"] = [told[0], ran[0], right, untouched]
    return found


def test_r07_windows_at_odd_offsets(doors: VisitedLab) -> None:
    """[R-07] accepted, right, and nothing is written beside the output."""
    found = _offend(doors, _register_at, offsets=[1, 100, 4095, 4097])
    assert len(found) == 8
    assert {tuple(each) for each in found.values()} == {("OK", "OK", True, True)}, found
    doors.settled()


# --- what is no memory of ours -------------------------------------------------------------------------


def _register_what_is_no_memory(http: int, grpc: int) -> dict[str, Any]:
    names = {name: f"h10-{os.getpid()}-{name}" for name in ("symlink", "fifo", "directory", "hardlink", "plain")}
    paths = {name: f"/dev/shm/{key}" for name, key in names.items()}
    secret = os.open(paths["plain"], os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(secret, 0, SIZE)
    os.pwrite(secret, b"secret", 0)
    os.close(secret)
    os.symlink("/etc/passwd", paths["symlink"])
    os.mkfifo(paths["fifo"])
    os.mkdir(paths["directory"])
    os.link(paths["plain"], paths["hardlink"])
    try:
        return {
            f"{kind} {name}": outcome(door.client.register_system_shared_memory, "trap", f"/{names[name]}", 16)
            for kind, door in _both(http, grpc).items()
            for name in ("symlink", "fifo", "directory", "hardlink")
        }
    finally:
        os.rmdir(paths.pop("directory"))
        for path in paths.values():
            os.unlink(path)


def test_r09_links_pipes_and_directories(doors: VisitedLab) -> None:
    """[R-09] refused at once; what they point to is not opened."""
    found = _offend(doors, _register_what_is_no_memory)
    assert {each[0] for each in found.values()} <= {"400", "500", "INVALID_ARGUMENT", "INTERNAL"}, found
    assert len(found) == 8
    assert "root:" not in str(found)
    doors.settled()


def _register_anothers(http: int, grpc: int, mode: int) -> dict[str, Any]:
    with raw.named_memory(SIZE, b"theirs") as key:
        os.chmod(f"/dev/shm{key}", mode)
        os.chown(f"/dev/shm{key}", STRANGER, STRANGER)
        return {
            kind: [
                outcome(door.client.register_system_shared_memory, "theirs", key, SIZE),
                outcome(door.infer, "theirs", 0, 64),
            ]
            for kind, door in _both(http, grpc).items()
        }


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o666], ids=oct)
def test_r10_memory_of_another_uid(doors: VisitedLab, mode: int) -> None:
    """[R-10] refused, though a broker that runs as root could open it."""
    found = _offend(doors, _register_anothers, mode=mode)
    for kind, (told, ran) in found.items():
        assert told[0] not in ("OK", "LOST"), (kind, told)
        assert ran[0] in ("404", "NOT_FOUND"), (kind, ran)
    doors.settled()


# --- R-21, C-07: names that come back ------------------------------------------------------------------------------


def _make(key: str, value: float) -> int:
    memory = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=SIZE)
    os.pwrite(memory.fd, np.full(SIZE // 4, value, np.float32).tobytes(), 0)
    return int(memory.fd)


def _float(fd: int, offset: int) -> float:
    return float(np.frombuffer(os.pread(fd, 4, offset), np.float32)[0])


def _recreate(http: int, grpc: int) -> dict[str, Any]:
    found = {}
    for kind, door in _both(http, grpc).items():
        key = f"/again-{kind}"
        old = _make(key, 10)
        door.client.register_system_shared_memory("first", key, SIZE)
        door.infer("first", 0, 64)
        posix_ipc.unlink_shared_memory(key)
        new = _make(key, 20)
        door.infer("first", 0, 128)
        same = outcome(door.client.register_system_shared_memory, "first", key, SIZE)
        other = outcome(door.client.register_system_shared_memory, "second", key, SIZE)
        after = outcome(door.infer, "first", 0, 192)
        second = outcome(door.infer, "second", 0, 256)
        found[kind] = {
            "told": [same[0], other[0], after[0], second[0]],
            "old": [_float(old, at) for at in (64, 128, 192, 256)],
            "new": [_float(new, at) for at in (64, 128, 192, 256)],
        }
        for name in ("first", "second"):
            door.client.unregister_system_shared_memory(name)
        posix_ipc.unlink_shared_memory(key)
        os.close(old)
        os.close(new)
    return found


def test_r21_unlinked_and_made_again(doors: VisitedLab) -> None:
    """[R-21] no request writes to, or reads from, another object than the one that was registered under its name."""
    for kind, found in _offend(doors, _recreate).items():
        same, *others = found["told"]
        assert others == ["OK", "OK", "OK"], (kind, found)
        if same == "OK":  # the object under the name "first" was its own dead predecessor
            assert (found["old"], found["new"]) == ([11, 11, 10, 10], [20, 20, 21, 21]), (kind, found)
        else:
            assert (found["old"], found["new"]) == ([11, 11, 11, 10], [20, 20, 20, 21]), (kind, found)
    doors.settled()


def _live_and_die(kind: str, http: int, grpc: int, value: float) -> None:
    """As a script does that is killed and started again: the same names every time."""
    try:
        posix_ipc.unlink_shared_memory("/c07")
    except posix_ipc.ExistentialError:
        pass
    memory = _make("/c07", value)
    door = Door(kind, http, grpc)
    found = outcome(door.client.register_system_shared_memory, "c07", "/c07", SIZE)
    ran = outcome(door.infer, "c07", 0, 64)
    child.say([found, ran, _float(memory, 64)])
    os.kill(os.getpid(), signal.SIGKILL)


def test_c07_killed_and_started_again_with_the_same_names(doors: VisitedLab) -> None:
    """[C-07] never ALREADY_EXISTS because of what one's own dead predecessor registered."""
    for life in range(scaled(20, 1000)):
        arguments = {"kind": KINDS[life % 2], "http": doors.http, "grpc": doors.grpc, "value": float(life)}
        script = doors.start(_live_and_die, valid=False, **arguments)
        said = script.heard()
        assert said == [["OK", ""], ["OK", ""], life + 1.0], said
        assert script.ended()
    _offend(doors, _forget, name="c07")
    doors.settled()


def _forget(http: int, grpc: int, name: str) -> None:
    Door("http", http, grpc).client.unregister_system_shared_memory(name)


# --- B-08, B-09: overlap -------------------------------------------------------------------------------------------


def _overlap(http: int, grpc: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, door in _both(http, grpc).items():
        with raw.named_memory(SIZE, X.tobytes()) as key:
            door.client.register_system_shared_memory("o", key, SIZE)
            for y in (0, 1, 8, 15):
                found[f"{kind} input {y}"] = outcome(door.infer, "o", 0, y)
            found[f"{kind} beside"] = outcome(door.infer, "o", 0, 16)
            inputs = [door.tensors((1, 4), "o", at, 0, 16, names=(name, ""))[0] for name, at in (("a", 0), ("b", 16))]
            for y in (64, 72, 79):
                outputs = [
                    door.tensors((1, 4), "o", 0, at, 16, names=("", name))[1]
                    for name, at in (("total", 64), ("difference", y))
                ]
                found[f"{kind} outputs {y}"] = outcome(door.client.infer, "two_input", inputs, outputs=outputs)
            door.client.unregister_system_shared_memory("o")
    return found


def test_b08_b09_overlapping_tensors(doors: VisitedLab) -> None:
    """[B-08] [B-09] an output over an input or another output of its request is refused, whatever the shift."""
    found = _offend(doors, _overlap)
    for name, (code, text) in found.items():
        if name.endswith("beside"):
            assert (code, text) == ("OK", ""), name
        else:
            assert code in ("400", "INVALID_ARGUMENT"), (name, code, text)
            assert "overlapping tensors" in text, (name, text)
    assert len(found) == 16
    doors.settled()


def _write_one_range(http: int, grpc: int, turns: int) -> dict[str, Any]:
    """Several threads, both wires, one output range."""
    codes: list[str] = []  # a counter would lose what two threads count at once
    with raw.named_memory(SIZE, X.tobytes()) as key:
        Door("http", http, grpc).client.register_system_shared_memory("one", key, SIZE)

        def ask(kind: str) -> None:
            door = Door(kind, http, grpc)
            for _ in range(turns):
                codes.append(outcome(door.infer, "one", 0, 64)[0])

        threads = [threading.Thread(target=ask, args=("grpc",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        ask("http")
        for thread in threads:
            thread.join()
        Door("grpc", http, grpc).client.unregister_system_shared_memory("one")
    return Counter(codes)


def test_b09_one_output_range_at_once(doors: VisitedLab) -> None:
    """[B-09] requests for the same range take turns: each is answered."""
    assert _offend(doors, _write_one_range, turns=20) == {"OK": 100}
    doors.settled()


# --- all of whose? -------------------------------------------------------------------------------------------


def _unregister_everything(http: int, grpc: int, directory: str) -> dict[str, Any]:
    """After it, regions of a session and of a ZeroMQ client of the same uid are used."""
    native = raw.session()
    raw.Region(native)
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "region": "z", "byte_size": 16}
    found: dict[str, Any] = {}
    with raw.named_memory(SIZE) as key, HandZmqClient(Path(directory)) as client:
        client.hello()
        assert client.ask("register", name="z", key=key, byte_size=SIZE)["type"] == "done"
        for kind, door in _both(http, grpc).items():
            door.client.register_system_shared_memory("mine", key, SIZE)
            door.client.unregister_system_shared_memory()
            found[kind] = {
                "mine": outcome(door.infer, "mine", 0, 64)[0],
                "zmq": client.ask("infer", model="add1", inputs=[tensor])["type"],
                "native": raw.outcome(raw.plan(native))[0],
            }
    native.close()
    return found


def test_r17_unregister_all_is_the_callers_own(tmp_path: Path) -> None:
    """[R-17] One uid over HTTP and gRPC is one caller; its sessions and ZeroMQ clients are others."""
    with FrontDoors(tmp_path) as lab:
        found = lab.offend(
            _unregister_everything, http=lab.http, grpc=lab.grpc, directory=str(lab.run_directory), timeout_s=60
        )
        assert found["http"] == {"mine": "404", "zmq": "result", "native": "Prepared"}
        assert found["grpc"] == {"mine": "NOT_FOUND", "zmq": "result", "native": "Prepared"}
        lab.settled()


# --- T-02: memory that shrinks under load --------------------------------------------------------------------------


def _shrink_under_load(http: int, grpc: int, rounds: int) -> dict[str, int]:
    """Requests while the file is cut and made whole again; it is registered anew when it is quarantined."""
    found: Counter[str] = Counter()
    with raw.named_memory(16 * SIZE) as key:
        memory = os.open(f"/dev/shm{key}", os.O_RDWR)
        stop = threading.Event()

        def ask(kind: str) -> None:
            door = Door(kind, http, grpc)
            while not stop.is_set():
                code, text = outcome(door.infer, "cut", 0, 8 * SIZE, (4, 2048))
                found[code if code in ("OK", "LOST") else f"{code} {text.partition('] ')[2]}"] += 1
                if code not in ("OK",):
                    outcome(door.client.unregister_system_shared_memory, "cut")
                    outcome(door.client.register_system_shared_memory, "cut", key, 16 * SIZE)

        threads = [threading.Thread(target=ask, args=(kind,)) for kind in ("grpc", "grpc")]
        for thread in threads:
            thread.start()
        until_s = time.monotonic() + 60  # a slow machine: until one has passed
        for turn in itertools.takewhile(
            lambda turn: turn < rounds or (not found["OK"] and time.monotonic() < until_s), itertools.count()
        ):
            os.ftruncate(memory, (0, 8 * SIZE, SIZE)[turn % 3])
            child.hear(0.001 * (turn % 7))
            os.ftruncate(memory, 16 * SIZE)
            child.hear(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        door = Door("http", http, grpc)
        door.client.unregister_system_shared_memory("cut")
        os.posix_fallocate(memory, 0, 16 * SIZE)
        found["at the end"] = outcome(door.client.register_system_shared_memory, "cut", key, 16 * SIZE)[0] == "OK"
        found["it runs"] = outcome(door.infer, "cut", 0, 8 * SIZE, (4, 2048))[0] == "OK"
        door.client.unregister_system_shared_memory("cut")
        os.close(memory)
    return found


def test_t02_a_file_that_is_cut_under_load(doors: VisitedLab) -> None:
    """[T-02] ✱ broker and gateway live, at most that worker is replaced, and nobody gets a wrong answer."""
    found = _offend(doors, _shrink_under_load, rounds=scaled(60, 3000), timeout_s=120)
    assert "LOST" not in found, found
    assert found["at the end"] == found["it runs"] == 1, found
    assert found["OK"] > 0, found
    doors.settled(replaced=SAME)
