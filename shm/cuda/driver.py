"""NVIDIA's driver library, through `cuda.bindings.driver`: the only module that imports CUDA, and only when it is used.

    probe()            can this process use CUDA, and if not, exactly why
    devices()          the GPUs it sees, by UUID
    with Context(n):   the primary context of GPU n is this thread's; afterwards the one it had before
    call(name, …)      one function of the driver; CudaError names function and error

Used by `shm.cuda.handles`, by `clientlib.cuda*` and by workers. A process that calls `probe` or `devices` initialises
the driver but has no context, so no memory of a GPU, until a Context is entered.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, final

from shm.cuda.descriptor import uuid_text
from shm.errors import Code, InferError

Kind = Literal["ok", "no bindings", "no driver", "no device", "version mismatch", "driver error"]

OLDEST: Final = (
    12000  # as cuDriverGetVersion counts: the first with every function that is called here (but one, see `marks`)
)
NO_DEVICE, NOT_INITIALIZED, OUT_OF_MEMORY, NOT_SUPPORTED, ALREADY_MAPPED = 100, 3, 2, 801, 208
INVALID_HANDLE = 400
NOT_READY = 600  # of cuEventQuery and cuStreamQuery: no failure
# CUresult of drivers that do not fit their kernel module, their device or this program (cuda.h):
# STUB_LIBRARY, CALL_REQUIRES_NEWER_DRIVER, SYSTEM_DRIVER_MISMATCH, COMPAT_NOT_SUPPORTED_ON_DEVICE.
MISMATCHES: Final = frozenset({34, 36, 803, 804})
# After these the context is lost and every call fails: only a new process helps (cuda.h: "the process must be
# terminated"). ECC_UNCORRECTABLE, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, ASSERT, HARDWARE_STACK_ERROR … LAUNCH_FAILED.
STICKY: Final = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})


@final
class CudaError(InferError):
    """A call of the driver that failed: `function`, `name` (as cuda.h has it) and `number` of the error."""

    def __init__(self, function: str, name: str, number: int) -> None:
        code = {OUT_OF_MEMORY: Code.UNAVAILABLE, NOT_SUPPORTED: Code.UNSUPPORTED}.get(number, Code.INTERNAL)
        hint = ""
        if number == NOT_INITIALIZED and _initialised_in not in (0, os.getpid()):
            hint = ": this process was forked after CUDA had been initialised; start processes by spawn instead"
        super().__init__(code, f"{function} failed with {name} ({number}){hint}")
        self.function, self.name, self.number = function, name, number

    @property
    def sticky(self) -> bool:
        """Nothing of CUDA works in this process any more."""
        return self.number in STICKY

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.function, self.name, self.number))


@final
@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or an instance of a partitioned one (MIG), as this process sees it. `ordinal` means nothing to others,
    `uuid` ("GPU-…" of both) does. Sizes in bytes.
    """

    ordinal: int
    uuid: str
    name: str
    compute_capability: tuple[int, int]
    total_memory: int


@final
@dataclass(frozen=True, slots=True)
class Status:
    """What `probe` found: `kind` for programs, `text` for people; `devices` when it is "ok"."""

    kind: Kind
    text: str
    devices: tuple[Device, ...] = ()

    def require(self, what: str) -> tuple[Device, ...]:
        """The devices. Raises InferError UNSUPPORTED that says why there are none; `what` cannot be done without."""
        if self.kind != "ok":
            raise InferError(Code.UNSUPPORTED, f"{what}: CUDA is not available: {self.text}")
        return self.devices


_initialised_in = 0  # pid


@functools.cache
def bindings() -> Any:
    """The module `cuda.bindings.driver`: for its types and enumerations. Raises ImportError without the package."""
    from cuda.bindings import driver

    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver: its result, a tuple of several, or None. Raises CudaError.

    Raises InferError UNSUPPORTED where there is no driver, or one without this function.
    """
    try:
        code, *results = getattr(bindings(), name)(*arguments)
    except RuntimeError as error:  # what the bindings raise for a library or a function that is not there
        raise InferError(Code.UNSUPPORTED, f"{name} cannot be called: {error}") from None
    if code != 0:
        raise CudaError(name, code.name, int(code))
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def attempt(name: str, *arguments: Any) -> Any:
    """As `call`, but None when the driver answers with an error that is not sticky: for what may have no answer."""
    try:
        return call(name, *arguments)
    except CudaError as error:
        if error.sticky:
            raise
        return None


def probe() -> Status:
    """Can this process use CUDA? Never raises; creates no context. Asked anew each time, for a driver may come up."""
    global _initialised_in
    try:
        bindings()
    except ImportError as error:
        return Status(
            "no bindings", f"the package cuda-bindings cannot be imported ({error}); pip install 'tensorbroker[cuda]'"
        )
    try:
        call("cuInit", 0)
        version = call("cuDriverGetVersion")
        if version < OLDEST:
            has, wants = f"{version // 1000}.{version % 1000 // 10}", f"{OLDEST // 1000}.0"
            return Status("version mismatch", f"the driver is of CUDA {has}, at least {wants} is needed: update it")
        _initialised_in = _initialised_in or os.getpid()
        return Status("ok", "", tuple(_device(ordinal) for ordinal in range(call("cuDeviceGetCount"))))
    except CudaError as error:
        return _refusal(error)
    except InferError as error:
        return Status(
            "no driver",
            "NVIDIA's driver library libcuda.so.1 was not found or lacks a function; install the driver, or give the "
            f"container access to the GPU (--gpus all). {error.message}",
        )


def _refusal(error: CudaError) -> Status:
    if error.number == NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is '{visible}'"
        return Status("no device", f"the driver sees no GPU{why}")
    if error.number in MISMATCHES:
        return Status(
            "version mismatch",
            f"{error.message}: driver library, kernel module and GPU do not fit together; reboot after an update of "
            "the driver, or remove the compatibility package",
        )
    return Status("driver error", f"{error.message}; see `nvidia-smi` and the kernel's log")


def devices(what: str) -> tuple[Device, ...]:
    """The GPUs of this process. Raises InferError UNSUPPORTED; `what` is what cannot be done without any."""
    return probe().require(what)


def find_device(uuid: str, what: str) -> Device:
    """The GPU with this UUID. Raises InferError NOT_FOUND, which lists those there are."""
    known = devices(what)
    for device in known:
        if device.uuid == uuid:
            return device
    names = ", ".join(device.uuid for device in known)
    raise InferError(
        Code.NOT_FOUND, f"{what}: there is no GPU {uuid} in this process, which sees {names} (CUDA_VISIBLE_DEVICES)"
    )


def _device(ordinal: int) -> Device:
    attributes = bindings().CUdevice_attribute
    major = attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    return Device(
        ordinal,
        uuid_text(bytes(call("cuDeviceGetUuid", ordinal).bytes)),
        call("cuDeviceGetName", 128, ordinal).partition(b"\0")[0].decode(errors="replace"),
        (call("cuDeviceGetAttribute", major, ordinal), call("cuDeviceGetAttribute", minor, ordinal)),
        int(call("cuDeviceTotalMem", ordinal)),
    )


_contexts: dict[int, Any] = {}
_retaining = threading.Lock()


def primary(ordinal: int) -> Any:
    """The primary context of a GPU: the one that torch, cupy and the CUDA runtime use. Kept until the process ends."""
    found = _contexts.get(ordinal)
    if found is None:
        with _retaining:
            found = _contexts.get(ordinal)
            if found is None:
                found = _contexts[ordinal] = call("cuDevicePrimaryCtxRetain", ordinal)
    return found


_thread = threading.local()


def make_current(ordinal: int) -> None:
    """Make a GPU's primary context current for this thread and leave it so: for threads of a worker, which run nothing
    else. Costs nothing where it is.
    """
    known = getattr(_thread, "ordinal", None)
    if known != ordinal:
        if known is not None:
            call("cuCtxPopCurrent")
        call("cuCtxPushCurrent", primary(ordinal))
        _thread.ordinal = ordinal


@final
class Context:
    """`with Context(ordinal):` makes a GPU's primary context current for this thread, and puts back what was.

    The first one in a process creates the context, which takes the GPU some hundred MiB and some time.
    """

    __slots__ = ("_ordinal",)

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def __enter__(self) -> Context:
        call("cuCtxPushCurrent", primary(self._ordinal))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(CudaError):  # with a sticky error even this fails, and that error was seen
            call("cuCtxPopCurrent")


def has_context(ordinal: int) -> bool:
    """Has this process made a context on the GPU, by whatever library? Asking makes none."""
    flags_and_active = attempt("cuDevicePrimaryCtxGetState", ordinal)
    return bool(flags_and_active and flags_and_active[1])


def free_memory() -> tuple[int, int]:
    """Bytes that are free on the current GPU, and of how many; zeros where it does not say."""
    free, total = attempt("cuMemGetInfo") or (0, 0)
    return int(free), int(total)


def integrated(ordinal: int) -> bool:
    """Does the GPU use the host's memory, as those of Jetson do?"""
    return bool(call("cuDeviceGetAttribute", bindings().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED, ordinal))


def pointer_attribute(name: str, pointer: int) -> Any:
    """CU_POINTER_ATTRIBUTE_`name` of a pointer; None where it has none, as ordinary memory of the host has."""
    return attempt(
        "cuPointerGetAttribute", getattr(bindings().CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"), pointer
    )
