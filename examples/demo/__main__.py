"""Several cameras, one broker, faces found in real video: `python -m examples.demo`, from the project root.

Owns the command line, the signals and the exit status.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from examples.demo.interrupts import Interrupts, Stopped


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="Several cameras, one broker, faces found in real video."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the cameras play (default: 60)")
    parser.add_argument("--cameras", type=int, default=4, help="how many camera processes (default: 4)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="where the pictures go")
    arguments = parser.parse_args()
    if not 1 <= arguments.cameras <= 16:
        parser.error("--cameras must be between 1 and 16")
    if not 1 <= arguments.seconds <= 3600:
        parser.error("--seconds must be between 1 and 3600")
    return arguments


def main() -> int:
    """Runs the demo; 0 at its end, 1 if something failed, 128 + the signal's number (Ctrl-C: 130) if stopped."""
    arguments = parse()
    interrupts = Interrupts()
    interrupts.install()
    try:
        # Signals are handled already while numpy and the rest load.
        from examples.assets import AssetError
        from examples.demo.processes import DemoError
        from examples.demo.run import run

        try:
            run(arguments.cameras, arguments.seconds, arguments.output, interrupts)
        except (AssetError, DemoError) as error:
            print(f"\nerror: {error}", file=sys.stderr)
            return 1
    except Stopped as stopped:
        print(f"\nstopped by {stopped}; everything has been shut down", file=sys.stderr)
        return 128 + stopped.number
    return 0


if __name__ == "__main__":
    sys.exit(main())
