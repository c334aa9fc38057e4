"""The floor: a model in the caller's own process, on the caller's own arrays, with everything prepared beforehand."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnxruntime

from bench.models import Model


class InProcess:
    """A session with the settings of the broker's worker: same runtime threads, which do not spin between runs."""

    def __init__(self, model: Model, *, spin: bool = False) -> None:
        """`spin`: let the runtime's threads spin, as they do by default outside the broker."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = model.threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
        self._model = model
        self._session = onnxruntime.InferenceSession(
            model.proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def bind(self, x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
        """One call of the model on these arrays, which the caller keeps alive."""
        binding = self._session.io_binding()
        binding.bind_input(self._model.input, "cpu", 0, np.float32, x.shape, x.ctypes.data)
        binding.bind_output(self._model.output, "cpu", 0, np.float32, y.shape, y.ctypes.data)
        return functools.partial(self._session.run_with_iobinding, binding)
