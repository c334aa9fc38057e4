"""Built-in backend `square`: IN INT32 [1] = n has n responses OUT INT32 [1] = n, decoupled. For tests.

As Triton's, with its parameters: `CUSTOM_INFER_DELAY_NS` before every response, `CUSTOM_OUTPUT_DELAY_NS` before those
that have an output or an error, `CUSTOM_CANCEL_DELAY_NS` after a cancellation was seen; of the n responses the last
`CUSTOM_EMPTY_COUNT` are empty and the `CUSTOM_FAIL_COUNT` before those are errors. CPU only.
"""

from __future__ import annotations

import time
from typing import final

import numpy as np

from broker.worker.backends import Binding, Context, Operand
from broker.worker.backends.builtin import cpu_only, decoupled_only, no_bindings, number
from broker.worker.stream import Stream


def load(context: Context) -> Square:
    """Raises InferError for GPU instances, models that are not decoupled, and parameters that are no numbers."""
    cpu_only(context, "square")
    decoupled_only(context, "square")
    return Square(context)


@final
class Square:
    """One instance."""

    __slots__ = ("_cancel_s", "_empty", "_fail", "_infer_s", "_output_s")

    def __init__(self, context: Context) -> None:
        self._infer_s = number(context, "CUSTOM_INFER_DELAY_NS") / 1e9
        self._output_s = number(context, "CUSTOM_OUTPUT_DELAY_NS") / 1e9
        self._cancel_s = number(context, "CUSTOM_CANCEL_DELAY_NS") / 1e9
        self._fail = int(number(context, "CUSTOM_FAIL_COUNT"))
        self._empty = int(number(context, "CUSTOM_EMPTY_COUNT"))

    def execute(self, streams: list[Stream]) -> None:
        """Answer one after the other."""
        for stream in streams:
            self._answer(stream)

    def _answer(self, stream: Stream) -> None:
        value = stream.inputs["IN"].reshape(-1)
        count = int(value[0])
        shape = stream.inputs["IN"].shape
        for index in range(count):
            if stream.cancelled:  # a response that was begun is finished, as Triton's does
                time.sleep(self._cancel_s)
                break
            time.sleep(self._infer_s)
            if index >= count - self._empty:
                continue
            stream.computed()
            time.sleep(self._output_s)
            if index >= count - self._empty - self._fail:
                stream.send(error="square backend's intentional error, as CUSTOM_FAIL_COUNT says")
            else:
                stream.send({"OUT": np.full(shape, count, np.int32)})
        stream.send(final=True)

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> Binding:
        """Never: it answers streams only."""
        raise no_bindings("square")

    def close(self) -> None:
        """It holds nothing."""
