"""Compiles the simulated driver into a directory that the caller chose. Needs gcc and cuda.h, both checked here."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
LIBRARY = "libcuda.so.1"  # what bindings ask the loader for


def headers() -> Path | None:
    """The folder of cuda.h in the wheel nvidia-cuda-runtime; it holds headers and a library nobody loads here."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for header in sorted(Path(root).glob("cu*/include/cuda.h")):
            return header.parent
    return None


@functools.cache
def missing() -> str:
    """What the simulator lacks to be built and used, in words; "": nothing."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "the package cuda-bindings is not installed"
    if shutil.which("gcc") is None:
        return "there is no gcc"
    return "" if headers() else "cuda.h is missing: the package nvidia-cuda-runtime is not installed"


def build(directory: Path) -> Path:
    """`directory`/libcuda.so.1. A compiler's word against it ends the test session's use of it: RuntimeError."""
    target = directory / LIBRARY
    command = ["gcc", "-std=gnu11", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread"]
    command += ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]  # the API has some that nobody reads here
    command += [f"-I{headers()}", f"-Wl,-soname,{LIBRARY}", "-o", str(target), *map(str, SOURCES), "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if result.returncode:
        raise RuntimeError(f"the simulated CUDA driver does not compile:\n{result.stderr}")
    return target
