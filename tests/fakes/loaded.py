"""One model of a worker, loaded in this process: the real runtime on real memory, requests made by hand.

`Memory` is what a client has: regions, written and read as arrays. `Loaded` is what the worker makes of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np

from broker.repository.config import ModelConfig
from broker.worker import backends
from broker.worker.execute import run_batch
from broker.worker.messages import AddRegion, BindPlan, PlanTensor
from broker.worker.model import LoadedModel, instance_count
from broker.worker.overlap import Crowds
from broker.worker.plans import Plan, adopt
from broker.worker.regions import Region, RegionTable
from broker.worker.streams import Streams
from shm import datatypes, sockets, statistics
from shm.admission import Request
from shm.layout import NOTE_BYTES
from shm.messages import TensorSpec
from shm.parameters import Parameter
from shm.regions import create_pool
from shm.statistics import StatisticsPage
from shm.worker_channel import WorkerChannel


def spec(name: str, shape: Sequence[int], datatype: str = "FP32", **place: int) -> TensorSpec:
    """A tensor of a plan; `offset`, `stride` and `byte_size` as in TensorSpec. `region` is given to `Loaded.plan`."""
    return TensorSpec(name=name, region="r", datatype=datatype, shape=tuple(shape), **place)


class Memory:
    """A region of `byte_size` bytes with its descriptor, as the broker gives it to workers."""

    numbers = iter(range(1, 1 << 30))

    def __init__(self, byte_size: int = 1 << 16, fd: int = -1, kind: str = "pool", offset: int = 0) -> None:
        self.fd = create_pool(byte_size) if fd < 0 else os.dup(fd)
        status = os.fstat(self.fd)
        number = next(self.numbers)
        self.info = AddRegion(
            region=number,
            generation=number,
            name=f"r{number}",
            kind=kind,
            byte_size=byte_size,
            offset=offset,
            file_size=status.st_size,
            device=status.st_dev,
            inode=status.st_ino,
            writable=True,
        )
        self.bytes = Region(self.info, self.fd).bytes  # a mapping of its own, like a client's

    def put(self, offset: int, array: np.ndarray) -> None:
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        self.bytes[offset : offset + data.size] = data

    def get(self, offset: int, shape: Sequence[int], datatype: str = "FP32") -> np.ndarray:
        size = datatypes.byte_size(datatype, shape)
        return np.frombuffer(self.bytes[offset : offset + size].tobytes(), datatypes.numpy_dtype(datatype)).reshape(
            shape
        )

    def tensor(self, what: TensorSpec) -> PlanTensor:
        return PlanTensor(spec=what, region=self.info.region, generation=self.info.generation)


class Loaded:
    """A model and the plans on it. A context manager."""

    def __init__(self, config: ModelConfig, version: int = 1, page: StatisticsPage | None = None) -> None:
        self.page = page or StatisticsPage.create()
        self._own_page = page is None
        self.regions = RegionTable()
        self.live: list[Request] = []
        self.crowds = Crowds(lambda: self.live)
        self.signatures: dict[object, object] = {}
        self._sessions = 0
        self._memories: list[Memory] = []
        self.model = self.load(config, version)

    def load(self, config: ModelConfig, version: int = 1) -> LoadedModel:
        """Load it (again): the statistics go on in the same blocks."""
        model = LoadedModel(config, version, 1)
        model.streams = Streams(config) if config.decoupled else None
        blocks = [self.page.block(index) for index in range(instance_count(config.instance_group))]
        model.load(backends.find(config), config.versions[version], blocks)
        return model

    def memory(self, byte_size: int = 1 << 16, **how) -> Memory:
        memory = Memory(byte_size, **how)
        self.regions.add(memory.info, memory.fd)
        self._memories.append(memory)
        return memory

    def plan(
        self,
        memory: Memory,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        positions: int | tuple[int, int] = 1,
        rows: int = 0,
        responses: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> Plan:
        """A plan of a session of its own, all in one region."""
        self._sessions += 1
        input_positions, output_positions = (positions, positions) if isinstance(positions, int) else positions
        message = BindPlan(
            session=self._sessions,
            index=0,
            generation=1,
            model=self.model.name,
            version=self.model.version,
            inputs=tuple(map(memory.tensor, inputs)),
            outputs=tuple(map(memory.tensor, outputs)),
            input_positions=input_positions,
            output_positions=output_positions,
            rows=rows,
            interface=self.model.config.interface,
            responses=responses,
            parameters=dict(parameters or {}),
        )
        plan = Plan(message, self.regions, self.crowds)
        adopt(plan, self.model, self.signatures)
        return plan

    def request(self, plan: Plan, input_position: int = 0, output_position: int = -1, rows: int = 0) -> Request:
        """As taken from a channel; `output_position` as `input_position` unless given."""
        output = input_position if output_position < 0 else output_position
        return make_request(plan, input_position, output, rows)

    def run(self, *requests: Request, model: LoadedModel | None = None) -> Request:
        """Run them together; returns the last."""
        run_batch((model or self.model).instances[0], list(requests))
        return requests[-1]

    def infer(self, plan: Plan, input_position: int = 0, output_position: int = -1, rows: int = 0) -> Request:
        """Run one request alone; it must succeed."""
        request = self.run(self.request(plan, input_position, output_position, rows))
        assert not request.code, request.note.decode()
        return request

    def count(self, word: int) -> int:
        """A word of the model's statistics, over all instances."""
        for instance in self.model.instances:
            instance.flush()
        return sum(instance.block[word] for instance in self.model.instances)

    def copied(self) -> dict[str, int]:
        """Bytes copied, by reason; those without are left out."""
        total = {reason: self.count(statistics.COPIED + at) for at, reason in enumerate(statistics.REASONS)}
        return {reason: count for reason, count in total.items() if count}

    def batches(self) -> dict[int, int]:
        """Batch size → executions."""
        executions = {size: self.count(statistics.BATCHES + 4 * (size - 1)) for size in range(1, 65)}
        return {size: count for size, count in executions.items() if count}

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.model.close()
        sockets.close_all([memory.fd for memory in self._memories])
        if self._own_page:
            os.close(self.page.fd)


def make_request(
    plan: Plan, input_position: int = 0, output_position: int = 0, rows: int = 0, *, deadline: int = 0, now: int = 1
) -> Request:
    """A request that no channel has: enough for whoever only runs it."""
    entry = (1, plan.key, 0, deadline, input_position, output_position, rows, 0, 0, 0, 0, 0, 0)
    channel: WorkerChannel = None  # type: ignore[assignment]
    return Request(channel, 0, entry, plan, now)


def text_of(request: Request) -> str:
    """An error's text."""
    assert len(request.note) <= NOTE_BYTES
    return request.note.decode()


def shapes_of(request: Request) -> list[tuple[int, ...]]:
    """The shapes of open outputs in a request's note."""
    words = np.frombuffer(request.note, "<u8").tolist()
    shapes = []
    while words:
        rank = words.pop(0)
        shapes.append(tuple(words[:rank]))
        del words[:rank]
    return shapes
