"""`python -m tests.stress.victim DIRECTORY`: a client that is to be killed, with as much as a session can own.

50 regions, as many channels as there may be, requests in flight on all of them. Says "ready" then.
"""

from __future__ import annotations

import sys
import threading
import time

import clientlib
from tests.stress.broker import die_with_parent
from tests.stress.models import COLUMNS, SLOW

REGIONS, CHANNELS = 50, 64
SIZE = 64 * 1024


def main(directory: str) -> None:
    die_with_parent()
    client = clientlib.connect(f"ipc://{directory}")
    regions = [client.create_region(f"region{number}", SIZE) for number in range(REGIONS)]
    shape = (1, COLUMNS)
    plans = [
        client.prepare(
            SLOW.name,
            inputs={"x": region.tensor(shape, "FP32")},
            outputs={"y": region.tensor(shape, "FP32", offset=SIZE // 2)},
            slots=CHANNELS,
        )
        for region in regions
    ]
    together = threading.Barrier(CHANNELS + 1)

    def work(number: int) -> None:
        plan = plans[number % len(plans)]
        plan.infer(input_slot=number, output_slot=number)
        together.wait()
        plan.submit(input_slot=number, output_slot=number)
        together.wait()
        time.sleep(60)

    for number in range(CHANNELS):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    together.wait()
    together.wait()
    print("ready", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
