"""A printed page read with the models in a broker: `python -m examples.ocr`, from the project root.

Owns the command line and the exit status: 0 if the text is that of the package alone.
"""

from __future__ import annotations

import argparse
import sys


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.ocr", description="Reads a page, models in a broker.")
    parser.add_argument("picture", nargs="?", choices=("page", "text"), default="page", help="which (default: page)")
    return parser.parse_args()


def main() -> int:
    """Runs the example."""
    arguments = parse()
    from examples.assets import AssetError
    from examples.demo.processes import DemoError
    from examples.ocr.run import run

    try:
        same = run(arguments.picture)
    except (AssetError, DemoError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    print("the text is that of the package alone" if same else "error: the text is not that of the package alone")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
