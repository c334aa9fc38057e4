"""A process that loads models, again and again, until it is told to stop. See `bench.control`.

    python -m bench.reloader URL

A line names a model, and may have a configuration (JSON) behind it; it is loaded, and unloaded if it was not there,
until the next line. The answer is how often.
"""

from __future__ import annotations

import select
import sys

import clientlib


def main() -> None:
    with clientlib.connect(sys.argv[1]) as client:
        stays = {name for name, model in client.models().items() if model.state == "READY"}
        print("ready", flush=True)
        while order := sys.stdin.readline().strip():
            name, _, config = order.partition(" ")
            count = 0
            while not select.select([sys.stdin], [], [], 0)[0]:
                if config:
                    client.load(name, config=config, files={"1/none": b""})
                else:
                    client.load(name)
                if name not in stays:
                    client.unload(name)
                count += 1
            sys.stdin.readline()
            print(count, flush=True)


if __name__ == "__main__":
    main()
