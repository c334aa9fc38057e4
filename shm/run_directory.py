"""Where a broker and its clients meet when nobody names a place: one rule for both sides.

Used by `broker` (which makes and locks the directory) and by `clientlib` (which connects there). Touches no file.
"""

from __future__ import annotations

import os
import tempfile

SOCKET = "broker.sock"


def default_directory() -> str:
    """$TENSORBROKER_DIR, else below $XDG_RUNTIME_DIR, else a directory per uid below the temporary one."""
    if chosen := os.environ.get("TENSORBROKER_DIR"):
        return os.path.abspath(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "tensorbroker")
    return os.path.join(tempfile.gettempdir(), f"tensorbroker-{os.getuid()}")
