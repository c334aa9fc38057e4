"""The log on stderr (or in a file), in Triton's format: `E0131 10:11:12.345678 4242 server.py:57] "message"`.

Set up once by `broker.server`. Messages are JSON strings, so nothing a client sends can start a line of its own.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import final

from broker.options import Options

_LETTERS = {logging.DEBUG: "I", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}
MAX_MESSAGE = 8192  # characters


@final
class TritonFormatter(logging.Formatter):
    """`style` is "default" or "ISO8601". $TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 leaves messages as they are."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self._iso = style == "ISO8601"
        self._escape = os.environ.get("TRITON_SERVER_ESCAPE_LOG_MESSAGES") != "0"

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        letter = _LETTERS.get(record.levelno, "I")
        moment = time.gmtime(record.created)
        if self._iso:
            start = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {letter}"
        else:
            start = f"{letter}{time.strftime('%m%d %H:%M:%S', moment)}.{int(record.created % 1 * 1e6):06d}"
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        if len(text) > MAX_MESSAGE:
            text = f"{text[:MAX_MESSAGE]}…"
        quoted = json.dumps(text) if self._escape else text
        return f"{start} {record.process} {record.filename}:{record.lineno}] {quoted}"


def set_up(options: Options) -> None:
    """Send the log of this process where the options say."""
    handler: logging.Handler = logging.FileHandler(options.log_file) if options.log_file else logging.StreamHandler()
    handler.setFormatter(TritonFormatter(options.log_format))
    wanted = {
        logging.DEBUG: options.log_verbose > 0,
        logging.INFO: options.log_info,
        logging.WARNING: options.log_warning,
        logging.ERROR: options.log_error,
        logging.CRITICAL: options.log_error,
    }
    handler.addFilter(lambda record: wanted.get(record.levelno, True))
    logging.basicConfig(
        level=logging.DEBUG if options.log_verbose > 0 else logging.INFO, handlers=[handler], force=True
    )
    logging.getLogger("asyncio").setLevel(logging.INFO)
