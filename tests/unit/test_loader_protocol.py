"""The loader's stream, with bytes packed by hand, and what its reader concludes when it breaks off."""

from __future__ import annotations

import itertools

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.repository.config import LoadFailure
from broker.repository.protocol import LoadRequest, LoadRun, decode_request, encode_request
from shm.errors import InferError


def packed(**message) -> bytes:
    body = msgpack.packb(message)
    return len(body).to_bytes(4, "little") + body


PLAN = packed(type="Plan", models=["a", "b", "c"], errors={"/r": "gone"})
BEGUN_A, BEGUN_B = packed(type="Begun", name="a"), packed(type="Begun", name="b")
FAILED_A = packed(type="Failed", failure={"name": "a", "reason": "no"})
LOADED_B = packed(
    type="Loaded",
    config={
        "name": "b",
        "platform": "",
        "backend": "identity",
        "directory": "/r/b",
        "versions": {1: "/r/b/1"},
        "default_model_filename": "",
        "max_batch_size": 0,
        "input": [{"name": "x", "datatype": "FP32", "dims": [-1], "symbols": ["?x:0"]}],
        "output": [],
        "instance_group": [],
    },
)
STREAM = PLAN + BEGUN_A + FAILED_A + BEGUN_B + LOADED_B + packed(type="Finished")


def fed(data: bytes) -> LoadRun:
    run = LoadRun()
    run.feed(data)
    return run


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_the_pieces_in_which_a_stream_arrives_do_not_matter(cuts):
    run = LoadRun()
    messages = []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        messages += run.feed(STREAM[start:end])
    assert [type(message).__name__ for message in messages] == [
        "Plan", "Begun", "Failed", "Begun", "Loaded", "Finished",
    ]  # fmt: skip
    assert run.plan.models == ("a", "b", "c")
    assert run.plan.errors == {"/r": "gone"}
    assert run.results["a"] == LoadFailure(name="a", reason="no")
    assert run.results["b"].versions == {1: "/r/b/1"}
    assert run.finished
    assert run.ended("exited with status 0") == ()


def test_a_death_belongs_to_the_model_that_was_being_read():
    run = fed(PLAN + BEGUN_A + FAILED_A + BEGUN_B + LOADED_B[:-1])
    assert run.ended("was killed by SIGSEGV") == ("c",)
    assert run.results["b"].reason == "the loader process was killed by SIGSEGV while it read this model's files"
    assert set(run.results) == {"a", "b"}


def test_a_death_between_models_fails_the_rest():
    run = fed(PLAN + BEGUN_A + FAILED_A)
    assert run.ended("exited with status 1") == ()
    assert (
        run.results["b"].reason
        == run.results["c"].reason
        == "the loader process exited with status 1 before this model"
    )


def test_a_death_before_the_plan_says_nothing_about_models():
    run = fed(PLAN[:-1])
    assert run.plan is None
    assert run.ended("exited with status 1") == ()
    assert run.results == {}


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"\xff\xff\xff\xff", "announced a message of 4294967295 bytes"),
        (b"\x01\0\0\0\xc1", "cannot be read"),
        (b"Hello, stdout\n", "announced a message of"),
        (packed(type="Nonsense"), "cannot be read"),
        (packed(type="Begun", name=3), "cannot be read"),
    ],
)
def test_a_damaged_stream(data, part):
    with pytest.raises(InferError, match=part) as caught:
        LoadRun().feed(data)
    assert caught.value.code == "INTERNAL"


def test_requests_survive_the_wire():
    request = LoadRequest(repositories=("/a", "/b"), models=("m",), strict=True, default_max_batch_size=9, gpus=(0, 1))
    assert decode_request(encode_request(request)) == request
    assert decode_request(msgpack.packb({"repositories": ["/a"]})) == LoadRequest(repositories=("/a",))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgpack.packb({"repositories": ["/a"], "x": 1}), bytes(2 << 20)])
def test_requests_that_cannot_be_read(data):
    with pytest.raises(InferError) as caught:
        decode_request(data)
    assert caught.value.code == "INVALID_ARG"
