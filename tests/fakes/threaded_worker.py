"""A worker whose module starts a thread when it is imported, as some runtimes do: a zygote may not fork after that."""

from __future__ import annotations

import threading

from tests.fakes import link_worker

threading.Thread(target=threading.Event().wait, daemon=True).start()
main = link_worker.main
