"""What a run of an ensemble with members elsewhere leaves to the next: memory, plans here, and plans in other workers.

Used by `broker.worker.ensemble_remote` and `ensemble_remote_run`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, final

from broker.repository.config import RemoteMember
from broker.repository.scheduling import Step
from broker.worker.ensemble_graph import Needed
from broker.worker.ensemble_memory import Prepared, Shape, Value, private
from broker.worker.ensemble_remote_memory import Block, SharedMemory
from broker.worker.ensemble_remote_session import StepSession
from broker.worker.plans import PlacedTensor, Plan
from shm import datatypes
from shm.errors import Code, InferError
from shm.message_values import TensorSpec
from shm.messages import Prepare, PrepareStep, Release, Reply
from shm.messages import Prepared as Answer
from shm.sockets import close_all

if TYPE_CHECKING:
    from broker.worker.ensemble_remote import SpreadEnsemble

Key = tuple[object, ...]
ROOM = 4096  # of an output elsewhere whose size is unknown; the largest so far is remembered


@final
class Bound:
    """The plan of a step in another worker, asked for when this is made."""

    __slots__ = ("_error", "_lock", "_memory", "_released", "_session", "_word", "plan")

    def __init__(self, session: StepSession, memory: SharedMemory, plan: Plan, message: PrepareStep) -> None:
        self.plan = plan  # the same here, for which nothing runs
        self._session = session
        self._memory = memory
        self._lock = threading.Lock()
        self._word = 0
        self._error: InferError | None = None
        self._released = False
        session.call(message, self._answered)

    def word(self) -> int:
        """What submissions name it by, 0 while it is not known. Raises InferError if it cannot be had."""
        if self._error is not None:
            raise self._error
        return self._word

    def release(self) -> None:
        """No request of it is under way, and none will be."""
        with self._lock:
            known, self._released = self._word, True
        if known:
            self._let_go(known)

    def _answered(self, reply: Reply | InferError, fds: list[int]) -> None:
        close_all(fds)
        if not isinstance(reply, Answer):
            names = (tensor.region.info.name for tensor in (*self.plan.inputs, *self.plan.outputs))
            refused = self._memory.refusal(names)  # if so, that there is no such region says nothing
            self._error = refused or (reply if isinstance(reply, InferError) else InferError(Code.INTERNAL, "no plan"))
            return
        with self._lock:
            self._word = reply.index | reply.generation << 32
            released = self._released
        if released:
            self._let_go(self._word)

    def _let_go(self, word: int) -> None:
        self._session.call(Release(index=word & 0xFFFF_FFFF, generation=word >> 32))


@final
class SharedPrepared(Prepared):
    """One run's at a time. `key`: of runs that it may serve."""

    __slots__ = ("_blocks", "_ensemble", "bound", "key")

    def __init__(self, needed: Needed, epoch: int, key: Key, ensemble: SpreadEnsemble) -> None:
        super().__init__(needed, epoch)
        self.key = key
        self._ensemble = ensemble
        self._blocks: dict[str, Block] = {}
        self.bound: dict[int, Bound] = {}

    @property
    def byte_size(self) -> int:
        """Of this worker's memory, what it shares with others included."""
        return sum(block.byte_size for block in self._blocks.values()) + super().byte_size

    def own_place(self, name: str, datatype: str, shape: Shape) -> Value:
        """See `Prepared.own_place`: shared if a step elsewhere reads or writes it and its size is bounded."""
        ensemble = self._ensemble
        known = datatype != datatypes.BYTES and -1 not in shape
        if name in ensemble.written:
            size = datatypes.byte_size(datatype, list(shape)) if known else ensemble.rooms.get(name, ROOM)
            return self.shared(name, datatype, shape, size)
        if known and name in ensemble.shared:
            return self.shared(name, datatype, shape, datatypes.byte_size(datatype, list(shape)))
        return private(datatype, shape)

    def shared(self, name: str, datatype: str, shape: Shape, byte_size: int) -> Value:
        """The place of an ensemble's tensor in shared memory; what lay there is lost."""
        block = self._blocks.get(name)
        if block is None or block.byte_size < byte_size:
            if block is not None:
                del self._blocks[name]
                self._forget(block)
            block = self._blocks[name] = self._ensemble.memory.allocate(byte_size)
        return Value(datatype, shape, block.region, block.offset, byte_size)

    def bind(self, at: int, plan: Plan, step: Step, member: RemoteMember, owner: int) -> Bound:
        """Have the plan of a step prepared where its member is, unless it is that which was prepared last."""
        bound = self.bound.get(at)
        if bound is None or bound.plan is not plan:
            if bound is not None:
                bound.release()
            wanted = Prepare(
                model=step.model_name,
                version=str(step.model_version) if step.model_version > 0 else "",
                worker=member.worker,
                inputs=tuple(map(_spec, plan.inputs)),
                outputs=tuple(map(_spec, plan.outputs)),
                parameters=dict(plan.parameters),
            )
            retry = member.retry and self._ensemble.model.config.retryable
            message = PrepareStep(plan=wanted, owner=owner if member.sequences else 0, retry=retry)
            bound = self.bound[at] = Bound(self._ensemble.session, self._ensemble.memory, plan, message)
        return bound

    def dispose(self) -> None:
        """No run will use it again."""
        bound, self.bound = self.bound, {}
        for each in bound.values():
            each.release()
        blocks, self._blocks = self._blocks, {}
        self._ensemble.memory.free(list(blocks.values()))

    def _forget(self, block: Block) -> None:
        """Nothing is under way there, but plans elsewhere may still name it."""
        for at, bound in list(self.bound.items()):
            if any(
                t.region is block.region and t.place.offset == block.offset
                for t in (*bound.plan.inputs, *bound.plan.outputs)
            ):
                self.bound.pop(at).release()
        self._ensemble.memory.free([block])


def _spec(tensor: PlacedTensor) -> TensorSpec:
    return TensorSpec(
        name=tensor.name,
        region=tensor.region.info.name,
        datatype=tensor.datatype,
        shape=tensor.shape,
        offset=tensor.place.offset,
        byte_size=tensor.place.byte_size,
    )
