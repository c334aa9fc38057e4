"""The plan of an ensemble's step: the member's tensors on the ensemble's, checked against the member.

A step's plan has one position. Used by `broker.worker.ensembles.run` when a step cannot go on the plan of an earlier
run: for the first request of a position, after a reload, or when shapes have changed.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.repository.config import TensorConfig
from broker.repository.scheduling import Step
from broker.worker.ensembles.memory import Prepared, Shape, Value, fitted, not_fitting, of_client, private
from broker.worker.messages import BindPlan, PlanTensor
from broker.worker.model import LoadedModel
from broker.worker.overlap import Crowds
from broker.worker.plans import Plan
from broker.worker.regions import RegionTable
from shm import datatypes
from shm.admission import Request
from shm.errors import Code, InferError
from shm.message_values import TensorSpec
from shm.model_fit import check_inputs_named


class Asked(NamedTuple):
    """A request for an ensemble and what a run on it may use again."""

    request: Request
    plan: Plan
    ensemble: LoadedModel
    prepared: Prepared


def plan_of(asked: Asked, step: Step, member: LoadedModel, values: dict[str, Value]) -> Plan:
    """A plan for `member` on the tensors that exist and on places for those that it will write, noted in `prepared`.

    `values`: ensemble tensor → what exists of it. It is bound to no model yet. Raises InferError INVALID_ARG for a
    tensor that the member does not take.
    """
    config = member.config
    inputs, rows = _inputs(step, member, values, asked.request.rows or 1)
    sizes = _sizes(member, inputs)
    outputs: dict[str, Value] = {}
    for tensor in config.output:
        name = step.output_map.get(tensor.name)
        if name is not None and name in asked.prepared.needed.wanted:
            shape = _shape(tensor, sizes)
            shape = (rows, *shape) if config.max_batch_size else shape
            outputs[tensor.name] = asked.prepared.places[name] = _place(asked, name, tensor.datatype, shape)
    return _plan(asked.plan, step, inputs, outputs, rows)


def _inputs(step: Step, member: LoadedModel, values: dict[str, Value], rows: int) -> tuple[dict[str, Value], int]:
    """The member's inputs and the rows they have (0: it does not batch). `rows`: of a batch without any input."""
    most = member.config.max_batch_size
    batch = (-1,) if most else ()
    inputs: dict[str, Value] = {}
    rows = rows if batch else 0
    given = {name: values[tensor] for name, tensor in step.input_map.items() if tensor in values}
    check_inputs_named(member.name, member.config.input, [*given])
    for tensor in member.config.input:
        value = given.get(tensor.name)
        if value is None:
            continue  # it is optional
        wanted = (*batch, *tensor.dims)
        shape = fitted(value.shape, wanted)
        if shape is None:
            raise not_fitting(tensor.name, value.shape, member.name, wanted)
        if batch and inputs and shape[0] != rows:
            raise InferError(
                Code.INVALID_ARG,
                f"input '{tensor.name}' batch size does not match other inputs for '{member.name}': it has"
                f" {shape[0]} rows, others {rows}",
            )
        rows = shape[0] if batch else 0
        inputs[tensor.name] = value._replace(shape=shape)
    if batch and not 0 < rows <= most:
        bound = f"<= {most}" if rows else ">= 1"
        raise InferError(
            Code.INVALID_ARG, f"inference request batch-size must be {bound} for '{member.name}', got {rows}"
        )
    return inputs, rows


def _sizes(member: LoadedModel, inputs: dict[str, Value]) -> dict[str, int]:
    """Of the dimensions that the model's file has names for, as the inputs have them: only where they agree."""
    sizes: dict[str, int] = {}
    torn: set[str] = set()
    for tensor in member.config.input:
        if tensor.name in inputs:
            shape = inputs[tensor.name].shape
            for symbol, size in zip(tensor.symbols, shape[-len(tensor.dims) :], strict=False):
                if symbol and sizes.setdefault(symbol, size) != size:
                    torn.add(symbol)
    return {symbol: size for symbol, size in sizes.items() if symbol not in torn}


def _shape(tensor: TensorConfig, sizes: dict[str, int]) -> Shape:
    """An output's, without batch dimension, -1 where only the run will tell."""
    symbols = tensor.symbols if len(tensor.symbols) == len(tensor.dims) else ("",) * len(tensor.dims)
    return tuple(sizes.get(symbol, -1) if dim == -1 else dim for dim, symbol in zip(tensor.dims, symbols, strict=True))


def _place(asked: Asked, name: str, datatype: str, shape: Shape) -> Value:
    """The client's own range where its size is certain and it lies well, else memory of this worker.

    What the response cache keeps must not lie where a client can write. The range of a decoupled ensemble has places
    for several responses, which are written one after the other.
    """
    request = asked.request
    own = asked.prepared.own_place(name, datatype, shape)
    if own is not None:
        return own
    if asked.ensemble.cached is None and -1 not in shape and not asked.plan.responses:
        for tensor in asked.plan.outputs:
            if tensor.name != name or not tensor.aligned or tensor.datatype != datatype or datatype == datatypes.BYTES:
                continue
            size = datatypes.byte_size(datatype, list(shape))
            if tensor.open and (tensor.make_room(size) or size <= tensor.place.byte_size):
                return of_client(tensor, request.output_position, 0, shape)._replace(byte_size=size)
            if not tensor.open and shape == asked.ensemble.shape(name, tensor.shape_of(request.rows)):
                return of_client(tensor, request.output_position, request.rows, shape)
    return private(datatype, shape)


def _plan(client: Plan, step: Step, inputs: dict[str, Value], outputs: dict[str, Value], rows: int) -> Plan:
    table = RegionTable()
    numbers: dict[int, int] = {}

    def place(name: str, value: Value) -> PlanTensor:
        number = numbers.setdefault(id(value.region), len(numbers))
        table.hold(number, value.region)
        spec = TensorSpec(
            name=name, region=name, datatype=value.datatype, shape=value.shape, offset=value.offset,
            byte_size=value.byte_size,
        )  # fmt: skip
        return PlanTensor(spec=spec, region=number, generation=0)

    message = BindPlan(
        id=0,
        session=client.session,
        index=client.index,
        generation=client.generation,
        model=step.model_name,
        version=step.model_version,
        inputs=tuple(place(name, value) for name, value in inputs.items()),
        outputs=tuple(place(name, value) for name, value in outputs.items()),
        input_positions=1,
        output_positions=1,
        rows=rows,
        follow_latest=step.model_version < 0,
        owner=client.owner,
        parameters=client.parameters,
    )
    return Plan(message, table, Crowds(lambda: ()))


def told(step: Step, at: int, values: dict[str, Value]) -> str:
    """Which step it was, for whoever reads why it failed: number, model, and what it read."""
    tensors = [
        f"'{name}' = '{tensor}' {datatypes.shape_text(values[tensor].shape)}"
        for name, tensor in step.input_map.items()
        if tensor in values
    ]
    more = ", …" if len(tensors) > 3 else ""
    read = f" on {', '.join(tensors[:3])}{more}" if tensors else ""
    return f"step {at}: model '{step.model_name}'{read}"
