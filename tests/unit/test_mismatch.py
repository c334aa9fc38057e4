"""A contradiction in columns, and the one edit that ends it."""

from __future__ import annotations

import pytest

from shm.mismatch import request_fix, side_by_side


def test_columns_are_aligned():
    lines = side_by_side(("config.pbtxt", "model file"), [("dims", "[ 4 ]", ""), ("shape", "[-1,4]", "[n,4]")], "x")
    assert lines.splitlines() == [
        "",
        "           config.pbtxt  model file",
        "    dims   [ 4 ]         -",
        "    shape  [-1,4]        [n,4]",
        "    fix: x",
    ]


@pytest.mark.parametrize(
    ("expected", "came", "file_shape", "max_batch_size", "fix"),
    [
        ((-1, 3, 640), (3, 640), "[batch,3,640]", 8, "send the batch dimension as well: shape [1,3,640]"),
        ((3, 640), (1, 3, 640), "[3,640]", 0, "leave the first dimension out: shape [3,640], or set max_batch_size"),
        ((-1, 3, 640), (1, 3, 384), "[batch,3,size]", 8, "dims: [ 3, -1 ] in config.pbtxt: the model file leaves"),
        ((-1, 3, 640), (1, 3, 384), "[batch,3,640]", 8, "send shape [-1,3,640]: the model file takes nothing else"),
        ((-1, 4), (9, 4), "[batch,4]", 8, "send at most 8 rows, or write a larger max_batch_size into config.pbtxt"),
        ((4,), (5,), "", 0, "send shape [4], or change dims in config.pbtxt"),
        ((-1, 1), (3, 4), "[n]", 4, "one value per row: shape [1,1] to [4,1]; to send vectors, max_batch_size: 0 and"),
        ((-1, 1), (3,), "[n]", 4, "one value per row: shape [1,1] to [4,1]; to send vectors, max_batch_size: 0 and"),
        ((4,), (5, 6, 7), "[4]", 0, "send shape [4]: the model file takes nothing else"),
    ],
)
def test_the_edit_that_fixes_a_request(expected, came, file_shape, max_batch_size, fix):
    assert request_fix(expected, came, file_shape, max_batch_size).startswith(fix)
