"""`python -m tests.fakes.small_gateway FD COUNTERS`: a gateway that does what its server's name (--id) says.

serve: says that it serves, ends with its session · fail: says that it cannot · die: ends before it says anything ·
mute: says nothing · linger: serves, and stays when its session has ended · once: serves the first time, dies at every
later start. By its own msgpack; while it serves it gives signs of life.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

import msgpack

from shm.gateway_counters import GatewayCounters


def main(fd: int, counters: int) -> None:
    options = json.load(sys.stdin)
    what = options["server_name"]
    if what == "die":
        os._exit(3)
    if what == "once":
        mark = Path(options["directory"]) / "started"
        if mark.exists():
            os._exit(4)
        mark.touch()
    while what == "mute":
        signal.pause()
    link = socket.socket(fileno=fd)
    link.setblocking(True)
    error = "Socket '127.0.0.1:1' already in use " if what == "fail" else ""
    lines = () if error else (f"Started nothing at {options['index']}",)
    link.sendall(msgpack.packb({"type": "Serving", "id": 1, "lines": lines, "error": error}))
    if error:
        os._exit(1)
    life = GatewayCounters(counters)
    while True:
        if not select.select([link], [], [], 0.05)[0]:
            life.beat()
        elif not (data := link.recv(65536)):
            break
        elif msgpack.unpackb(data)["type"] == "Exiting" and what != "linger":
            return
    while what == "linger":
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
