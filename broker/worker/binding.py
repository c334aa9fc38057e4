"""Bindings of a plan's positions to a model instance, and the delivery of outputs that the runtime allocated.

A binding is made on first use and kept with the plan; it keeps the memory it points to.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from broker.worker.backends import OWN_CODE, Binding, Operand
from broker.worker.counting import follow
from broker.worker.model import Instance, LoadedModel
from broker.worker.plans import PlacedTensor, Plan
from shm import datatypes
from shm.admission import Request
from shm.errors import Code, InferError, described, too_small

Bytes = npt.NDArray[np.uint8]
MAX_BINDINGS = 4096  # per plan; a binding costs a few kilobytes


@final
class Execution:
    """A binding and what surrounds it: copies before, open outputs after. `typical_ns` 0 = never measured."""

    __slots__ = ("binding", "copied", "copies", "instance", "opens", "run", "typical_ns")

    def __init__(
        self,
        instance: Instance,
        binding: Binding,
        copies: list[tuple[Bytes, Bytes, str]],
        opens: list[PlacedTensor],
    ) -> None:
        self.instance = instance
        self.binding = binding
        self.run = binding.run
        self.copies = copies
        self.copied = sum(source.size for _, source, _ in copies)
        self.opens = opens
        self.typical_ns = 0

    def measured(self, took: int) -> None:
        """What the run took, for the decision to run it inline."""
        self.typical_ns = follow(self.typical_ns, took)


def execution_of(plan: Plan, instance: Instance, input_position: int, output_position: int, rows: int) -> Execution:
    """The cached binding of one request's position, made on first use."""
    key = (instance.number, input_position, output_position, rows)
    found = plan.bindings.get(key)
    if found is None:
        found = bind(plan, instance, input_position, output_position, rows)
        remember(plan, key, found)
    return found


def remember(plan: Plan, key: tuple[int, int, int, int], execution: Execution) -> None:
    """Cache it with the plan, in place of the oldest when there are too many."""
    bindings = plan.bindings
    if not _serves(plan, execution.instance):
        return
    if len(bindings) >= MAX_BINDINGS:
        try:
            bindings.pop(next(iter(bindings)), None)
        except RuntimeError:
            pass  # another instance's thread has just changed it: one too many does no harm
    bindings[key] = execution


def _serves(plan: Plan, instance: Instance) -> bool:
    """Is it worth keeping? Not what a replaced or unloaded model still has queued: it would outlive the model."""
    return plan.closed is None and plan.model is instance.model


def bind(
    plan: Plan,
    instance: Instance,
    input_position: int,
    output_position: int,
    rows: int,
    count: int = 1,
    all_open: bool = False,
) -> Execution:
    """Bind `count` adjacent positions from the given ones on, `rows` rows each.

    `all_open`: the runtime allocates every output, because one came out in another shape than the plan says. So it does
    where answers are kept: what clients can write to is not kept.
    """
    inputs: list[Operand] = []
    copies: list[tuple[Bytes, Bytes, str]] = []
    total = rows * count
    # Runtimes that are given strings give strings, and everything beside them, in memory of their own.
    all_open = all_open or instance.model.cached is not None
    all_open = all_open or any(tensor.datatype == "BYTES" for tensor in (*plan.inputs, *plan.outputs))
    for tensor in plan.inputs:
        memory = _block(tensor, input_position, rows, count)
        policy = tensor.name in instance.model.copied
        if policy or not tensor.aligned:
            staging = instance.scratch("input", tensor.name, memory.size)
            copies.append((staging, memory, "policy" if policy else "align"))
            memory = staging
        inputs.append(
            Operand(tensor.name, tensor.datatype, instance.model.shape(tensor.name, tensor.shape_of(total)), memory)
        )
    outputs: list[Operand] = []
    opens: list[PlacedTensor] = []
    for tensor in plan.outputs:
        runtime_allocates = tensor.open or not tensor.aligned or all_open
        place = None if runtime_allocates else _block(tensor, output_position, rows, count)
        outputs.append(
            Operand(tensor.name, tensor.datatype, instance.model.shape(tensor.name, tensor.shape_of(total)), place)
        )
        if runtime_allocates:
            opens.append(tensor)
    return Execution(instance, instance.bind(inputs, outputs, total, plan.parameters), copies, opens)


def _block(tensor: PlacedTensor, position: int, rows: int, count: int) -> Bytes:
    if count == 1:
        return tensor.memory(position, rows)
    start = tensor.place.offset + position * tensor.place.stride
    return tensor.region.bytes[start : start + count * tensor.place.byte_size]


def deliver(
    model: LoadedModel, request: Request, tensors: Sequence[PlacedTensor], arrays: Sequence[npt.NDArray[np.generic]]
) -> int:
    """Copy what the runtime allocated to where the plan wants it; nothing is written unless everything fits.

    Returns the bytes copied. The true shapes of open outputs go into the request's note.
    """
    note: list[int] = []
    moves: list[tuple[Bytes, Bytes]] = []
    check_count(model, arrays, len(tensors))
    for tensor, given in zip(tensors, arrays, strict=True):
        array = _checked(model, tensor, given)
        data = given_bytes(model, tensor, array)
        note.extend(place_for(model, request, tensor, client_shape(model, tensor, array), data.size))
        moves.append((tensor.memory(request.output_position)[: data.size], data))
    for target, data in moves:
        target[:] = data
    request.note = struct.pack(f"<{len(note)}Q", *note)
    return sum(data.size for _, data in moves)


def place_for(
    model: LoadedModel, request: Request, tensor: PlacedTensor, shape: tuple[int, ...], byte_size: int
) -> tuple[int, ...]:
    """Does a result of `byte_size` bytes fit where the plan wants it? `shape`: the client's.

    Returns what the request's note is to say of it: rank and shape of an open output. Raises InferError.
    """
    if tensor.seen != (request.rows, shape):  # before its size: it is the model's mistake, not the caller's
        check_shape(model, tensor.name, shape, request.rows)
        tensor.seen = request.rows, shape
    if not tensor.open and shape != tensor.shape_of(request.rows):
        raise InferError(
            Code.INVALID_ARG,
            f"output '{tensor.name}' of model '{model.name}' has shape {datatypes.shape_text(shape)}, the plan says"
            f" {datatypes.shape_text(tensor.shape_of(request.rows))}: leave the dimension open (-1), in config.pbtxt"
            " too if that fixes it, and give it room by byte_size",
        )
    if not (tensor.open and tensor.make_room(byte_size)) and byte_size > tensor.place.byte_size:
        raise InferError(Code.INVALID_ARG, too_small(f"output '{tensor.name}'", tensor.place.byte_size, byte_size))
    return (len(shape), *shape) if tensor.open else ()


def client_shape(model: LoadedModel, tensor: PlacedTensor, array: npt.NDArray[np.generic]) -> tuple[int, ...]:
    """A result's shape as the client has it."""
    reshape = model.reshapes.get(tensor.name)
    return tuple(array.shape) if reshape is None else reshape.to_client(tensor.name, array.shape)


def check_shape(model: LoadedModel, name: str, shape: tuple[int, ...], rows: int = 0) -> None:
    """Raises InferError INTERNAL for a result of another shape than the configuration says, where no model file does.

    `rows`: of the request, 0 for any number.
    """
    wanted = model.unproven.get(name)
    if wanted is None:
        return
    fits = len(shape) == len(wanted) and all(want in (-1, dim) for want, dim in zip(wanted, shape, strict=True))
    if not fits or (rows and shape[0] != rows):
        expected = (rows, *wanted[1:]) if rows else wanted
        raise InferError(
            Code.INTERNAL,
            f"output '{name}' of model '{model.name}' has the shape {datatypes.shape_text(shape)}, its configuration "
            f"says {datatypes.shape_text(expected)}",
        )


def check_rows(model: LoadedModel, name: str, array: npt.NDArray[np.generic], rows: int) -> None:
    """Raises InferError INTERNAL for a result of a batch that cannot be cut into the rows of its requests."""
    shape = np.shape(array)  # of own code that may be a list
    if not shape or shape[0] != rows:
        raise InferError(
            Code.INTERNAL,
            f"output '{name}' of model '{model.name}' has the shape {datatypes.shape_text(shape)}, a batch of "
            f"{rows} rows has outputs of the shape [{rows},…]",
        )


def results_of(model: LoadedModel, binding: Binding, wanted: int) -> list[npt.NDArray[np.generic]]:
    """What a run made of the `wanted` outputs that have no memory. Raises InferError INTERNAL for another number."""
    with OWN_CODE:
        results = binding.results()
    if type(results) is not list and (wanted if results is None else not _is_list(results)):
        raise InferError(
            Code.INTERNAL,
            f"'results' of model '{model.name}' returned {_said(results)}: it must return a list with one array for "
            f"each output whose memory is None, in order, here {wanted}",
        )
    check_count(model, results or (), wanted)
    return results or []


def _is_list(results: object) -> bool:
    return isinstance(results, Sequence) and not isinstance(results, str | bytes)


def _said(results: object) -> str:
    """What came in the place of a list, for an error."""
    if isinstance(results, np.ndarray):
        return f"an array of {results.dtype} with the shape {datatypes.shape_text(results.shape)}"
    return "None" if results is None else type(results).__name__


def watched_results(instance: Instance, binding: Binding, wanted: int, rows: int) -> list[npt.NDArray[np.generic]]:
    """`results_of` with the hang watch on: the code of a model's own may hang there, too."""
    instance.begin(rows, time.monotonic_ns())
    try:
        return results_of(instance.model, binding, wanted)
    finally:
        instance.end(rows, 0)


def check_in_place(model: LoadedModel, execution: Execution) -> None:
    """After the first run of a binding all of whose outputs have memory: raises InferError INTERNAL where `results`
    gives arrays all the same, which nobody would look at. Only code that nobody has read can do that.
    """
    if execution.typical_ns or execution.opens or not model.unproven:
        return
    with contextlib.suppress(NotImplementedError, AttributeError):  # of code that has nothing to give
        results_of(model, execution.binding, 0)


def check_count(model: LoadedModel, results: Sequence[object], wanted: int) -> None:
    """Raises InferError INTERNAL for too many results, or too few."""
    if results and not wanted:
        outputs = ", ".join(f"'{tensor.name}'" for tensor in model.config.output)
        raise InferError(
            Code.INTERNAL,
            f"model '{model.name}' gave {len(results)} results, no output waits for one: each of those asked for (of "
            f"{outputs}) has memory: write there ('results' is for outputs whose memory is None)",
        )
    if len(results) != wanted:
        raise InferError(
            Code.INTERNAL, f"model '{model.name}' gave {len(results)} results, {wanted} outputs wait for one"
        )


def _checked(model: LoadedModel, tensor: PlacedTensor, given: object) -> npt.NDArray[np.generic]:
    """A result as an array of the output's datatype: other bytes would be read as what they are not."""
    try:
        array = np.asarray(given)
    except Exception as error:  # lists of different lengths, what an object's own code raises
        raise InferError(
            Code.INTERNAL,
            f"what model '{model.name}' gave for output '{tensor.name}', {type(given).__name__}, does not become an "
            f"array: {described(error).splitlines()[0]}",
        ) from error
    if tensor.datatype == datatypes.BYTES:
        fits = array.dtype.kind in "OSU"
    else:
        fits = array.dtype == datatypes.numpy_dtype(tensor.datatype)
        fits = fits or (tensor.datatype == "BF16" and array.dtype.itemsize == 2)  # which numpy does not have
    if not fits:
        raise InferError(
            Code.INTERNAL,
            f"output '{tensor.name}' of model '{model.name}' is {tensor.datatype}, the model gave an array of "
            f"{array.dtype}",
        )
    return array


def given_bytes(model: LoadedModel, tensor: PlacedTensor, array: npt.NDArray[np.generic]) -> Bytes:
    """`serialized`, of what `model` has just given. Raises InferError INTERNAL for strings that are none."""
    try:
        return serialized(tensor, array)
    except InferError as error:
        raise no_strings(model.name, tensor.name, error) from None


def no_strings(model: str, output: str, error: InferError) -> InferError:
    """What `shm.datatypes.encode_bytes` said of an output: the model's mistake, and not its caller's."""
    return InferError(Code.INTERNAL, f"output '{output}' of model '{model}' is BYTES: {error.message}")


def serialized(tensor: PlacedTensor, array: npt.NDArray[np.generic]) -> Bytes:
    """The bytes of an output as they lie in clients' memory."""
    if tensor.datatype == "BYTES":
        return np.frombuffer(datatypes.encode_bytes(array), np.uint8)
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1) if array.size else np.empty(0, np.uint8)
