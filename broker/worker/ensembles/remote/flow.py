"""A branch of a flow (`broker.worker.ensembles.flow`) of an ensemble with members in other workers.

Made by `broker.worker.ensembles.remote.elsewhere`. Where tensors lie is as in other runs of such ensembles
(`ensembles.remote.run`). What a branch has in shared memory its children read, so that goes when the flow has done with
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from broker.worker.ensembles.flow import Branch, is_decoupled
from broker.worker.ensembles.memory import Value
from broker.worker.ensembles.remote.run import SpreadRun
from shm.admission import Request


@final
class SpreadBranch(SpreadRun, Branch):
    """See `Branch`."""

    __slots__ = ()

    def leave(self) -> None:
        """See `Branch.leave`: the next flow may use what this one has prepared, unless something failed in it."""
        if self._request.code or self._request.ended:
            self._prepared.dispose()
        else:
            self._ensemble.keep(self._plan, self._request, self._prepared)
        Branch.leave(self)

    def learn(self, written: Mapping[str, Value]) -> None:
        """A response of a member elsewhere is complete: the rooms for the next ones follow."""
        rooms = self._ensemble.rooms
        for tensor, value in written.items():
            if value.byte_size > rooms.get(tensor, 0):
                rooms[tensor] = 1 << (value.byte_size - 1).bit_length()

    def is_over(self) -> bool:
        """See `SpreadRun.is_over`."""
        return self.unwanted() or super().is_over()

    # --- as a run -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        super()._read()
        self._flow.copied(self._request.copied)

    def _collect(self, step: Request) -> list[int]:
        if is_decoupled(step) and not step.code:
            return []  # its responses are branches
        return super()._collect(step)

    def _finish(self) -> None:
        Branch._finish(self)  # what was prepared is kept until `leave`
