"""`python -m broker.gateway SESSION COUNTERS` (descriptors): a gateway process. Started by `broker.gateways` alone."""

from __future__ import annotations

import sys

from broker.gateway.process import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
