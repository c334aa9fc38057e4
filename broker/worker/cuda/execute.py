"""Runs batches that have to do with GPUs: models on a GPU, and models on the CPU whose clients' memory is on one.

`broker.worker.execute.run_batch` hands them over (`LoadedModel.runner`). There are two ways:

    a model on a GPU        `gpu_runs`: in place, or rows gathered on the GPU, which for host memory is the copy there
    everything else         regions are mirrored on the host: copied in, run as ever, copied out (`_run_staged`)

A completion is published after this returns, so after the GPU has done everything.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

from broker.worker.assembly import Row
from broker.worker.cuda.events import PATIENCE_NS, events_of
from broker.worker.cuda.gpu_runs import Batches, count_moved, run_alone, run_together
from broker.worker.cuda.mirrors import Mirrors
from broker.worker.cuda.streams import Lane, end_if_lost
from broker.worker.model import Instance
from broker.worker.plans import PlacedTensor, Plan
from broker.worker.running import fail
from shm import datatypes
from shm.admission import Request
from shm.cuda.driver import CudaError, devices
from shm.errors import InferError

OnHost = Callable[[Instance, list[Request], Sequence[Row]], None]
_now = time.monotonic_ns


@final
class CudaRunner:
    """Of one loaded model. Each instance is run by one thread at a time."""

    __slots__ = ("_batches", "_lanes")

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], Lane] = {}  # of instances on the CPU: by instance and GPU
        self._batches: dict[int, Batches] = {}  # of those on a GPU

    def run(self, instance: Instance, requests: list[Request], rows: Sequence[Row], on_host: OnHost) -> None:
        """Run them: every request gets its ending. `on_host` runs a batch whose memory is the host's."""
        patience = _now() + PATIENCE_NS
        usable = [request for request in requests if self._begin(instance, request, patience)]
        now = _now()  # waiting for a producer is no work of the model's
        try:
            if not usable:
                return
            lane = getattr(instance.runtime, "lane", None)
            if lane is not None:
                lane.moved.clear()  # of a warm-up, or of a run that failed
            if lane is not None and _plain(instance, usable):
                batches = self._batches.setdefault(instance.number, Batches())
                if len(usable) == 1 or not run_together(instance, lane, batches, usable, now):
                    for request in usable:
                        request.queue_ns = now - request.arrival
                        run_alone(instance, lane, request)
            else:
                with _mirrored(usable):
                    self._run_staged(instance, usable, rows, on_host)
        finally:
            self._let_go(instance, usable)
            for request in usable:
                for window in _plan(request).windows:
                    window.finish()

    def _let_go(self, instance: Instance, requests: list[Request]) -> None:
        """Keep no binding that has more of the GPU than an instance may keep (`Scratch.most`)."""
        scratch = getattr(instance.runtime, "scratch", None)
        if scratch is None or not scratch.lent:
            return
        scratch.lent = False
        self._batches.pop(instance.number, None)
        instance.buffers.clear()
        for request in requests:
            _plan(request).bindings.clear()

    def forget(self, instance: Instance) -> None:
        """It is closed, nothing runs on it."""
        self._batches.pop(instance.number, None)
        for key in [key for key in tuple(self._lanes) if key[0] == instance.number]:  # others may be closed just now
            self._lanes.pop(key).close()

    def _begin(self, instance: Instance, request: Request, patience: int) -> bool:
        """The request holds its regions, and what its client has enqueued for it is done. False: it has failed."""
        began = _now()
        held = []
        try:
            for window in _plan(request).windows:
                window.begin()
                held.append(window)
            if request.wait_event:
                events_of(request, _plan(request)).wait(request.wait_event, patience, request.deadline)
        except Exception as error:
            for window in held:
                window.finish()
            self._fail(instance, request, error, began)
            return False
        return True

    def _lane(self, instance: Instance, ordinal: int) -> Lane:
        own: Lane | None = getattr(instance.runtime, "lane", None)
        if own is not None and own.device.ordinal == ordinal:
            return own
        key = instance.number, ordinal
        if key not in self._lanes:
            self._lanes[key] = Lane(devices("GPU memory")[ordinal])
        return self._lanes[key]

    def _run_staged(self, instance: Instance, requests: list[Request], rows: Sequence[Row], on_host: OnHost) -> None:
        began = _now()
        ready: dict[Request, int] = {}  # bytes copied in
        for request in requests:
            try:
                ready[request] = self._copy(instance, request, inward=True)
            except Exception as error:
                self._fail(instance, request, error, began)
        cached = instance.model.cached
        runs = [request for request in ready if cached is None or not cached.answer(request, started=True)]
        staged = [row if row is not None and row in runs else None for row in rows]
        if runs:
            on_host(instance, runs, staged)
            own: Lane | None = getattr(instance.runtime, "lane", None)
            if own is not None:
                count_moved(instance, own)
                if any(request.code for request in ready):
                    own.check()
        for request, copied in ready.items():
            if request.code:
                continue
            try:
                request.copied += copied + self._copy(instance, request, inward=False)
            except Exception as error:
                self._fail(instance, request, error, began)

    def _copy(self, instance: Instance, request: Request, *, inward: bool) -> int:
        """Copy what the request reads in, or what it has written out; complete. Returns the bytes."""
        used: set[Lane] = set()
        try:
            copied = self._enqueue(instance, request, used, inward=inward)
        except Exception:
            for lane in used:  # what was enqueued before reads and writes the mirrors until then
                with contextlib.suppress(InferError):
                    lane.enter()
                    lane.finish()
            raise
        for lane in used:
            lane.enter()
            lane.finish()
        instance.count_copy("transfer", copied)
        return copied

    def _enqueue(self, instance: Instance, request: Request, used: set[Lane], *, inward: bool) -> int:
        copied = 0
        for tensor, position, size in _read(request) if inward else _written(request):
            window = tensor.region.gpu
            if window is None or not size:
                continue
            lane = self._lane(instance, window.ordinal)
            lane.enter()
            used.add(lane)
            memory = tensor.memory(position)[:size]
            pointer = window.pointer + tensor.place.offset + position * tensor.place.stride
            if inward:
                lane.copy_out(memory, pointer)
            else:
                lane.copy_in(pointer, memory)
            copied += size
        return copied

    def _fail(self, instance: Instance, request: Request, error: Exception, began: int) -> None:
        if isinstance(error, CudaError):
            end_if_lost(error, f"model '{instance.model.name}'")
        fail(instance, request, error, began)


def _plan(request: Request) -> Plan:
    plan = request.plan
    assert isinstance(plan, Plan)
    return plan


def _mirrored(requests: Sequence[Request]) -> contextlib.AbstractContextManager[None]:
    """What stands on the host for their GPU memory is theirs while they run."""
    mirrors: Mirrors | None = None
    spans = []
    for request in requests:
        plan = _plan(request)
        sides = (plan.inputs, request.input_position), (plan.outputs, request.output_position)
        for tensor, position in ((tensor, position) for tensors, position in sides for tensor in tensors):
            window = tensor.region.gpu
            if window is not None:
                start = tensor.place.offset + position * tensor.place.stride
                spans.append((window.mirror, start, start + tensor.place.byte_size))
                mirrors = window.mirrors
    return contextlib.nullcontext() if mirrors is None else mirrors.held(spans)


def _read(request: Request) -> Iterator[tuple[PlacedTensor, int, int]]:
    """What a model needs of its client's memory: tensor, position, bytes.

    Also the room of strings: how much of it the model writes is not known afterwards, and the rest stays as it is.
    """
    plan, output = _plan(request), request.output_position
    yield from ((tensor, request.input_position, _size(tensor, request.rows)) for tensor in plan.inputs)
    yield from ((t, output, t.place.byte_size) for t in plan.outputs if t.datatype == datatypes.BYTES)


def _written(request: Request) -> Iterator[tuple[PlacedTensor, int, int]]:
    """What it has written there. The sizes of open outputs follow from their shapes, which are in the note."""
    words = list(struct.unpack(f"<{len(request.note) // 8}Q", request.note))
    for tensor in _plan(request).outputs:
        size = _size(tensor, request.rows)
        if tensor.open and words:
            rank = words.pop(0)
            shape, words = words[:rank], words[rank:]
            if tensor.datatype != datatypes.BYTES:
                size = datatypes.byte_size(tensor.datatype, shape)
        yield tensor, request.output_position, size


def _size(tensor: PlacedTensor, rows: int) -> int:
    return rows * tensor.row_bytes if rows and tensor.row_bytes else tensor.place.byte_size


def _plain(instance: Instance, requests: Sequence[Request]) -> bool:
    """May the runtime be given pointers of the GPU? Else it gets the host's, and copies what it needs there."""
    model = instance.model
    if model.assembly is not None or model.streams is not None or model.cached is not None:
        return False
    return not any(
        tensor.datatype == datatypes.BYTES
        for request in requests
        for tensor in (*_plan(request).inputs, *_plan(request).outputs)
    )
