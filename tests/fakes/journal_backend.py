"""A backend that writes down when its instances begin and end. Copied into model directories as `backend.py`.

x, y: FP32 [n]; y = x. Each run appends "+ MODEL" and "- MODEL" as lines to the file `journal` of the repository, a few
milliseconds apart. The first ones wait for each other until as many run together as the parameter `together` says, so
that a busy machine, on which each would have ended before the next begins, shows that they may.
"""

from __future__ import annotations

import os
import threading
import time

RUN_S = 0.003
MEET_S = 5.0  # that many do not come

_running = 0
_met = False
_change = threading.Condition()


def _meet(together):
    """Another runs; wait until so many do, once."""
    global _running, _met
    with _change:
        _running += 1
        _met = _met or _running >= together
        _change.notify_all()
        if not _met:
            _change.wait_for(lambda: _met, MEET_S)
            _met = True


def _part():
    global _running
    with _change:
        _running -= 1


class _Binding:
    def __init__(self, journal, name, together, inputs, outputs):
        self.journal, self.name, self.together = journal, name.encode(), together
        self.x, self.y = inputs[0].memory, outputs[0].memory

    def run(self):
        os.write(self.journal, b"+ %s\n" % self.name)
        _meet(self.together)
        time.sleep(RUN_S)
        self.y[:] = self.x
        os.write(self.journal, b"- %s\n" % self.name)
        _part()

    def results(self):
        return []


class _Model:
    def __init__(self, context):
        root = os.path.dirname(os.path.dirname(context.directory))
        self.name = context.config.name
        self.together = int(context.config.parameters.get("together", "1"))
        self.journal = os.open(f"{root}/journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def bind(self, inputs, outputs):
        return _Binding(self.journal, self.name, self.together, inputs, outputs)

    def close(self):
        os.close(self.journal)


def load(context):
    return _Model(context)
