"""Warm-up (`model_warmup`): runs that make an instance ready before it serves anybody, seen in no statistics.

Called by `broker.worker.model` while a model is loaded, for each instance in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import final

import numpy as np
import numpy.typing as npt

from broker.repository.config import ModelConfig
from broker.repository.scheduling import Control, State, WarmUp, WarmUpInput
from broker.worker.backends import Operand, RuntimeModel, bind
from broker.worker.backends.builtin import array_of
from broker.worker.padding import made_inputs
from broker.worker.stream import Stream
from shm import datatypes
from shm.errors import Code, InferError, described, fresh

Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]
RANDOM_BELOW = 100  # random integers are small: they may be indices
RANDOM_TEXT = 8  # characters
STREAM_S = 60.0  # for the final response of a decoupled model


def warm_up(config: ModelConfig, runtime: RuntimeModel, shape_of: Callable[[str, Shape], Shape]) -> None:
    """Run every sample as often as it says. `shape_of`: the runtime's shape of a tensor, from the clients'.

    Raises InferError with Triton's text. A decoupled model has a minute for its final response to a sample.
    """
    for sample in config.warm_up:
        try:
            operands = _Operands(config, sample, shape_of)
            execute = getattr(runtime, "execute", None) if config.decoupled else None
            if execute is not None:
                for _ in range(sample.count):
                    _stream(execute, operands)
                continue
            binding = bind(runtime, operands.inputs(), operands.outputs())
            for _ in range(sample.count):
                binding.run()
        except BaseException as error:  # the runtime raises classes of its own, and own code may exit
            code = Code[error.code] if isinstance(error, InferError) else Code.INTERNAL
            text = error.message if isinstance(error, InferError) else described(error)
            raise InferError(code, f"failed to run warmup sample '{sample.name}': {text}") from error


@final
class _Operands:
    """Of one sample: what clients would send, and what a sequence's scheduler would add for its first request."""

    def __init__(self, config: ModelConfig, sample: WarmUp, shape_of: Callable[[str, Shape], Shape]) -> None:
        self._config = config
        self._sample = sample
        self._shape_of = shape_of
        self._batch = (sample.batch_size,) if config.max_batch_size > 0 else ()
        self.rows = sample.batch_size if config.max_batch_size > 0 else 0

    def inputs(self) -> list[Operand]:
        given = {each.name for each in self._sample.inputs}
        missing = [t.name for t in self._config.input if not t.optional and t.name not in given]
        if missing:
            raise InferError(Code.INVALID_ARG, f"it has no data for input '{missing[0]}'")
        operands = [self._operand(each) for each in self._sample.inputs]
        sequence = self._config.sequence_batching
        if sequence is not None:
            operands += [self._control(each) for each in sequence.control_input]
            operands += [self._state(each) for each in sequence.state]
        return [*operands, *self._made(given)]

    def _made(self, given: set[str]) -> Iterator[Operand]:
        """What stands beside padded inputs, here without padding."""
        padding = self._config.padding
        if padding is None:
            return
        lengths = {
            each.dims[padding.inputs[each.name] - 1] for each in self._sample.inputs if each.name in padding.inputs
        }
        longest = max(lengths, default=0)
        for helper, array in made_inputs(padding, [longest], [self.rows], longest):
            if helper.name not in given:
                yield Operand(helper.name, helper.datatype, array.shape, array.view(np.uint8).reshape(-1))

    def outputs(self) -> list[Operand]:
        shapes = ((t, self._shape_of(t.name, (*self._batch, *t.dims))) for t in self._config.output)
        return [Operand(tensor.name, tensor.datatype, shape, None) for tensor, shape in shapes]

    def _operand(self, given: WarmUpInput) -> Operand:
        shape = (*self._batch, *given.dims)
        memory = _repeated(_element(given), self._batch)
        return Operand(given.name, given.datatype, self._shape_of(given.name, shape), memory)

    def _control(self, control: Control) -> Operand:
        """A first request: START and READY are on, END is off, CORRID is 1."""
        shape = (*self._batch, 1)
        if control.kind == "CONTROL_SEQUENCE_CORRID":
            value: float = 1
        else:
            value = control.off if control.kind == "CONTROL_SEQUENCE_END" else control.on
        if control.datatype == datatypes.BYTES:
            return Operand(control.name, control.datatype, shape, _repeated(_texts(["1"]), self._batch))
        filled = np.full(shape, value).astype(datatypes.numpy_dtype(control.datatype))
        return Operand(control.name, control.datatype, shape, filled.view(np.uint8).reshape(-1))

    def _state(self, state: State) -> Operand:
        initial = state.initial_state
        dims = initial.dims if initial is not None else tuple(1 if dim == -1 else dim for dim in state.dims)
        data = initial.data if initial is not None else b""
        given = WarmUpInput(
            name=state.input_name, datatype=state.datatype, dims=dims, kind="file" if data else "zero", data=data
        )
        return Operand(state.input_name, state.datatype, (*self._batch, *dims), _repeated(_element(given), self._batch))


def _stream(execute: Callable[[list[Stream]], None], operands: _Operands) -> None:
    """One request to a decoupled model, whose responses nobody wants."""
    ending = _Ending()
    inputs = {operand.name: array_of(operand) for operand in operands.inputs()}
    names = [operand.name for operand in operands.outputs()]
    execute([Stream(ending, inputs, names, 0, operands.rows)])
    if not ending.came.wait(STREAM_S):
        raise InferError(Code.UNAVAILABLE, f"it had no final response within {STREAM_S:g} s")
    if ending.error:
        raise fresh(ending.error)


@final
class _Ending:
    """Waits for the final response. Implements `broker.worker.stream.Taker`."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.error: InferError | None = None

    def send(self, outputs: object, error: str | InferError, final: bool, parameters: object = None) -> None:
        """Nobody looks at what is sent but for errors."""
        if error:
            self.error = fresh(error) if isinstance(error, InferError) else InferError(Code.INTERNAL, error)
        if final:
            self.came.set()

    def fail(self, error: InferError) -> None:
        """The model raised: `warm_up` sees that itself."""

    def is_unwanted(self) -> bool:
        """It is wanted until it ends."""
        return self.came.is_set()

    def computed(self) -> None:
        """No statistics."""

    def reschedule(self) -> None:
        """Once is enough."""
        self.came.set()

    def let_go(self) -> None:
        """Without a final response."""
        if not self.came.is_set():
            self.send(None, "the model let go of the request without a final response", True)


def _element(given: WarmUpInput) -> Bytes:
    """The bytes of one element of the batch."""
    if given.kind == "file":
        return np.frombuffer(given.data, np.uint8)
    count = datatypes.element_count(given.dims)
    generator = np.random.default_rng()
    if given.datatype == datatypes.BYTES:
        size = RANDOM_TEXT if given.kind == "random" else 0
        return _texts(["".join(map(chr, generator.integers(97, 123, size))) for _ in range(count)])
    if given.kind == "zero":
        return np.zeros(datatypes.byte_size(given.datatype, given.dims), np.uint8)
    dtype = datatypes.numpy_dtype(given.datatype)
    below = 2 if given.datatype == "BOOL" else RANDOM_BELOW
    whole = dtype.kind in "biu"
    values = generator.integers(0, below, count) if whole else generator.random(count)
    return values.astype(dtype).view(np.uint8).reshape(-1)


def _texts(values: list[str]) -> Bytes:
    array = np.array([value.encode() for value in values], object)
    return np.frombuffer(datatypes.encode_bytes(array), np.uint8)


def _repeated(element: Bytes, batch: Shape) -> Bytes:
    # A copy in memory of its own: what comes from a file lies wherever the message that brought it does.
    return np.tile(element, batch[0] if batch else 1)
