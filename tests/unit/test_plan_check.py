"""What a plan is refused for, in Triton's words, and which ranges may not overlap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.plan_check import _meet_at_one_position, check
from broker.records import RegionEntry
from shm.cuda.descriptor import CudaEvents
from shm.errors import InferError
from shm.messages import ModelMetadata, Prepare, TensorMetadata, TensorSpec
from shm.model_fit import symbol_sizes
from shm.views import Placement, touches


def entry(name, byte_size=1 << 16, *, inode=None, offset=0, writable=True):
    return RegionEntry(
        region=1 + len(name),
        generation=1 + len(name),
        name=name,
        kind="pool",
        fd=-1,
        byte_size=byte_size,
        offset=offset,
        file_size=offset + byte_size,
        device=1,
        inode=hash(name) if inode is None else inode,
        writable=writable,
    )


REGIONS = {
    region.name: region
    for region in (
        entry("in"),
        entry("out_", 1 << 20),
        entry("fixed", writable=False),
        entry("window_1", 4096, inode=5, offset=0),
        entry("window_22", 4096, inode=5, offset=2048),
    )
}
ADD = ModelMetadata(
    name="add",
    version="1",
    max_batch_size=4,
    inputs=(
        TensorMetadata(name="A", datatype="FP32", shape=(-1, 16), symbols=("", "")),
        TensorMetadata(name="B", datatype="FP32", shape=(-1, 16), symbols=("", "")),
    ),
    outputs=(TensorMetadata(name="SUM", datatype="FP32", shape=(-1, 16), symbols=("", "")),),
)
FREE = ModelMetadata(
    name="free",
    version="1",
    inputs=(
        TensorMetadata(name="X", datatype="FP32", shape=(-1, -1), symbols=("n", "m")),
        TensorMetadata(name="MASK", datatype="BOOL", shape=(-1,), symbols=("n",), optional=True),
    ),
    outputs=(
        TensorMetadata(name="SAME", datatype="FP32", shape=(-1, 3), symbols=("n", "")),
        TensorMetadata(name="FOUND", datatype="INT64", shape=(2, -1), symbols=("", "?FOUND:1")),
        TensorMetadata(name="TEXT", datatype="BYTES", shape=(-1,), symbols=("n",)),
    ),
)


def tensor(name, shape, datatype="FP32", region="in", **place):
    return TensorSpec(name=name, region=region, datatype=datatype, shape=shape, **place)


def find(name):
    if name not in REGIONS:
        raise InferError("NOT_FOUND", f"Unable to find shared memory region: '{name}'")
    return REGIONS[name]


def add(inputs=None, outputs=None, **positions):
    inputs = (tensor("A", (2, 16)), tensor("B", (2, 16), offset=128)) if inputs is None else inputs
    outputs = (tensor("SUM", (2, 16), region="out_"),) if outputs is None else outputs
    return check(ADD, Prepare(model="add", inputs=inputs, outputs=outputs, **positions), find)


def free(inputs, outputs):
    return check(FREE, Prepare(model="free", inputs=inputs, outputs=outputs), find)


def test_a_valid_plan_carries_regions_and_rows():
    checked = add(input_positions=3, output_positions=2)
    assert checked.rows == 2
    assert [t.spec.name for t in checked.inputs] == ["A", "B"]
    assert {r.name for r in checked.regions} == {"in", "out_"}
    assert checked.outputs[0].region == REGIONS["out_"].region


def test_without_batching_there_are_no_rows():
    checked = free((tensor("X", (5, 7)),), (tensor("SAME", (5, 3), region="out_"),))
    assert checked.rows == 0


A, B = tensor("A", (2, 16)), tensor("B", (2, 16), offset=128)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            (A,),
            "expected 2 inputs but got 1 inputs for model 'add'. Got input(s) ['A'], but missing required input(s) "
            "['B']. Please provide all required input(s).",
        ),
        ((), "expected 2 inputs but got 0 inputs for model 'add'. Got input(s) []"),
        ((A, A), "input 'A' already exists in request"),
        ((A, tensor("C", (2, 16))), "unexpected inference input 'C' for model 'add'"),
        (
            (tensor("A", (2, 16), "INT32"), B),
            "inference input 'A' data-type is 'INT32', but model 'add' expects 'FP32'",
        ),
        (
            (tensor("A", (1, 17)), tensor("B", (1, 16))),
            "unexpected shape for input 'A' for model 'add'. Expected [-1,16], got [1,17]. NOTE: Setting a non-zero "
            "max_batch_size in the model config requires a batch dimension to be prepended to each input shape.",
        ),
        ((tensor("A", (16,)), tensor("B", (16,))), "inference request batch-size must be <= 4 for 'add'"),
        ((tensor("A", (5, 16)), tensor("B", (5, 16))), "inference request batch-size must be <= 4 for 'add'"),
        ((tensor("A", (0, 16)), tensor("B", (0, 16))), "inference request batch-size must be >= 1 for 'add'"),
        ((tensor("A", (1, 16)), B), "input 'B' batch size does not match other inputs for 'add'"),
        ((tensor("A", ()), B), "input 'A' has no shape but model requires batch dimension for 'add'"),
        (
            (tensor("A", (2, -1)), B),
            "All input dimensions should be specified for input 'A' for model 'add', got [2,-1]",
        ),
        ((tensor("A", (-1, 16)), B), "All input dimensions should be specified for input 'A' for model 'add'"),
        (
            (tensor("A", (2, 16), byte_size=129), B),
            "input byte size mismatch for input 'A' for model 'add'. Expected 128, got 129",
        ),
        ((tensor("A", (2, 16), offset=65536), B), "Invalid offset for shared memory region: 'in'"),
        ((tensor("A", (2, 16), offset=65409), B), "Invalid offset + byte size for shared memory region: 'in'"),
    ],
)
def test_input_errors(inputs, text):
    with pytest.raises(InferError) as refusal:
        add(inputs)
    assert text in refusal.value.message
    assert refusal.value.code == "INVALID_ARG"


def test_a_shape_is_shown_beside_those_of_the_configuration_and_the_model_file():
    known = replace(ADD, inputs=tuple(replace(tensor, file_shape="[batch,n]") for tensor in ADD.inputs))
    request = Prepare(
        model="add",
        inputs=(tensor("A", (1, 17)), tensor("B", (1, 16))),
        outputs=(tensor("SUM", (1, 16), region="out_"),),
    )
    with pytest.raises(InferError) as refusal:
        check(known, request, find)
    assert refusal.value.message.splitlines()[1:] == [
        "                    config.pbtxt  model file  request",
        "    max_batch_size  4             -           -",
        "    dims            [ 16 ]        -           -",
        "    shape           [-1,16]       [batch,n]   [1,17]",
        "    fix: dims: [ -1 ] in config.pbtxt: the model file leaves this size open",
    ]


@pytest.mark.parametrize("shape", [(3,), (16,)])
def test_a_batch_size_that_nobody_wrote_is_explained(shape):
    chosen = replace(ADD, max_batch_size_completed=True)
    inputs = (tensor("A", shape), tensor("B", shape))
    request = Prepare(model="add", inputs=inputs, outputs=(tensor("SUM", (2, 16), region="out_"),))
    with pytest.raises(InferError) as refusal:
        check(chosen, request, find)
    note = "max_batch_size was set to 4 by auto-completion: put `max_batch_size: 0` in config.pbtxt to turn it off"
    assert f" {note}\n" in refusal.value.message
    with pytest.raises(InferError) as refusal:
        check(ADD, request, find)
    assert "auto-completion" not in refusal.value.message


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ((), "a plan needs at least one output, model 'add' has ['SUM']"),
        ((tensor("DIFF", (2, 16), region="out_"),), "unexpected inference output 'DIFF' for model 'add'"),
        (
            (tensor("SUM", (2, 16), region="out_"), tensor("SUM", (2, 16), region="out_", offset=512)),
            "output 'SUM' already exists in request",
        ),
        ((tensor("SUM", (2, 16), "FP64", region="out_"),), "data-type is 'FP64', but model 'add' gives 'FP32'"),
        (
            (tensor("SUM", (3, 16), region="out_"),),
            "unexpected shape for output 'SUM' for model 'add'. Expected [2,16], got [3,16]",
        ),
        ((tensor("SUM", (-1, 16), region="out_", byte_size=128),), "Expected [2,16], got [-1,16]"),
        ((tensor("SUM", (2, 16), region="fixed"),), "'fixed', which is read-only"),
        ((tensor("SUM", (2, 16), region="out_", byte_size=64),), "should be at least 128 bytes to hold the results"),
    ],
)
def test_output_errors(outputs, text):
    with pytest.raises(InferError) as refusal:
        add(outputs=outputs)
    assert text in refusal.value.message
    assert refusal.value.code == "INVALID_ARG"


def test_unknown_region_is_not_found():
    with pytest.raises(InferError, match="Unable to find shared memory region: 'nowhere'") as refusal:
        add(outputs=(tensor("SUM", (2, 16), region="nowhere"),))
    assert refusal.value.code == "NOT_FOUND"


def test_a_ring_of_events_is_no_memory_for_a_tensor(monkeypatch):
    events = CudaEvents(device="GPU-00000000-0000-0000-0000-000000000000", handles=bytes(64))
    ring = entry("ring")
    ring.kind, ring.events = "events", events
    monkeypatch.setitem(REGIONS, "ring", ring)
    with pytest.raises(InferError, match="tensor 'A' lies in 'ring', which is a ring of events and no memory"):
        add(inputs=(tensor("A", (2, 16), region="ring"), tensor("B", (2, 16))))


def test_optional_inputs_give_a_range():
    out = (tensor("SAME", (5, 3), region="out_"),)
    free((tensor("X", (5, 7)), tensor("MASK", (5,), "BOOL", offset=4096)), out)
    with pytest.raises(InferError, match="expected number of inputs between 1 and 2 but got 0 inputs for model 'free'"):
        free((), out)
    with pytest.raises(InferError, match=r"missing required input\(s\) \['X'\]"):
        free((tensor("MASK", (5,), "BOOL"),), out)


def test_output_shapes_follow_from_the_inputs_where_they_do():
    x = (tensor("X", (5, 7)),)
    with pytest.raises(InferError, match=r"Expected \[5,3\], got \[4,3\]"):
        free(x, (tensor("SAME", (4, 3), region="out_"),))
    with pytest.raises(InferError, match=r"Expected \[5,3\], got \[-1,3\]"):
        free(x, (tensor("SAME", (-1, 3), region="out_", byte_size=60),))
    free(x, (tensor("FOUND", (2, -1), "INT64", region="out_", byte_size=4096),))
    free(x, (tensor("FOUND", (2, 9), "INT64", region="out_"),))
    with pytest.raises(InferError, match="byte_size must be specified"):
        free(x, (tensor("FOUND", (2, -1), "INT64", region="out_"),))
    free(x, (tensor("TEXT", (-1,), "BYTES", region="out_", byte_size=100),))
    free(x, (tensor("TEXT", (5,), "BYTES", region="out_", byte_size=100),))


def test_inputs_that_disagree_about_a_symbol_decide_nothing():
    specs = (tensor("X", (5, 7)), tensor("MASK", (4,), "BOOL", offset=4096))
    assert symbol_sizes(FREE, {spec.name: spec.shape for spec in specs}) == {"m": 7}
    free(specs, (tensor("SAME", (9, 3), region="out_"),))


def test_too_many_open_dimensions_for_a_result():
    wide = ModelMetadata(
        name="wide",
        version="1",
        outputs=tuple(TensorMetadata(name=f"O{i}", datatype="FP32", shape=(-1,), symbols=("?",)) for i in range(32)),
    )

    def outputs(count):
        return tuple(tensor(f"O{i}", (-1,), region="out_", offset=i * 4096, byte_size=4) for i in range(count))

    check(wide, Prepare(model="wide", inputs=(), outputs=outputs(31)), find)
    with pytest.raises(InferError, match="64 ranks and dimensions together, a result can report 62"):
        check(wide, Prepare(model="wide", inputs=(), outputs=outputs(32)), find)


@pytest.mark.parametrize("offset", [0, 1, 64, 127, 128, 192, 255])
def test_output_over_input_is_refused(offset):
    with pytest.raises(InferError, match=r"overlapping tensors .* output 'SUM' .* overlaps input '[AB]'"):
        add(outputs=(tensor("SUM", (2, 16), offset=offset),))


def test_an_input_at_another_position_counts_too():
    inputs = (tensor("A", (2, 16), stride=256), tensor("B", (2, 16), offset=128, stride=256))
    add(inputs, (tensor("SUM", (2, 16), offset=768),), input_positions=3)
    with pytest.raises(InferError, match="overlap"):
        add(inputs, (tensor("SUM", (2, 16), offset=768),), input_positions=4)


def test_windows_of_one_file_are_one_memory():
    inputs = (tensor("A", (2, 16), region="window_1", offset=2048), B)
    add(inputs, (tensor("SUM", (2, 16), region="window_22", offset=128),))
    with pytest.raises(InferError, match="overlap"):
        add(inputs, (tensor("SUM", (2, 16), region="window_22", offset=127),))


def test_interleaved_inputs_and_outputs_are_fine():
    inputs = (tensor("A", (2, 16), stride=384), tensor("B", (2, 16), offset=128, stride=384))
    add(inputs, (tensor("SUM", (2, 16), offset=256, stride=384),), input_positions=9, output_positions=9)


def test_two_outputs_overlap_only_at_the_same_position():
    x = (tensor("X", (5, 7)),)

    def two(offset, stride):
        request = Prepare(
            model="free",
            inputs=x,
            outputs=(
                tensor("SAME", (5, 3), region="out_", stride=stride),
                tensor("FOUND", (2, 3), "INT64", region="out_", offset=offset, stride=stride),
            ),
            output_positions=4,
        )
        return check(FREE, request, find)

    two(offset=60, stride=128)
    two(offset=128, stride=128)  # where the next request's output may lie: the worker watches live ranges
    for offset in (0, 59):
        with pytest.raises(InferError, match=r"output 'FOUND' .* overlaps output 'SAME'"):
            two(offset, stride=128)


places = st.builds(
    lambda offset, stride, size, positions: Placement(
        offset, max(stride, size), size, positions, offset + (positions - 1) * max(stride, size) + size
    ),
    st.integers(0, 60),
    st.integers(0, 25),
    st.integers(0, 12),
    st.just(7),
)


@given(places, places)
@settings(max_examples=500)
def test_meeting_at_one_position_is_exact(a, b):
    assert _meet_at_one_position(a, b, 7) == any(touches(a, k, b, k) for k in range(7))
