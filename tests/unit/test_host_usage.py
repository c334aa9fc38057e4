"""Triton's nv_cpu_… gauges, from a /proc that says what the test wants."""

from __future__ import annotations

from pathlib import Path

from broker.gateway.metrics import HostUsage

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nHugePages_Total:       0\n"


def write(proc: Path, busy: int, idle: int) -> None:
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3 4\n")
    (proc / "meminfo").write_text(MEMINFO)


def test_utilization_is_that_between_two_looks(tmp_path: Path) -> None:
    now = [100.0]
    write(tmp_path, 1000, 1000)
    usage = HostUsage(2.0, clock=lambda: now[0], proc=tmp_path)
    write(tmp_path, 1030, 1010)
    now[0] = 101.0
    assert usage()["nv_cpu_utilization"] == 0, "too soon to tell"
    now[0] = 102.0
    assert usage()["nv_cpu_utilization"] == 0.75
    write(tmp_path, 1030, 2010)
    now[0] = 103.9
    assert usage()["nv_cpu_utilization"] == 0.75
    now[0] = 104.0
    assert usage()["nv_cpu_utilization"] == 0


def test_memory_is_in_bytes(tmp_path: Path) -> None:
    write(tmp_path, 1, 1)
    found = HostUsage(2.0, clock=lambda: 0.0, proc=tmp_path)()
    assert (found["nv_cpu_memory_total_bytes"], found["nv_cpu_memory_used_bytes"]) == (1000 * 1024, 600 * 1024)


def test_it_reads_what_linux_writes() -> None:
    found = HostUsage(0.0)()
    assert 0 <= found["nv_cpu_utilization"] <= 1
    assert 0 < found["nv_cpu_memory_used_bytes"] < found["nv_cpu_memory_total_bytes"]
