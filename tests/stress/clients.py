"""`python -m tests.stress.clients KIND DIRECTORY COUNTERS_FD BLOCK SEED`: one client process of a stress run."""

from __future__ import annotations

import sys

from tests.stress.array_client import LoopClient, ThreadClient
from tests.stress.broker import die_with_parent
from tests.stress.counters import Counters
from tests.stress.hostile import Hostile
from tests.stress.plan_client import PlanClient

KINDS = ("spinning", "blocking", "threads", "loop", "hostile")


def main(kind: str, directory: str, fd: str, block: str, seed: str) -> None:
    die_with_parent()
    counters = Counters(int(fd))
    tally = counters.tally(int(block))
    match kind:
        case "spinning":
            PlanClient(directory, counters, tally, int(seed), spin_us=50, patience_s=0.02).run()
        case "blocking":  # for long enough to notice a lost wake-up
            PlanClient(directory, counters, tally, int(seed), spin_us=0, patience_s=1.0).run()
        case "threads":
            ThreadClient(directory, counters, tally, int(seed)).run()
        case "loop":
            LoopClient(directory, counters, tally, int(seed)).run()
        case "hostile":
            Hostile(directory, counters, tally, int(seed)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
