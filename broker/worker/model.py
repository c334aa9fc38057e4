"""A loaded model version: its instances, its queue, and what it is known to cost.

Owned by the control thread (load, unload) and used by the loop. An instance runs one batch at a time; only the thread
that runs it touches its statistics block and its buffers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import numpy as np
import numpy.typing as npt

from broker.repository.config import InstanceGroup, ModelConfig
from broker.worker import backends
from broker.worker.assembly import assembly_of
from broker.worker.backends import Backend, Binding, Context, NoRuntime, Operand, RuntimeModel, load_instance
from broker.worker.batcher import SingleQueue, has_timeouts, queue_for, scheduler_delay
from broker.worker.buffers import BatchBuffers, aligned_buffer
from broker.worker.counting import Counted
from broker.worker.in_order import InOrder
from broker.worker.queue_bytes import bounded
from broker.worker.queues import Queue
from broker.worker.rate_limiter import Claim
from broker.worker.reshape import reshapes
from broker.worker.sequence_endings import Endings, tell, wants
from broker.worker.sequences import Sequences
from broker.worker.tracebacks import complain
from broker.worker.warm_up import warm_up
from shm import statistics
from shm.admission import Verdict
from shm.errors import Code, described, forget_frames
from shm.parameters import Parameter

if TYPE_CHECKING:
    from broker.worker.cached import Cached
    from broker.worker.cuda.execute import CudaRunner
    from broker.worker.ensembles.ensemble import Ensemble
    from broker.worker.streams import Streams

MAX_KINDS = 32  # of batches, each with memory and bindings of its own
RECHECK = 100  # batches after which it is looked at again whether batching has come to pay
LONG_NS = 2_000_000  # a run this long does not feel what a run of its own costs a request: 50 to 100 µs
_numbers = itertools.count(1)
_log = logging.getLogger(__name__)


def not_loaded(model: str) -> Verdict:
    """Of requests that have not begun."""
    return Code.UNAVAILABLE, f"model '{model}' is not loaded"


@final
class Instance(Counted):
    """One execution slot of a model version."""

    __slots__ = (
        "_before",
        "_scratch",
        "_told",
        "buffers",
        "index",
        "longest",
        "model",
        "name",
        "number",
        "runtime",
    )

    def __init__(self, model: LoadedModel, name: str, runtime: RuntimeModel, block: memoryview, index: int = 0) -> None:
        super().__init__(block)
        self.model = model
        self.index = index  # among those of the model
        self.name = name
        self.number = next(_numbers)  # never reused: bindings of an instance that is gone cannot be found again
        self.runtime = runtime
        self.longest: dict[int, int] = {}  # rows → ns of the longest run: what a hang is measured by
        self.buffers: dict[object, BatchBuffers] = {}
        self._scratch: dict[tuple[str, str], npt.NDArray[np.uint8]] = {}
        self._told = -1
        self._before = block[statistics.LONGEST], block[statistics.LARGEST]  # in the worker that this one replaces
        block[statistics.BATCH] = 0  # a worker that died here left its batch behind

    def scratch(self, side: str, tensor: str, byte_size: int) -> npt.NDArray[np.uint8]:
        """Private memory for one tensor ("input" or "output") of the batch that runs: all plans use the same.

        It grows by doubling, so that what older bindings keep is at most as much again.
        """
        found = self._scratch.get((side, tensor))
        if found is None or found.size < byte_size:
            found = self._scratch[side, tensor] = aligned_buffer(1 << (byte_size - 1).bit_length() if byte_size else 0)
        return found[:byte_size]

    def keep_buffers(self, key: object, buffers: BatchBuffers) -> None:
        """For the next batch of this kind, in place of the oldest: clients choose the shapes, so there is no end."""
        if len(self.buffers) >= MAX_KINDS:
            self.buffers.pop(next(iter(self.buffers)))
        self.buffers[key] = buffers

    def close(self) -> None:
        """Give the runtime's memory back, and the instance's own. What its backend raises is for the log."""
        if self.model.runner is not None:
            self.model.runner.forget(self)
        self.buffers.clear()
        self._scratch.clear()
        self.leaves()
        try:
            self.runtime.close()
        except BaseException as error:
            _log.error("model '%s': close of its backend raised %s", self.model.name, described(error))
            complain(self.model.config, error)
            forget_frames(error)
        self.runtime = NoRuntime()  # the model and its instances refer to each other until Python looks for cycles
        self.has_left()

    def bind(
        self, inputs: list[Operand], outputs: list[Operand], rows: int, parameters: Mapping[str, Parameter]
    ) -> Binding:
        """Have the runtime prepare a run of so many rows, with the hang watch on. What it takes is no run."""
        began = time.monotonic_ns()
        self.begin(rows, began)
        try:
            made = backends.bind(self.runtime, inputs, outputs, parameters)
            if backends.gives_parameters(made):
                self.model.give_parameters()
            return made
        finally:
            self.end(rows, 0)
            self._keep(time.monotonic_ns() - began, 0)

    def begin(self, rows: int, now: int) -> None:
        """Tell the broker what runs, so that it can see a hang."""
        block = self.block
        block[statistics.STARTED] = now
        expected = self.longest.get(rows) or self._expected(rows)
        if expected != self._told:
            self._told = block[statistics.EXPECTED] = expected
        block[statistics.BATCH] = rows or 1

    def end(self, rows: int, took: int) -> None:
        """The run is over."""
        self.block[statistics.BATCH] = 0
        if took > self.longest.get(rows, 0):
            self.longest[rows] = took
            self._keep(took, rows + 1)

    def _expected(self, rows: int) -> int:
        """The longest run at this size or larger; 0 = unmeasured.

        In a replacement that has measured none: whatever took longest before, the first run and preparations included,
        since it has those before it again.
        """
        longest, largest = self._before
        before = longest if rows < largest else 0
        return max((took for size, took in self.longest.items() if size >= rows), default=before)

    def _keep(self, took: int, largest: int) -> None:
        """For a replacement of this worker."""
        block = self.block
        block[statistics.LONGEST] = max(block[statistics.LONGEST], took)
        block[statistics.LARGEST] = max(block[statistics.LARGEST], largest)


@final
class LoadedModel:
    """One version of one model. `closed` says why it takes no requests any more."""

    __slots__ = (
        "_may_share",
        "alone",
        "answers",
        "assembly",
        "cached",
        "claims",
        "closed",
        "config",
        "copied",
        "count",
        "device",
        "endings",
        "ensemble",
        "files",
        "free",
        "generation",
        "gives_parameters",
        "held",
        "immediate",
        "in_order",
        "instances",
        "intake",
        "pins",
        "queue",
        "reads_parameters",
        "reshapes",
        "resting",
        "runner",
        "shares",
        "streams",
        "timed",
        "uncertain",
        "unproven",
        "version",
    )

    def __init__(self, config: ModelConfig, version: int, generation: int, device: str = "") -> None:
        self.config = config
        self.device = device
        self.version = version
        self.generation = generation
        self.instances: list[Instance] = []
        self.free: list[Instance] = []
        self.count = instance_count(config.instance_group) or 1  # what it is to have (see `resizing`)
        self.files: tuple[tuple[str, str], ...] | None = None  # that it was loaded from (see `resizing`)
        self.resting: list[Instance] = []  # those beyond, when they have nothing to do any more
        self.queue: Queue = queue_for(config, instance_count(config.instance_group))
        self.closed: Verdict | None = None
        batching = config.dynamic_batching
        self.timed = has_timeouts(config)
        self.alone = isinstance(self.queue, SingleQueue)  # every request runs alone
        self.queue = bounded(self.queue, config)
        # Does a lone request go as soon as an instance is free?
        self.immediate = batching is None or not batching.max_queue_delay_microseconds
        self.answers = config.ensemble is not None  # without an instance of its own; see also `keep_answers`
        self.intake = self.answers  # its requests meet `broker.worker.intake` before its queue
        self.held = 0  # requests that wait there; under the lock of `broker.worker.held`
        self.cached: Cached | None = None
        self.claims: tuple[Claim, ...] = ()  # of its instances; () when no rate limiter has a say
        self.ensemble: Ensemble | None = None
        self.reads_parameters = False  # of requests: only those with equal ones run together
        self.gives_parameters = False  # with responses, as its first binding shows
        self.endings: Endings | None = None  # of sequences, if its backend is to be told
        self.pins = 0  # runs of ensembles that are going to use it, or are at it; under the model table's lock
        self.streams: Streams | None = None
        self.runner: CudaRunner | None = None  # of its batches, once it has to do with GPUs
        self.shares = 0  # since all that waits was last given to one instance
        most = config.max_batch_size
        self._may_share = self.immediate and batching is not None and batching.preferred_batch_size in ((), (most,))
        several = instance_count(config.instance_group) > 1
        self.in_order = InOrder() if batching is not None and batching.preserve_ordering and several else None
        if self.in_order is not None or (batching is not None and scheduler_delay()):
            self.alone = self.immediate = False
        self.assembly = None if config.decoupled else assembly_of(config)
        if self.assembly is not None or config.decoupled:
            self.alone = self.immediate = False
        self.copied = frozenset(tensor.name for tensor in config.input if not tensor.zero_copy)
        self.reshapes = reshapes(config)
        # Outputs of runtimes whose files nobody has read: what they give may be anything.
        batch = (-1,) if most else ()
        self.unproven = {tensor.name: (*batch, *tensor.dims) for tensor in config.output if tensor.file_rank < 0}
        # Outputs whose shape only a run tells, whatever a plan says of it.
        self.uncertain = frozenset(
            tensor.name for tensor in config.output if any(symbol.startswith("?") for symbol in tensor.symbols)
        )

    @property
    def name(self) -> str:
        """The model's name."""
        return self.config.name

    def shape(self, tensor: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The runtime's shape of a tensor that has `shape` in a plan."""
        reshape = self.reshapes.get(tensor)
        return shape if reshape is None else reshape.to_model(shape)

    def share(self, instance: Instance) -> int:
        """How many of the requests that wait `instance` should take; 0 = as many as fit in a batch.

        With several instances, a batch that takes as long as its rows would one by one only keeps work from instances
        that are about to be free, and its answers back until all are there. Where the instance's own runs show that
        (less than a fifth is won per row), those that wait are shared out; where nearly nothing is won and runs are
        long, one by one: what runs alone runs in place, without a copy. Waiting for more, or for preferred sizes, is
        the configuration's to decide and never changed.
        """
        instances, waiting = len(self.instances), min(len(self.queue), self.config.max_batch_size)
        if instances == 1 or waiting < 2 or not self._may_share:
            return 0
        part, typical = max(1, waiting // instances), instance.typical
        # As many as it has shown of these. A copy: inline runs of other threads add to it.
        most = max((rows for rows in list(typical) if 1 < rows <= waiting), default=0)
        whole, piece, single = typical.get(most, 0), typical.get(part, 0), typical.get(1, 0)
        self.shares += 1
        if whole and self.shares <= RECHECK:
            if single >= LONG_NS and 100 * whole >= 97 * single * most:
                return 1
            if piece and 5 * whole * part >= 4 * piece * most:
                return part
        self.shares = 0
        return 0

    def reach_gpus(self) -> None:
        """It is on a GPU, or clients' memory is: its batches are for `broker.worker.cuda.execute` from here on."""
        self.intake = True  # their clients may not be done with it
        if self.runner is None:
            from broker.worker.cuda.execute import CudaRunner

            self.runner = CudaRunner()

    def load(self, backend: Backend, directory: str, blocks: list[memoryview]) -> None:
        """Load and warm up every instance. Raises InferError, or whatever the backend raises."""
        places = iter(blocks)
        for group in self.config.instance_group:
            for number in range(group.count):
                name = f"{group.name}_{number}"
                context = Context(self.config, self.version, directory, group, name, self.device)
                instance = Instance(self, name, load_instance(backend, context), next(places), len(self.instances))
                self.instances.append(instance)
                self.reads_parameters = backends.reads_parameters(instance.runtime)
                if getattr(instance.runtime, "lane", None) is not None:
                    self.reach_gpus()
                warm_up(self.config, instance.runtime, self.shape)
        if isinstance(self.queue, Sequences):
            self.queue.endings.wanted = any(wants(instance.runtime) for instance in self.instances)
            self.endings = self.queue.endings if self.queue.endings.wanted else None
        self.free = list(self.instances)

    def pending(self) -> int:
        """How many requests wait in its queue, which also holds what it is to be told of sequences."""
        return len(self.queue) - (0 if self.endings is None else len(self.endings))

    def tells(self, instance: Instance) -> bool:
        """Is there a sequence whose end the instance does not know of yet?"""
        return self.endings is not None and self.endings.waiting(instance.index)

    def free_again(self, instance: Instance) -> None:
        """It has run. Caller: the scheduler, with its lock."""
        (self.free if instance.index < self.count else self.resting).append(instance)

    def surplus(self) -> list[Instance]:
        """Take out the instances that are too many and have nothing to do. Caller: the scheduler, with its lock."""
        gone, self.resting = self.resting, []
        for instance in [each for each in self.instances if each.index >= self.count and each not in gone]:
            with contextlib.suppress(ValueError):  # it runs; the inline path takes and returns without the lock
                self.free.remove(instance)
                gone.append(instance)
        self.instances = [instance for instance in self.instances if instance not in gone]
        return gone

    def load_ensemble(self, block: memoryview) -> None:
        """What stands for the instances of an ensemble, which has none: statistics. Its steps run on members."""
        self.instances = [Instance(self, self.name, NoRuntime(), block)]
        self.instances[0].forms_batches = False
        self.free = list(self.instances)
        self.alone = self.immediate = False

    def limit(self, claims: tuple[Claim, ...]) -> None:
        """Before it serves: its instances run only as the rate limiter lets them, so nothing runs at once."""
        self.claims = claims
        self.alone = self.immediate = self._may_share = False

    def keep_answers(self, cached: Cached) -> None:
        """Before it serves. What is kept is read from the instances' own copies, so nothing runs on clients' memory."""
        self.cached = cached
        self.answers = self.intake = True
        self.copied = frozenset(tensor.name for tensor in self.config.input)
        self.alone = self.immediate = False

    def give_parameters(self) -> None:
        """Its responses have some: what runs at once is answered without a note. Before the first binding runs."""
        self.gives_parameters = True
        self.alone = self.immediate = False

    def look(self, now: int) -> bool:
        """End streams that nobody can answer or wants, and what is kept too long. Is any left? (Control thread)"""
        if self.streams is not None:
            self.streams.look()
        kept = self.ensemble is not None and self.ensemble.expire(now)
        return kept or bool(self.streams)

    def flush(self) -> None:
        """Write the statistics of what has run inline."""
        if self.ensemble is not None:
            self.ensemble.flush()
            return
        for instance in self.instances:
            instance.flush()

    def close(self) -> None:
        """Give the runtimes' memory back. Nothing runs any more."""
        if self.cached is not None:
            self.cached.close()
        if self.ensemble is not None:
            self.ensemble.close()
        for instance in self.instances:
            if isinstance(self.queue, Sequences):
                tell(instance, self.queue.unload(instance.index))
            instance.close()


def instance_count(groups: tuple[InstanceGroup, ...]) -> int:
    """How many statistics blocks a model version needs."""
    return sum(group.count for group in groups)
