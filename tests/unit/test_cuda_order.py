"""What names a stream, and which events a ring may have: no driver is asked."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broker.cuda_regions import ring_of
from clientlib import cuda_order
from clientlib.cuda_order import Orders, stream_address
from clientlib.cuda_region import CudaArray
from clientlib.session import Call
from shm.cuda import driver, marks
from shm.cuda.descriptor import MAX_EVENTS, CudaEvents
from shm.errors import ConnectionLost, InferError
from shm.messages import Done, RegisterEvents

GPU, OTHER = (f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in (1, 2))


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 77


@pytest.mark.parametrize(
    ("stream", "address"),
    [
        (0, 0),
        (2, 2),
        (SimpleNamespace(cuda_stream=11), 11),  # torch
        (SimpleNamespace(ptr=12), 12),  # cupy
        (SimpleNamespace(handle=ctypes.c_void_p(13)), 13),  # numba
        (SimpleNamespace(handle=14), 14),
        (Protocol(), 77),
    ],
)
def test_streams_of_libraries_are_known(stream: object, address: int) -> None:
    assert stream_address(stream) == address


@pytest.mark.parametrize("stream", ["0", 1.5, -1, object(), SimpleNamespace(ptr="x"), SimpleNamespace(handle=None)])
def test_anything_else_is_refused(stream: object) -> None:
    with pytest.raises(InferError, match=r"\[INVALID_ARG\] after= takes a stream"):
        stream_address(stream)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 64 * (MAX_EVENTS + 1)])
def test_a_ring_has_whole_handles_and_fits_a_message(size: int) -> None:
    CudaEvents(device=GPU, handles=bytes(64 * MAX_EVENTS)).check("e")
    with pytest.raises(InferError, match=f"a ring is 1 to {MAX_EVENTS} handles .* {size} bytes came"):
        CudaEvents(device=GPU, handles=bytes(size)).check("e")


def test_handles_are_not_shown() -> None:
    shown = repr(CudaEvents(device=GPU, handles=b"secret!!" * 16))
    assert shown == f"<2 CUDA events on {GPU}>"


class Known:
    """Stands for a ring."""

    name, registered = "e", True

    def registration(self) -> Call:
        return Call(RegisterEvents(name=self.name, events=CudaEvents(device=GPU, handles=bytes(64))))


@pytest.mark.parametrize(("refusal", "known"), [(None, "e"), ("ALREADY_EXISTS", "e"), ("UNSUPPORTED", "")])
def test_a_ring_is_registered_on_the_next_session_or_given_up(refusal: str | None, known: str) -> None:
    orders = Orders()
    orders._rings = {GPU: Known(), OTHER: None}  # type: ignore[dict-item]
    procedure = orders.attach()
    assert next(procedure).message.name == "e"  # type: ignore[attr-defined]
    with contextlib.suppress(StopIteration):
        procedure.send((Done(), [])) if refusal is None else procedure.throw(InferError(refusal, "no"))
    assert orders.known("e") == known


def test_a_ring_is_kept_for_the_next_session_when_that_is_lost_too() -> None:
    orders = Orders()
    orders._rings = {GPU: Known()}  # type: ignore[dict-item]
    procedure = orders.attach()
    next(procedure)
    with pytest.raises(ConnectionLost):
        procedure.throw(ConnectionLost("gone"))
    assert orders.known("e") == "e"


def entry(**fields: object) -> Any:
    return SimpleNamespace(**{"name": "e", "kind": "events", "events": None, "cuda": None, **fields})


def test_the_events_of_a_plan_are_of_the_one_gpu_that_has_its_memory() -> None:
    ring = entry(events=SimpleNamespace(device=GPU))
    here, there, host = (entry(cuda=SimpleNamespace(device=GPU)), entry(cuda=SimpleNamespace(device=OTHER)), entry())
    assert ring_of(ring, [here, host]) is ring
    for regions, where in (([there], OTHER), ([here, there], f"{GPU}, {OTHER}"), ([host], "on no GPU")):
        with pytest.raises(InferError, match=f"the events of 'e' are of {GPU}, the plan's memory is .*{where}"):
            ring_of(ring, regions)
    with pytest.raises(InferError, match="'p' is a pool region, no ring of events"):
        ring_of(entry(name="p", kind="pool"), [here])


def test_a_stream_of_another_gpu_is_told_as_such() -> None:
    handle = driver.CudaError("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE", driver.INVALID_HANDLE)
    told = marks.of_another(handle, 0x1234, 1)
    assert (told.code, told.message[:31]) == ("INVALID_ARG", "stream 0x1234 is none of GPU 1,")
    other = driver.CudaError("cuEventRecord", "CUDA_ERROR_ILLEGAL_ADDRESS", 700)
    assert marks.of_another(other, 0x1234, 1) is other


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_what_is_no_address_is_no_stream(number: int) -> None:
    with pytest.raises(InferError, match="after= takes a stream"):
        cuda_order.stream_address(number)


def test_results_on_a_gpu_can_be_shown() -> None:
    array = CudaArray(0x1000, (1, 4), np.dtype("<f4"), True, None)
    assert (array.dtype, array.shape) == (np.float32, (1, 4))
