"""Speech as windows, and what the original model says of them without a broker."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from examples.voice.model import CONTEXT, RATE, WINDOW

Samples: TypeAlias = npt.NDArray[np.float32]


def read(path: Path) -> Samples:
    """A WAV file of one channel with 16 bits at 16 kHz, as numbers from -1 to 1. Raises ValueError for others."""
    with wave.open(str(path)) as file:
        form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
        if form != (1, 2, RATE):
            raise ValueError(
                f"{path}: {form} channels, bytes per sample and samples per second, expected (1, 2, {RATE})"
            )
        data = file.readframes(file.getnframes())
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def windows(samples: Samples) -> Iterator[Samples]:
    """Every window with what came just before it: silence before the first, and after the last to fill it."""
    count = -(-len(samples) // WINDOW)
    padded = np.zeros(CONTEXT + count * WINDOW, np.float32)
    padded[CONTEXT : CONTEXT + len(samples)] = samples
    for start in range(0, count * WINDOW, WINDOW):
        yield padded[start : start + CONTEXT + WINDOW]


def reference(original: Path, samples: Samples) -> Samples:
    """The probabilities of the unchanged model file: alone, window by window, its state handed on by hand."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session: Any = onnxruntime.InferenceSession(str(original), options, providers=["CPUExecutionProvider"])
    state, probabilities = np.zeros((2, 1, 128), np.float32), []
    for window in windows(samples):
        output, state = session.run(
            ["output", "stateN"], {"input": window[None], "state": state, "sr": np.array(RATE, np.int64)}
        )
        probabilities.append(output[0, 0])
    return np.array(probabilities, np.float32)
