"""What an application may pass for GPU memory: arrays by their interfaces, addresses. No driver is asked."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from clientlib.cuda_export import under_wsl
from clientlib.cuda_source import Source, _Tensor, contiguous, source_of
from shm.errors import InferError


class Interface:
    """An array as cupy and numba show theirs."""

    def __init__(self, **changes: Any) -> None:
        interface = {"shape": (2, 3), "typestr": "<f4", "data": (0x1000, False), "version": 3, "strides": None}
        self.__cuda_array_interface__ = interface | changes


class Packed:
    """A DLPack producer. Its capsule is a real one; `released` says that its destructor ran."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...] | None, device: int = 2, bits: int = 16
    ) -> None:
        self.device = device
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self.tensor = _Tensor(
            data=0x2000, device_type=device, device_id=1, ndim=len(shape), code=4, bits=bits, lanes=1, byte_offset=64
        )
        self.tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        if self.strides is not None:
            self.tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 1

    def __dlpack__(self, stream: Any = None) -> Any:
        self.asked.append(stream)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


def of(tensor: Any = None, pointer: Any = None, byte_size: Any = None) -> Source:
    return source_of("r", tensor, pointer, byte_size)


def why(*arguments: Any, **named: Any) -> str:
    with pytest.raises(InferError) as caught:
        of(*arguments, **named)
    assert caught.value.code == "INVALID_ARG"
    assert "Traceback" not in caught.value.message
    return caught.value.message


def test_an_array_interface_is_read() -> None:
    array = Interface()
    source = of(array)
    assert (source.pointer, source.byte_size, source.writable, source.ordinal) == (0x1000, 24, True, None)
    assert source.keep is array
    assert not of(Interface(data=(0x1000, True))).writable
    assert of(Interface(shape=(), typestr="|u1")).byte_size == 1


def test_dlpack_is_read_where_there_is_no_interface() -> None:
    array = Packed((2, 3), (3, 1))
    source = of(array)
    assert (source.pointer, source.byte_size, source.ordinal) == (0x2000 + 64, 12, 1)
    assert array.asked == [-1], "no synchronisation: nothing is read"
    assert source.keep[0] is array  # type: ignore[index]
    assert of(Packed((2, 3), None)).byte_size == 12


def test_an_interface_that_raises_leaves_it_to_dlpack() -> None:
    """As torch does for bfloat16."""

    class Both(Packed):
        @property
        def __cuda_array_interface__(self) -> Any:
            raise TypeError("no typestr for bfloat16")

    assert of(Both((4,), (1,))).byte_size == 8


def test_an_address_needs_a_size() -> None:
    assert of(pointer=0x1000, byte_size=64).byte_size == 64
    assert of(pointer=np.uint64(0x1000), byte_size=np.int32(64)).pointer == 0x1000
    assert "pointer= needs byte_size=" in why(pointer=0x1000)
    assert "pass either an array" in why()
    assert "pass either an array" in why(Interface(), pointer=1)
    assert "pointer must be an integer" in why(pointer=0, byte_size=1)
    assert "byte_size must be an integer" in why(pointer=1, byte_size=0)
    assert "pointer must be an integer" in why(pointer="0x1000", byte_size=8)


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), (16, 4)), ((3, 2), (4, 12)), ((2, 3), (-12, 4)), ((2, 3), (0, 4))]
)
def test_gaps_and_other_orders_are_refused_with_a_remedy(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert "register x.contiguous() (torch)" in why(Interface(shape=shape, strides=strides))
    assert "not C-contiguous" in why(Packed(shape, tuple(stride // 4 for stride in strides)))


def test_strides_of_axes_with_one_element_do_not_matter() -> None:
    assert contiguous((2, 1, 3), (12, 99, 4), 4)
    assert of(Interface(shape=(1, 6), strides=(4, 4))).byte_size == 24
    assert of(Interface(shape=(2, 3), strides=(12, 4))).byte_size == 24


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": None},
        {"shape": (2.5,)},
        {"shape": (-1,)},
        {"shape": (1,) * 65},
        {"typestr": "what"},
        {"data": 5},
        {"data": ("x", False)},
        {"strides": (4,)},
        {"strides": "ab"},
    ],
)
def test_an_interface_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    assert "cannot be read" in why(Interface(**wrong))


def test_what_has_no_memory_of_a_gpu_is_refused() -> None:
    assert "'ndarray' has neither __cuda_array_interface__ nor DLPack of a GPU" in why(np.zeros(4))
    assert "the array is empty" in why(Interface(shape=(0, 3)))
    assert "masked arrays" in why(Interface(mask=object()))
    assert "'int' has neither" in why(5)
    assert "the array has 24 bytes, byte_size=8 was given" in why(Interface(), byte_size=8)


def test_a_producer_that_fails_is_quoted() -> None:
    class Gradient(Packed):
        def __dlpack__(self, stream: Any = None) -> Any:
            raise BufferError("Can't export tensors that require gradient")

    assert "require gradient" in why(Gradient((4,), None))


def test_windows_says_who_it_is(tmp_path: Any) -> None:
    version = tmp_path / "version"
    assert not under_wsl(version)
    version.write_text("Linux version 6.8.0-45-generic (gcc)")
    assert not under_wsl(version)
    version.write_text("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@host)")
    assert under_wsl(version)
