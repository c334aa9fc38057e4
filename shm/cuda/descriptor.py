"""How GPU memory is named in messages: an allocation of some device, and a window of it. Plain data. So are the events
that tell when a producer on such a device is done.

Made by `clientlib`, carried by the broker, opened by a worker of that device.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Final, Literal, final

import msgspec

from shm.descriptor_kinds import has_seals, is_dma_buf
from shm.errors import Code, InferError
from shm.message_values import Size

HANDLE_SIZE: Final = 64  # bytes of CUipcMemHandle, CUipcEventHandle and the runtime's types (CU_IPC_HANDLE_SIZE)
MAX_EVENTS: Final = 256  # of a ring: its handles must fit a message
LEGACY: Final = "legacy"  # an allocation of cuMemAlloc or cudaMalloc, by its handle
VMM: Final = "vmm"  # memory of cuMemCreate, by a file descriptor
_DIGITS: Final = "-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_GIVEN: Final = re.compile(f"(?:gpu|mig)({_DIGITS})")

Uuid = Annotated[str, msgspec.Meta(pattern=f"^GPU{_DIGITS}$")]


@final
class CudaMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The window [offset, offset + byte_size) of an allocation of `allocation_size` bytes on GPU `device` (its UUID).

    A number of a device means nothing to another process: CUDA_VISIBLE_DEVICES renumbers them. Neither does an address.
    `handle`: of LEGACY memory its 64 bytes; they let whoever has them read and write the whole allocation, so they are
    not logged. VMM memory has none: its descriptor travels beside the message.
    """

    kind: Literal["legacy", "vmm"]
    device: Uuid
    allocation_size: Size
    offset: Size
    byte_size: Size
    handle: bytes = b""

    def check(self, name: str) -> None:
        """Do the numbers fit together? `name` is the region's. Raises InferError INVALID_ARG."""
        expected = HANDLE_SIZE if self.kind == LEGACY else 0
        if len(self.handle) != expected:
            raise InferError(
                Code.INVALID_ARG,
                f"cannot register '{name}': a handle of {self.kind} CUDA memory has {expected} bytes, "
                f"{len(self.handle)} came",
            )
        if self.byte_size == 0 or self.offset + self.byte_size > self.allocation_size:
            raise InferError(
                Code.INVALID_ARG,
                f"cannot register '{name}': {self.byte_size} bytes at offset {self.offset} of an allocation of "
                f"{self.allocation_size} bytes; a region has at least 1 byte and lies in its allocation",
            )

    def __repr__(self) -> str:
        """Without the handle, which is a key."""
        place = f"[{self.offset}, {self.offset + self.byte_size}) of {self.allocation_size} bytes"
        return f"<{self.kind} CUDA memory, {place} on {self.device}>"


@final
class CudaEvents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ring of IPC events on GPU `device`: `handles` has 64 bytes of each, one after the other. Not logged, as above.

    Its owner records event i after the work that fills an input, and a submission names it as i + 1.
    """

    device: Uuid
    handles: bytes

    offset = 0  # as `CudaMemory` has one

    @property
    def byte_size(self) -> int:
        """Of the handles."""
        return len(self.handles)

    def check(self, name: str) -> None:
        """Are there handles? `name` is the ring's. Raises InferError INVALID_ARG."""
        if not self.handles or len(self.handles) % HANDLE_SIZE or len(self.handles) > MAX_EVENTS * HANDLE_SIZE:
            raise InferError(
                Code.INVALID_ARG,
                f"cannot register '{name}': a ring is 1 to {MAX_EVENTS} handles of events of {HANDLE_SIZE} bytes, "
                f"{len(self.handles)} bytes came",
            )

    def __repr__(self) -> str:
        """Without the handles, which are keys."""
        return f"<{len(self.handles) // HANDLE_SIZE} CUDA events on {self.device}>"


def allocation_of(fd: int) -> tuple[int, int] | None:
    """(device, inode) of the memory behind a descriptor of VMM memory: equal for every export of one allocation.

    None where the descriptor does not tell: a device node of NVIDIA's is the same file for all allocations. A dma-buf
    and a memfd (which tests/cusim exports) are files of their own. Never blocks.
    """
    try:
        if has_seals(fd) or is_dma_buf(fd):  # else fstat might wait for a process of the peer's
            status = os.fstat(fd)
            return status.st_dev, status.st_ino
    except (OSError, ValueError):  # no descriptor came, or there is no /proc
        pass
    return None


def uuid_text(uuid: bytes) -> str:
    """16 bytes as NVIDIA's tools write them. Of an instance of a partitioned GPU, too, which those write as MIG-…: the
    driver gives the bytes and does not say what of.
    """
    digits = uuid.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


def uuid_of(text: object) -> str:
    """A UUID that a user gave, GPU-… or MIG-…, as `uuid_text` writes it. Raises InferError INVALID_ARG."""
    found = _GIVEN.fullmatch(text.strip().lower()) if isinstance(text, str) else None
    if found is None:
        raise InferError(
            Code.INVALID_ARG,
            f"a device is named by its UUID, as `nvidia-smi -L` prints it (GPU-… or MIG-…), got {text!r:.100}",
        )
    return f"GPU{found[1]}"
