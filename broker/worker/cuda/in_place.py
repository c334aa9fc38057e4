"""A lone request whose memory is all a GPU's, run at once on the leader's thread: what makes it one of the hot path's.

`gpu_runs` finds out by a first run that a binding copies nothing; the loop then runs it as it runs those on the host
(`Loop._run_inline`), and comes back to `CudaRunner` with whatever fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import Binding
from broker.worker.binding import Execution
from broker.worker.model import Instance
from broker.worker.plans import Plan
from shm.admission import Request

if TYPE_CHECKING:
    from broker.worker.cuda.windows import Window


@final
class _InPlace:
    """The run, with the hold on its regions. Implements `broker.worker.backends.Binding`."""

    __slots__ = ("_binding", "_windows")

    def __init__(self, binding: Binding, windows: tuple[Window, ...]) -> None:
        self._binding, self._windows = binding, windows

    def run(self) -> None:
        """Raises what the run raises, and InferError NOT_FOUND if memory is gone."""
        held = 0
        try:
            for window in self._windows:
                window.begin()
                held += 1
            self._binding.run()
        finally:
            for window in self._windows[:held]:
                window.finish()

    def results(self) -> list[npt.NDArray[np.generic]]:
        """None: every output has its place."""
        return []


def measured(plan: Plan, instance: Instance, request: Request, binding: Binding, took: int) -> None:
    """A run of `request` copied nothing and took so many ns: if that is short, the next one like it runs at once."""
    if plan.staged or plan.closed is not None or plan.model is not instance.model:
        return
    bindings: dict[tuple[int, int, int, int], Any] = plan.bindings
    key = (instance.number, request.input_position, request.output_position, request.rows)
    found: Execution | None = bindings.get(key)
    if found is None:
        found = bindings[key] = Execution(instance, _InPlace(binding, plan.windows), [], [])
    found.measured(took)
