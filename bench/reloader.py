"""A process that loads models, again and again, until it is told to stop. See `bench.control`.

    python -m bench.reloader URL

A line is an `Order` in JSON: its model is loaded with one configuration after the other, and unloaded if it was not
there, until the next line. The answer is how often.
"""

from __future__ import annotations

import select
import sys

import msgspec

import clientlib


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Load `model`. `configs`: in JSON; none: what is in the repository. `bare`: without the repository's files."""

    model: str
    configs: tuple[str, ...] = ()
    bare: bool = False

    def load(self, client: clientlib.Client, number: int) -> None:
        """For the `number`th time. What has not changed since the last time would not be loaded again."""
        config = self.configs[number % len(self.configs)] if self.configs else None
        client.load(self.model, config=config, files={"1/none": b""} if self.bare else None)


def main() -> None:
    with clientlib.connect(sys.argv[1]) as client:
        stays = {name for name, model in client.models().items() if model.state == "READY"}
        print("ready", flush=True)
        while order := sys.stdin.readline().strip():
            what = msgspec.json.decode(order, type=Order)
            count = 0
            while not select.select([sys.stdin], [], [], 0)[0]:
                what.load(client, count)
                if what.model not in stays:
                    client.unload(what.model)
                count += 1
            sys.stdin.readline()
            print(count, flush=True)


if __name__ == "__main__":
    main()
