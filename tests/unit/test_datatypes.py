"""Datatypes, tensor sizes and the codec of BYTES."""

import struct
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm import datatypes
from shm.datatypes import (
    DATATYPES,
    MAX_STRING_ELEMENTS,
    byte_size,
    datatype_of,
    decode_bytes,
    element_count,
    element_size,
    encode_bytes,
    from_numpy,
    numpy_dtype,
    shape_text,
)
from shm.errors import InferError

WHAT = "inference input 'X' for model 'm'"
SIZES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BF16": 2,
}


def objects(*elements):
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def stored(*elements):
    """BYTES as the protocol defines them, written without the code under test."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def splits(data, count):
    """The one way to read `data` as `count` elements, if there is one."""
    if len(data) < 4 or not count:
        return [[]] if not data and not count else []
    end = 4 + int.from_bytes(data[:4], "little")
    return [[data[4:end], *rest] for rest in splits(data[end:], count - 1)] if end <= len(data) else []


def refusal(function, *arguments):
    with pytest.raises(InferError) as caught:
        function(*arguments)
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


class TestTable:
    def test_is_kserves_table(self):
        assert set(DATATYPES) == {*SIZES, "BYTES"}

    @pytest.mark.parametrize(("datatype", "size"), SIZES.items())
    def test_sizes_and_dtypes_agree(self, datatype, size):
        assert element_size(datatype) == numpy_dtype(datatype).itemsize == size
        assert datatype_of(numpy_dtype(datatype)) == datatype

    def test_bf16_is_ml_dtypes_bfloat16(self):
        assert numpy_dtype("BF16") == np.dtype(ml_dtypes.bfloat16)

    def test_bf16_without_ml_dtypes_is_its_bits(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        datatypes.bfloat16.cache_clear()
        try:
            assert numpy_dtype("BF16") == np.dtype(np.uint16)
            assert from_numpy(np.array([0x3F80], np.uint16), "BF16", WHAT).dtype == np.uint16
        finally:
            datatypes.bfloat16.cache_clear()

    @pytest.mark.parametrize("dtype", [object, "S5", "U5"])
    def test_strings_are_bytes(self, dtype):
        assert datatype_of(np.dtype(dtype)) == "BYTES"

    def test_byte_order_does_not_change_the_datatype(self):
        assert datatype_of(np.dtype(">f4")) == "FP32"

    @pytest.mark.parametrize("dtype", [np.complex64, np.longdouble, "M8[s]", "V2", [("a", "f4")]])
    def test_other_dtypes_are_refused_by_name(self, dtype):
        assert str(np.dtype(dtype)) in refusal(datatype_of, np.dtype(dtype))

    @pytest.mark.parametrize("datatype", ["", "fp32", "FP128", "STRING", "FP32\0"])
    def test_unknown_datatypes_are_refused(self, datatype):
        for function in (element_size, numpy_dtype, lambda name: byte_size(name, (1,))):
            assert "unknown datatype" in refusal(function, datatype)


class TestByteSize:
    @given(st.sampled_from(sorted(SIZES)), st.lists(st.integers(0, 50), max_size=4))
    def test_equals_numpys(self, datatype, shape):
        assert byte_size(datatype, shape) == np.empty(shape, numpy_dtype(datatype)).nbytes

    def test_takes_numpy_integers(self):
        size = byte_size("FP32", np.array([2, 3], np.int32))
        assert size == 24
        assert type(size) is int

    @pytest.mark.parametrize("shape", [(2**32, 2**32), (2**62, 4), (2**31,) * 3, (0, 2**60), (2**63 - 1,) * 64])
    def test_products_do_not_wrap(self, shape):
        assert "any memory" in refusal(byte_size, "FP32", shape)

    @pytest.mark.parametrize("shape", [(-1,), (3, -2), (0, -1)])
    def test_negative_dimensions_are_refused(self, shape):
        assert shape_text(shape) in refusal(byte_size, "FP32", shape)

    @pytest.mark.parametrize("shape", [(1.0,), ("4",), (None,), (float("nan"),)])
    def test_dimensions_are_integers(self, shape):
        assert "integers" in refusal(element_count, shape)

    def test_bytes_have_no_size(self):
        assert "byte_size" in refusal(byte_size, "BYTES", (1,))

    def test_shapes_are_printed_as_triton_does(self):
        assert shape_text((-1, 3, 640)) == "[-1,3,640]"
        assert shape_text(()) == "[]"


class TestFromNumpy:
    @pytest.mark.parametrize("datatype", sorted(SIZES))
    def test_takes_its_own_dtype_without_a_copy(self, datatype):
        array = np.zeros((2, 3), numpy_dtype(datatype))
        assert np.shares_memory(from_numpy(array, datatype, WHAT), array)

    def test_bf16_takes_bits_and_numbers(self):
        one = np.array([1.0], ml_dtypes.bfloat16)
        for array in (one, one.view(np.uint16), one.view(np.uint16).astype(">u2")):
            assert from_numpy(array, "BF16", WHAT).tolist() == [1.0]

    def test_other_dtypes_are_refused_with_the_fix(self):
        message = refusal(from_numpy, np.zeros(2), "FP32", "input 'images'")
        assert message == "input 'images' is FP32, but the array given has dtype float64: use array.astype('float32')"
        assert "bfloat16" in refusal(from_numpy, np.zeros(2, np.float32), "BF16", WHAT)
        refusal(from_numpy, np.zeros(2, np.complex64), "FP32", WHAT)
        refusal(from_numpy, np.zeros(2), "BYTES", WHAT)
        refusal(from_numpy, np.zeros(2, object), "FP32", WHAT)

    def test_ragged_lists_are_refused(self):
        assert "not an array" in refusal(from_numpy, [[1], [1, 2]], "INT64", WHAT)

    def test_lists_of_strings_keep_their_nuls(self):
        assert encode_bytes(from_numpy([b"a\0\0"], "BYTES", WHAT)) == stored(b"a\0\0")


class TestBytes:
    CASES = (b"", b"a\0\0", b"\xff\xfe", b"x" * 1_000_000, "é".encode())

    def test_layout(self):
        assert encode_bytes(objects(*self.CASES)) == stored(*self.CASES)

    def test_reads_the_layout(self):
        assert decode_bytes(stored(*self.CASES), len(self.CASES), WHAT).tolist() == list(self.CASES)

    @given(st.lists(st.binary(max_size=20), max_size=20))
    def test_round_trip(self, elements):
        assert decode_bytes(encode_bytes(objects(*elements)), len(elements), WHAT).tolist() == elements

    def test_elements_are_row_major(self):
        array = objects(b"a", b"b", b"c", b"d").reshape(2, 2)
        assert encode_bytes(array.T) == stored(b"a", b"c", b"b", b"d")
        assert encode_bytes(objects(b"a").reshape(())) == stored(b"a")

    @pytest.mark.parametrize("array", [np.array([b"ab", b"c"]), np.array(["ab", "c"]), objects("ab", b"c")])
    def test_encodes_every_string_dtype(self, array):
        assert encode_bytes(array) == stored(b"ab", b"c")

    def test_zero_elements(self):
        assert encode_bytes(np.empty((0, 3), object)) == b""
        for nothing in (b"", np.empty(0, np.uint8), memoryview(b"")):
            array = decode_bytes(nothing, 0, WHAT)
            assert array.shape == (0,)
            assert array.dtype == object

    @pytest.mark.parametrize("element", [1, None, 1.5, [b"a"]])
    def test_elements_that_are_no_strings_are_refused(self, element):
        assert "element 1 is" in refusal(encode_bytes, objects(b"a", element))

    def test_text_that_is_not_utf8_is_refused(self):
        assert "element 0" in refusal(encode_bytes, objects("\ud800"))

    @pytest.mark.parametrize("extra", [1, 2, 3])
    def test_trailing_bytes(self, extra):
        message = refusal(decode_bytes, stored(b"abc") + b"\0" * extra, 2, WHAT)
        assert message.startswith(f"incomplete string length indicator for {WHAT}, expecting 4 bytes")
        assert f"only {extra} bytes" in message

    @pytest.mark.parametrize("length", [4, 0x7FFFFFFF, 0xFFFFFFFF])
    def test_last_length_past_the_end(self, length):
        message = refusal(decode_bytes, stored(b"ab") + struct.pack("<I", length) + b"abc", 2, WHAT)
        assert message.startswith(f"incomplete string data for {WHAT}, expecting string of length {length}")
        assert "element 1" in message

    def test_too_many_elements(self):
        message = refusal(decode_bytes, stored(b"a", b"b", b"c"), 2, WHAT)
        assert message.startswith(f"unexpected number of string elements 3 for {WHAT}")
        assert refusal(decode_bytes, stored(b"a"), 0, WHAT).startswith("unexpected number of string elements 1")

    def test_too_few_elements(self):
        assert refusal(decode_bytes, stored(b"a"), 2, WHAT) == f"expected 2 string elements for {WHAT}, got 1"
        assert refusal(decode_bytes, b"", 1, WHAT) == f"expected 1 string elements for {WHAT}, got 0"

    def test_count_is_limited(self):
        count = MAX_STRING_ELEMENTS + 1
        assert "limit" in refusal(decode_bytes, b"\0" * 4 * count, count, WHAT)
        assert "limit" in refusal(encode_bytes, np.full(count, b"", object))

    def test_more_empty_elements_than_expected_end_the_walk(self):
        assert "elements 3 " in refusal(decode_bytes, b"\0" * 40_000_000, 2, WHAT)

    @given(
        st.lists(st.binary(max_size=8), max_size=5).map(lambda elements: stored(*elements)) | st.binary(max_size=64),
        st.integers(0, 5),
    )
    def test_any_bytes_are_decoded_exactly_or_refused(self, data, count):
        try:
            elements = decode_bytes(data, count, WHAT).tolist()
        except InferError:
            assert not splits(data, count)
        else:
            assert stored(*elements) == data
            assert len(elements) == count
