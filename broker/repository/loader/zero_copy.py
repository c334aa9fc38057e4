"""The graph policy: may the runtime read this input directly in the client's memory, or must it be copied first?

A runtime that validates a value and reads it again can be led out of bounds by a client that rewrites it in between.
So an input is granted only when every operator that can see its memory is on the list of `operators`. Pure function
of the graph; `load` applies the configuration's own word (`zero_copy_inputs`) afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

import onnx

from broker.repository.loader.onnx_file import constants
from broker.repository.loader.operators import OPERATORS

_STANDARD_DOMAINS = ("", "ai.onnx")
_ANALYSED = frozenset(
    {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.BFLOAT16,
        # 8-bit integers are pixels and quantised values. No standard operator takes them as indices or sizes; one
        # that reaches such an operator through Cast is followed there and refused.
        onnx.TensorProto.INT8,
        onnx.TensorProto.UINT8,
    }
)
_MAX_NAMED = 4  # operators listed in a reason


class Verdict(NamedTuple):
    """`reason` is a sentence for `tensorbroker explain`, whichever way it went."""

    allowed: bool
    reason: str


class _Use(NamedTuple):
    node: onnx.NodeProto
    position: int


def policy(model: onnx.ModelProto, sent: frozenset[str] = frozenset()) -> dict[str, Verdict]:
    """The verdict for every graph input that is not an initializer. Anything that is not understood is copied.

    `sent` as in `read_signature`: default values that a request may replace are inputs, not constants.
    """
    initializers = constants(model, sent)
    graph = _Uses(model, sent - initializers)
    verdicts: dict[str, Verdict] = {}
    for value in model.graph.input:
        if value.name in initializers:
            continue
        element = value.type.tensor_type.elem_type
        if element == onnx.TensorProto.STRING:
            verdicts[value.name] = Verdict(False, "copied: BYTES elements are parsed before use")
        elif element not in _ANALYSED:
            kind = "BOOL" if element == onnx.TensorProto.BOOL else "integer"
            verdicts[value.name] = Verdict(
                False, f"copied: {kind} inputs can be indices, sizes or masks, checked once and read again"
            )
        else:
            verdicts[value.name] = graph.judge(value.name)
    return verdicts


@final
class _Uses:
    """Who reads which tensor, by name, over the graph and all its subgraphs.

    Scopes are ignored: a name that a subgraph uses for a tensor of its own counts as a use of the outer one too. That
    errs towards copying.
    """

    __slots__ = ("_by_name", "_constants", "_local", "_subgraph_outputs")

    def __init__(self, model: onnx.ModelProto, sent: frozenset[str]) -> None:
        self._by_name: dict[str, list[_Use]] = {}
        self._constants: set[str] = set()
        self._subgraph_outputs: set[str] = set()
        self._local = {function.name for function in model.functions if function.domain in _STANDARD_DOMAINS}
        for graph in _graphs(model.graph):
            self._constants.update(tensor.name for tensor in graph.initializer if tensor.name not in sent)
            if graph is not model.graph:
                self._subgraph_outputs.update(value.name for value in graph.output)
            for node in graph.node:
                if node.op_type == "Constant" and node.domain in _STANDARD_DOMAINS:
                    self._constants.update(node.output)
                for position, name in enumerate(node.input):
                    if name:
                        self._by_name.setdefault(name, []).append(_Use(node, position))

    def judge(self, name: str) -> Verdict:
        """Follow `name` through everything that may be the same memory."""
        pending, seen = [name], {name}
        readers: dict[str, None] = {}
        while pending:
            current = pending.pop()
            if current in self._subgraph_outputs:
                return Verdict(False, f"copied: '{current}' leaves a subgraph, which is not followed")
            for use in self._by_name.get(current, ()):
                if objection := self._objection(use):
                    return Verdict(False, f"copied: {objection}")
                readers[use.node.op_type] = None
                if OPERATORS[use.node.op_type].follow:
                    new = [output for output in use.node.output if output and output not in seen]
                    seen.update(new)
                    pending += new
        if not readers:
            return Verdict(True, "zero-copy: no operator reads it")
        shown = "; ".join(f"{name} ({OPERATORS[name].reason})" for name in list(readers)[:_MAX_NAMED])
        more = f"; and {len(readers) - _MAX_NAMED} more" if len(readers) > _MAX_NAMED else ""
        return Verdict(True, f"zero-copy: read by {shown}{more}")

    def _objection(self, use: _Use) -> str:
        """Why this use forbids shared memory; "" if it does not."""
        node, position = use
        title = f"{node.op_type} (node '{node.name}')" if node.name else node.op_type
        if node.domain not in _STANDARD_DOMAINS:
            return f"read by {node.domain}::{title}, an operator outside the standard ONNX domain"
        if node.op_type in self._local:
            return f"read by {title}, a function defined inside the model"
        operator = OPERATORS.get(node.op_type)
        if operator is None:
            return f"read by {title}, which is not on the list of single-pass operators"
        if operator.data is not None and position not in operator.data:
            return f"input {position} of {title} is not plain data (an index, a shape or a parameter)"
        for operand in operator.constant:
            if operand < len(node.input) and node.input[operand] and node.input[operand] not in self._constants:
                return (
                    f"read by {title}, whose input {operand} ('{node.input[operand]}') is not fixed in the model file"
                )
        return ""


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
            for inner in attribute.graphs:
                yield from _graphs(inner)
