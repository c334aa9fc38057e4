"""A request as a decoupled model sees it: read its inputs, send any number of responses, from any thread.

Given to models by `broker.worker.decoupled`, and by `broker.worker.warm_up`. Backends import it for its type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, final

import numpy.typing as npt

from shm.errors import Code, InferError, described
from shm.parameters import Parameter

Arrays = Mapping[str, npt.NDArray[Any]]
Given = Mapping[str, Parameter]  # with a response
NOTHING: Given = MappingProxyType({})


class Taker(Protocol):
    """Who takes the responses of one request."""

    def send(self, outputs: Arrays | None, error: str | InferError, final: bool, parameters: Given = NOTHING) -> None:
        """As `Stream.send`."""

    def fail(self, error: InferError) -> None:
        """As `Stream.fail`."""

    def is_unwanted(self) -> bool:
        """As `Stream.cancelled`."""

    def computed(self) -> None:
        """As `Stream.computed`."""

    def reschedule(self) -> None:
        """As `Stream.reschedule`."""

    def let_go(self) -> None:
        """Nobody holds the stream any more."""


class States(Protocol):
    """What keeps the states of the sequence that a request belongs to."""

    def take(self, outputs: Arrays) -> Arrays:
        """Keep those among what is sent; returns the rest."""


@final
class Stream:
    """A request as a decoupled model sees it (`broker.worker.backends.DecoupledModel`). Any thread may use it.

    `inputs`: arrays by name, copies of the client's; BYTES as object arrays of `bytes`. `outputs`: the names that the
    client asked for; what it did not ask for is not sent. `request_id`: the client's number, 0 without one. `kept`:
    what the model keeps of a request that it has run again (`reschedule`). `parameters`: the request's own.
    """

    __slots__ = ("_answers", "_released", "_states", "inputs", "kept", "outputs", "parameters", "request_id", "rows")

    def __init__(
        self,
        answers: Taker,
        inputs: Arrays,
        outputs: Sequence[str],
        request_id: int,
        rows: int,
        kept: dict[str, Any] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        states: States | None = None,
    ) -> None:
        self._answers = answers
        self._released = False
        self._states = states
        self.kept: dict[str, Any] = {} if kept is None else kept
        self.inputs: Arrays = MappingProxyType(dict(inputs))
        self.outputs = tuple(outputs)
        self.request_id = request_id
        self.parameters: Mapping[str, Parameter] = MappingProxyType(parameters or {})
        self.rows = rows

    @property
    def cancelled(self) -> bool:
        """Does nobody want responses any more? What is sent then is dropped; there is no need to."""
        return self._answers.is_unwanted()

    def computed(self) -> None:
        """For the statistics: the next response is computed, what the model does until it is sent is output."""
        self._answers.computed()

    def send(
        self,
        outputs: Arrays | None = None,
        *,
        error: str | Exception = "",
        final: bool = False,
        parameters: Given | None = None,
    ) -> None:
        """Send one response: `outputs`, or an error; `final`: the last one, which may also be empty. States of the
        sequence among the outputs (`sequence_batching.state`) are kept for its next step instead. `parameters`: of a
        response with outputs, which need be no more than {}.

        Copies the arrays. Waits while the client has 16 responses unread, fewer of large ones. Raises InferError for
        outputs that the model does not have or in another datatype, for parameters that no response can have, and after
        the final response.
        """
        if self._released:
            raise InferError(Code.INTERNAL, "Unable to send response. Response sender has been closed.")
        if outputs is not None and not isinstance(outputs, Mapping):
            raise InferError(
                Code.INTERNAL, f"a response maps the names of outputs to arrays, got {type(outputs).__name__}"
            )
        if parameters and (outputs is None or error):
            raise InferError(Code.INVALID_ARG, "parameters go with the outputs of a response, which it does not have")
        if outputs is not None and self._states is not None:
            outputs = self._states.take(outputs) or None
            if not (outputs or error or final):
                return
        if isinstance(error, Exception) and not isinstance(error, InferError):
            error = InferError(Code.INTERNAL, described(error))
        self._answers.send(outputs, error, final, parameters or NOTHING)

    def reschedule(self) -> None:
        """In place of a final response, before `execute` returns: run the request once more, when others had their
        turn. The model gets it as a new stream, with what `kept` has; this one is over.

        Raises InferError unless the model has `sequence_batching { iterative_sequence: true }`.
        """
        if self._released:
            raise InferError(Code.INTERNAL, "the request was rescheduled already")
        self._answers.reschedule()
        self._released = True

    def fail(self, error: InferError) -> None:
        """End it with an error, unless it has ended: for whoever ran the model, which raised."""
        self._released = False
        self._answers.fail(error)

    def __del__(self) -> None:
        if not self._released:
            self._answers.let_go()
