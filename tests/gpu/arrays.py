"""Arrays of real libraries: which of their memory can be shared, and is what cannot be refused with the right reason?

python -m tests.gpu.arrays         status 77: none of the libraries is here
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from clientlib.cuda_export import export
from shm.errors import InferError


def _told(array: Any) -> str:
    try:
        found = export("r", array, None, None, None)
    except InferError as error:
        return f"refused: {error.message}"
    memory = found.memory
    found.close()
    return f"{memory.kind}, {memory.byte_size} bytes at {memory.offset} of {memory.allocation_size}"


def torch_native() -> str:
    """Two small tensors lie in one block: the second at an offset."""
    torch = importlib.import_module("torch")
    first, second = (torch.ones(1000, device="cuda") for _ in range(2))
    told = _told(second)
    assert told.startswith("legacy, 4000 bytes at "), told
    assert " at 0 " not in told, told
    assert _told(first[10:20]).startswith("legacy, 40 bytes")
    assert "not C-contiguous" in _told(torch.ones(4, 4, device="cuda").t())
    assert _told(torch.ones(8, device="cuda", dtype=torch.bfloat16)).startswith("legacy, 16 bytes")
    return told


def torch_expandable() -> str:
    torch = importlib.import_module("torch")
    told = _told(torch.ones(1000, device="cuda"))
    assert told.startswith("vmm, 4000 bytes") or "expandable_segments" in told, told
    return told


def torch_asynchronous() -> str:
    torch = importlib.import_module("torch")
    told = _told(torch.ones(1000, device="cuda"))
    assert "stream-ordered pool" in told, told
    return told


def cupy_pool() -> str:
    cupy = importlib.import_module("cupy")
    told = _told(cupy.ones(1000, dtype=cupy.float32))
    assert told.startswith("legacy, 4000 bytes"), told
    return told


def cupy_asynchronous() -> str:
    cupy = importlib.import_module("cupy")
    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    told = _told(cupy.ones(1000, dtype=cupy.float32))
    assert "stream-ordered pool" in told, told
    return told


CASES: dict[str, tuple[str, Callable[[], str], dict[str, str]]] = {
    "torch_native": ("torch", torch_native, {}),
    "torch_expandable": ("torch", torch_expandable, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "torch_asynchronous": ("torch", torch_asynchronous, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    "cupy_pool": ("cupy", cupy_pool, {}),
    "cupy_asynchronous": ("cupy", cupy_asynchronous, {}),
}


def main() -> int:
    """Each case in a process of its own: an allocator is chosen once."""
    results = []
    for name, (library, _, settings) in CASES.items():
        if importlib.util.find_spec(library) is None:
            print(f"{name}: no {library}")
            continue
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.arrays", name], env=os.environ | settings, timeout=50, check=False
        )
        results.append(done.returncode)
    if not results:
        print("SKIPPED: neither torch nor cupy is here")
        return 77
    return int(any(results))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(f"{sys.argv[1]}: {CASES[sys.argv[1]][1]()}")
    else:
        sys.exit(main())
