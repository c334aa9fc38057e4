"""`python -m broker` whose workers rest after half a second without anything to serve."""

from __future__ import annotations

import sys

from broker import supervision

supervision.REST_AFTER_S = 0.5

from broker.__main__ import main  # noqa: E402  the constant is taken at import

if __name__ == "__main__":
    sys.exit(main())
