"""Tests: unit (no process), conformance (one suite, many implementations), integration, faults, stress."""

import os

# Before anything imports the runtime: tests leave nothing in the home of who runs them.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
