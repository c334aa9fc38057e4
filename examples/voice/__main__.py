"""Voice activity in many streams of speech at once: `python -m examples.voice`, from the project root.

Owns the command line and the exit status: 0 if every stream got what the unchanged model computes alone.
"""

from __future__ import annotations

import argparse
import sys


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.voice", description="Voice activity in many streams.")
    parser.add_argument("--streams", type=int, default=16, help="how many streams play at once (default: 16)")
    parser.add_argument("--grpc", type=int, default=2, help="how many of them over gRPC (default: 2)")
    parser.add_argument("--seconds", type=float, default=8.0, help="how much audio each plays (default: 8)")
    arguments = parser.parse_args()
    if not 1 <= arguments.streams <= 64:
        parser.error("--streams must be between 1 and 64")
    if not 0 <= arguments.grpc <= arguments.streams:
        parser.error("--grpc must be between 0 and --streams")
    if not 0.1 <= arguments.seconds <= 28:
        parser.error("--seconds must be between 0.1 and 28")
    return arguments


def main() -> int:
    """Runs the example."""
    arguments = parse()
    from examples.assets import AssetError
    from examples.demo.processes import DemoError
    from examples.voice.run import run

    try:
        agreed = run(arguments.streams, arguments.grpc, arguments.seconds)
    except (AssetError, DemoError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    print("every stream has the probabilities of the unchanged model, run alone" if agreed else "error: streams differ")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
