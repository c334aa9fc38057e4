"""What one worker needs of all of them: `broker.workers.Workers`, as `broker.logical_worker` sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from broker.coroner import PlanBook
from broker.statistics_blocks import StatisticsBlocks
from broker.worker.messages import Predecessor, Start
from broker.worker_process import WorkerProcess

if TYPE_CHECKING:
    from broker.logical_worker import Worker


class Owner(Protocol):
    """What a worker needs of `broker.workers.Workers`."""

    blocks: StatisticsBlocks
    load_s: float
    model_load_deaths: int
    model_loads: int
    ping_every_s: float
    ping_limit_s: float
    plans: PlanBook | None
    rest_after_s: float
    on_channel_broken: Callable[[int, str], None]
    on_model_lost: Callable[[str, int, int, str], None]
    on_session_wanted: Callable[[WorkerProcess], None]

    def first_message(self, worker: str, block: int, before: Predecessor | None) -> Start:
        """What a new process of `worker` is told before anything else."""

    def blame(self, session: int, model: str, now_ns: int, dead: Worker | None = None) -> None:
        """A request of `session` was alone when its worker's process died for the second time; `dead`: just now."""

    def quarantine(self, region: int, generation: int) -> None:
        """This region was truncated: no worker may map it again."""
