"""Rows F-04 and C-09: no process or thread can be started any more; a dead process's number is another's already.

Each in a pid namespace of its own (`tests.faults.few_pids`), so that nothing else on this machine notices.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.lab import ROOT

LIMIT_S = 100.0
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def kernel() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


def run(row: str, directory: Path) -> None:
    if os.geteuid() or shutil.which(ALONE[0]) is None:
        pytest.skip("a pid namespace needs root and unshare(1)")
    done = subprocess.run(
        [*ALONE, sys.executable, "-m", "tests.faults.few_pids", row, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    log = directory / "run.log"
    assert done.returncode == 0, f"{done.stderr}\n{log.read_text()[-4000:] if log.exists() else ''}"


def test_f04_no_process_and_no_thread_can_be_started(tmp_path: Path) -> None:
    """[F-04] what serves goes on, loads are refused, what dies meanwhile comes back with every model."""
    if kernel() < (6, 14):
        pytest.skip("before Linux 6.14 kernel.pid_max is the whole machine's")
    run("f04", tmp_path)


def test_c09_numbers_of_dead_processes_are_taken_by_others(tmp_path: Path) -> None:
    """[C-09] sessions and workers are known by their descriptors; nobody is spared, or killed, for a number."""
    if not Path("/proc/sys/kernel/ns_last_pid").exists():
        pytest.skip("this kernel does not let a pid be chosen (CONFIG_CHECKPOINT_RESTORE)")
    run("c09", tmp_path)
