"""Which GPUs there are, and if there are none, exactly why.

Asked in a process of its own (`python -m broker.gpus`): whoever initialises the driver must not fork afterwards, and
that is what the broker and the zygote are there for. Made by the composition root, and by commands that read models;
loads, workers, regions and the status page ask it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Final, final

import msgspec
from msgspec.structs import replace

from broker.repository.config import SHARED
from broker.repository.protocol import LoadRequest
from shm.cuda.driver import Device, Status, probe
from shm.errors import Code, InferError

LIBRARY: Final = "libcuda.so.1"
ANSWER_S: Final = 30.0  # for a driver to say what it sees; several GPUs without persistence mode take ten
AGAIN_S: Final = 10.0  # between two looks while there is none
LEAST: Final = (6, 0)  # compute capability, as in Triton
ABSENT: Final = Status(
    "no driver",
    f"NVIDIA's driver library {LIBRARY} was not found; install the driver, or give the container access to the GPU "
    "(--gpus all)",
)
_BUILT_IN: Final = tuple(sorted(SHARED - {"onnxruntime", "ensemble"}))  # in Triton, too, they are for the CPU alone
_DIRECTORIES: Final = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")  # where the dynamic loader looks besides its cache

_log = logging.getLogger(__name__)


@final
class Gpus:
    """What the last look has found. A GPU's ordinal is the broker's, under its CUDA_VISIBLE_DEVICES."""

    def __init__(self) -> None:
        self.status = ABSENT
        self._looked = float("-inf")  # time.monotonic
        self._looking = asyncio.Lock()

    async def look(self) -> Status:
        """Look now, if none was found before and the last look is not of just now. Says in the log what changed."""
        async with self._looking:
            if self.status.kind == "ok" or time.monotonic() - self._looked < AGAIN_S:
                return self.status
            first, before = self._looked == float("-inf"), self.status
            self.status = await asyncio.to_thread(_ask) if driver_is_there() else ABSENT
            self._looked = time.monotonic()
            if first or self.status != before:
                _tell(self.status)
            return self.status

    async def known_to(self, request: LoadRequest) -> LoadRequest:
        """`request` with the GPUs there are, for the loader."""
        status = await self.look()
        usable = tuple(device.ordinal for device in status.devices if device.compute_capability >= LEAST)
        return replace(request, gpus=usable, no_gpus=self.reason(), on_cpu=_without_gpu())

    def uuid(self, ordinal: int) -> str:
        """Of GPU `ordinal`. Raises InferError UNAVAILABLE when there is none."""
        for device in self.status.devices:
            if device.ordinal == ordinal:
                return device.uuid
        raise InferError(Code.UNAVAILABLE, f"there is no GPU {ordinal}: {self.reason()}")

    def uuids(self) -> tuple[str, ...]:
        """Of all GPUs."""
        return tuple(device.uuid for device in self.status.devices)

    def reason(self) -> str:
        """Why there is no (other) GPU."""
        if self.status.kind == "ok":
            return f"the broker sees {len(self.status.devices)} (CUDA_VISIBLE_DEVICES)"
        return f"CUDA is not available: {self.status.text}"

    def facts(self) -> dict[str, Any]:
        """For the status page: `state` is "ok" or what is wrong, `reason` says more; sizes in bytes."""
        return {
            "state": self.status.kind,
            "reason": self.status.text,
            "gpus": [_row(device) for device in self.status.devices],
        }


def driver_is_there(environ: dict[str, str] | os._Environ[str] = os.environ) -> bool:
    """Would the dynamic loader find the driver's library? Without it nothing needs to be started to know that."""
    if LIBRARY in environ.get("LD_PRELOAD", ""):
        return True
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    own = (path for path in environ.get("LD_LIBRARY_PATH", "").split(":") if path)
    for directory in (*own, *_DIRECTORIES, *(os.path.join(path, multiarch) for path in _DIRECTORIES)):
        if os.path.exists(os.path.join(directory, LIBRARY)):
            return True
    try:
        with open("/etc/ld.so.cache", "rb") as file:
            return f"{LIBRARY}\0".encode() in file.read()
    except OSError:
        return False


def _ask() -> Status:
    command = [sys.executable, "-P", "-m", __name__]
    try:
        asked = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=ANSWER_S, check=False)
        return msgspec.json.decode(asked.stdout, type=Status)
    except subprocess.TimeoutExpired:
        return Status("driver error", f"the driver did not answer within {ANSWER_S:g} s; see `nvidia-smi`")
    except OSError as error:
        return Status("driver error", f"the driver cannot be asked: {error}")
    except msgspec.DecodeError:
        words = asked.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Status("driver error", f"the process that asks the driver ended with {asked.returncode}: {words}")


def _tell(status: Status) -> None:
    if status.kind != "ok":
        _log.info("CUDA is not available: %s", status.text)
    for device in status.devices:
        row = _row(device)
        _log.info(
            "GPU %(ordinal)d: %(name)s, %(uuid)s, compute capability %(compute_capability)s, %(total_memory)d bytes",
            row,
        )
        if device.compute_capability < LEAST:
            _log.warning("GPU %d runs no models: they need a compute capability of %d.%d", device.ordinal, *LEAST)


def _without_gpu() -> tuple[str, ...]:
    """Backends that use no GPU, as they are installed."""
    try:
        distribution("onnxruntime-gpu")
    except PackageNotFoundError:
        return (*_BUILT_IN, "onnxruntime")
    return _BUILT_IN


def _row(device: Device) -> dict[str, Any]:
    major, minor = device.compute_capability
    return {
        "ordinal": device.ordinal,
        "uuid": device.uuid,
        "name": device.name,
        "compute_capability": f"{major}.{minor}",
        "total_memory": device.total_memory,
    }


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(probe()))
