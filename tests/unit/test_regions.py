"""Pools, system regions and what the broker refuses, on real memfds and real files of /dev/shm."""

import ctypes
import fcntl
import gc
import mmap
import os
import socket
import stat
import uuid
from pathlib import Path

import numpy as np
import pytest

from shm.errors import InferError
from shm.regions import (
    FileIdentity,
    LocalMemory,
    MappedMemory,
    check_pool,
    create_pool,
    open_system,
    reserve,
    shrunk,
)

SHM = Path("/dev/shm")
UID = os.getuid()
PAGE = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MFD_HUGETLB = 4
as_root = pytest.mark.skipif(UID != 0, reason="needs root")


@pytest.fixture
def fds():
    """A list of descriptors to close at the end."""
    opened = []
    yield opened
    for fd in opened:
        os.close(fd)


@pytest.fixture
def prefix():
    """A name nobody else uses; whatever starts with it in /dev/shm is removed at the end."""
    name = f"tensorbroker-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    for path in SHM.glob(f"{name}*"):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def system_object(name, content=b"", size=None, mode=0o600):
    path = SHM / name
    path.write_bytes(content)
    if size is not None:
        os.truncate(path, size)
    path.chmod(mode)
    return path


def memfd(byte_size=PAGE, seals=SEALS, allocate=True):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if allocate:
        os.posix_fallocate(fd, 0, byte_size)
    else:
        os.ftruncate(fd, byte_size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def refusal(function, *arguments, code="INVALID_ARG"):
    with pytest.raises(InferError) as caught:
        function(*arguments)
    assert caught.value.code == code
    return caught.value.message


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


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
        assert open_descriptors() == before

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
        before = open_descriptors()
        fd, identity = open_system("in0", prefix, PAGE, 0, UID)
        fds.append(fd)
        assert open_descriptors() == before + 1
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
        assert open_descriptors() == before
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
        assert open_descriptors() == descriptors
        assert maps.read_text().count("tensorbroker-pool") == mappings

    def test_more_local_memory_than_an_address_space(self):
        for byte_size in (2**60, 2**70):
            refusal(LocalMemory, byte_size, code="UNAVAILABLE")
