"""The bounds check and the overlap predicates, against a model that lists every byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.errors import InferError
from shm.messages import MAX_POSITIONS, TensorSpec
from shm.views import Placement, array, meets, resolve, touches

UINT64_MAX = 2**64 - 1


def tensor(shape=(1, 4), datatype="FP32", **fields):
    return TensorSpec(name="X", region="r", datatype=datatype, shape=shape, **fields)


def refusal(spec, region_byte_size=64, positions=1, *, output=False):
    with pytest.raises(InferError) as caught:
        resolve(spec, region_byte_size, positions, output=output, model="m")
    assert caught.value.code == "INVALID_ARG"
    return caught.value.message


class TestResolve:
    def test_size_follows_from_shape_and_datatype(self):
        placement = resolve(tensor(offset=8), 64, 1, output=False)
        assert placement == Placement(offset=8, stride=0, byte_size=16, positions=1, end=24)
        assert resolve(tensor(offset=8, byte_size=16), 64, 1, output=False) == placement

    def test_positions_are_a_stride_apart(self):
        assert resolve(tensor(stride=24), 64, 3, output=False) == Placement(0, 24, 16, 3, 64)

    def test_input_stride_0_is_the_same_data_at_every_position(self):
        assert resolve(tensor(offset=48), 64, 1000, output=False) == Placement(48, 0, 16, 1000, 64)

    def test_input_positions_may_overlap(self):
        assert resolve(tensor(stride=4), 64, 13, output=False).end == 64

    def test_output_stride_0_is_back_to_back(self):
        assert resolve(tensor(), 64, 4, output=True) == Placement(0, 16, 16, 4, 64)

    def test_output_positions_must_not_overlap(self):
        assert "stride 15 is less than the 16 bytes" in refusal(tensor(stride=15), 640, 2, output=True)
        assert resolve(tensor(stride=15), 16, 1, output=True).end == 16

    def test_last_position_ends_inside(self):
        assert resolve(tensor(stride=24), 64, 3, output=True).end == 64
        message = refusal(tensor(stride=24), 63, 3)
        assert message.startswith("Invalid offset + byte size for shared memory region: 'r'")

    @pytest.mark.parametrize("offset", [49, 63])
    def test_end_past_the_region(self, offset):
        assert refusal(tensor(offset=offset)).startswith("Invalid offset + byte size for shared memory region: 'r'")

    @pytest.mark.parametrize("offset", [64, 65, 2**63 - 1, 2**64 - 32])
    def test_offset_past_the_region(self, offset):
        assert refusal(tensor(offset=offset)).startswith("Invalid offset for shared memory region: 'r'")

    @pytest.mark.parametrize("byte_size", [UINT64_MAX, 2**64 - 32])
    def test_integer_overflow(self, byte_size):
        message = refusal(tensor(offset=32, byte_size=byte_size))
        assert message == (
            f"Integer overflow detected: byte_size ({byte_size}) + offset (32) exceeds maximum value "
            f"({UINT64_MAX}) for region 'r'"
        )

    def test_positions_times_stride_do_not_wrap(self):
        # 3 * (2**64 / 3) + 1 byte: the last position would wrap to the start of the region.
        assert "Integer overflow detected" in refusal(tensor((1,), "UINT8", stride=UINT64_MAX // 3 + 1), positions=4)
        assert "Invalid offset + byte size" in refusal(tensor(stride=2**62), positions=2)

    @pytest.mark.parametrize("field", ["offset", "stride", "byte_size"])
    @pytest.mark.parametrize("value", [-1, -(2**63), 1.5, "8", None])
    def test_fields_are_whole_numbers(self, field, value):
        message = refusal(tensor(**{field: value}))
        assert "Invalid offset for shared memory region" in message if field == "offset" else field in message

    def test_numpy_integers_do_not_wrap(self):
        spec = tensor(stride=np.int64(2**62), offset=np.uint8(200), byte_size=np.int32(16))
        assert "Integer overflow detected" in refusal(spec, 1000, 5)
        assert type(resolve(tensor(offset=np.uint8(200)), 1000, 1, output=False).end) is int

    @pytest.mark.parametrize("positions", [0, -1, MAX_POSITIONS + 1])
    def test_number_of_positions(self, positions):
        assert f"1 to {MAX_POSITIONS}" in refusal(tensor(), positions=positions)
        assert resolve(tensor(), 16, MAX_POSITIONS, output=False).positions == MAX_POSITIONS

    @pytest.mark.parametrize("byte_size", [15, 17, 32])
    def test_input_size_mismatch(self, byte_size):
        message = refusal(tensor(byte_size=byte_size))
        assert message == f"input byte size mismatch for input 'X' for model 'm'. Expected 16, got {byte_size}"

    def test_output_size_mismatch(self):
        assert refusal(tensor(byte_size=8), output=True) == (
            "shared memory size specified with the request for output 'X' for model 'm' (8 bytes) "
            "should be at least 16 bytes to hold the results"
        )
        assert "Expected 16, got 32" in refusal(tensor(byte_size=32), output=True)

    def test_bounds_are_checked_before_the_size(self):
        assert "Invalid offset + byte size" in refusal(tensor(byte_size=65))

    def test_inputs_have_no_open_dimension(self):
        message = refusal(tensor((-1, 4), byte_size=16))
        assert message == "All input dimensions should be specified for input 'X' for model 'm', got [-1,4]"

    def test_open_outputs_state_their_room(self):
        assert resolve(tensor((-1, 4), byte_size=20), 64, 3, output=True) == Placement(0, 20, 20, 3, 60)
        assert "byte_size must be specified for output 'X'" in refusal(tensor((-1, 4)), output=True)

    @pytest.mark.parametrize("output", [False, True])
    def test_bytes_state_their_size(self, output):
        assert resolve(tensor((2,), "BYTES", byte_size=20), 64, 1, output=output).byte_size == 20
        assert "byte_size must be specified for" in refusal(tensor((2,), "BYTES"), output=output)

    @pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
    def test_tensors_without_elements(self, datatype):
        assert resolve(tensor((0, 4), datatype, offset=63), 64, 2, output=False).end == 63
        assert resolve(tensor((0, -1), datatype), 64, 2, output=True) == Placement(0, 0, 0, 2, 0)
        assert "Expected 0, got 4" in refusal(tensor((0, 4), datatype, byte_size=4))

    @pytest.mark.parametrize("shape", [(-2,), (2**32, 2**32), (0, 2**60)])
    @pytest.mark.parametrize("output", [False, True])
    def test_absurd_shapes(self, shape, output):
        refusal(tensor(shape), output=output)
        refusal(tensor(shape, "BYTES", byte_size=8), output=output)

    def test_unknown_datatype(self):
        assert "unknown datatype 'FP31'" in refusal(tensor(datatype="FP31"))

    def test_the_model_is_named_only_when_it_is_known(self):
        with pytest.raises(InferError, match=r"for input 'X'\. Expected 16, got 8"):
            resolve(tensor(byte_size=8), 64, 1, output=False)

    @given(
        offset=st.integers(0, 40),
        stride=st.integers(0, 24),
        elements=st.integers(0, 12),
        positions=st.integers(1, 5),
        region=st.integers(0, 64),
        output=st.booleans(),
    )
    def test_accepts_exactly_what_fits(self, offset, stride, elements, positions, region, output):
        spec = tensor((elements,), "UINT8", offset=offset, stride=stride)
        step = stride or (elements if output else 0)
        fits = offset < region and all(offset + k * step + elements <= region for k in range(positions))
        if output and positions > 1:
            fits = fits and step >= elements
        try:
            placement = resolve(spec, region, positions, output=output)
        except InferError:
            assert not fits
        else:
            assert fits
            assert placement.end == max(offset + k * step + elements for k in range(positions))


STRIDES = st.integers(0, 12)


def placements(strides=STRIDES):
    return st.builds(
        lambda offset, stride, size, positions: Placement(
            offset, stride, size, positions, offset + (positions - 1) * stride + size
        ),
        st.integers(0, 40),
        strides,
        st.integers(0, 9),
        st.integers(1, 6),
    )


def covered(placement, position):
    start = placement.offset + position * placement.stride
    return set(range(start, start + placement.byte_size))


def all_covered(placement):
    return set().union(*(covered(placement, k) for k in range(placement.positions)))


def is_at_one_place(placement):
    return placement.positions == 1 or placement.stride == 0


class TestOverlap:
    @given(placements(), placements(), st.data())
    def test_touches_is_exact(self, a, b, data):
        i = data.draw(st.integers(0, a.positions - 1))
        j = data.draw(st.integers(0, b.positions - 1))
        assert touches(a, i, b, j) == bool(covered(a, i) & covered(b, j))
        assert touches(b, j, a, i) == touches(a, i, b, j)

    @given(STRIDES, st.data())
    def test_meets_is_exact_for_equal_strides(self, stride, data):
        a, b = (data.draw(placements(st.just(stride))) for _ in range(2))
        assert meets(a, b) == meets(b, a) == bool(all_covered(a) & all_covered(b))

    @given(placements(), placements())
    def test_meets_is_exact_against_one_place(self, a, b):
        exact = bool(all_covered(a) & all_covered(b))
        if is_at_one_place(a) or is_at_one_place(b):
            assert meets(a, b) == meets(b, a) == exact
        else:
            assert meets(a, b) == meets(b, a)
            assert meets(a, b) or not exact

    def test_interleaved_tensors_do_not_meet(self):
        image = Placement(0, 96, 64, 20, 19 * 96 + 64)
        result = Placement(64, 96, 32, 20, 20 * 96)
        assert not meets(image, result)
        assert meets(image, Placement(63, 96, 32, 20, 19 * 96 + 95))

    def test_shifted_counts_from_an_earlier_byte(self):
        assert Placement(8, 4, 2, 3, 18).shifted(100) == Placement(108, 4, 2, 3, 118)


class TestArray:
    MEMORY = np.arange(64, dtype=np.uint8)

    @pytest.mark.parametrize("offset", [0, 1, 3, 16])
    def test_is_a_view_at_any_offset(self, offset):
        memory = self.MEMORY.copy()
        view = array(memory, offset, (2, 3), np.dtype(np.float32))
        assert view.tobytes() == memory[offset : offset + 24].tobytes()
        view[1, 2] = 7.0
        assert memory[offset + 20 : offset + 24].view(np.float32)[0] == 7.0

    def test_keeps_memory_alive(self):
        view = array(np.frombuffer(b"\1\2\3\4", np.uint8), 2, (2,), np.dtype(np.uint8))
        assert view.tolist() == [3, 4]
        assert not view.flags.writeable

    @pytest.mark.parametrize(
        ("offset", "shape"),
        [(61, (1,)), (-1, (1,)), (64, (1,)), (0, (17,)), (0, (-1,)), (0, (2**62, 4)), (2**64, (1,)), (65, (0,))],
    )
    def test_never_leaves_memory(self, offset, shape):
        with pytest.raises(InferError) as caught:
            array(self.MEMORY, offset, shape, np.dtype(np.float32))
        assert caught.value.code == "INVALID_ARG"

    def test_edges(self):
        assert array(self.MEMORY, 60, (1,), np.dtype(np.float32)).shape == (1,)
        assert array(self.MEMORY, 64, (0, 3), np.dtype(np.float32)).shape == (0, 3)
        assert array(self.MEMORY, 0, (), np.dtype(np.float32)).shape == ()

    def test_too_many_dimensions_and_objects_are_refused(self):
        for shape, dtype in (((1,) * 100, np.uint8), ((1,), object)):
            with pytest.raises(InferError):
                array(self.MEMORY, 0, shape, np.dtype(dtype))
