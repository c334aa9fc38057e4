"""R-22: POSIX memory shared with programs of other Pythons, whose resource trackers unlink what they attach to.

Before 3.13 `multiprocessing.shared_memory` takes the name of an object away when a process that merely attached to it
ends. Ours never do that to others; what others do to ours costs a name, and no region.
"""

from __future__ import annotations

import functools
import glob
import os
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import posix_ipc
import pytest

import clientlib
from tests.faults import child, front_doors, raw
from tests.faults.front_doors import FrontDoors
from tests.faults.lab import FULL, SAME, Lab, eventually

LIMIT_S = 30.0
SIZE = 8192
FOREIGN = textwrap.dedent("""
    import sys
    from multiprocessing.shared_memory import SharedMemory
    verb, name, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if verb == "attach":
        memory = SharedMemory(name=name)
        print(memory.size >= size, flush=True)
    else:
        memory = SharedMemory(name=name, create=True, size=size)
        memory.buf[-8:] = b"its own!"
        print("made", flush=True)
        sys.stdin.readline()
        again = SharedMemory(name=name)
        print(bytes(again.buf[size - 8:size]).decode(), flush=True)
        again.close()
        memory.unlink()
    memory.close()
""")


@functools.cache
def pythons() -> dict[str, str]:
    """Version → interpreter, of every one that is installed and has the module."""
    names = [f"python3.{minor}" for minor in range(8, 16)]
    places = [os.path.expanduser("~/.pyenv/versions/*/bin"), "/opt/hostedtoolcache/Python/*/*/bin", "/usr/bin"]
    found = [sys.executable, *filter(None, map(shutil.which, names))]
    found += [path for place in places for name in names for path in sorted(glob.glob(os.path.join(place, name)))]
    ask = "import sys, multiprocessing.shared_memory; print('%d.%d' % sys.version_info[:2])"
    versions: dict[str, str] = {}
    for path in found:
        done = subprocess.run([path, "-I", "-c", ask], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            versions.setdefault(done.stdout.strip(), path)
    return versions


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Not a decorator, which every child of a lab would run. The oldest and ours, unless all are wanted."""
    found = pythons()
    versions = sorted(found, key=lambda version: int(version.split(".")[1]))
    ours = next(version for version, path in found.items() if path == sys.executable)
    metafunc.parametrize("version", versions if FULL else sorted({versions[0], ours}))


def foreign(python: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-I", "-c", FOREIGN, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # the tracker's warnings
        text=True,
        env={"PATH": os.defpath},
    )


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with FrontDoors(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


def is_there(key: str) -> bool:
    try:
        os.close(posix_ipc.SharedMemory(key).fd)
    except posix_ipc.ExistentialError:
        return False
    return True


def add_one(client: clientlib.Client, region: clientlib.Region) -> bool:
    x, y = region.array((2, 4), "FP32"), region.array((2, 4), "FP32", 256)
    x[:], y[:] = np.arange(8, dtype=np.float32).reshape(2, 4), 0
    inputs, outputs = {"x": region.tensor((2, 4), "FP32")}, {"y": region.tensor((2, 4), "FP32", 256)}
    client.prepare("add1", inputs=inputs, outputs=outputs).infer(timeout=40)
    return bool((y == x + 1).all())


# --- theirs, used by ours --------------------------------------------------------------------------------------------


def own(python: str, key: str) -> str:
    """What the owner finds in its memory, under its name, when all others have gone."""
    with foreign(python, "own", key.strip("/"), str(SIZE)) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        assert owner.stdout.readline() == "made\n"
        child.say("made")
        child.hear()
        owner.stdin.write("\n")
        owner.stdin.flush()
        return owner.stdout.readline().strip()


def use(key: str, stay: bool) -> bool:
    client = clientlib.connect(timeout=40)
    right = add_one(client, client.register_system_shm("theirs", key, SIZE))
    if stay:
        child.say(right)
        child.hear()
    client.close()
    return right


def use_http(http: int, key: str) -> list[int]:
    return [answer[0] for answer in front_doors.http_verbs(http, key, "theirs").values()]


def test_r22_memory_of_another_python_outlives_all_of_ours(lab: Any, version: str) -> None:
    """[R-22] a client that ends, one that is killed, a gateway's region, a worker that dies with it mapped."""
    key = f"/row-{secrets.token_hex(6)}"
    owner = lab.start(own, valid=False, python=pythons()[version], key=key)
    assert owner.heard() == "made"
    assert lab.offend(use, key=key, stay=False)
    killed = lab.start(use, key=key, stay=True)
    assert killed.heard()
    killed.kill()
    assert set(lab.offend(use_http, http=lab.http, key=key)) == {200}
    holder = lab.start(use, key=key, stay=True)
    assert holder.heard()
    victim = lab.worker_pid()
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: lab.worker_pid() not in (0, victim), "a new worker")
    holder.tell("leave")
    assert holder.result()
    owner.tell("look")
    assert owner.result() == "its own!"
    lab.settled(replaced=SAME)


# --- ours, used by theirs --------------------------------------------------------------------------------------------


def lend(python: str) -> dict[str, Any]:
    """Regions of ours, made over ZeroMQ or registered by name, that another Python attaches to and leaves."""
    told: dict[str, Any] = {}
    with raw.named_memory(SIZE) as key, clientlib.connect(timeout=40) as native:
        remote = clientlib.connect(f"zmq+ipc://{os.environ['TENSORBROKER_DIR']}", timeout=40)
        regions = (native, native.register_system_shm("named", key, SIZE)), (remote, remote.create_region("made", SIZE))
        for client, region in regions:
            assert add_one(client, region)
            assert is_there(region.key)
            with foreign(python, "attach", region.key.strip("/"), str(SIZE)) as program:
                told[region.name] = program.communicate(timeout=LIMIT_S)[0].strip()
            told[f"{region.name} works"] = add_one(client, region)
            client.unregister(region.name)
            told[f"{region.name} afterwards"] = add_one(client, client.create_region(region.name, SIZE))
        remote.close()
    return told


def test_r22_another_python_takes_a_name_and_no_region(lab: Any, version: str) -> None:
    told = lab.offend(lend, python=pythons()[version])
    for name in ("named", "made"):
        assert told[name] == "True", told
        assert told[f"{name} works"], told
        assert told[f"{name} afterwards"], told
    lab.settled()
