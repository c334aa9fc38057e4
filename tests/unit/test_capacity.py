"""How much memory is left, read from copies of /proc and of cgroup trees."""

import pytest

from shm.capacity import check_room, memory_limit, memory_room
from shm.errors import InferError

MIB = 2**20


@pytest.fixture
def proc(tmp_path):
    directory = tmp_path / "proc"
    (directory / "self").mkdir(parents=True)
    (directory / "meminfo").write_text(
        "MemTotal:       8388608 kB\nMemFree:          100000 kB\nMemAvailable:    4194304 kB\n"
    )
    (directory / "self/cgroup").write_text("")
    return directory


def cgroup_v2(directory, limit, current, cached=0):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{current}\n")
    (directory / "memory.stat").write_text(f"anon 1\nfile 999\nshmem 5\ninactive_file {cached}\nactive_file 0\n")


def cgroup_v1(directory, limit, usage, cached=0):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file 0\ntotal_active_file {cached}\n")


def test_host_without_cgroups(proc, tmp_path):
    assert memory_room(proc, tmp_path / "none") == 4096 * MIB
    assert memory_limit(proc, tmp_path / "none") == 8192 * MIB


def test_tightest_cgroup_of_version_2(proc, tmp_path):
    (proc / "self/cgroup").write_text("0::/service/broker\n")
    cgroup_v2(tmp_path / "cgroup/service/broker", "max", 10)
    cgroup_v2(tmp_path / "cgroup/service", 1024 * MIB, 1000 * MIB, cached=100 * MIB)
    assert memory_room(proc, tmp_path / "cgroup") == 124 * MIB
    assert memory_limit(proc, tmp_path / "cgroup") == 1024 * MIB


def test_version_1_in_a_container_that_sees_the_hosts_path(proc, tmp_path):
    (proc / "self/cgroup").write_text("5:cpu:/docker/1\n4:memory:/docker/1\n0::/\n")
    cgroup_v1(tmp_path / "cgroup/memory", 512 * MIB, 500 * MIB, cached=8 * MIB)
    assert memory_room(proc, tmp_path / "cgroup") == 20 * MIB
    assert memory_limit(proc, tmp_path / "cgroup") == 512 * MIB


def test_never_negative(proc, tmp_path):
    (proc / "self/cgroup").write_text("0::/\n")
    cgroup_v2(tmp_path / "cgroup", 10 * MIB, 11 * MIB)
    assert memory_room(proc, tmp_path / "cgroup") == 0


def test_this_host():
    assert 0 < memory_room() <= memory_limit()
    check_room(1)
    with pytest.raises(InferError, match=r"\[UNAVAILABLE\] no space left"):
        check_room(memory_limit())
