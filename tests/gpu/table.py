"""Records the driver's table on this machine and says where the simulator differs from it.

python -m tests.gpu.table hardware.json
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

from shm.cuda import driver
from tests.conformance.cuda_table import CASES, run

SIMULATED = Path(__file__).parents[1] / "conformance" / "cuda_simulated.json"


def main(target: str) -> int:
    device = driver.devices("the table")[0]
    table = {case: run(case) for case in CASES}
    document = {
        "device": device.name,
        "driver": driver.call("cuDriverGetVersion"),
        "date": datetime.date.today().isoformat(),
        "table": table,
    }
    Path(target).write_text(json.dumps(document, indent=1) + "\n")
    simulated = json.loads(SIMULATED.read_text())["table"]
    differences = 0
    for case, facts in table.items():
        for fact in sorted({*facts, *simulated.get(case, {})}):
            here, there = facts.get(fact, "(none)"), simulated.get(case, {}).get(fact, "(none)")
            if here != there:
                differences += 1
                print(f"{case}.{fact}: {device.name} {here!r}, simulator {there!r}")
    print(f"{differences} facts differ")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
