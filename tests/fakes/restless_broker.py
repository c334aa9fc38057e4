"""`python -m broker` that is soon impatient: with workers that serve nothing, and with loads that take long."""

from __future__ import annotations

import sys

from broker import load_watch, supervision

supervision.REST_AFTER_S = 0.5
load_watch.SLOW_S = load_watch.LOGGED_S = load_watch.LOOK_S = 0.2  # type: ignore[misc]

from broker.__main__ import main  # noqa: E402  the constants are taken at import

if __name__ == "__main__":
    sys.exit(main())
