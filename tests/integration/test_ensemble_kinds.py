"""Ensembles of every kind of member in a real broker: nested, reshaped, strings, sequences, unknown shapes, versions.

Also what a request can meet on its way: a cancel or a deadline while a step waits, and answers that are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import eventually
from tests.fakes.gateways import Gateway
from tests.fakes.lone_worker import Gate

pytestmark = pytest.mark.timeout(120)


def tensors(kind: str, *described: str) -> str:
    """`name TYPE dims [more]` each."""
    found = []
    for each in described:
        name, datatype, dims, *more = each.split(maxsplit=3)
        found.append(f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] {" ".join(more)} }}')
    return "\n".join(found)


def step(model: str, inputs: str, outputs: str, version: int = -1) -> str:
    """Maps as `member=ensemble`, blanks between."""

    def maps(kind: str, text: str) -> str:
        pairs = (pair.split("=") for pair in text.split())
        return " ".join(f'{kind} {{ key: "{own}" value: "{tensor}" }}' for own, tensor in pairs)

    head = f'model_name: "{model}" model_version: {version}'
    return f"{{ {head} {maps('input_map', inputs)} {maps('output_map', outputs)} }}"


def ensemble(root: Path, name: str, inputs: list[str], outputs: list[str], *steps: str, batch: int = 4, more: str = ""):
    models.write_model(
        root,
        name,
        config=f"""platform: "ensemble" max_batch_size: {batch}
{tensors("input", *inputs)}
{tensors("output", *outputs)}
ensemble_scheduling {{ step [ {", ".join(steps)} ] {more} }}
""",
    )


def member(root: Path, name: str, inputs: list[str], outputs: list[str], more: str, batch: int = 4) -> None:
    """Of a built-in backend, which `more` names."""
    text = f"max_batch_size: {batch}\n{tensors('input', *inputs)}\n{tensors('output', *outputs)}\n{more}\n"
    models.write_model(root, name, config=text)


def plus(number: float) -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["x", "by"], ["y"])]
    shape = ["batch", 4]
    by = {"by": np.full(1, number, np.float32)}
    return models.build(nodes, [models.tensor("x", shape)], [models.tensor("y", shape)], by)


def doubled_square() -> onnx.ModelProto:
    """y = 2 x on [batch, 2, 2]."""
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    shape = ["batch", 2, 2]
    return models.build(nodes, [models.tensor("x", shape)], [models.tensor("y", shape)])


CONTROLS = """backend: "sequence"
sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } control_input [
  { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
  { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } } ] }"""
IDENTITY = 'backend: "identity"'
SLOW = """backend: "gate" parameters { key: "worker_group" value { string_value: "default" } }
parameters { key: "gate" value { string_value: "%s/gate" } }
parameters { key: "told" value { string_value: "%s/told" } }"""
KEPT = "response_cache { enable: true }"


def write_members(root: Path) -> None:
    models.write_model(root, "add1", models.add1(), config=tensors("input", "x FP32 4") + tensors("output", "y FP32 4"))
    for version in (1, 2):
        models.write_model(
            root, "versions", plus(version), version=version, config="version_policy: { all { } } max_batch_size: 4"
        )
    models.write_model(
        root,
        "square",
        doubled_square(),
        config="max_batch_size: 4\n"
        + tensors("input", "x FP32 4 reshape { shape: [ 2, 2 ] }")
        + tensors("output", "y FP32 4 reshape { shape: [ 2, 2 ] }"),
    )
    models.write_model(root, "text", models.identity(TensorProto.STRING), config="max_batch_size: 4")
    models.write_model(root, "nonzero", models.nonzero(), config=models.NONZERO_CONFIG)
    models.write_model(root, "gather", models.gather(), config="max_batch_size: 0")
    member(root, "echo", ["INPUT0 INT64 -1"], ["OUTPUT0 INT64 -1"], IDENTITY, batch=0)
    member(root, "ints", ["INPUT0 INT32 1"], ["OUTPUT0 INT32 1"], IDENTITY)
    member(root, "sums", ["INPUT INT32 1"], ["OUTPUT INT32 1"], CONTROLS)
    pair = ["INPUT0 FP32 4", "INPUT1 FP32 4 optional: true"]
    member(root, "optional", pair, ["OUTPUT0 FP32 4", "OUTPUT1 FP32 -1"], IDENTITY)
    member(root, "slow", ["x FP32 4"], ["y FP32 4"], SLOW % (root / "slow", root / "slow"))
    models.write_model(root, "kept", models.add1(), config=f"max_batch_size: 4 {KEPT}")


def write_ensembles(root: Path) -> None:
    x, y, fp32 = "x=IN", "y=OUT", (["IN FP32 4"], ["OUT FP32 4"])
    ensemble(root, "inner", *fp32, step("add1", x, "y=mid"), step("square", "x=mid", y))
    ensemble(root, "outer", *fp32, step("inner", "IN=IN", "OUT=mid"), step("inner", "IN=mid", "OUT=OUT"))
    ensemble(root, "pinned", *fp32, step("versions", x, "y=mid", 1), step("versions", "x=mid", y, 2))
    ensemble(root, "reshaped", *fp32, step("square", x, "y=mid"), step("add1", "x=mid", y))
    square = "OUT FP32 2,2 reshape { shape: [ 4 ] }"  # which the member has with a batch dimension
    ensemble(root, "alone", ["IN FP32 1,4"], [square], step("square", x, "y=mid"), step("add1", "x=mid", y), batch=0)
    ensemble(root, "texts", ["IN STRING -1"], ["OUT STRING -1"], step("text", x, "y=mid"), step("text", "x=mid", y))
    steps = (step("nonzero", "x=IN", "y=where"), step("gather", "index=where", "y=OUT"))
    ensemble(root, "unknown", ["IN FP32 -1"], ["where INT64 1,-1", "OUT FP32 1,-1,4"], *steps, batch=0)
    ensemble(root, "found", ["IN FP32 -1"], ["where INT64 1,-1"], step("nonzero", "x=IN", "y=where"), batch=0)
    steps = (step("found", "IN=IN", "where=where"), step("gather", "index=where", "y=OUT"))
    ensemble(root, "unknown_inside", ["IN FP32 -1"], ["where INT64 1,-1", "OUT FP32 1,-1,4"], *steps, batch=0)
    steps = (step("ints", "INPUT0=IN", "OUTPUT0=mid"), step("sums", "INPUT=mid", "OUTPUT=OUT"))
    ensemble(root, "stateful", ["IN INT32 1"], ["OUT INT32 1"], *steps)
    one = step("optional", "INPUT0=IN INPUT1=MORE", "OUTPUT0=mid OUTPUT1=SECOND")
    inputs = ["IN FP32 4", "MORE FP32 4 optional: true"]
    ensemble(root, "options", inputs, ["OUT FP32 4", "SECOND FP32 -1"], one, step("add1", "x=mid", y))
    ensemble(root, "needs", ["IN FP32 4 optional: true"], ["OUT FP32 4"], step("add1", x, y))
    slow = [step("slow", x, "y=mid"), step("add1", "x=mid", y)]
    ensemble(root, "slowly", *fp32, *slow)
    ensemble(root, "slower", *fp32, step("slowly", "IN=IN", "OUT=OUT"))
    ensemble(root, "gated", *fp32, *slow, more="max_inflight_requests: 1")
    ensemble(root, "over_kept", *fp32, step("kept", x, "y=mid"), step("add1", "x=mid", y))
    ensemble(root, "kept_whole", *fp32, step("add1", x, "y=mid"), step("add1", "x=mid", y))
    with open(root / "kept_whole" / "config.pbtxt", "a") as file:
        file.write(KEPT)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """Of the member `slow`, in the repository."""
    gate = Gate(tmp_path_factory.mktemp("repository") / "slow")
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def broker(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = gate.directory.parent
    write_members(root)
    write_ensembles(root)
    with Gateway(root, tmp_path_factory.mktemp("run"), "--cache-config=local,size=1000000") as broker:
        yield broker.ready()


@pytest.fixture
def client(broker: Gateway) -> Iterator[clientlib.Client]:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        yield client


def rows(count: int = 1, start: float = 0) -> np.ndarray:
    return np.arange(start, start + 4 * count, dtype=np.float32).reshape(count, 4)


# --- kinds of members ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("outer", lambda x: 2 * (2 * (x + 1) + 1)),
        ("pinned", lambda x: x + 3),
        ("reshaped", lambda x: 2 * x + 1),
    ],
)
def test_floats_through(client, name, expected):
    for count in (1, 3, 4):
        x = rows(count, 7)
        assert np.array_equal(client.infer(name, {"IN": x}, timeout=30)["OUT"], expected(x))


def test_an_ensemble_that_does_not_batch_has_members_that_do(client):
    x = rows(1, 7)
    assert client.infer("alone", {"IN": x}, timeout=30)["OUT"].tolist() == (2 * x + 1).reshape(2, 2).tolist()


def test_strings_of_any_length(client):
    for texts in (["a", "bb"], ["", "a longer one" * 30], ["ü"]):
        x = np.array([[text.encode() for text in texts]], object)
        found = client.infer("texts", {"IN": x}, timeout=30)["OUT"]
        assert found.tolist() == x.tolist()


@pytest.mark.parametrize("name", ["unknown", "unknown_inside"])
def test_shapes_that_only_a_run_tells(client, name):
    for values in ([0, 1, 1, 0, 1], [1], [1] * 50, [0, 1]):
        x = np.array(values, np.float32)
        found = client.infer(name, {"IN": x}, timeout=30)
        where = np.flatnonzero(x)
        assert found["where"].tolist() == [where.tolist()]
        assert found["OUT"].tolist() == [[[float(at)] * 4 for at in where]]


def test_nothing_found_is_an_answer_too(client):
    found = client.infer("unknown", {"IN": np.zeros(3, np.float32)}, timeout=30)
    assert (found["where"].shape, found["OUT"].shape) == ((1, 0), (1, 0, 4))


def test_sequences_go_through_to_their_member(broker):
    url = f"127.0.0.1:{broker.ports['grpc']}"
    with triton.InferenceServerClient(url) as client:

        def ask(number: int | str, value: int, **ends: bool) -> int:
            given = triton.InferInput("IN", [1, 1], "INT32")
            given.set_data_from_numpy(np.array([[value]], np.int32))
            result = client.infer("stateful", [given], sequence_id=number, client_timeout=30, **ends)
            told = result.get_response().parameters
            assert number == getattr(told["sequence_id"], told["sequence_id"].WhichOneof("parameter_choice"))
            for end in ("sequence_start", "sequence_end"):
                assert told[end].bool_param == ends.get(end, False)
            return int(result.as_numpy("OUT")[0, 0])

        ids: list[int | str] = [7, 2**63 - 1, "nine"]
        assert [ask(each, 10 * at, sequence_start=True) for at, each in enumerate(ids)] == [0, 10, 20]
        assert [ask(each, 1) for each in ids] == [1, 11, 21]
        assert [ask(each, 2, sequence_end=True) for each in ids] == [3, 13, 23]
        with pytest.raises(Exception, match=r"in ensemble 'stateful', .*'sums' must specify the START flag"):
            ask(7, 1)


def test_an_optional_input_may_be_left_out(client):
    x = rows()
    both = client.infer("options", {"IN": x, "MORE": x + 50}, timeout=30)
    assert np.array_equal(both["OUT"], x + 1)
    assert np.array_equal(both["SECOND"], x + 50)
    one = client.infer("options", {"IN": x}, outputs=["OUT"], timeout=30)
    assert np.array_equal(one["OUT"], x + 1)


def test_an_optional_input_that_a_step_needs_is_missed_by_that_step(client):
    with pytest.raises(InferError) as caught:
        client.infer("needs", {}, timeout=30)
    assert (caught.value.code, caught.value.message) == (
        "INVALID_ARG",
        "in ensemble 'needs', expected 1 inputs but got 0 inputs for model 'add1'. Got input(s) [], but missing "
        "required input(s) ['x']. Please provide all required input(s). (step 0: model 'add1')",
    )
    assert np.array_equal(client.infer("needs", {"IN": rows()}, timeout=30)["OUT"], rows() + 1)


def test_an_error_names_step_model_and_tensor(client):
    with pytest.raises(InferError) as caught:
        client.infer("unknown", {"IN": np.ones(100, np.float32)}, timeout=30)  # only 64 rows can be gathered
    assert caught.value.message.startswith("in ensemble 'unknown', ")
    assert caught.value.message.endswith("(step 1: model 'gather' on 'index' = 'where' [1,100])")
    assert client.infer("unknown", {"IN": np.ones(1, np.float32)}, timeout=30)["where"].tolist() == [[0]]


# --- on the way ---------------------------------------------------------------------------------------------------


def executions(client: clientlib.Client, model: str) -> int:
    return sum(int(row["execution_count"]) for row in client.statistics(model))


HELD = np.full((1, 4), -1, np.float32)  # the gate holds it back; what comes out in the end is 1


def submitted(client: clientlib.Client, name: str, count: int) -> list[clientlib.Pending]:
    """Requests that are held back, of one plan."""
    region = client.create_region(f"held by {name}", 4096)
    region.array((1, 4), np.float32)[:] = HELD
    plan = client.prepare(name, {"IN": region.tensor((1, 4), "FP32")})
    return [plan.submit() for _ in range(count)]


@pytest.mark.parametrize("name", ["slowly", "slower", "gated"])
def test_a_cancel_takes_back_the_step_that_waits(client, gate, name):
    before = executions(client, "slow")
    first, second, third = submitted(client, name, 3)
    gate.entered()
    third.cancel()
    with pytest.raises(InferError) as caught:
        third.result(30)
    assert caught.value.code == "CANCELLED"
    assert not first.done()
    assert not second.done()
    gate.let(2)
    for request in (first, second):
        assert request.result(30)["OUT"].tolist() == [[1] * 4]
    gate.entered(1)
    eventually(lambda: executions(client, "slow") == before + 2, "only two have run")


def test_a_deadline_ends_the_step_that_waits(client, gate):
    before = executions(client, "slow")
    region = client.create_region("held", 4096)
    region.array((1, 4), np.float32)[:] = HELD
    plan = client.prepare("slowly", {"IN": region.tensor((1, 4), "FP32")})
    first = plan.submit()
    gate.entered()
    with pytest.raises(InferError, match="Request timeout expired"):
        plan.submit(timeout=0.1).result(30)
    eventually(lambda: client.statistics("slowly")[0]["pending"] == 1, "its step is not queued any more")
    gate.let()
    first.result(30)
    assert client.infer("slowly", {"IN": rows()}, timeout=30)["OUT"].tolist() == [[2, 3, 4, 5]]
    eventually(lambda: executions(client, "slow") == before + 2, "only two have run")


def test_a_client_that_goes_leaves_nothing_behind(broker, client, gate):
    before = executions(client, "slow")
    gone = clientlib.connect(f"ipc://{broker.directory}")
    submitted(gone, "slowly", 4)
    gate.entered()
    eventually(lambda: client.statistics("slowly")[0]["pending"] == 4, "they came")
    gone.close()
    eventually(lambda: client.statistics("slowly")[0]["pending"] == 1, "those that waited are gone")
    gate.let()
    assert client.infer("slowly", {"IN": rows()}, timeout=30)["OUT"].tolist() == [[2, 3, 4, 5]]
    eventually(lambda: executions(client, "slow") == before + 2, "only two have run")


def test_no_more_than_one_at_each_step(client, gate):
    requests = submitted(client, "gated", 3)
    gate.entered()
    eventually(lambda: client.statistics("gated")[0]["pending"] == 3, "they came")
    gate.let(3)
    assert [request.result(30)["OUT"].tolist() for request in requests] == [[[1] * 4]] * 3
    gate.entered(2)


def inference_stats(broker: Gateway, model: str) -> dict[str, Any]:
    status, body = broker.get(f"/v2/models/{model}/stats")
    assert status == 200
    found: dict[str, Any] = json.loads(body)["model_stats"][0]
    return {"executions": found["execution_count"], **{k: v["count"] for k, v in found["inference_stats"].items()}}


@pytest.mark.parametrize(("name", "kept", "runs"), [("over_kept", "kept", 2), ("kept_whole", "kept_whole", 1)])
def test_answers_of_members_and_of_ensembles_are_kept(broker, client, name, kept, runs):
    x = rows(2, 11)
    for _ in range(2):
        assert np.array_equal(client.infer(name, {"IN": x}, timeout=30)["OUT"], x + 2)

    def counted() -> tuple[int, ...]:
        found = inference_stats(broker, kept)
        own = inference_stats(broker, name)["executions"]
        return found["cache_hit"], found["cache_miss"], found["executions"], found["success"], own

    eventually(lambda: counted() == (1, 1, 1, 2, runs), "the second is a hit")
    assert np.array_equal(client.infer(name, {"IN": x + 1}, timeout=30)["OUT"], x + 3)
