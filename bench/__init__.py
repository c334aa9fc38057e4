"""Benchmarks: one module per question, each run by `python -m bench.NAME [--quick]`, all by `make bench`.

    latency     what does a request cost over calling the model in one's own process?
    throughput  how many requests per second, and does dynamic batching keep up with the best batch in-process?
    ensembles   what do the steps of an ensemble cost over calling its members one after another?
    control     what do loads, reloads and unloads cost those who ask for inference, and is the memory back?
    hop         what do the transports between two processes cost by themselves?

Absolute times belong to one machine and one minute. So every row is measured in several rounds that interleave all
rows, every round measures the row's floor as well, and the tables show medians over rounds with the ratio to the floor.
"""

import os

# As in the broker's workers: the runtime of the floor, too, neither writes to the user's home nor calls anybody.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
