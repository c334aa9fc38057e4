"""H-07: another process of the broker's own uid goes for the memory and the descriptors of the broker's processes.

The broker runs as users run it, without capabilities and without $TENSORBROKER_DEBUG; the attacker is no better off.
A plain process of the same kind shows that each way in is open where nobody closed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from shm.prctl import PR_SET_PDEATHSIG, prctl
from tests.fakes.broker import Broker, eventually
from tests.fakes.gateways import free_ports
from tests.fakes.processes import name_of
from tests.faults import repository

PR_CAPBSET_DROP = 24
CAPABILITIES = 64
LIMIT_S = 30.0
# ptrace's attach is what Yama may refuse to anybody (kernel.yama.ptrace_scope): it proves nothing of a plain process.
ATTACH = {"PTRACE_ATTACH", "PTRACE_SEIZE", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "write of mem"}
ATTACK = textwrap.dedent("""
    import ctypes, json, os, sys
    libc = ctypes.CDLL(None, use_errno=True)
    PTRACE_DETACH, PTRACE_ATTACH, PTRACE_SEIZE = 17, 16, 0x4206

    def call(function, *arguments):
        if function(*(ctypes.c_void_p(each) if each is None else ctypes.c_long(each) for each in arguments)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def vector(function, pid, address):
        place = ctypes.create_string_buffer(8)
        mine = (ctypes.c_size_t * 2)(ctypes.addressof(place), 8)
        its = (ctypes.c_size_t * 2)(address, 8)
        call(function, pid, ctypes.addressof(mine), 1, ctypes.addressof(its), 1, 0)

    def trace(request, pid):
        call(libc.ptrace, request, pid, 0, 0)
        os.waitpid(pid, 0x40000000) if request == PTRACE_ATTACH else None
        call(libc.ptrace, PTRACE_DETACH, pid, 0, 0)

    def steal(pid):
        fd = os.pidfd_open(pid)
        call(libc.syscall, 438, fd, 0, 0)  # pidfd_getfd

    pid, address = int(sys.argv[1]), int(sys.argv[2])
    ways = {
        "what fd is": lambda: os.readlink(f"/proc/{pid}/fd/0"),
        "open of fd": lambda: os.close(os.open(f"/proc/{pid}/fd/0", os.O_RDONLY)),
        "maps": lambda: open(f"/proc/{pid}/maps").read(),
        "map_files": lambda: os.listdir(f"/proc/{pid}/map_files"),
        "environ": lambda: open(f"/proc/{pid}/environ").read(),
        "read of mem": lambda: open(f"/proc/{pid}/mem", "rb").close(),
        "write of mem": lambda: open(f"/proc/{pid}/mem", "r+b").close(),
        "root": lambda: os.listdir(f"/proc/{pid}/root"),
        "process_vm_readv": lambda: vector(libc.process_vm_readv, pid, address),
        "process_vm_writev": lambda: vector(libc.process_vm_writev, pid, address),
        "pidfd_getfd": lambda: steal(pid),
        "PTRACE_ATTACH": lambda: trace(PTRACE_ATTACH, pid),
        "PTRACE_SEIZE": lambda: trace(PTRACE_SEIZE, pid),
    }
    found = {}
    for name, way in ways.items():
        try:
            way()
            found[name] = "open"
        except OSError as error:
            found[name] = type(error).__name__
    print(json.dumps(found))
""")
PLAIN = "import ctypes; place = ctypes.create_string_buffer(8); print(ctypes.addressof(place), flush=True); input()"


def as_a_user() -> None:
    """In a child before exec: whoever starts as root keeps its uid and nothing else."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # no such capability: that was the last one
            for capability in range(CAPABILITIES):
                prctl(PR_CAPBSET_DROP, capability)


def end_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    as_a_user()


def attack(pid: int, address: int) -> dict[str, str]:
    """Way in → "open" or what refused it."""
    done = subprocess.run(
        [sys.executable, "-c", ATTACK, str(pid), str(address)],
        capture_output=True,
        timeout=LIMIT_S,
        preexec_fn=end_with_parent,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    monkeypatch.delenv("TENSORBROKER_DEBUG", raising=False)
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    http, grpc, metrics = free_ports(3)
    flags = ("--gateways=1", f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
    with Broker(repository.write(tmp_path / "models"), directory, *flags, before=as_a_user) as broker:
        yield broker.ready()


def test_h07_nobody_of_the_same_uid_gets_at_memory_or_descriptors(broker: Broker) -> None:
    """[H-07] of broker, zygote, workers and gateways. Ending them by signals is what the same uid may do."""
    plain = subprocess.Popen(
        [sys.executable, "-c", PLAIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=end_with_parent
    )
    with plain:
        assert plain.stdin is not None
        assert plain.stdout is not None
        address = int(plain.stdout.readline())
        control = attack(plain.pid, address)
        plain.stdin.write(b"\n")
    closed = {way for way, found in control.items() if found != "open"}
    assert closed <= ATTACH, f"this test would prove nothing: {control}"

    def family() -> dict[int, str]:
        return {pid: name_of(pid) for pid in (broker.pid, *broker.descendants())}

    eventually(lambda: {"tb-zygote", "tb-worker", "tb-gateway"} <= set(family().values()), "all kinds are there")
    for pid in family():
        found = attack(pid, address)
        ways = {way for way, how in found.items() if how == "open"}
        assert not ways, f"{name_of(pid)}: {ways} open"
    assert broker.status()["workers"], "it serves on"
