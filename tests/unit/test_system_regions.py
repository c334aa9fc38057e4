"""POSIX objects that others made: what is accepted, what is refused, and reserving their pages."""

import ctypes
import fcntl
import os
import socket
import stat
from pathlib import Path

import pytest

from shm.errors import InferError
from shm.regions import (
    FileIdentity,
    MappedMemory,
    check_pool,
    create_pool,
    open_system,
    reserve,
    shrunk,
)
from tests.fakes.processes import descriptors
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


class TestSystem:
    def test_opens_what_the_peer_owns(self, prefix, fds):
        path = system_object(prefix, b"abcd" * PAGE)
        for key in (prefix, f"/{prefix}"):
            fd, identity = open_system("in0", key, 4 * PAGE, 0, UID)
            fds.append(fd)
            status = path.stat()
            assert identity == FileIdentity(status.st_dev, status.st_ino, 4 * PAGE, True)
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            assert os.pread(fd, 4, 0) == b"abcd"

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "/",
            "//",
            "//x",
            ".",
            "..",
            "/.",
            "/..",
            "../x",
            "/../etc/passwd",
            "a/b",
            "x/",
            "x" * 255,
            "x" * 256,
            "x\0y",
            "x\n",
            "%2e%2e",
            "é",
            "x y",
            "\uff11",
        ],
    )
    def test_bad_keys(self, key):
        message = refusal(open_system, "in0", key, 1, 0, UID)
        assert message.startswith(f"cannot register shared memory region 'in0' - invalid shm key {key!r}")
        assert "\0" not in message
        assert "\n" not in message

    @pytest.mark.parametrize("slashes", ["", "/", "//"])
    def test_reserved_keys(self, slashes):
        key = f"{slashes}triton_python_backend_shm_region_1"
        assert refusal(open_system, "in0", key, 1, 0, UID) == (
            f"cannot register shared memory region 'in0' with key '{key}' as the key contains the reserved prefix "
            "'triton_python_backend_shm_region_'"
        )

    def test_missing_object_says_where_the_broker_looked(self, prefix):
        message = refusal(open_system, "in0", f"/{prefix}", 1, 0, UID, code="INTERNAL")
        directory = SHM.stat()
        assert message.startswith(f"Unable to open shared memory region: '/{prefix}': ENOENT")
        assert f"uid {os.geteuid()} and its /dev/shm is {directory.st_dev}:{directory.st_ino}" in message
        assert not (SHM / prefix).exists()

    @pytest.mark.parametrize(("offset", "byte_size"), [(0, PAGE), (1, PAGE - 1), (100, 1), (PAGE - 1, 1)])
    def test_any_range_inside_the_object(self, offset, byte_size, prefix, fds):
        system_object(prefix, size=PAGE)
        fds.append(open_system("in0", prefix, byte_size, offset, UID)[0])

    @pytest.mark.parametrize(
        ("offset", "byte_size"),
        [
            (0, PAGE + 1),
            (1, PAGE),
            (PAGE, 1),
            (0, 2**40),
            (2**64 - PAGE, PAGE),
            (2**63 - 1, 2**63 - 1),
            (0, 0),
            (0, -1),
            (-1, 1),
            (2**64 - PAGE, 2 * PAGE),
        ],
    )
    def test_ranges_outside_the_object(self, offset, byte_size, prefix):
        system_object(prefix, size=PAGE)
        message = refusal(open_system, "in0", prefix, byte_size, offset, UID)
        assert message.startswith("failed to register shared memory region 'in0': invalid args")
        assert f"which has {PAGE}" in message

    def test_empty_object(self, prefix):
        system_object(prefix)
        assert "invalid args" in refusal(open_system, "in0", prefix, 1, 0, UID)

    def test_symbolic_link(self, prefix, tmp_path):
        (tmp_path / "secret").write_bytes(bytes(PAGE))
        (SHM / prefix).symlink_to(tmp_path / "secret")
        assert "ELOOP" in refusal(open_system, "in0", prefix, PAGE, 0, UID)

    def test_fifo_does_not_block(self, prefix):
        os.mkfifo(SHM / prefix)
        assert "not a shared memory object (p" in refusal(open_system, "in0", prefix, 1, 0, UID)

    @as_root
    def test_fifo_that_only_opens_for_reading_does_not_block(self, prefix):
        os.mkfifo(SHM / prefix)
        (SHM / prefix).chmod(0o444)
        os.seteuid(12345)
        try:
            assert "not a shared memory object (p" in refusal(open_system, "in0", prefix, 1, 0, UID)
        finally:
            os.seteuid(UID)

    def test_directory_and_socket(self, prefix):
        (SHM / prefix).mkdir()
        assert "EINVAL" in refusal(open_system, "in0", prefix, 1, 0, UID)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(SHM / f"{prefix}-socket"))
            assert "ENXIO" in refusal(open_system, "in0", f"{prefix}-socket", 1, 0, UID)

    @as_root
    def test_character_device(self, prefix):
        os.mknod(SHM / prefix, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        assert "not a shared memory object (c" in refusal(open_system, "in0", prefix, 1, 0, UID)

    def test_hard_link(self, prefix):
        os.link(system_object(prefix, size=PAGE), SHM / f"{prefix}-link")
        assert "one name, and has 2" in refusal(open_system, "in0", f"{prefix}-link", PAGE, 0, UID)

    @pytest.mark.parametrize("mode", [0o600, 0o666])
    def test_object_of_another_uid(self, mode, prefix):
        system_object(prefix, bytes(PAGE), mode=mode)
        message = refusal(open_system, "in0", prefix, PAGE, 0, UID + 1)
        assert f"belongs to uid {UID}, and this connection to uid {UID + 1}" in message

    @as_root
    def test_root_opens_a_users_object_for_that_user_only(self, prefix, fds):
        os.chown(system_object(prefix, size=PAGE), 12345, 12345)
        fds.append(open_system("in0", prefix, PAGE, 0, 12345)[0])
        assert "belongs to uid 12345" in refusal(open_system, "in0", prefix, PAGE, 0, 0)

    @as_root
    def test_unmapped_uid_owns_nothing(self, prefix):
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        os.chown(system_object(prefix, size=PAGE), overflow, overflow)
        assert "user namespaces" in refusal(open_system, "in0", prefix, PAGE, 0, overflow)

    def test_read_only_object_is_opened_read_only(self, prefix, fds):
        system_object(prefix, bytes(PAGE), mode=0o400)
        before = descriptors()
        fd, identity = open_system("in0", prefix, PAGE, 0, UID)
        fds.append(fd)
        assert [each.split()[0] for each in descriptors() - before] == [str(fd)]
        assert not identity.writable
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)

    def test_object_its_owner_cannot_read(self, prefix):
        system_object(prefix, bytes(PAGE), mode=0o200)
        code = "INVALID_ARG" if UID == 0 else "INTERNAL"
        assert "EACCES" in refusal(open_system, "in0", prefix, PAGE, 0, UID, code=code)

    def test_descriptor_outlives_the_name(self, prefix, fds):
        path = system_object(prefix, b"old" + bytes(PAGE))
        fd, identity = open_system("in0", prefix, PAGE, 0, UID)
        fds.append(fd)
        path.unlink()
        assert os.fstat(fd).st_nlink == 0
        system_object(prefix, b"new" + bytes(PAGE))
        assert os.pread(fd, 3, 0) == b"old"
        fd, other = open_system("in0", prefix, PAGE, 0, UID)
        fds.append(fd)
        assert other.inode != identity.inode

    def test_refused_registrations_leave_no_descriptor(self, prefix):
        os.mkfifo(SHM / f"{prefix}-fifo")
        system_object(f"{prefix}-object", size=PAGE)
        system_object(f"{prefix}-unreadable", size=PAGE, mode=0o200)
        os.link(system_object(f"{prefix}-first", size=PAGE), SHM / f"{prefix}-second")
        unsealed = memfd(seals=0)
        attempts = [
            lambda: open_system("in0", "a/b", PAGE, 0, UID),
            lambda: open_system("in0", f"{prefix}-missing", PAGE, 0, UID),
            lambda: open_system("in0", f"{prefix}-fifo", PAGE, 0, UID),
            lambda: open_system("in0", f"{prefix}-object", PAGE + 1, 0, UID),
            lambda: open_system("in0", f"{prefix}-object", PAGE, 0, UID + 1),
            lambda: open_system("in0", f"{prefix}-unreadable", PAGE, 0, UID),
            lambda: open_system("in0", f"{prefix}-second", PAGE, 0, UID),
            lambda: check_pool(unsealed, PAGE),
            lambda: create_pool(2**60),
            lambda: MappedMemory(unsealed, 0, 2 * PAGE, True),
        ]
        before = open_descriptors()
        for _ in range(1000):
            for attempt in attempts:
                with pytest.raises(InferError):
                    attempt()
        assert open_descriptors() <= before
        os.close(unsealed)


class TestReserve:
    def test_allocates_the_pages_of_the_range(self, prefix, fds):
        path = system_object(prefix, size=8 * PAGE)
        fd, _ = open_system("out0", prefix, 2 * PAGE, PAGE + 100, UID)
        fds.append(fd)
        assert path.stat().st_blocks == 0
        reserve(fd, PAGE + 100, 2 * PAGE)
        assert path.stat().st_blocks * 512 == 3 * PAGE
        assert path.stat().st_size == 8 * PAGE

    def test_keeps_content(self, prefix, fds):
        system_object(prefix, b"x" * PAGE, size=4 * PAGE)
        fds.append(os.open(SHM / prefix, os.O_RDWR))
        reserve(fds[0], 0, 4 * PAGE)
        reserve(fds[0], 0, 4 * PAGE)
        assert os.pread(fds[0], 4 * PAGE, 0) == b"x" * PAGE + bytes(3 * PAGE)

    def test_more_than_there_is(self, prefix, fds):
        path = system_object(prefix, size=2**46)
        fds.append(open_system("out0", prefix, 2**46, 0, UID)[0])
        message = refusal(reserve, fds[0], 0, 2**46, code="UNAVAILABLE")
        # Without an errno: refused by looking at what is available, not by running into the end of it.
        assert message.startswith("no space left for shared memory: ")
        assert path.stat().st_blocks == 0

    @as_root
    def test_full_filesystem(self, tmp_path, fds):
        libc = ctypes.CDLL(None, use_errno=True)
        target = os.fsencode(tmp_path)
        if libc.mount(b"tmpfs", target, b"tmpfs", 0, b"size=1m") != 0:
            pytest.skip(f"mount: {os.strerror(ctypes.get_errno())}")
        try:
            (tmp_path / "region").touch()
            fd = os.open(tmp_path / "region", os.O_RDWR)
            os.ftruncate(fd, 2**22)
            try:
                message = refusal(reserve, fd, 0, 2**22, code="UNAVAILABLE")
                assert os.fstat(fd).st_blocks == 0
            finally:
                os.close(fd)
        finally:
            assert libc.umount(target) == 0
        assert message == (
            f"no space left for shared memory (ENOSPC): {2**22} bytes asked, {2**22} of them not allocated yet, "
            f"{2**20} bytes available"
        )

    def test_shrunk_object(self, prefix, fds):
        path = system_object(prefix, size=2 * PAGE)
        fd, identity = open_system("out0", prefix, 2 * PAGE, 0, UID)
        fds.append(fd)
        assert not shrunk(fd, identity.file_size)
        os.truncate(path, PAGE)
        assert shrunk(fd, identity.file_size)
        assert "changed size" in refusal(reserve, fd, 0, 2 * PAGE)
        assert path.stat().st_size == PAGE
        os.truncate(path, 3 * PAGE)
        assert not shrunk(fd, identity.file_size)

    def test_read_only_object_has_all_its_pages(self, prefix, fds):
        system_object(f"{prefix}-full", bytes(PAGE + 1), mode=0o400)
        system_object(f"{prefix}-sparse", b"x", size=4 * PAGE, mode=0o400)
        fds.append(open_system("in0", f"{prefix}-full", PAGE, 0, UID)[0])
        fds.append(open_system("in0", f"{prefix}-sparse", PAGE, 0, UID)[0])
        reserve(fds[0], 0, PAGE)
        assert "read-only" in refusal(reserve, fds[1], 0, PAGE)
