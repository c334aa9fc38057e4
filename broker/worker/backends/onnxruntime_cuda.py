"""ONNX Runtime's CUDA execution provider: its options, and whether it is really there.

Called by `broker.worker.backends.onnxruntime` for instances on a GPU. Not run on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shm.cuda.driver import Device
from shm.errors import Code, InferError

PROVIDER: Final = "CUDAExecutionProvider"
# Triton's parameters of the same names, as numbers or as the runtime's own words.
_WORDS: Final = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}


def provider_options(parameters: Mapping[str, str], device: Device, stream: int) -> dict[str, str]:
    """For one session. Raises InferError INVALID_ARG for values that a parameter cannot have.

    Its work goes to `stream`, which orders it with the copies around it. Memory is taken as it is needed, unless the
    model says otherwise: doubling would starve the other models of a GPU.
    """
    options = {
        "device_id": str(device.ordinal),
        "user_compute_stream": str(stream),
        "do_copy_in_default_stream": "1",  # that is `stream`
        "arena_extend_strategy": "kSameAsRequested",
    }
    for name, words in _WORDS.items():
        if name in parameters:
            options[name] = _word(name, parameters[name], words)
    if "gpu_mem_limit" in parameters:
        text = parameters["gpu_mem_limit"]
        if not (text.isascii() and text.isdigit()):
            raise InferError(
                Code.INVALID_ARG, f"model parameter 'gpu_mem_limit' must be a number of bytes, got '{text}'"
            )
        options["gpu_mem_limit"] = text
    if "do_copy_in_default_stream" in parameters:
        options["do_copy_in_default_stream"] = _word(
            "do_copy_in_default_stream", parameters["do_copy_in_default_stream"], ("0", "1")
        )
    return options


def _word(name: str, text: str, words: tuple[str, ...]) -> str:
    numbered = {str(number): word for number, word in enumerate(words)}
    found = numbered.get(text, text)
    if found not in words:
        known = ", ".join(f"{number} ({word})" if number != word else word for number, word in numbered.items())
        raise InferError(Code.INVALID_ARG, f"model parameter '{name}' must be one of {known}, got '{text}'")
    return found


def check_provider(runtime: Any, session: Any, instance: str) -> None:
    """Raise InferError UNAVAILABLE if the runtime put a model on the CPU, which it does without an exception."""
    first = next(iter(session.get_providers()), "no provider")
    if first == PROVIDER:
        return
    if PROVIDER in runtime.get_available_providers():
        why = (
            "the libraries of CUDA 13 or cuDNN 9 cannot be loaded, or do not fit the driver (the runtime names them on "
            "standard error): pip install 'tensorbroker[gpu]'"
        )
    else:
        why = (
            "the installed package is the runtime for the CPU: pip uninstall onnxruntime onnxruntime-gpu, then pip "
            "install 'tensorbroker[gpu]'; with both installed the one that came last wins"
        )
    raise InferError(
        Code.UNAVAILABLE,
        f"instance '{instance}' is to run on a GPU, but ONNX Runtime {runtime.__version__} runs it by {first}: {why}",
    )
