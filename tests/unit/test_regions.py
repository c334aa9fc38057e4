"""Pools and mappings, and what the broker refuses, on real memfds."""

import fcntl
import gc
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from shm.descriptor_kinds import filesystem_of
from shm.regions import (
    FileIdentity,
    LocalMemory,
    MappedMemory,
    check_pool,
    create_pool,
)
from tests.fakes.region_files import (  # noqa: F401 (fixtures)
    MFD_HUGETLB,
    PAGE,
    SEALS,
    SHM,
    UID,
    as_root,
    fds,
    memfd,
    open_descriptors,
    prefix,
    refusal,
    system_object,
)


def test_the_file_system_of_a_descriptor_is_known_without_asking_that(fds, tmp_path):
    (tmp_path / "file").touch()
    fds.extend((memfd(), *(os.open(tmp_path / "file", flags) for flags in (os.O_RDONLY, os.O_PATH))))
    assert [filesystem_of(fd) for fd in fds] == [os.fstat(fd).st_dev for fd in fds]
    assert filesystem_of(fds[0]) != filesystem_of(fds[1])
    closed = os.dup(fds[0])
    os.close(closed)
    assert filesystem_of(closed) is None


class TestPool:
    def test_is_sealed_allocated_and_zeroed(self, fds):
        fd = create_pool(3 * PAGE)
        fds.append(fd)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        status = os.fstat(fd)
        assert (status.st_size, status.st_blocks * 512) == (3 * PAGE, 3 * PAGE)
        assert os.pread(fd, 3 * PAGE, 0) == bytes(3 * PAGE)
        for size in (0, 4 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)

    def test_is_admitted(self, fds):
        fd = create_pool(100)
        fds.append(fd)
        status = os.fstat(fd)
        assert check_pool(fd, 100) == FileIdentity(status.st_dev, status.st_ino, 100, True)
        assert check_pool(fd, 1).file_size == 100

    def test_more_than_the_host_has_is_refused_before_it_is_allocated(self):
        before = open_descriptors()
        message = refusal(create_pool, 2**50, code="UNAVAILABLE")
        assert message.startswith(f"no space left for shared memory: {2**50} bytes asked")
        assert "bytes available" in message
        assert open_descriptors() <= before

    @pytest.mark.parametrize("byte_size", [0, -1])
    def test_has_a_size(self, byte_size, fds):
        refusal(create_pool, byte_size)
        fds.append(create_pool(1))
        refusal(check_pool, fds[0], byte_size)

    @pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, 0x10])
    def test_write_sealed_is_for_inputs_only(self, seal, fds):
        fds.append(memfd(seals=SEALS | seal))
        assert not check_pool(fds[0], PAGE).writable

    @pytest.mark.parametrize(
        ("seals", "missing"),
        [
            (0, "F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL is missing"),
            (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL, "F_SEAL_GROW is missing"),
            (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, "F_SEAL_SHRINK is missing"),
            (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "F_SEAL_SEAL is missing"),
        ],
    )
    def test_unsealed_is_refused(self, seals, missing, fds):
        fds.append(memfd(seals=seals))
        assert missing in refusal(check_pool, fds[0], PAGE)

    def test_too_short_is_refused(self, fds):
        fds.append(memfd(PAGE))
        assert f"the memfd has {PAGE} bytes" in refusal(check_pool, fds[0], PAGE + 1)

    def test_sparse_is_refused(self, fds):
        fds.append(memfd(4 * PAGE, allocate=False))
        os.pwrite(fds[0], b"x", 0)
        assert f"has {PAGE} of {4 * PAGE} bytes" in refusal(check_pool, fds[0], PAGE)

    def test_read_only_descriptor_is_refused(self, fds):
        fds.append(memfd())
        fds.append(os.open(f"/proc/self/fd/{fds[0]}", os.O_RDONLY))
        assert "reading and writing" in refusal(check_pool, fds[1], PAGE)

    def test_huge_pages_are_refused(self, fds):
        fds.append(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | MFD_HUGETLB))
        fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, SEALS)
        assert "huge pages" in refusal(check_pool, fds[0], PAGE)

    def test_everything_else_is_refused(self, tmp_path, prefix, fds):
        (tmp_path / "file").write_bytes(bytes(PAGE))
        near, far = os.pipe()
        one, other = socket.socketpair()
        fds += (near, far, one.detach(), other.detach())
        fds.append(os.open(tmp_path, os.O_RDONLY))
        fds.append(os.open(tmp_path / "file", os.O_RDWR))
        fds.append(os.open(tmp_path / "file", os.O_PATH))
        fds.append(os.open("/dev/zero", os.O_RDWR))
        for fd in fds:
            assert "must be a memfd" in refusal(check_pool, fd, PAGE)
        fds.append(os.open(system_object(prefix, bytes(PAGE)), os.O_RDWR))
        assert "register_system_shm" in refusal(check_pool, fds[-1], PAGE)
        assert "must be a memfd" in refusal(check_pool, 1_000_000, PAGE)


class TestMapping:
    def test_shares_the_file(self, fds):
        fds.append(create_pool(2 * PAGE))
        memory = MappedMemory(fds[0], PAGE, PAGE, True)
        memory.bytes[:3] = (1, 2, 3)
        assert os.pread(fds[0], 3, PAGE) == b"\1\2\3"
        os.pwrite(fds[0], b"\7", PAGE)
        assert memory.bytes[0] == 7

    @pytest.mark.parametrize("offset", [1, 100, PAGE - 1, PAGE + 1])
    def test_unaligned_offset(self, offset, fds):
        fds.append(create_pool(4 * PAGE))
        os.pwrite(fds[0], bytes(range(256)) * 64, 0)
        memory = MappedMemory(fds[0], offset, PAGE, True)
        assert memory.bytes.tobytes() == os.pread(fds[0], PAGE, offset)

    def test_read_only_mapping_follows_the_file(self, fds):
        fds.append(create_pool(PAGE))
        memory = MappedMemory(fds[0], 0, PAGE, False)
        assert memory.bytes[0] == 0
        os.pwrite(fds[0], b"\7", 0)
        assert memory.bytes[0] == 7
        assert not memory.writable
        with pytest.raises(ValueError, match="read-only"):
            memory.bytes[0] = 1

    def test_write_sealed_memfd(self, fds):
        fds.append(memfd(seals=SEALS | fcntl.F_SEAL_WRITE))
        assert MappedMemory(fds[0], 0, PAGE, False).bytes.sum() == 0
        refusal(MappedMemory, fds[0], 0, PAGE, True, code="UNAVAILABLE")

    def test_descriptor_stays_with_the_caller_unless_kept(self, fds):
        fds.append(create_pool(PAGE))
        memory = MappedMemory(fds[0], 0, PAGE, True)
        assert memory.fd is None
        memory.close()
        os.fstat(fds[0])
        kept = MappedMemory(fds[0], 0, PAGE, True, keep_fd=True)
        assert kept.fd == fds[0]
        kept.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fds.pop())
        kept.close()

    def test_file_that_became_too_small(self, prefix, fds):
        path = system_object(prefix, size=2 * PAGE)
        fds.append(os.open(path, os.O_RDWR))
        os.truncate(path, PAGE)
        message = refusal(MappedMemory, fds[0], 100, 2 * PAGE, True, code="INTERNAL")
        assert message == f"shared memory changed size: {2 * PAGE + 100} bytes were registered, {PAGE} are left"

    @pytest.mark.parametrize(("offset", "byte_size"), [(-1, PAGE), (0, 0), (0, -1)])
    def test_absurd_ranges(self, offset, byte_size, fds):
        fds.append(create_pool(PAGE))
        refusal(MappedMemory, fds[0], offset, byte_size, True)
        if offset == 0:
            refusal(LocalMemory, byte_size)

    def test_no_descriptor_and_no_mapping_outlives_its_views(self, fds):
        fds.append(create_pool(PAGE))
        maps = Path("/proc/self/maps")
        descriptors, mappings = open_descriptors(), maps.read_text().count("tensorbroker-pool")
        for _ in range(200):
            memory = MappedMemory(fds[0], 0, PAGE, True)
            view = memory.bytes[10:20].view(np.uint16)
            memory.close()
            view[0] = 1
        del memory, view
        gc.collect()
        assert open_descriptors() <= descriptors
        assert maps.read_text().count("tensorbroker-pool") <= mappings

    def test_more_local_memory_than_an_address_space(self):
        for byte_size in (2**60, 2**70):
            refusal(LocalMemory, byte_size, code="UNAVAILABLE")
