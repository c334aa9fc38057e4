"""A loader process for tests: plans the models it is asked for, and meets the fate that each one's name asks for.

Run as `python -m tests.fakes.dying_loader` in the real loader's place.
Names: "segv…", "realtime…", "exit…", "hang…", "noise…";
"unplanned" dies before the plan; all others are loaded.
"""

from __future__ import annotations

import os
import signal
import sys

from broker.repository.config import ModelConfig
from broker.repository.protocol import Begun, Finished, Loaded, Plan, decode_request, frame


def _config(name: str) -> ModelConfig:
    return ModelConfig(
        name=name,
        platform="onnxruntime_onnx",
        backend="onnxruntime",
        directory="",
        versions={1: ""},
        default_model_filename="model.onnx",
        max_batch_size=0,
        input=(),
        output=(),
        instance_group=(),
    )


def main() -> None:
    out = sys.stdout.buffer
    names = decode_request(sys.stdin.buffer.read()).models
    if "unplanned" in names:
        sys.exit(9)
    out.write(frame(Plan(models=names)))
    for name in names:
        out.write(frame(Begun(name=name)))
        out.flush()
        if name.startswith("segv"):
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        elif name.startswith("realtime"):
            os.kill(os.getpid(), signal.SIGRTMIN + 6)
        elif name.startswith("exit"):
            os._exit(3)
        elif name.startswith("hang"):
            signal.pause()
        elif name.startswith("noise"):
            out.write(b"\xff" * 100)
            out.flush()
            signal.pause()
        out.write(frame(Loaded(config=_config(name))))
    out.write(frame(Finished()))
    out.flush()


if __name__ == "__main__":
    main()
