"""Classes of an output: order, text and shape as Triton gives them."""

from __future__ import annotations

import numpy as np
import pytest

from broker.gateway.classification import classify
from shm.datatypes import decode_bytes
from shm.errors import InferError


def classes(values, count, datatype="FP32", dtype=np.float32, batched=False):
    array = np.asarray(values, dtype)
    data, shape = classify(np.frombuffer(array.tobytes(), np.uint8), datatype, array.shape, count, batched=batched)
    found = decode_bytes(data, int(np.prod(shape)), "classes").reshape(shape)
    return [[item.decode() for item in row] for row in found] if batched else [item.decode() for item in found]


def test_the_highest_come_first_with_six_decimals():
    assert classes([0.5, 2, -1, 1.25], 3) == ["2.000000:1", "1.250000:3", "0.500000:0"]


def test_each_row_of_a_batch_is_ranked():
    assert classes([[1, 2], [4, 3]], 1, batched=True) == [["2.000000:1"], ["4.000000:0"]]


def test_without_a_batch_dimension_all_elements_are_one_row():
    assert classes([[1, 2], [4, 3]], 3) == ["4.000000:2", "3.000000:3", "2.000000:1"]


def test_more_classes_than_elements_give_all():
    assert classes([1, 2], 10) == ["2.000000:1", "1.000000:0"]
    assert classes([[1, 2]], 10, batched=True) == [["2.000000:1", "1.000000:0"]]
    assert classes(np.zeros((2, 0)), 3, batched=True) == [[], []]
    assert classes(np.zeros((0, 2)), 3, batched=True) == []


def test_labels_follow_the_index_where_there_are_any():
    data, shape = classify(
        np.array([3, 1, 2, 0], np.uint8), "UINT8", (4,), 4, batched=False, labels=[b"cat", b"", b"dog"]
    )
    assert decode_bytes(data, 4, "classes").tolist() == [b"3:0:cat", b"2:2:dog", b"1:1", b"0:3"]
    assert shape == (4,)


def test_of_equal_values_the_first_wins():
    assert classes([7, 7, 7, 9], 3) == ["9.000000:3", "7.000000:0", "7.000000:1"]


@pytest.mark.parametrize(
    ("datatype", "dtype", "values", "expected"),
    [
        ("UINT8", np.uint8, [0, 255, 3], "255:1"),
        ("UINT64", np.uint64, [2**64 - 1, 0, 2**63], f"{2**64 - 1}:0"),
        ("INT64", np.int64, [-(2**63), -1, -5], "-1:1"),
        ("INT8", np.int8, [-128, 127, 0], "127:1"),
        ("FP64", np.float64, [1e300, 0, 0], f"{1e300:.6f}:0"),
        ("FP32", np.float32, [0.1, 0, 0], "0.100000:0"),
        ("FP32", np.float32, [np.nan, np.inf, 0], "inf:1"),
    ],
)
def test_every_type_that_has_classes(datatype, dtype, values, expected):
    assert classes(values, 1, datatype, dtype) == [expected]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BOOL", "BYTES"])
def test_types_without_classes(datatype):
    with pytest.raises(InferError) as caught:
        classify(np.zeros(8, np.uint8), datatype, (4,), 1, batched=False)
    assert caught.value.message == f"class result not available for output due to unsupported type '{datatype}'"
    assert caught.value.code == "INVALID_ARG"


def test_a_million_elements_at_most():
    classify(np.zeros(1_000_000, np.uint8), "UINT8", (1_000_000,), 1, batched=False)
    with pytest.raises(InferError, match="classification output tensor too large"):
        classify(np.zeros(1_000_001, np.uint8), "UINT8", (1_000_001,), 1, batched=False)
