"""The functions of `cuda.bindings.runtime` that tritonclient's CUDA module calls, done with the driver alone.

NOT REAL: the second part, beside tests/cusim, that stands in for NVIDIA's: the CUDA runtime refuses a driver that is
not NVIDIA's. So that the client itself runs as it is, its calls end here. Never installed with --cuda=real.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver, runtime

SUCCESS = runtime.cudaError_t.cudaSuccess
Answer = tuple[Any, ...]
_thread = threading.local()


def _device() -> int:
    return int(getattr(_thread, "device", 0))


def _asked(function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Call the driver in the primary context of this thread's device: what the runtime does before each call."""
    driver.cuInit(0)
    code, context = driver.cuDevicePrimaryCtxRetain(_device())
    if int(code):
        return (runtime.cudaError_t(int(code)), None)
    driver.cuCtxPushCurrent(context)
    try:
        code, *results = function(*arguments)
    finally:
        driver.cuCtxPopCurrent()
    return (runtime.cudaError_t(int(code)), *results)


def cuda_get_device() -> Answer:
    return SUCCESS, _device()


def cuda_set_device(device: int) -> Answer:
    _thread.device = device
    return _asked(driver.cuDeviceGet, device)[:1]


def cuda_device_get_attribute(attribute: Any, device: int) -> Answer:
    return _asked(driver.cuDeviceGetAttribute, driver.CUdevice_attribute(int(attribute)), device)


def cuda_malloc(byte_size: int) -> Answer:
    code, pointer = _asked(driver.cuMemAlloc, byte_size)
    return code, None if pointer is None else int(pointer)


def cuda_free(pointer: int) -> Answer:
    return _asked(driver.cuMemFree, pointer)


def cuda_ipc_get_mem_handle(pointer: int) -> Answer:
    code, found = _asked(driver.cuIpcGetMemHandle, pointer)
    handle = runtime.cudaIpcMemHandle_t()
    if found is not None:
        ctypes.memmove(handle.getPtr(), found.getPtr(), 64)
    return code, handle


def cuda_stream_create() -> Answer:
    code, stream = _asked(driver.cuStreamCreate, 0)
    return code, runtime.cudaStream_t(int(stream))


def cuda_stream_destroy(stream: Any) -> Answer:
    return _asked(driver.cuStreamDestroy, int(stream))


def cuda_stream_synchronize(stream: Any) -> Answer:
    return _asked(driver.cuStreamSynchronize, int(stream))


def cuda_memcpy_async(to: Any, source: Any, byte_size: int, kind: Any, stream: Any) -> Answer:
    return _asked(driver.cuMemcpyAsync, _address(to), _address(source), byte_size, int(stream))


def _address(value: Any) -> int:
    if isinstance(value, bytes):
        return ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value or 0
    return ctypes.addressof(value) if isinstance(value, ctypes.Array) else int(value)


def install() -> None:
    """In this process, for good."""
    runtime.cudaGetDevice = cuda_get_device
    runtime.cudaSetDevice = cuda_set_device
    runtime.cudaDeviceGetAttribute = cuda_device_get_attribute
    runtime.cudaMalloc = cuda_malloc
    runtime.cudaFree = cuda_free
    runtime.cudaIpcGetMemHandle = cuda_ipc_get_mem_handle
    runtime.cudaStreamCreate = cuda_stream_create
    runtime.cudaStreamDestroy = cuda_stream_destroy
    runtime.cudaStreamSynchronize = cuda_stream_synchronize
    runtime.cudaMemcpyAsync = cuda_memcpy_async
