"""A contradiction between configuration, model file and request, in columns, with the edit that ends it.

Used by the loader when a model is loaded, and by `shm.model_fit` when a request does not fit. Plain text only.
"""

from __future__ import annotations

from collections.abc import Sequence

INDENT = "\n    "


def dims_text(shape: Sequence[int]) -> str:
    """A shape as config.pbtxt spells it: [ 3, 640 ]."""
    return "[ " + ", ".join(map(str, shape)) + " ]" if shape else "[ ]"


def side_by_side(columns: Sequence[str], rows: Sequence[tuple[str, ...]], fix: str, about: str = "") -> str:
    """Lines to append to an error. `rows`: what is compared, then one text per column; "" prints as "-".
    `about`: one more line."""
    lines = [("", *columns), *((row[0], *(text or "-" for text in row[1:])) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    table = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "".join(f"{INDENT}{line}" for line in (*table, *filter(None, (about,)), f"fix: {fix}"))


def request_fix(expected: Sequence[int], came: Sequence[int], file_shape: str, max_batch_size: int) -> str:
    """What to change when a request's shape does not fit. `expected` has -1 for variable sizes and the batch."""
    if fits(expected, came):
        return f"send at most {max_batch_size} rows, or write a larger max_batch_size into config.pbtxt"
    if max_batch_size > 0 and fits(expected[1:], came):
        return f"send the batch dimension as well: shape {_shape([1, *came])}"
    if max_batch_size == 0 and len(came) == len(expected) + 1 and fits(expected, came[1:]):
        return f"leave the first dimension out: shape {_shape(came[1:])}, or set max_batch_size in config.pbtxt"
    dims = [*expected]
    sizes = file_shape[1:-1].split(",") if len(file_shape) > 2 else []
    if len(sizes) == 1 and max_batch_size > 0:
        return (
            f"one value per row: shape [1,1] to [{max_batch_size},1]; to send vectors, max_batch_size: 0 and dims: "
            "[ -1 ], without reshape, in config.pbtxt"
        )
    if len(came) == len(expected) and len(sizes) == len(expected):
        wrong = [axis for axis, size in enumerate(expected) if size not in (-1, came[axis])]
        if wrong and all(not sizes[axis].isdigit() for axis in wrong):
            for axis in wrong:
                dims[axis] = -1
            inner = dims[1:] if max_batch_size > 0 else dims
            return f"dims: {dims_text(inner)} in config.pbtxt: the model file leaves this size open"
    if sizes:
        return f"send shape {_shape(expected)}: the model file takes nothing else (or export it with variable sizes)"
    return f"send shape {_shape(expected)}, or change dims in config.pbtxt"


def fits(expected: Sequence[int], shape: Sequence[int]) -> bool:
    """Same rank, and every fixed size met."""
    return len(expected) == len(shape) and all(want in (-1, dim) for want, dim in zip(expected, shape, strict=True))


def _shape(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
