"""How a worker ends whose own code has failed. Its models can bring that about: descriptors are everybody's.

Used by `broker.worker.process` and `broker.worker.control`, and by `broker.worker.link` when it cannot send.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Final, NoReturn

from broker.worker.messages import CLOSED_DESCRIPTORS

BROKEN: Final = 70  # exit status: a mistake of ours


def is_closed(error: BaseException) -> bool:
    """Is a descriptor of this process gone, or another file's by now? We close none that is in use."""
    return type(error) is OSError and error.errno in (errno.EBADF, errno.ENOTSOCK)


def end(error: BaseException) -> NoReturn:
    """End this process, whatever comes of saying why: its replacement redoes everything from the ledger."""
    status = CLOSED_DESCRIPTORS if is_closed(error) else BROKEN
    try:
        if status == BROKEN:
            traceback.print_exception(error)  # which asks the exception, and that may be own code's
        else:  # no file is opened to say it: its number might be one of those that are missed
            *_, (frame, line) = traceback.walk_tb(error.__traceback__)
            at = f"{frame.f_code.co_filename}:{line}"
            print(f"worker (pid {os.getpid()}): {error}, in {frame.f_code.co_name} ({at})", file=sys.stderr)
        sys.stderr.flush()
    finally:
        os._exit(status)
