"""A broker and its worker as one thread of the test's own process, over a real socket, real memory and real channels.

It answers what a client asks, knows six models, and does as told: hold requests back, hang up, come back under a new
epoch. No models are loaded and nothing is checked that the real broker checks.

    double   y = 2 * x, FP32 [-1, -1]         twice   y = 2 * x, FP32 [-1, 4], max_batch_size 8
    nonzero  i = numpy.nonzero(x), open       echo    BYTES in, BYTES out
    spread   y = x, 40,000 times over: more than any client reserves at first
    several  decoupled, x: FP32 [-1], y: INT32 [-1]; the test answers, as `several`
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import clientlib
from shm import datatypes, messages, sockets
from shm.admission import Request, Verdict
from shm.errors import Code, InferError
from shm.layout import Geometry
from shm.memory import sealed_memfd
from shm.messages import ModelMetadata, Prepare, TensorMetadata, TensorSpec
from shm.regions import MappedMemory, check_pool, create_pool
from shm.run_directory import SOCKET
from shm.worker_channel import WorkerChannel

WORKER = "cpu/default"
MAX_CHANNELS = 2


def _tensor(name: str, datatype: str, shape: tuple[int, ...], symbols: tuple[str, ...]) -> TensorMetadata:
    return TensorMetadata(name=name, datatype=datatype, shape=shape, symbols=symbols, zero_copy=True)


def _model(name: str, inputs: TensorMetadata, outputs: TensorMetadata, batch: int = 0) -> ModelMetadata:
    return ModelMetadata(name=name, version="1", inputs=(inputs,), outputs=(outputs,), max_batch_size=batch)


MODELS = {
    model.name: model
    for model in (
        _model("double", _tensor("x", "FP32", (-1, -1), ("a", "b")), _tensor("y", "FP32", (-1, -1), ("a", "b"))),
        _model("twice", _tensor("x", "FP32", (-1, 4), ("", "")), _tensor("y", "FP32", (-1, 4), ("", "")), batch=8),
        _model("nonzero", _tensor("x", "FP32", (-1,), ("n",)), _tensor("i", "INT64", (1, -1), ("", "?i:1"))),
        _model("spread", _tensor("x", "FP32", (-1,), ("n",)), _tensor("y", "FP32", (-1,), ("?y:0",))),
        _model("echo", _tensor("x", "BYTES", (-1,), ("n",)), _tensor("y", "BYTES", (-1,), ("n",))),
    )
}
MODELS["several"] = msgspec.structs.replace(
    _model("several", _tensor("x", "FP32", (-1,), ("n",)), _tensor("y", "INT32", (-1,), ("?y:0",))), decoupled=True
)


class _Plan:
    """What a submission names. `closed` and so on are what the channel's admission asks for."""

    def __init__(self, prepare: Prepare, memories: dict[str, MappedMemory]) -> None:
        self.model = self.model_name = prepare.model
        self.spec_in, self.spec_out = prepare.inputs[0], prepare.outputs[0]
        self.memories = memories
        self.input_positions, self.output_positions = prepare.input_positions, prepare.output_positions
        self.rows = self.spec_in.shape[0] if MODELS[prepare.model].max_batch_size else 0
        self.retryable = True
        self.closed: Verdict | None = None
        self.refused_until_ns = 0
        self.signature: object = None
        self.simple = False
        self.busy = bytearray(prepare.output_positions)
        self.responses = prepare.responses

    def conflict(self, input_position: int, output_position: int) -> str:
        return "output overlaps another" if self.busy[output_position] else ""

    def run(self, request: Request) -> None:
        source = self._bytes(self.spec_in, request.input_position)
        target = self._bytes(self.spec_out, request.output_position)
        note = b""
        if self.model == "echo":
            result = source
            note = struct.pack("<2Q", 1, *self.spec_in.shape)
        else:
            x = source.view(np.float32)
            if self.model == "nonzero":
                indexes = np.stack(np.nonzero(x))
                result = indexes.astype(np.int64).reshape(-1).view(np.uint8)
                note = struct.pack("<3Q", 2, *indexes.shape)
            elif self.model == "spread":
                result = np.tile(x, 40_000).view(np.uint8)
                note = struct.pack("<2Q", 1, 40_000 * x.size)
            else:
                result = (2 * x).view(np.uint8)
                if request.rows:
                    result = result[: request.rows * 16]
        if result.size > target.size:
            request.fail(
                Code.INVALID_ARG,
                f"shared memory size specified with the request for output '{self.spec_out.name}' ({target.size} bytes)"
                f" should be at least {result.size} bytes to hold the results",
            )
        else:
            target[: result.size] = result
            request.note = note
            request.infer_ns, request.copied = 1000, 0

    def _bytes(self, spec: TensorSpec, position: int) -> np.ndarray:
        start = spec.offset + position * spec.stride
        return self.memories[spec.region].bytes[start : start + spec.byte_size]


class _Session:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.memories: dict[str, MappedMemory] = {}
        self.plans: dict[int, Any] = {}
        self.channels: list[tuple[WorkerChannel, tuple[int, ...]]] = []
        self.given_back = 0  # channels, which stay in the list

    def close(self) -> None:
        self.sock.close()
        for channel, fds in self.channels:
            channel.close()
            sockets.close_all(fds)


class SmallBroker:
    """Listens in `directory`. `hold` keeps taken requests; `completed` counts those that ran."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.epoch = 0
        self.hold = False
        self.starting = False  # greet nobody
        self.calls: list[str] = []
        self.closed: list[int] = []  # channels that were given back
        self.workers: dict[str, str] = {}  # by model; WORKER has the others
        self.deadlines: list[int] = []  # of the submissions, as they came
        self.answers: dict[str, Callable[[Any], Any]] = {}  # what to answer instead, by type of request
        self.several: Callable[[Request], bool] = lambda request: True  # runs a request; does it end now?
        self._held: list[Request] = []
        self._completed = 0
        self._completing = threading.Lock()
        self._generation = 0
        self._fence = threading.Lock()
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self._stopping = False
        self._sessions: list[_Session] = []
        self._listener = sockets.seqpacket()
        path = self.directory / SOCKET
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """As if killed: sessions end, and the write ends of all pipes close."""
        if self._thread is not None:
            self._stopping = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(10)
            assert not self._thread.is_alive()
            self._thread = None
            os.close(self._wake)
            (self.directory / SOCKET).unlink()

    @property
    def completed(self) -> int:
        """How many requests ran, with all whose end a client may have seen."""
        with self._completing:
            return self._completed

    def release(self) -> None:
        """Let go of what was held back."""
        self.hold = False
        os.eventfd_write(self._wake, 1)

    def reload(self) -> None:
        """As if every model had got another signature: the plans that there are take no request any more."""
        for session in self._sessions:
            for plan in session.plans.values():
                plan.closed = (Code.UNAVAILABLE, "the model was reloaded: prepare the plan again")

    # --- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stopping:
            self._turn()
        for session in self._sessions:
            session.close()
        self._sessions.clear()  # a mapping keeps a descriptor
        self._held.clear()
        self._listener.close()

    def _turn(self) -> None:
        poller = select.poll()
        for fd in (self._listener, self._wake, *(session.sock for session in self._sessions)):
            poller.register(fd, select.POLLIN)
        channels = [channel for session in self._sessions for channel, _ in session.channels]
        for channel in channels:
            poller.register(channel.bell, select.POLLIN)
            channel.arm()
        with self._fence:  # either the client sees that we sleep, or we see what it published
            pass
        busy = any(channel.pending() for channel in channels)
        poller.poll(0 if busy else 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._sessions.append(_Session(sock))
        for session in list(self._sessions):
            self._listen(session)
        for session in self._sessions:
            for channel, _ in session.channels:
                self._work(channel)
        if not self.hold:  # what was held back ends before what comes after its release
            held, self._held = self._held, []
            for request in held:
                self._run(request)

    def _work(self, channel: WorkerChannel) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(channel.bell)
        out: list[Request] = []
        # What is held back was taken in time, however late this thread is.
        notable = channel.take(64, 1 if self.hold else time.monotonic_ns(), out)
        self.deadlines += [request.deadline for request in out]
        for request, was_admitted in notable:
            if was_admitted:
                request.fail(Code.CANCELLED, "the request was cancelled")
                self._held = [held for held in self._held if held is not request]
            channel.complete([request])
        self._held.extend(out)

    def _run(self, request: Request) -> None:
        assert isinstance(request.plan, _Plan)
        if request.plan.responses:
            if not self.several(request):
                return
        else:
            request.plan.run(request)
        with self._completing:
            request.channel.complete([request])
            self._completed += 1

    def _listen(self, session: _Session) -> None:
        try:
            received = sockets.receive(session.sock)
        except BlockingIOError:
            return
        if received is None:
            self._sessions.remove(session)
            self._held = [held for held in self._held if held.channel not in [c for c, _ in session.channels]]
            session.close()
            return
        data, fds = received
        asked = messages.decode_request(data)
        self.calls.append(type(asked).__name__)
        out: list[int] = []
        try:
            make = self.answers.get(type(asked).__name__)
            reply = make(asked) if make is not None else self._answer(session, asked, fds, out)
        except InferError as error:
            reply = messages.Failure(code=error.code, message=error.message)
        if reply is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # whoever asked may be gone
                sockets.send(session.sock, messages.encode(_with_id(reply, asked.id)), out)
        sockets.close_all([*fds, *out])

    def _answer(self, session: _Session, asked: Any, fds: list[int], out: list[int]) -> Any:
        match asked:
            case messages.Hello():
                if self.starting:
                    return messages.Starting(done=3, total=7)
                return messages.Welcome(
                    protocol=1, epoch=str(self.epoch), session=1, version="0", max_channels=MAX_CHANNELS
                )
            case messages.GetModels():
                return messages.Models(models=tuple(MODELS.values()))
            case messages.GetModel(model=name):
                if name not in MODELS:
                    raise InferError(Code.INVALID_ARG, f"Request for unknown model: '{name}' is not found")
                return messages.Models(models=(MODELS[name],))
            case messages.RegisterPool(name=name, byte_size=size):
                check_pool(fds[0], size)
                return self._register(session, name, fds[0], size, "pool")
            case messages.OpenRegion(name=name):
                out.append(create_pool(4096))
                return self._register(session, name, out[0], 4096, "pool")
            case messages.Unregister(name=name):
                session.memories.pop(name, None)
                return messages.Done()
            case messages.ShareRegion():
                return messages.Token(token="token")
            case messages.ListRegions():
                sizes = {name: memory.byte_size for name, memory in session.memories.items()}
                records = (messages.RegionRecord(name=n, kind="pool", byte_size=s) for n, s in sizes.items())
                return messages.Regions(regions=tuple(records))
            case Prepare():
                return self._prepare(session, asked)
            case messages.Release(index=index, generation=generation):
                session.plans.pop(index | generation << 32, None)
                return messages.Done()
            case messages.OpenChannel(slots=slots):
                return self._open_channel(session, slots, out)
            case messages.CloseChannel(channel=number):
                self.closed.append(number)
                session.given_back += 1
                return messages.Done()
            case messages.GetStatistics():
                return messages.Statistics(model_stats=({"name": "double"},))
        return messages.Done()

    def _register(self, session: _Session, name: str, fd: int, size: int, kind: str) -> Any:
        if name in session.memories:
            raise InferError(Code.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")
        session.memories[name] = MappedMemory(fd, 0, size, True)
        return messages.RegionInfo(name=name, kind=kind, region=1, generation=1, byte_size=size, file_size=size)

    def _prepare(self, session: _Session, asked: Prepare) -> Any:
        model = MODELS[asked.model]
        for spec, expected in zip(asked.inputs, model.inputs, strict=True):
            if spec.datatype != expected.datatype:
                raise InferError(
                    Code.INVALID_ARG,
                    f"inference input '{spec.name}' data-type is '{spec.datatype}', but model '{model.name}' expects "
                    f"'{expected.datatype}'",
                )
            if spec.datatype != "BYTES":
                assert spec.byte_size == datatypes.byte_size(spec.datatype, spec.shape)
        self._generation += 1
        plan = _Plan(asked, dict(session.memories))
        session.plans[7 | self._generation << 32] = plan
        worker = self.workers.get(asked.model, WORKER)
        return messages.Prepared(index=7, generation=self._generation, worker=worker, model_version="1", rows=plan.rows)

    def _open_channel(self, session: _Session, slots: int, out: list[int]) -> Any:
        if len(session.channels) - session.given_back >= MAX_CHANNELS:
            raise InferError(Code.UNAVAILABLE, f"too many channels: a session has at most {MAX_CHANNELS}")
        slots = 1 << (slots - 1).bit_length()
        geometry = Geometry(slots)
        memory = sealed_memfd("test-channel", geometry.channel_bytes)
        ledger = sealed_memfd("test-ledger", geometry.ledger_bytes)
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        pipe_read, pipe_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        channel = WorkerChannel(memory, ledger, bell, pipe_write, slots, session.plans)
        channel.arm()
        session.channels.append((channel, (memory, ledger, bell, pipe_write)))
        out += [os.dup(memory), os.dup(bell), pipe_read]
        return messages.ChannelInfo(channel=len(session.channels), worker=WORKER, slots=slots)


def _with_id(reply: Any, number: int) -> Any:
    return reply if isinstance(reply, messages.Starting) else msgspec.structs.replace(reply, id=number)


def connect(broker: SmallBroker, **options: Any) -> clientlib.Client:
    return clientlib.connect(f"ipc://{broker.directory}", **options)


def doubling(client: clientlib.Client, slots: Any = 1) -> tuple[clientlib.Region, clientlib.Plan]:
    """A region and a plan of `double` on it: x (1, 4) at 0, y (1, 4) at 2048."""
    region = client.create_region("r", 4096)
    x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", offset=2048)
    region.array((8, 4), np.float32)[:] = np.arange(32).reshape(8, 4)
    return region, client.prepare("double", {"x": x}, {"y": y}, slots=slots)
