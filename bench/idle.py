"""`python -m bench.idle URL COUNT`: clients that stay connected and do nothing, until standard input ends.

Each has a session, a region, a plan and a channel of its own; they share a process, which neither the broker nor the
worker notices.
"""

from __future__ import annotations

import sys

import clientlib


def main(url: str, count: int) -> None:
    clients = [clientlib.connect(url) for _ in range(count)]
    for client in clients:
        region = client.create_region("idle", 8192)
        x, y = region.tensor((1, 256), "FP32"), region.tensor((1, 256), "FP32", offset=4096)
        client.prepare("identity", {"x": x}, {"y": y}).infer(timeout=30)
    print("ready", flush=True)
    sys.stdin.read()
    for client in clients:
        client.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
