"""kill -9 of a client and of a worker in the middle of a request on the client's GPU memory, with a real broker.

    python -m tests.gpu.kill kill.json

Others are served meanwhile and afterwards, a killed worker's request runs once more, and the GPU has as much memory
left in the end as before. The same for clients whose events go while the worker looks at them: by cuEventDestroy, and
with their process. CUDA leaves open what a query says then, and tests/cusim knows no more.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shm.cuda import driver
from shm.errors import InferError
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_children import Child
from tests.gpu.here import SIMULATED, broker, environment, report

LIMIT_S = 20.0
LOOKS_S = 0.2  # of the second for which the worker looks at an event
SLACK = 64 << 20  # bytes: what a context may take more or less than the one before
CONFIG = """backend: "mover" max_batch_size: 0
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1, %d ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1, %d ] } ]
instance_group [ { kind: KIND_GPU gpus: 0 } ]
"""
FIFOS = ("told", "gate")


def write_mover(root: Path, name: str, count: int) -> None:
    """A model whose output is a copy of its input, `count` FP32."""
    from tests.fakes import models, mover_backend

    models.write_model(root, name, config=CONFIG % (count, count))
    (root / name / "backend.py").write_bytes(Path(mover_backend.__file__).read_bytes())


def write(root: Path) -> None:
    write_mover(root, "mover", 4)
    for name in FIFOS:
        os.mkfifo(root / "mover" / name)


def until(condition: Callable[[], Any], what: str) -> float:
    """Seconds until it is true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < LIMIT_S, f"never came true: {what}"
        time.sleep(0.02)
    return round(time.monotonic() - began, 3)


class Scene:
    """A broker, users of it, and the gate of their model."""

    def __init__(self, env: CudaEnv, running: Any, repository: Path) -> None:
        self.env, self.broker = env, running
        self.fds = [os.open(repository / "mover" / name, os.O_RDWR) for name in FIFOS]

    def user(self, target: str = "tests.fakes.cuda_user:User") -> Child:
        made = Child(self.env, target, f"ipc://{self.broker.directory}")
        made.call("allocate", "r", "legacy")
        made.call("prepare", "mover", {"INPUT0": "r"}, {"OUTPUT0": "r"}, [1, 4])
        return made

    def served(self) -> None:
        with self.user() as user:
            assert user.call("infer", {"INPUT0": 3}, "OUTPUT0") == [0, 3, 3, 3, 3]

    def entered(self) -> None:
        assert select.select([self.fds[0]], [], [], LIMIT_S)[0], "no run came"
        os.read(self.fds[0], 1)

    def let(self) -> None:
        os.write(self.fds[1], b"G")

    def worker(self) -> int:
        pid: int = next(row["pid"] for row in self.broker.status()["workers"] if row["key"].startswith("gpu0/"))
        return pid

    def free(self) -> int:
        """Bytes that the GPU has left, as a process sees it that has a context for as long as this takes."""
        program = (
            "from shm.cuda import driver\n"
            "driver.devices('this step')\n"
            "with driver.Context(0): print(driver.call('cuMemGetInfo')[0])"
        )
        return int(self.env.run("-c", program).stdout)

    def open_now(self) -> int:
        """Handles that the worker has open; the simulator counts them."""
        calls = self.env.calls(self.worker())
        return calls.get("cuIpcOpenMemHandle", 0) - calls.get("cuIpcCloseMemHandle", 0)

    def given_back(self, before: int) -> float:
        if SIMULATED:
            return until(lambda: self.open_now() == 0, "the worker has closed everything")
        return until(lambda: self.free() > before - SLACK, f"{before} bytes are free again")


def events_gone(scene: Scene) -> str:
    """How a request ends whose event was destroyed; the worker outlives this, and the death of an event's owner."""
    worker = scene.worker()
    for killed in (False, True):
        with scene.user("tests.fakes.cuda_producer:Producer") as user:
            user.call("infer", {"INPUT0": 3}, "OUTPUT0")
            user.call("run", "event", "OUTPUT0")
            user.call("write_late", {"INPUT0": 5})
            user.call("submit", "event")
            time.sleep(LOOKS_S)
            if killed:
                user.kill()
                continue
            user.call("destroy_events")
            try:
                ended = f"wrote {user.call('result', 'OUTPUT0')}"
            except InferError as error:
                ended = error.message
            user.call("open_gate")
        scene.served()
    scene.served()
    assert scene.worker() == worker, "the worker has died of it"
    return ended


def main(target: str) -> None:
    driver.devices("this step")
    env = environment()
    with broker(env, write) as running:
        scene = Scene(env, running, running.directory.parent / "repository")
        scene.served()
        before = scene.free()
        figures: dict[str, Any] = {}
        with scene.user() as user:
            user.ask("infer", {"INPUT0": -1}, "OUTPUT0")
            scene.entered()
            user.kill()
            scene.let()
        scene.served()
        figures["client_killed"] = {"memory_back_s": scene.given_back(before)}
        with scene.user() as user:
            user.ask("infer", {"INPUT0": -1}, "OUTPUT0")
            scene.entered()
            began = time.monotonic()
            os.kill(scene.worker(), 9)
            scene.entered()
            again = round(time.monotonic() - began, 3)
            scene.let()
            assert user.answer() == [0, -1, -1, -1, -1]
        scene.served()
        figures["worker_killed"] = {"runs_again_s": again, "memory_back_s": scene.given_back(before)}
        figures["event_destroyed"] = {"the request": events_gone(scene), "memory_back_s": scene.given_back(before)}
        report(target, figures)


if __name__ == "__main__":
    main(sys.argv[1])
