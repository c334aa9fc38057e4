"""Which ONNX operators may read memory that its owner rewrites meanwhile: the list, with the reason for every entry.

An operator is on the list when no value it reads becomes an address, a size, a count or an order. Then a concurrent
write can change the result, never the memory that is touched. Missing from it on purpose: TopK, Unique and NonMax-
Suppression (order), NonZero and Compress (count first, write later), Gather*, Scatter*, OneHot and GridSample (their
indices), ArgMax and Hardmax (an index by comparison), everything that draws or parses.

Used by `zero_copy` alone.
"""

from __future__ import annotations

from typing import NamedTuple

EVERY = None  # all input positions


class Operator(NamedTuple):
    """`data`: the input positions at which shared memory may arrive. `constant`: those that must be fixed in the file.

    Any other position (an index, a shape, a scale) is not allowed to be shared memory. `follow`: the consumers of the
    output must qualify as well, because the output is an alias of the input, or the operator can be one that a graph
    optimiser removes (x + 0, a transpose and its inverse, a cast back and forth).
    """

    reason: str
    data: tuple[int, ...] | None = (0,)
    constant: tuple[int, ...] = ()
    follow: bool = False


def _each(names: str, operator: Operator) -> dict[str, Operator]:
    return dict.fromkeys(names.split(), operator)


_VIEWS = _each(
    "Reshape Squeeze Unsqueeze Flatten Identity Dropout",
    Operator("a view: the bytes are not read", follow=True),
)

_SHAPES = _each("Shape Size", Operator("reads the dimensions, not the bytes"))

_ELEMENTWISE = _each(
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish "
    "IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign "
    "Sqrt Swish Tan Tanh ThresholdedRelu",
    Operator("one output element per input element"),
) | _each(
    "And Equal Greater GreaterOrEqual Less LessOrEqual Mod Or Pow PRelu Where Xor",
    Operator("one output element per input element, by broadcasting", EVERY),
)

_REMOVABLE_ARITHMETIC = _each(
    "Add Clip Sub Mul Div Max Mean Min Sum",
    Operator("one output element per input element, by broadcasting", EVERY, follow=True),
)

_CONVERSIONS = _each(
    "Cast CastLike QuantizeLinear DequantizeLinear DynamicQuantizeLinear",
    Operator("converts element by element, with saturation", follow=True),
)

_PRODUCTS = (
    _each("Conv ConvTranspose Gemm MatMul", Operator("multiply-accumulate: addresses come from shapes alone", EVERY))
    | _each("ConvInteger MatMulInteger QLinearConv", Operator("multiply-accumulate: addresses come from shapes alone"))
    | {
        "QLinearMatMul": Operator("multiply-accumulate: addresses come from shapes alone", (0, 3)),
        # Position 4 holds sequence lengths.
        "GRU": Operator("matrix products over time steps that are counted by shapes", (0, 1, 2, 3, 5)),
        "LSTM": Operator("matrix products over time steps that are counted by shapes", (0, 1, 2, 3, 5, 6, 7)),
        "RNN": Operator("matrix products over time steps that are counted by shapes", (0, 1, 2, 3, 5)),
    }
)

_POOLING = _each(
    "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool",
    Operator("windows come from attributes; a maximum's index is a position inside its window"),
)

_NORMALISATIONS = _each(
    "BatchNormalization GroupNormalization InstanceNormalization LayerNormalization RMSNormalization",
    Operator("reads twice, but only to compute: the statistics scale values and address nothing", EVERY),
) | _each(
    "LogSoftmax LpNormalization LRN MeanVarianceNormalization Softmax",
    Operator("reads twice, but only to compute: the statistics scale values and address nothing"),
)

_REDUCTIONS = _each(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
    "ReduceSumSquare",
    Operator("accumulates over axes that are no data", follow=True),
)

_MOVES = (
    _each("Concat", Operator("copies whole rows", EVERY, follow=True))
    | _each("DepthToSpace SpaceToDepth Transpose", Operator("permutes by attributes", follow=True))
    | _each("Resize Upsample", Operator("interpolates at positions that come from the sizes", follow=True))
    | {
        "Expand": Operator("copies to a fixed shape", constant=(1,), follow=True),
        "Gather": Operator("copies rows at fixed indices", constant=(1,), follow=True),
        "Pad": Operator("copies into fixed borders", constant=(1, 2, 3), follow=True),
        "Slice": Operator("copies a fixed range", constant=(1, 2, 3, 4), follow=True),
        "Split": Operator("copies fixed ranges", constant=(1,), follow=True),
        "Tile": Operator("copies a fixed number of times", constant=(1,), follow=True),
    }
)

OPERATORS: dict[str, Operator] = (
    _VIEWS
    | _SHAPES
    | _ELEMENTWISE
    | _REMOVABLE_ARITHMETIC
    | _CONVERSIONS
    | _PRODUCTS
    | _POOLING
    | _NORMALISATIONS
    | _REDUCTIONS
    | _MOVES
)
"""Operators of the standard ONNX domain, by name."""
