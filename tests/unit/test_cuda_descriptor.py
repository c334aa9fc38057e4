"""How GPU memory is named in messages."""

from __future__ import annotations

import msgspec
import pytest

from shm.cuda.descriptor import CudaMemory, uuid_of, uuid_text
from shm.errors import Code, InferError

UUID = "GPU-43555349-4d00-0000-0000-000000000001"


def memory(**changes: object) -> CudaMemory:
    fields = {
        "kind": "legacy",
        "device": UUID,
        "allocation_size": 4096,
        "offset": 1024,
        "byte_size": 3072,
        "handle": bytes(range(64)),
    }
    return CudaMemory(**(fields | changes))  # type: ignore[arg-type]


def test_the_message_form_keeps_everything() -> None:
    for each in (memory(), memory(kind="vmm", handle=b"")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=CudaMemory) == each


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "pool"},
        {"device": "0"},
        {"device": UUID.upper()},
        {"device": UUID + "0"},
        {"byte_size": -1},
        {"offset": 1 << 63},
        {"handle": "text"},
        {"more": 1},
    ],
)
def test_what_is_no_such_message_is_refused(changes: dict[str, object]) -> None:
    fields = msgspec.to_builtins(memory()) | {"handle": bytes(64)} | changes
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=CudaMemory)


@pytest.mark.parametrize("length", [0, 1, 63, 65])
def test_a_handle_has_64_bytes(length: int) -> None:
    with pytest.raises(InferError, match=f"has 64 bytes, {length} came") as caught:
        memory(handle=b"x" * length).check("r")
    assert caught.value.code == Code.INVALID_ARG.name


def test_a_handle_of_vmm_memory_is_its_descriptor() -> None:
    with pytest.raises(InferError, match="has 0 bytes, 64 came"):
        memory(kind="vmm").check("r")


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, 4097), (4096, 1), (1 << 62, 1 << 62)])
def test_a_window_lies_in_its_allocation(offset: int, size: int) -> None:
    with pytest.raises(InferError, match="lies in its allocation"):
        memory(offset=offset, byte_size=size).check("r")
    memory(offset=0, byte_size=4096).check("r")


def test_a_handle_is_not_shown() -> None:
    shown = repr(memory(handle=b"secret".ljust(64, b"!")))
    assert "secret" not in shown
    assert UUID in shown


def test_uuids_are_written_as_nvidia_does() -> None:
    assert uuid_text(b"CUSIM" + bytes(10) + b"\x01") == UUID
    assert uuid_of(" gpu-43555349-4D00-0000-0000-000000000001 ") == UUID
    assert uuid_of("MIG-43555349-4d00-0000-0000-000000000001") == UUID, "the driver tells the bytes alone"
    for wrong in ("", "0", 0, None, "GPU-1", UUID + "\n1", "GPU" + UUID[4:], f"MIG-{UUID}/1/0"):
        with pytest.raises(InferError, match="named by its UUID"):
            uuid_of(wrong)
