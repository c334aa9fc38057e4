"""Rows D-01 … D-05 and D-10: datatypes, shapes and batches that are not the model's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import clientlib
from tests.fakes.broker import tensor
from tests.faults import child, raw
from tests.faults.lab import Lab

BIG = 2**63 - 1


def _ask(cases: list[list[Any]]) -> list[list[str]]:
    """Prepare [model, inputs, outputs] of each case, all tensors in one region."""
    client = raw.session()
    raw.Region(client, byte_size=1 << 16)
    found = []
    for model, inputs, outputs in cases:
        reply = client.ask("Prepare", model=model, inputs=inputs, outputs=outputs)
        if reply["type"] == "Prepared":
            client.ask("Release", index=reply["index"], generation=reply["generation"])
        found.append(raw.outcome(reply))
    return found


def _x(shape: list[int], datatype: str = "FP32", name: str = "x", **place: int) -> dict[str, Any]:
    return tensor(name, "r", shape, datatype, **place)


def _y(shape: list[int], datatype: str = "FP32", name: str = "y") -> dict[str, Any]:
    return tensor(name, "r", shape, datatype, offset=1 << 15)


WRONG_DATATYPES = ["INT32", "FP64", "FP16", "BF16", "UINT8", "BOOL", "BYTES", "fp32", "FP32 ", "FLOAT", "x" * 256, "\0"]


def test_d01_datatypes(lab: Lab) -> None:
    """[D-01] both datatypes are named, in Triton's words, for inputs; outputs say who gives what."""
    cases = [["add1", [_x([1, 4], wrong, byte_size=16)], [_y([1, 4])]] for wrong in WRONG_DATATYPES]
    for wrong, (code, text) in zip(WRONG_DATATYPES, lab.offend(_ask, cases=cases), strict=True):
        assert code == "INVALID_ARG"
        assert text.splitlines()[0] == f"inference input 'x' data-type is '{wrong}', but model 'add1' expects 'FP32'"
        assert text.endswith("fix: send 'x' as FP32")
    cases = [["add1", [_x([1, 4])], [_y([1, 4], wrong)]] for wrong in WRONG_DATATYPES]
    for wrong, (code, text) in zip(WRONG_DATATYPES, lab.offend(_ask, cases=cases), strict=True):
        assert code == "INVALID_ARG"
        assert text == f"inference output 'y' data-type is '{wrong}', but model 'add1' gives 'FP32'"
    lab.settled()


RIGHT_SHAPES = [[1, 4], [4, 4]]
WRONG_SHAPES = [[1, 5], [1, 3], [4], [1, 4, 1], [1, 1, 4], [1, 0], [2, 2, 2], [1, 2**40], [1] * 64]


def test_d02_ranks_and_dimensions(lab: Lab) -> None:
    """[D-02] the text shows the model's shape and the one that came; the right ones are taken."""
    right = [["matmul", [_x(shape)], [_y(shape)]] for shape in RIGHT_SHAPES]
    assert lab.offend(_ask, cases=right) == [["Prepared", ""]] * len(right)
    wrong = [["matmul", [_x(shape)], [_y([1, 4])]] for shape in WRONG_SHAPES]
    for shape, (code, text) in zip(WRONG_SHAPES, lab.offend(_ask, cases=wrong), strict=True):
        assert code == "INVALID_ARG", shape
        if 0 < shape[0] <= 4:
            got = ",".join(map(str, shape))
            assert f"unexpected shape for input 'x' for model 'matmul'. Expected [-1,4], got [{got}]." in text
            assert "NOTE: Setting a non-zero max_batch_size" in text
    outputs = [["matmul", [_x([2, 4])], [_y(shape)]] for shape in ([2, 5], [3, 4], [2], [1, 4], [2, -1], [-1, 4])]
    for code, text in lab.offend(_ask, cases=outputs):
        assert code == "INVALID_ARG", text
        assert "unexpected shape for output 'y' for model 'matmul'. Expected [2,4], got" in text
    lab.settled()


def test_d03_dimensions_that_are_no_sizes(lab: Lab) -> None:
    """[D-03] -1, -2, none, none at all, a thousand."""
    shapes = [[1, -1], [-1, 4], [1, -2], [-(2**63), 4], [1, 2**63], [], [0, 4], [0], [1] * 65, [1] * 1000]
    cases = [["matmul", [_x(shape)], [_y([1, 4])]] for shape in shapes]
    found = dict(zip(map(str, shapes), lab.offend(_ask, cases=cases), strict=True))
    assert {code for code, _ in found.values()} == {"INVALID_ARG"}
    for shape in ("[1, -1]", "[-1, 4]"):
        assert "All input dimensions should be specified for input 'x' for model 'matmul'" in found[shape][1]
    assert "has no shape but model requires batch dimension" in found["[]"][1]
    for code, text in lab.offend(
        _ask, cases=[["nonzero", [_x(shape)], [_y([1, 8], "INT64")]] for shape in ([-1], [], [2, 2])]
    ):
        assert code == "INVALID_ARG", text
    lab.settled()


WRAPS = [
    [2**32, 2**32],
    [2**62, 4],
    [2**31, 2**31, 2**31],
    [0, 2**60],
    [2**60, 0],
    [BIG, BIG],
    [BIG],
    [2**61],
    [4, 2**62],
    [2**33, 2**29 + 1],
    [0, BIG, BIG],
]


def test_d04_products_that_wrap(lab: Lab) -> None:
    """[D-04] sizes are whole numbers without a limit: nothing becomes small by being too large."""
    cases: list[list[Any]] = [["gather", [_x([1, *dims], "INT64", "index")], [_y([1, *dims, 4])]] for dims in WRAPS]
    large = [dims[0] for dims in WRAPS if dims[0] > 4]
    cases += [["add1", [_x([1, dim])], [_y([1, dim])]] for dim in large]
    cases += [["nonzero", [_x([dim])], [_y([1, dim], "INT64")]] for dim in large]
    cases += [["add1", [_x([1, 4])], [_y([1, dim])]] for dim in large]
    cases += [["nonzero", [_x([8])], [_y([1, dim], "INT64")]] for dim in large]
    for case, (code, text) in zip(cases, lab.offend(_ask, cases=cases), strict=True):
        assert code == "INVALID_ARG", (case, text)
    lab.settled()


def test_d05_batches(lab: Lab) -> None:
    """[D-05] none, too many, and inputs that disagree."""
    cases = [
        ["add1", [_x([0, 4])], [_y([0, 4])]],
        ["add1", [_x([5, 4])], [_y([5, 4])]],
        ["add1", [_x([2**40, 4])], [_y([2**40, 4])]],
        ["two_input", [_x([2, 4], name="a"), _x([3, 4], name="b", offset=64)], [_y([2, 4], name="total")]],
    ]
    none, many, more, torn = lab.offend(_ask, cases=cases)
    assert {code for code, _ in (none, many, more, torn)} == {"INVALID_ARG"}
    assert "inference request batch-size must be >= 1 for 'add1', got 0" in none[1]
    assert "inference request batch-size must be <= 4 for 'add1', got 5" in many[1]
    assert "inference request batch-size must be <= 4 for 'add1'" in more[1]
    assert torn[1] == "input 'b' batch size does not match other inputs for 'two_input': 'a' has 2 rows, 'b' 3"
    lab.settled()


def _share_batches_with_bad_rows(rounds: int) -> dict[str, Any]:
    """Requests for `gather` in one go, every fourth of which has an index that the table does not have."""
    count = 32
    bad = {slot for slot in range(count) if slot % 4 == 3}
    codes: dict[str, int] = {}
    texts = set()
    wrong = 0
    with clientlib.connect() as client:
        region = client.create_region("batch", 1 << 14)
        index, rows = region.array((count, 1, 2), "INT64"), region.array((count, 1, 2, 4), "FP32", 1 << 13)
        plan = client.prepare(
            "gather",
            inputs={"index": region.tensor((1, 2), "INT64")},
            outputs={"y": region.tensor((1, 2, 4), "FP32", 1 << 13)},
            slots=count,
        )
        for turn in range(rounds):
            for slot in range(count):
                index[slot] = (70, -65, 5 * 10**10)[turn % 3] if slot in bad else (slot + turn) % 64
            rows[:] = -1
            pendings = [plan.submit(input_slot=slot, output_slot=slot) for slot in range(count)]
            for slot, pending in enumerate(pendings):
                code, text = child.refusal(pending.result, timeout=20)
                key = f"{'bad' if slot in bad else 'good'} {code}"
                codes[key] = codes.get(key, 0) + 1
                texts.add(text)
                wrong += slot not in bad and not (rows[slot] == (slot + turn) % 64).all()
    return {"codes": codes, "wrong": wrong, "texts": sorted(texts)[:5]}


def test_d05_d08_bad_row_fails_alone(lab: Lab) -> None:
    """[D-05] [D-08] others in the batch of a request that fails are unharmed: they are run again without it."""
    found = lab.offend(_share_batches_with_bad_rows, rounds=12)
    assert set(found["codes"]) == {"good OK", "bad INTERNAL"}, found
    assert found["wrong"] == 0
    lab.settled()


def _x2(name: str) -> dict[str, Any]:
    return _x([2, 4], name=name, offset={"a": 0, "b": 64}.get(name, 128))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            ["a"],
            "expected 2 inputs but got 1 inputs for model 'two_input'. Got input(s) ['a'], but missing required "
            "input(s) ['b']. Please provide all required input(s).",
        ),
        (["a", "c"], "unexpected inference input 'c' for model 'two_input'"),
        (["a", "b", "c"], "expected 2 inputs but got 3 inputs for model 'two_input'"),
        (["a", "a"], "input 'a' already exists in request"),
        (["A", "b"], "unexpected inference input 'A' for model 'two_input'"),
        (["a\0", "b"], "unexpected inference input 'a\0' for model 'two_input'"),
        ([], "expected 2 inputs but got 0 inputs for model 'two_input'"),
    ],
)
def test_d10_inputs_that_are_not_the_model_s(lab: Lab, names: list[str], text: str) -> None:
    """[D-10] missing, unknown, too many, twice."""
    inputs = [_x2(name) for name in names]
    ((code, got),) = lab.offend(_ask, cases=[["two_input", inputs, [_y([2, 4], name="total")]]])
    assert code == "INVALID_ARG"
    assert text in got
    lab.settled()


def test_d10_outputs_that_are_not_the_model_s(lab: Lab) -> None:
    """[D-10] unknown, twice, none; fewer than the model has is fine."""
    inputs = [_x2("a"), _x2("b")]
    total = _y([2, 4], name="total")
    cases = [["two_input", inputs, outputs] for outputs in ([_y([2, 4], name="sum")], [total, total], [], [total])]
    unknown, twice, none, one = lab.offend(_ask, cases=cases)
    assert unknown[0] == twice[0] == none[0] == "INVALID_ARG"
    assert "unexpected inference output 'sum' for model 'two_input'" in unknown[1]
    assert twice[1] == "output 'total' already exists in request"
    assert "at least one output" in none[1]
    assert one == ["Prepared", ""]
    lab.settled()


def _odd_values() -> bool:
    """[D-06] what is no number is none afterwards, either."""
    x = np.array([[np.nan, np.inf, -np.inf, 5e-324, 1e-45, -0.0, 3.4e38, 0.0]], np.float32)
    with clientlib.connect() as client:
        return bool(np.array_equal(client.infer("add1", {"x": x}, timeout=10)["y"], x + 1, equal_nan=True))


def test_d06_nan_inf_and_denormals(lab: Lab) -> None:
    """[D-06] the model's result, no error."""
    assert lab.offend(_odd_values) is True
    lab.settled()
