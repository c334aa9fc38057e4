"""A real worker process at the other end of a link that a test writes by hand, and a model that waits for the test.

`LoneWorker` stands in for the broker: it checks nothing and sends what it is told. `Gate` is a model repository's
directory with a backend of its own: y = x + 1, but while any element of x is negative a run waits to be let through.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from broker.repository.config import InstanceGroup, ModelConfig, TensorConfig
from broker.repository.scheduling import DynamicBatching
from broker.worker import messages
from shm import sockets, statistics
from shm.client_channel import ClientChannel
from shm.errors import Code, InferError
from shm.prctl import PR_SET_PDEATHSIG, prctl
from shm.statistics import StatisticsPage
from tests.fakes.broker import eventually
from tests.fakes.channel import Pending, Twin
from tests.fakes.loaded import Memory, spec

LIMIT_S = 30.0
SIZE = 4  # elements of a row
ROW = 4 * SIZE
WAIT = -1.0  # an element that makes a run wait
BEAST = -666.0  # one that makes it fail after that
_PROGRAM = "import socket; from broker.worker.process import main; main(socket.socket(fileno={}))"


def load_message(config: ModelConfig, blocks: tuple[int, ...], generation: int) -> messages.LoadInstances:
    """Of version 1. Each generation's configuration differs a little: else nothing would be loaded again."""
    config = msgspec.structs.replace(config, metric_tags={"generation": str(generation)})
    return messages.LoadInstances(config=config, version=1, generation=generation, blocks=blocks)


class LoneWorker:
    """One worker process. A context manager: it is killed at the end, unless it has left by itself."""

    def __init__(self, key: str = "cpu/test", environ: Mapping[str, str] = os.environ, peers: bool = False) -> None:
        self.page = StatisticsPage.create()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = ours
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**environ, "TENSORBROKER_DEBUG": "1"},  # its /proc entries may be read
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        theirs.close()
        self.pid = self.process.pid
        self.broken: list[messages.ChannelBroken] = []
        self.idle: list[messages.RegionIdle] = []
        self._answers: dict[int, messages.ToBroker] = {}
        self._numbers = iter(range(1, 1 << 30))
        self._blocks = iter(range(1, 512))
        self._channels = iter(range(1, 1 << 30))
        self.send(messages.Start(worker=key, broker_pid=os.getpid(), block=0, cuda_peers=peers), self.page.fd)
        self._read()

    # --- the link -----------------------------------------------------------------------------------------------

    def send(self, message: messages.LinkMessage, *fds: int) -> int:
        """Send it; `answer` waits for what comes of it."""
        number = next(self._numbers)
        sockets.send(self.link, messages.encode(msgspec.structs.replace(message, id=number)), fds)
        return number

    def answered(self, number: int) -> bool:
        """Has the answer come? Does not wait."""
        while select.select([self.link], [], [], 0)[0]:
            self._read()
        return number in self._answers

    def answer(self, number: int) -> str:
        """Wait for the answer: its detail. Raises InferError when the worker refuses."""
        while number not in self._answers:
            self._read()
        answer = self._answers.pop(number)
        if isinstance(answer, messages.Refused):
            raise InferError(Code[answer.code], answer.message)
        assert isinstance(answer, messages.Acknowledged)
        return answer.detail

    def ask(self, message: messages.LinkMessage, *fds: int) -> str:
        """Send it and wait for the answer."""
        return self.answer(self.send(message, *fds))

    def _read(self) -> None:
        assert select.select([self.link], [], [], LIMIT_S)[0], "the worker says nothing"
        received = sockets.receive(self.link)
        assert received is not None, "the worker is gone"
        message = messages.decode_to_broker(received[0])
        match message:
            case messages.Ready():
                assert message.pid == self.pid
            case messages.ChannelBroken():
                self.broken.append(message)
            case messages.RegionIdle():
                self.idle.append(message)
            case _:
                self._answers[message.id] = message

    # --- what the broker would have it do -----------------------------------------------------------------------

    def blocks(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(next(self._blocks) for group in config.instance_group for _ in range(group.count))

    def load(self, config: ModelConfig, blocks: Sequence[int] = (), generation: int = 1) -> memoryview:
        """Returns the statistics block of the first instance."""
        taken = tuple(blocks) or self.blocks(config)
        self.ask(load_message(config, taken, generation))
        return self.page.block(taken[0])

    def add_region(self, memory: Memory) -> Memory:
        self.ask(memory.info, memory.fd)
        return memory

    def retire_region(self, memory: Memory) -> str:
        return self.ask(messages.RetireRegion(region=memory.info.region, generation=memory.info.generation))

    def ask_region(self, memory: Memory) -> str:
        return self.ask(messages.AskRegion(region=memory.info.region, generation=memory.info.generation))

    def word(self, word: int) -> int:
        """Of the worker's own block."""
        return self.page.block(0)[word]

    def maps(self, memory: Memory) -> bool:
        """Does the process map this memory?"""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return any(line.split()[4] == str(memory.info.inode) for line in lines)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def __enter__(self) -> LoneWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        self.link.close()
        os.close(self.page.fd)


class Session:
    """A client of the worker: memory, a plan on each model it asks for, and one channel."""

    numbers = iter(range(1, 1 << 30))

    def __init__(self, worker: LoneWorker, slots: int = 16, memory: Memory | None = None, kind: str = "pool") -> None:
        self.worker = worker
        self.number = next(self.numbers)
        self.memory = worker.add_region(Memory(kind=kind) if memory is None else Memory(fd=memory.fd))
        self.twin = Twin(slots)
        self.client: ClientChannel = self.twin.client()
        self.channel = next(worker._channels)
        self._plans = iter(range(1 << 30))

    def attach(self) -> Session:
        message = messages.AttachChannel(channel=self.channel, session=self.number, slots=self.twin.slots)
        twin = self.twin
        self.worker.ask(message, twin.memory_fd, twin.ledger_fd, twin.bell_fd, twin.pipe_write)
        return self

    def bind(self, config: ModelConfig, at: int = 0, positions: int = 16, **fields: object) -> PlanOn:
        """A plan with inputs from byte `at` and outputs 4096 bytes on, one row each, back to back."""
        known: dict[str, object] = {"interface": config.interface, "follow_latest": True, "retryable": True, **fields}
        message = messages.BindPlan(
            session=self.number,
            index=next(self._plans),
            generation=1,
            model=config.name,
            version=1,
            inputs=(self.memory.tensor(spec("x", (1, SIZE), offset=at, stride=ROW)),),
            outputs=(self.memory.tensor(spec("y", (1, SIZE), offset=at + 4096, stride=ROW)),),
            input_positions=positions,
            output_positions=positions,
            rows=1 if config.max_batch_size else 0,
            **known,
        )
        self.worker.ask(message)
        return PlanOn(self, message, at)

    def reap(self) -> None:
        self.client.reap()

    def close(self) -> None:
        self.twin.close()
        os.close(self.memory.fd)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class PlanOn:
    """A bound plan: write, submit, read."""

    def __init__(self, session: Session, message: messages.BindPlan, at: int) -> None:
        self.session = session
        self.message = message
        self.at = at

    def submit(self, value: float, position: int = 0, deadline_ns: int = 0) -> Sent:
        """A request of SIZE times `value`."""
        self.session.memory.put(self.at + ROW * position, np.full(SIZE, value, np.float32))
        pending = Pending()
        word = self.message.index | self.message.generation << 32
        ident = self.session.client.submit(pending, word, position, position, 0, deadline_ns)
        assert ident, "the channel is full"
        return Sent(self, pending, ident, position)

    def infer(self, value: float, position: int = 0) -> float:
        """Submit, wait, and read the result."""
        return self.submit(value, position).result()

    def drop(self) -> None:
        message = self.message
        self.session.worker.ask(
            messages.DropPlan(session=message.session, index=message.index, generation=message.generation)
        )


class Sent:
    """A submitted request."""

    def __init__(self, plan: PlanOn, pending: Pending, ident: int, position: int) -> None:
        self.plan = plan
        self.pending = pending
        self.ident = ident
        self.position = position

    def ended(self) -> bool:
        self.plan.session.client.reap()
        return bool(self.pending.finals)

    def wait(self) -> Sent:
        """Until it has ended, once."""
        eventually(self.ended, "the request ends")
        assert self.pending.finals == 1
        return self

    @property
    def code(self) -> Code:
        return self.pending.code

    @property
    def text(self) -> str:
        return self.pending.text

    def output(self) -> float:
        return float(self.plan.session.memory.get(self.plan.at + 4096 + ROW * self.position, (1,))[0])

    def result(self) -> float:
        self.wait()
        assert self.code is Code.OK, self.text
        return self.output()

    def cancel(self) -> bool:
        return self.plan.session.client.cancel(self.ident)


class Gate:
    """A model that the test holds back: runs with a negative element wait for `let` after they have been `entered`.
    Those with an element `BEAST` fail then.
    """

    BACKEND = """
import os

def load(context):
    return Model(context.config.parameters)

class Model:
    def __init__(self, parameters):
        self.gate = os.open(parameters["gate"], os.O_RDWR)
        self.told = os.open(parameters["told"], os.O_RDWR)

    def bind(self, inputs, outputs):
        return Binding(self, inputs[0].memory.view("<f4"), outputs[0].memory.view("<f4"))

    def close(self):
        os.write(self.told, b"C")
        os.close(self.gate)
        os.close(self.told)

class Binding:
    def __init__(self, model, x, y):
        self.model, self.x, self.y = model, x, y

    def run(self):
        if (self.x < 0).any():
            os.write(self.model.told, b"E")
            os.read(self.model.gate, 1)
        if (self.x == -666).any():
            raise RuntimeError("beast")
        self.y[:] = self.x + 1

    def results(self):
        return []
"""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "1").mkdir(parents=True)
        (directory / "backend.py").write_text(self.BACKEND)
        self._fds = []
        for name in ("gate", "told"):
            os.mkfifo(directory / name)
            self._fds.append(os.open(directory / name, os.O_RDWR | os.O_CLOEXEC))
        self.closed = 0
        self._entered = 0

    def config(self, batch: int = 0, count: int = 1, delay: int = 0, **fields: object) -> ModelConfig:
        """As a model named like the directory."""
        name = self.directory.name
        batching = DynamicBatching(preferred_batch_size=(batch,), max_queue_delay_microseconds=delay)
        dims = (SIZE,) if batch else (1, SIZE)
        known: dict[str, object] = {
            "name": name,
            "platform": "",
            "backend": "gate",
            "directory": str(self.directory),
            "versions": {1: str(self.directory / "1")},
            "default_model_filename": "",
            "max_batch_size": batch,
            "input": (TensorConfig(name="x", datatype="FP32", dims=dims, zero_copy=True),),
            "output": (TensorConfig(name="y", datatype="FP32", dims=dims),),
            "instance_group": (InstanceGroup(name=name, count=count),),
            "dynamic_batching": batching if batch else None,
            "parameters": {"gate": str(self.directory / "gate"), "told": str(self.directory / "told")},
        }
        return ModelConfig(**{**known, **fields})  # type: ignore[arg-type]

    def _listen(self) -> None:
        while select.select([self._fds[1]], [], [], 0)[0]:
            for letter in os.read(self._fds[1], 4096).decode():
                self.closed += letter == "C"
                self._entered += letter == "E"

    def entered(self, count: int = 1) -> None:
        """Wait until `count` more runs wait at the gate."""

        def waiting() -> bool:
            self._listen()
            return self._entered >= count

        eventually(waiting, f"{count} runs wait at the gate")
        self._entered -= count

    def nobody_entered(self) -> bool:
        self._listen()
        return not self._entered

    def closed_are(self, count: int) -> None:
        """Wait until `count` instances have been closed, all in all."""

        def closed() -> bool:
            self._listen()
            return self.closed >= count

        eventually(closed, f"{count} instances are closed")
        assert self.closed == count

    def let(self, count: int = 1) -> None:
        """Let runs through, those that wait or the next ones."""
        os.write(self._fds[0], b"g" * count)

    def close(self) -> None:
        sockets.close_all(self._fds)


def counted(block: memoryview) -> tuple[int, int, int, int]:
    """Endings by their word: success, fail, cancelled, expired."""
    words = (statistics.SUCCESS, statistics.FAIL, statistics.CANCELLED, statistics.EXPIRED)
    return tuple(block[word] for word in words)  # type: ignore[return-value]
