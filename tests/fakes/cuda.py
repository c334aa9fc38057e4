"""The driver that CUDA tests run on: fixtures and the option --cuda. Loaded by tests/conftest.py.

Tests never import CUDA in pytest's own process: a driver stays loaded for good there. They start processes in
`cuda_env.environ`, which find the simulated driver by LD_LIBRARY_PATH, or the real one.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

ROOT = Path(__file__).parents[2]
COUNTER = struct.Struct("56sQ")  # struct counter of tests/cusim/device.c
STANDS_IN = (
    "tests/cusim stands in for NVIDIA's driver (libcuda.so.1): memory, IPC, VMM, streams, events; no kernels; and "
    "tests/fakes/cudart_on_driver.py for what tritonclient calls of the CUDA runtime. Nothing here was seen on a GPU."
)


@final
@dataclass(frozen=True)
class CudaEnv:
    """Where CUDA programs of a test run. `simulated`: on tests/cusim; then `directory` is where it counts calls."""

    simulated: bool
    library: Path | None
    directory: Path
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a process that is to use this driver."""
        made = {name: value for name, value in os.environ.items() if not name.startswith(("CUSIM_", "CUDA_"))}
        if self.library is not None:
            made["LD_LIBRARY_PATH"] = f"{self.library.parent}:{made.get('LD_LIBRARY_PATH', '')}".rstrip(":")
            made["CUSIM_COUNTS"] = str(self.directory)
        return made | self.settings

    def with_settings(self, **settings: object) -> CudaEnv:
        """The same with variables of tests/cusim/cusim.h, or CUDA_VISIBLE_DEVICES."""
        chosen = {name: str(value) for name, value in settings.items()}
        return CudaEnv(self.simulated, self.library, self.directory, self.settings | chosen)

    def calls(self, pid: int) -> dict[str, int]:
        """How often process `pid` has called each function of the driver by now; {} before its first call."""
        path = self.directory / str(pid)
        content = path.read_bytes() if path.exists() else b""
        return {name.rstrip(b"\0").decode(): calls for name, calls in COUNTER.iter_unpack(content) if calls}

    def devices(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that a process of this environment sees."""
        program = "from shm.cuda import driver\nprint(*(device.uuid for device in driver.probe().devices))"
        return tuple(self.run("-c", program).stdout.split())

    def run(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """A Python program of this environment, to its end."""
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=self.environ, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
