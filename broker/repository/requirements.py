"""What the loader process imports beyond the client's libraries, and whether this installation has it.

Asked before a loader is started, because its own answer would be a traceback. Imports nothing.
"""

from __future__ import annotations

import importlib.util

from shm.errors import Code, InferError

_PACKAGES = ("onnx", "tritonclient", "grpc")  # by the names they are imported by


def check_requirements() -> None:
    """Raise InferError UNAVAILABLE, saying what to install, if the loader cannot run here."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InferError(Code.UNAVAILABLE, f"the loader needs {' and '.join(missing)}: pip install 'tensorbroker[cpu]'")
