"""A backend that writes down when its instances begin and end. Copied into model directories as `backend.py`.

x, y: FP32 [n]; y = x. Each run appends "+ MODEL" and "- MODEL" as lines to the file `journal` of the repository, a few
milliseconds apart.
"""

from __future__ import annotations

import os
import time

RUN_S = 0.003


class _Binding:
    def __init__(self, journal, name, inputs, outputs):
        self.journal, self.name = journal, name.encode()
        self.x, self.y = inputs[0].memory, outputs[0].memory

    def run(self):
        os.write(self.journal, b"+ %s\n" % self.name)
        time.sleep(RUN_S)
        self.y[:] = self.x
        os.write(self.journal, b"- %s\n" % self.name)

    def results(self):
        return []


class _Model:
    def __init__(self, context):
        root = os.path.dirname(os.path.dirname(context.directory))
        self.name = context.config.name
        self.journal = os.open(f"{root}/journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def bind(self, inputs, outputs):
        return _Binding(self.journal, self.name, inputs, outputs)

    def close(self):
        os.close(self.journal)


def load(context):
    return _Model(context)
