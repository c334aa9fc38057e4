"""A lab whose broker has two GPUs, simulated (tests/cusim); offenders bring GPU memory through any of four doors.

Models, all FP32: `add` (gpu0, the double of TensorRT), `broken` (gpu0, its run loses the context); `mover` (gpu0),
`far` (gpu1), `stuck` (gpu0, its run never ends) and `copies` (CPU, beside the canary's), whose output is the input.
"""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

from tests.doubles import tensorrt as double
from tests.fakes import models, mover_backend
from tests.fakes.cuda import CudaEnv
from tests.fakes.cuda_worker import BACKEND
from tests.faults import gpu_doors, repository
from tests.faults.lab import ROOT
from tests.faults.nursery import LIMIT_S, Nursery
from tests.faults.visited import VisitedLab

GPU, OTHER_GPU = "gpu0/gpus", "gpu1/gpus"
MEMORY_MB = 64  # of a GPU, for each process
ONE = 'name: "%s" data_type: TYPE_FP32 dims: [ %s ]'
CONFIG = """backend: "%s" max_batch_size: 0
input [ %s ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ %s ] } ]
instance_group [ { %s } ]
%s
"""
IN_GROUP = 'parameters { key: "worker_group" value { string_value: "gpus" } }\n'
SHORT = """parameters { key: "hang_timeout_s" value { string_value: "1" } }
parameters { key: "retry" value { string_value: "false" } }
"""


def _inputs(dims: str, count: int) -> str:
    return ", ".join(f"{{ {ONE % (f'INPUT{at}', dims)} }}" for at in range(count))


def write(root: Path) -> Path:
    """The repository."""
    repository.write(root)
    models.write_model(root, "copies", config=CONFIG % ("identity", _inputs("-1", 1), "-1", "kind: KIND_CPU", ""))
    for name, gpu, more in (("mover", 0, ""), ("far", 1, ""), ("stuck", 0, SHORT)):
        where = f"kind: KIND_GPU gpus: {gpu}"
        models.write_model(root, name, config=CONFIG % ("mover", _inputs("-1", 1), "-1", where, IN_GROUP + more))
        (root / name / "backend.py").write_bytes(Path(mover_backend.__file__).read_bytes())
        for fifo in ("told", "gate"):
            os.mkfifo(root / name / fifo)
    for name, fault in (("add", ""), ("broken", "sticky")):
        write_adder(root, name, fault)
    return root


def write_adder(root: Path, name: str, fault: str = "") -> None:
    """A model of the double of TensorRT; `fault` as it knows them."""
    tensors = [double.tensor(f"INPUT{at}", [4]) for at in range(2)], [double.tensor("OUTPUT0", [4])]
    where = "kind: KIND_GPU gpus: 0"
    config = CONFIG % ("tensorrt", _inputs("4", 2), "4", where, IN_GROUP)
    models.write_model(root, name, config='default_model_filename: "model.plan"\n' + config)
    (root / name / "backend.py").write_text(BACKEND)
    (root / name / "1" / "model.plan").write_bytes(double.plan("add", *tensors, fault=fault))


class GpuLab(VisitedLab):
    """`settled` looks at the workers of the GPUs, too: what they have open, and what the GPU has left."""

    def __init__(self, directory: Path, env: CudaEnv) -> None:
        self.env = env.with_settings(CUSIM_DEVICES=2, CUSIM_PEER=0, CUSIM_MEM_MB=MEMORY_MB)
        super().__init__(directory, "--model-control-mode=explicit", "--load-model=*", models=write)
        self._fds = {
            name: os.open(self.repository / "mover" / name, os.O_RDWR | os.O_CLOEXEC) for name in ("told", "gate")
        }

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        while self._fds:
            os.close(self._fds.popitem()[1])

    def entered(self) -> None:
        """Return when a run of `mover` is in it, whose first element is below 0."""
        assert select.select([self._fds["told"]], [], [], LIMIT_S)[0], "no run came"
        os.read(self._fds["told"], 1)

    def let(self) -> None:
        """It may go on."""
        os.write(self._fds["gate"], b"G")

    def bring(self, function: Any, **arguments: Any) -> Any:
        """`offend`, with where the doors are."""
        return self.offend(function, http=self.http, grpc=self.grpc, **arguments)

    def opened(self, key: str = GPU) -> tuple[int, int]:
        """Handles that a worker has opened, and closed."""
        calls = self.env.calls(self.worker_pid(key))
        return calls.get("cuIpcOpenMemHandle", 0), calls.get("cuIpcCloseMemHandle", 0)

    def _in_broker(self) -> None:
        super()._in_broker()
        os.environ.update(self.env.environ, PYTHONPATH=str(ROOT))

    def _start_nursery(self) -> None:
        environment = {**self.env.environ, "TENSORBROKER_DIR": str(self.run_directory), "PYTHONPATH": str(ROOT)}
        self._nursery = Nursery(self.directory, environment, self.enter_namespace)

    def _warm_up(self) -> None:
        """Also what workers make at their first requests on GPU memory and keep: streams and their threads."""
        self.offend(gpu_doors.walk_through, http=self.http, grpc=self.grpc)
        super()._warm_up()
