"""A worker and an application with GPU memory, driven by a test over the worker's link: no broker.

`GpuMemory` is for GPU memory what `tests.fakes.loaded.Memory` is for the host's. `Caller` is a client: any tensors,
each in any region. `doubled` is a model on the double of TensorRT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from broker.repository.config import InstanceGroup, ModelConfig, TensorConfig
from broker.worker import messages
from shm import datatypes, statistics
from shm.cuda import driver
from shm.cuda.descriptor import CudaMemory
from shm.errors import Code
from shm.messages import TensorSpec
from tests.doubles import tensorrt as double
from tests.fakes import models
from tests.fakes.broker import eventually
from tests.fakes.channel import Pending
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.cuda_roles import Application
from tests.fakes.loaded import Memory, spec
from tests.fakes.lone_worker import LoneWorker, Session

BACKEND = """
from broker.worker.backends.tensorrt import load_with
from tests.doubles import tensorrt

def load(context):
    return load_with(tensorrt, context)
"""


class Client(Application):
    """Runs in the application's process (`tests.fakes.cuda_children`)."""

    def put(self, number: int, offset: int, data: bytes) -> None:
        driver.call("cuMemcpyHtoD", self.pointers[number] + offset, data, len(data))

    def get(self, number: int, offset: int, size: int) -> bytes:
        found = np.empty(size, np.uint8)
        driver.call("cuMemcpyDtoH", found.ctypes.data, self.pointers[number] + offset, size)
        return found.tobytes()


class GpuMemory:
    """A window of an allocation of `application` (a Child of `Client`), registered with `worker`."""

    def __init__(self, worker: LoneWorker, application: Child, byte_size: int = 4096, offset: int = 0) -> None:
        self.application, self.offset = application, offset
        self.number = application.call("allocate", offset + byte_size)
        described = application.call("export", self.number, offset, byte_size)
        memory = msgspec.convert(described, CudaMemory, builtin_types=(bytes,))
        number = next(Memory.numbers)
        self.info = messages.AddRegion(
            region=number,
            generation=number,
            name=f"r{number}",
            kind="cuda",
            byte_size=byte_size,
            offset=memory.offset,
            file_size=memory.allocation_size,
            device=-1,
            inode=number,
            writable=True,
            cuda=memory,
            owner=1,
        )
        self.give(worker)

    def give(self, worker: LoneWorker) -> None:
        worker.ask(self.info)

    def put(self, offset: int, array: Any) -> None:
        self.application.call("put", self.number, self.offset + offset, np.ascontiguousarray(array).tobytes())

    def get(self, offset: int, shape: Sequence[int], datatype: str = "FP32") -> np.ndarray:
        size = datatypes.byte_size(datatype, shape)
        data = self.application.call("get", self.number, self.offset + offset, size)
        return np.frombuffer(data, datatypes.numpy_dtype(datatype)).reshape(shape)

    def tensor(self, what: TensorSpec) -> messages.PlanTensor:
        return messages.PlanTensor(spec=what, region=self.info.region, generation=self.info.generation)


AnyMemory = GpuMemory | Memory
Placed = tuple[AnyMemory, TensorSpec]


class Asked(Pending):
    """A request of a `Caller`."""

    @property
    def copied(self) -> int:
        return self.entries[-1][7]

    @property
    def queued_ns(self) -> int:
        return self.entries[-1][3]

    @property
    def note(self) -> bytes:
        return self.notes[-1]


class Caller(Session):
    """A session that binds plans whose tensors lie anywhere."""

    def plan(
        self,
        config: ModelConfig,
        inputs: Sequence[Placed],
        outputs: Sequence[Placed],
        positions: int = 1,
        rows: int = 0,
    ) -> int:
        """The plan's word."""
        message = messages.BindPlan(
            session=self.number,
            index=next(self._plans),
            generation=1,
            model=config.name,
            version=1,
            inputs=tuple(memory.tensor(what) for memory, what in inputs),
            outputs=tuple(memory.tensor(what) for memory, what in outputs),
            input_positions=positions,
            output_positions=positions,
            rows=rows,
            interface=config.interface,
            retryable=True,
        )
        self.worker.ask(message)
        self.bound = [*getattr(self, "bound", []), message]
        return message.index | message.generation << 32

    def submit(self, plan: int, position: int = 0) -> Asked:
        pending = Asked()
        assert self.client.submit(pending, plan, position, position, 0, 0), "the channel is full"
        return pending

    def wait(self, pending: Asked) -> Asked:
        def ended() -> bool:
            self.client.reap()
            return bool(pending.finals)

        eventually(ended, "the request ends")
        return pending

    def infer(self, plan: int, position: int = 0) -> Asked:
        """Submit and wait; it must succeed."""
        pending = self.wait(self.submit(plan, position))
        assert pending.code is Code.OK, pending.text
        return pending

    def refused(self, plan: int, position: int = 0) -> tuple[Code, str]:
        pending = self.wait(self.submit(plan, position))
        return pending.code, pending.text


def copied(block: memoryview) -> dict[str, int]:
    """Bytes by reason, of an instance's statistics."""
    found = {reason: block[statistics.COPIED + at] for at, reason in enumerate(statistics.REASONS)}
    return {reason: count for reason, count in found.items() if count}


def config_of(
    directory: Path, inputs: Sequence[TensorConfig], outputs: Sequence[TensorConfig], **fields: Any
) -> ModelConfig:
    """A model named like its directory."""
    known: dict[str, Any] = {
        "name": directory.name,
        "platform": "",
        "backend": "own",
        "directory": str(directory),
        "versions": {1: str(directory / "1")},
        "default_model_filename": "",
        "max_batch_size": 0,
        "input": tuple(inputs),
        "output": tuple(outputs),
        "instance_group": (InstanceGroup(name=directory.name),),
    }
    return ModelConfig(**{**known, **fields})


def doubled(
    directory: Path, plan: bytes, inputs: Sequence[TensorConfig], outputs: Sequence[TensorConfig], **fields: Any
) -> ModelConfig:
    """On GPU 0, by the double of TensorRT."""
    (directory / "1").mkdir(parents=True)
    (directory / "backend.py").write_text(BACKEND)
    (directory / "1" / "model.plan").write_bytes(plan)
    group = InstanceGroup(name=directory.name, kind="KIND_GPU", gpus=(0,))
    return config_of(directory, inputs, outputs, default_model_filename="model.plan", instance_group=(group,), **fields)


def onnx_add1(directory: Path) -> ModelConfig:
    """y = x + 1, FP32 of any size, by the real runtime on the CPU."""
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.onnx").write_bytes(models.add1().SerializeToString())
    tensor = TensorConfig(name="x", datatype="FP32", dims=(-1, -1), zero_copy=True, file_rank=2)
    return config_of(directory, [tensor], [TensorConfig(name="y", datatype="FP32", dims=(-1, -1), file_rank=2)])


def adder(directory: Path, most: int = 8, fault: str = "", **fields: Any) -> ModelConfig:
    """OUTPUT0 = INPUT0 + INPUT1: batches of 1 to 8 rows of 4 FP32."""
    profile = [[1, 4], [4, 4], [8, 4]]
    plan = double.plan(
        "add",
        [double.tensor(f"INPUT{index}", [-1, 4], profiles=[profile]) for index in range(2)],
        [double.tensor("OUTPUT0", [-1, 4])],
        fault=fault,
    )
    given = [TensorConfig(name=f"INPUT{index}", datatype="FP32", dims=(4,)) for index in range(2)]
    made = [TensorConfig(name="OUTPUT0", datatype="FP32", dims=(4,))]
    return doubled(directory, plan, given, made, max_batch_size=most, **fields)


# --- what tests of workers share ---

ROW = 16
X, Y, Z = ({"offset": at * 1024, "stride": 1024 // 4} for at in range(3))


@pytest.fixture(scope="module")
def application(cuda_env: CudaEnv) -> Iterator[Child]:
    with Child(cuda_env, "tests.fakes.cuda_worker:Client") as child:
        yield child


@pytest.fixture(scope="module")
def cpu(cuda_env: CudaEnv) -> Iterator[LoneWorker]:
    with LoneWorker(environ=cuda_env.environ) as worker:
        yield worker


@pytest.fixture(scope="module")
def gpu(cuda_env: CudaEnv) -> Iterator[LoneWorker]:
    with LoneWorker("gpu0/test", cuda_env.environ) as worker:
        yield worker


def rows(count: int, value: float) -> np.ndarray:
    return np.full((count, 4), value, np.float32)


def add_plan(caller: Caller, config: ModelConfig, memory: GpuMemory | Memory, positions: int = 4) -> int:
    """INPUT0 at 0, INPUT1 at 1024, OUTPUT0 at 2048; positions of one row each, 256 bytes apart."""
    inputs = [(memory, spec("INPUT0", (1, 4), **X)), (memory, spec("INPUT1", (1, 4), **Y))]
    return caller.plan(config, inputs, [(memory, spec("OUTPUT0", (1, 4), **Z))], positions, rows=1)


def fill(memory: GpuMemory | Memory, position: int, x: float, y: float) -> None:
    memory.put(position * 256, rows(1, x))
    memory.put(1024 + position * 256, rows(1, y))
    memory.put(2048 + position * 256, rows(1, -1))


def result(memory: GpuMemory | Memory, position: int = 0) -> list[float]:
    return memory.get(2048 + position * 256, (4,)).tolist()
