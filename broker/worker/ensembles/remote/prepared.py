"""What a run of an ensemble with members elsewhere leaves to the next: memory, plans here, and plans in other workers.

Used by `broker.worker.ensembles.remote.elsewhere`, which keeps it in a `Pool`, and `ensembles.remote.run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from broker.repository.config import RemoteMember
from broker.repository.scheduling import Step
from broker.worker.ensembles.graph import Needed
from broker.worker.ensembles.memory import Prepared, Shape, Value, private
from broker.worker.ensembles.remote.memory import Block
from broker.worker.ensembles.remote.places import Places, room_of
from broker.worker.ensembles.remote.plans import Bound, least_of, prepare_of
from broker.worker.plans import Plan
from shm import datatypes
from shm.errors import InferError
from shm.messages import PrepareStep

if TYPE_CHECKING:
    from broker.worker.ensembles.remote.elsewhere import SpreadEnsemble

Key = tuple[object, ...]
LIGHT = 256 << 10  # bytes of a run's tensors: copying more takes longer than to wake somebody who does
ROOM = 4096  # of an output elsewhere whose size is unknown; the largest so far is remembered


@final
class SharedPrepared(Prepared):
    """One run's at a time. `key`: of runs that it may serve. `put_aside_ns`: when, see `ensembles.remote.pool`."""

    __slots__ = ("_blocks", "_ensemble", "_places", "bound", "key", "put_aside_ns")

    def __init__(self, needed: Needed, epoch: int, key: Key, ensemble: SpreadEnsemble) -> None:
        super().__init__(needed, epoch)
        self.key = key
        self.put_aside_ns = 0
        self._ensemble = ensemble
        self._blocks: dict[str, Block] = {}
        self._places: dict[int, Places] = {}  # of steps of decoupled members
        self.bound: dict[int, Bound] = {}

    @property
    def byte_size(self) -> int:
        """Of this worker's memory, what it shares with others included."""
        shared = sum(block.byte_size for block in self._blocks.values())
        return shared + sum(places.byte_size for places in self._places.values()) + super().byte_size

    @property
    def light(self) -> bool:
        """Is everything made that a run of its kind needs, and small?"""
        return 0 < self.kept <= LIGHT

    def own_place(self, name: str, datatype: str, shape: Shape) -> Value:
        """See `Prepared.own_place`: shared if a step elsewhere reads or writes it and its size is bounded."""
        ensemble = self._ensemble
        known = datatype != datatypes.BYTES and -1 not in shape
        if known and name in ensemble.shared:
            return self.shared(name, datatype, shape, datatypes.byte_size(datatype, list(shape)))
        if name in ensemble.written:
            block = self._blocks.get(name)  # which may be larger already, for what will not be remembered
            try:
                size = max(ensemble.rooms.get(name, ROOM), block.byte_size if block is not None else 0)
                return self.shared(name, datatype, shape, size)
            except InferError:
                ensemble.rooms.pop(name, None)  # others need less
                raise
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
        ensemble = self._ensemble
        places = self._places_of(at, plan, step) if member.config.decoupled else None
        bound = self.bound.get(at)
        if bound is not None and bound.plan is plan and bound.places is places:
            return bound
        if bound is not None:
            self.bound.pop(at).release()
        ensemble.plans.more()
        lanes = [ensemble.session.lane(worker, streams=places is not None) for worker in member.workers]
        now, turn = ensemble.now_and_turn()
        first = least_of(lanes, now, turn) or lanes[0]
        message = PrepareStep(
            plan=prepare_of(plan, step.model_name, step.model_version, first.worker, places),
            owner=owner if member.sequences else 0,
            retry=member.retry and ensemble.model.config.steps_retryable,
            credit=None if places is None else places.credit(),
        )
        bound = self.bound[at] = Bound(
            ensemble.session, ensemble.memory, ensemble.plans, plan, message, member.workers, places
        )
        return bound

    def dispose(self) -> None:
        """No run will use it again."""
        bound, self.bound = self.bound, {}
        for each in bound.values():
            each.release()
        blocks, self._blocks = self._blocks, {}
        self._ensemble.memory.free(list(blocks.values()))
        places, self._places = self._places, {}
        for each_places in places.values():
            each_places.free()

    def _places_of(self, at: int, plan: Plan, step: Step) -> Places:
        rooms = [
            room_of(tensor.datatype, tensor.shape, self._ensemble.rooms.get(step.output_map[tensor.name], 0))
            for tensor in plan.outputs
        ]
        places = self._places.get(at)
        if (
            places is None
            or [each.name for each in places.outputs] != [each.name for each in plan.outputs]
            or not (places.have(rooms))
        ):
            if places is not None:
                if at in self.bound:
                    self.bound.pop(at).release()
                del self._places[at]
                places.free()
            places = self._places[at] = Places(self._ensemble.memory, plan.outputs, step.output_map, rooms)
        return places

    def _forget(self, block: Block) -> None:
        """Nothing is under way there, but plans elsewhere may still name it."""
        for at, bound in list(self.bound.items()):
            if any(
                t.region is block.region and t.place.offset == block.offset
                for t in (*bound.plan.inputs, *bound.plan.outputs)
            ):
                self.bound.pop(at).release()
        self._ensemble.memory.free([block])
