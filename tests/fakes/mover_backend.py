"""A backend for models on a GPU whose output is a copy of their input, any size: no kernel, so any driver runs it.

Copied as `backend.py` into a repository. With FIFOs `told` and `gate` beside its config.pbtxt a run whose first element
is below 0 says so in `told` and waits for a byte in `gate` before it copies once more. A model named `stuck` never
ends: as a kernel without an end, its stream waits for ever.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from broker.worker.backends import Context, OnGpu, Operand
from broker.worker.cuda.staging import Places, Scratch, size_of
from broker.worker.cuda.streams import Bytes, Lane
from shm.cuda.driver import bindings, call, find_device


def load(context: Context) -> Model:
    return Model(find_device(context.device, "this test"), context.config.directory, context.config.name == "stuck")


class Model:
    def __init__(self, device: Any, directory: str, stuck: bool) -> None:
        self.lane, self.scratch, self.stuck = Lane(device), Scratch(device.ordinal), stuck
        names = [os.path.join(directory, name) for name in ("told", "gate")]
        self.fds = [os.open(name, os.O_RDWR) for name in names if os.path.exists(name)]

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        self.lane.enter()
        return Binding(self, inputs[0], outputs[0])

    def close(self) -> None:
        self.lane.close()
        for fd in self.fds:
            os.close(fd)


class Binding:
    def __init__(self, model: Model, x: Operand, y: Operand) -> None:
        self.model, self.size, self.where = model, size_of(x), Places(model.lane, model.scratch)
        self.source = self.where.input(x)
        self.own: list[tuple[OnGpu, tuple[int, ...]]] = []
        if y.gpu is None and y.memory is None:
            place = self.where.own(y, self.size)
            self.target, self.own = place.pointer, [(place, x.shape)]
        else:
            self.target = self.where.output(y)

    def run(self) -> None:
        lane = self.model.lane
        lane.enter()
        self.where.before()
        lane.copy(self.target, self.source, self.size)
        if self.model.fds and lane.fetch(OnGpu(self.source, 4)).view("<f4")[0] < 0:
            told, gate = self.model.fds
            os.write(told, b"E")
            os.read(gate, 1)
            lane.copy(self.target, self.source, self.size)
        if self.model.stuck:
            pause = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p).value
            call("cuLaunchHostFunc", lane.stream, bindings().CUhostFn(pause), 0)
        self.where.after()
        lane.finish()

    def places(self) -> list[tuple[OnGpu, tuple[int, ...]]]:
        return self.own

    def results(self) -> list[Bytes]:
        return [self.model.lane.fetch(place).view("<f4").reshape(shape) for place, shape in self.own]
