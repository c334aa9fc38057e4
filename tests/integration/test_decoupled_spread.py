"""Ensembles with decoupled members over two worker groups, in one real broker: what comes, in which order, at whose
pace; cancels, and deaths of either worker. And members that two workers serve.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes import models, spread, streaming_backend
from tests.fakes.broker import Broker, eventually
from tests.fakes.processes import kill_new

pytestmark = pytest.mark.timeout(120)
DEFAULT, OTHER = "cpu/default", "cpu/other"
TWO = """instance_group [ { count: 1 kind: KIND_CPU }, { count: 1 kind: KIND_CPU } ]
parameters { key: "worker_group" value { string_value: "left,right" } }
"""
REPEAT = """backend: "repeat" max_batch_size: 0 model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
"""
SQUARE = """backend: "square" max_batch_size: 0 model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def same(datatype: str, dims: str) -> str:
    return (
        f'backend: "identity" max_batch_size: 0 {spread.tensors("input", f"INPUT0 {datatype} {dims}")}'
        f" {spread.tensors('output', f'OUTPUT0 {datatype} {dims}')} "
    )


def through(model: str, source: str, target: str) -> str:
    return spread.step(model, f"INPUT0={source}", f"OUTPUT0={target}")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    root = tmp_path_factory.mktemp("repository")
    for name, config in {
        "acts": same("INT32", "5"),
        "bytes": same("UINT8", "-1"),
        "bytes_there": same("UINT8", "-1") + spread.OTHER,
        "texts": same("STRING", "-1"),
        "numbers": same("INT32", "-1"),
        "one": same("INT32", "1"),
        "wide": same("INT32", "1") + TWO,
        "repeat": REPEAT + spread.OTHER,
        "square": SQUARE + spread.OTHER,
    }.items():
        models.write_model(root, name, config=config)
    for name, more in (("here", ""), ("there", spread.OTHER)):
        models.write_model(root, name, config=streaming_backend.CONFIG + more)
        shutil.copy(streaming_backend.__file__, root / name / "backend.py")
    outputs = ["INDEX INT32 1", "Y UINT8 -1"]
    steps = (
        through("acts", "ACT", "act"),
        spread.step("there", "ACT=act", "INDEX=INDEX Y=raw T=words"),
        through("bytes", "raw", "Y"),
        through("texts", "words", "T"),
    )
    spread.ensemble(root, "far", ["ACT INT32 5"], [*outputs, "T STRING -1"], *steps, batch=0)
    steps = (spread.step("here", "ACT=ACT", "INDEX=INDEX Y=raw"), through("bytes_there", "raw", "Y"))
    spread.ensemble(root, "behind", ["ACT INT32 5"], outputs, *steps, batch=0)
    steps = (
        through("numbers", "IN", "in"),
        spread.step("repeat", "IN=in DELAY=DELAY WAIT=WAIT", "OUT=a IDX=IDX"),
        spread.step("square", "IN=a", "OUT=b"),
        through("one", "b", "OUT"),
    )
    inputs = ["IN INT32 -1", "DELAY UINT32 -1", "WAIT UINT32 1"]
    spread.ensemble(root, "twice", inputs, ["OUT INT32 1", "IDX UINT32 1"], *steps, batch=0)
    steps = (through("one", "IN", "a"), through("wide", "a", "OUT"))
    spread.ensemble(root, "either", ["IN INT32 1"], ["OUT INT32 1"], *steps, batch=0)
    with Broker(root, tmp_path_factory.mktemp("run"), "--model-control-mode=explicit", "--load-model=*") as broker:
        yield broker.ready()


@pytest.fixture
def client(broker: Broker) -> Iterator[clientlib.Client]:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        yield client


def act(count: int, size: int = 3, delay_ms: int = 0, fails: int = -1) -> dict[str, np.ndarray]:
    return {"ACT": np.array([count, size, delay_ms, fails, -1], np.int32)}


def body(number: int, size: int) -> list[int]:
    return ((np.arange(size) + number) % 251).tolist()


def worker(broker: Broker, key: str) -> dict:
    return next(row for row in broker.status()["workers"] if row["key"] == key)


def kill(broker: Broker, key: str, gone: set[int]) -> None:
    def named() -> int:
        row = worker(broker, key)
        return int(row["pid"]) if row["state"] == "ready" else 0

    kill_new(named, gone)


@pytest.mark.parametrize("name", ["far", "behind"])
@pytest.mark.parametrize(("count", "size"), [(0, 3), (1, 0), (40, 5), (300, 70), (5, 1_000_000), (3, 4097)])
def test_every_response_comes_once_and_in_order(client, name, count, size):
    found = list(client.stream(name, act(count, size), outputs=["INDEX", "Y"], timeout=60))
    assert [int(each["INDEX"][0]) for each in found] == list(range(count))
    for number, each in enumerate(found):
        assert each["Y"].tolist() == body(number, size)


def test_what_a_response_does_not_have_is_waited_for_by_no_other(client):
    found = list(client.stream("far", act(6, 2), outputs=["INDEX", "T"], timeout=60))
    assert [int(each["INDEX"][0]) for each in found] == [0, 2, 4]
    assert [each["T"].tolist() for each in found] == [[f"response {n}".encode(), "éé".encode()] for n in (0, 2, 4)]


def test_one_decoupled_member_elsewhere_behind_another(client):
    values = [3, 0, 2, 40]
    asked = {"IN": np.array(values, np.int32), "DELAY": np.zeros(4, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    found = [(int(each["IDX"][0]), int(each["OUT"][0])) for each in client.stream("twice", asked, timeout=60)]
    assert found == [(at, value) for at, value in enumerate(values) for _ in range(value)]


def test_many_at_once_each_get_their_own(client):
    streams = [client.stream("far", act(number, number), outputs=["INDEX", "Y"], timeout=60) for number in range(24)]
    for number, stream in enumerate(streams):
        found = [each["Y"].tolist() for each in stream]
        assert found == [body(at, number) for at in range(number)]


def test_an_error_of_the_member_elsewhere_ends_the_request_after_what_came_before(client):
    stream = client.stream("far", act(9, fails=4), outputs=["INDEX"], timeout=60)
    assert [int(next(stream)["INDEX"][0]) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(InferError, match=r"in ensemble 'far', .*step 1: model 'there'"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def sent(client: clientlib.Client, model: str) -> dict[str, int]:
    """Requests of it that run, and that were cancelled, so far. One of an earlier test may end a little later."""
    statistics = client.statistics(model)[0]
    return {"cancelled": statistics["cancelled"], "ended": statistics["inference_stats"]["success"]["count"]}


def test_a_cancel_reaches_the_step_elsewhere(client):
    before = sent(client, "there")
    with client.stream("far", act(10_000, delay_ms=20), outputs=["INDEX"]) as stream:
        next(stream)
    eventually(lambda: sent(client, "there")["cancelled"] > before["cancelled"], "the member's request is over")
    eventually(lambda: client.statistics("far")[0]["pending"] == 0, "and the ensemble's")


def test_a_reader_that_is_slow_holds_the_member_back_and_loses_nothing(client):
    """160 MiB: more than all that may wait on the way."""
    count, size = 160, 1 << 20
    before = sent(client, "there")
    with client.stream("far", act(count, size), outputs=["INDEX", "Y"], timeout=100) as stream:
        first = next(stream)
        assert int(first["INDEX"][0]) == 0
        others = [client.stream("far", act(2), outputs=["INDEX"], timeout=60) for _ in range(20)]
        assert [len(list(each)) for each in others] == [2] * 20, "nobody else is held back"
        eventually(lambda: sent(client, "there")["ended"] >= before["ended"] + 20)
        for number, each in enumerate(stream, 1):
            assert int(each["INDEX"][0]) == number
            assert np.array_equal(each["Y"][:300], body(number, 300))
        assert number == count - 1
    eventually(lambda: sent(client, "there")["ended"] >= before["ended"] + 21)


@pytest.mark.parametrize("key", [DEFAULT, OTHER])
def test_a_death_in_the_middle_ends_it_after_what_came_before(broker, client, key):
    stream = client.stream("far", act(100_000, delay_ms=2), outputs=["INDEX"], timeout=60)
    came = [int(next(stream)["INDEX"][0]) for _ in range(5)]
    kill(broker, key, set())
    with pytest.raises(InferError, match=r"died while it ran this request, (alone, )?after its first response"):
        came.extend(int(each["INDEX"][0]) for each in stream)
    assert came == list(range(len(came)))
    found = [int(each["INDEX"][0]) for each in client.stream("far", act(7), outputs=["INDEX"], timeout=60)]
    assert found == list(range(7))


def test_a_death_of_a_worker_that_only_answers_costs_the_flow_nothing(broker, client):
    stream = client.stream("behind", act(400, delay_ms=2), outputs=["INDEX", "Y"], timeout=60)
    came = [int(next(stream)["INDEX"][0]) for _ in range(5)]
    kill(broker, OTHER, set())
    came += [int(each["INDEX"][0]) for each in stream]
    assert came == list(range(400))


def test_a_member_that_two_workers_serve_is_asked_in_both_and_in_one_while_the_other_is_replaced(broker, client):
    failed: list[str] = []
    done = [0] * 3  # of each thread: what a death made run again has ended when all have gone on
    stop = threading.Event()

    def ask(number: int) -> None:
        with clientlib.connect(f"ipc://{broker.directory}") as own:
            while not stop.is_set():
                value = np.array([number * 1000 + done[number] % 997], np.int32)
                try:
                    if own.infer("either", {"IN": value}, timeout=60)["OUT"].tolist() != value.tolist():
                        failed.append(f"of {value}")
                except InferError as error:
                    failed.append(error.message)
                done[number] += 1

    def taken() -> list[int]:
        return [worker(broker, key)["requests"] for key in ("cpu/left", "cpu/right")]

    before = taken()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(done))]
    for thread in threads:
        thread.start()
    eventually(lambda: all(now > then + 9 for now, then in zip(taken(), before, strict=True)), "both are used")
    gone: set[int] = set()
    for key in ("cpu/left", "cpu/right"):
        kill(broker, key, gone)
        before = done.copy()
        eventually(lambda: all(now > then + 7 for now, then in zip(done, before, strict=True)), "all are answered")  # noqa: B023
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failed == []


def test_nothing_is_left_of_ensembles_that_are_unloaded(broker, client):
    """After all that the tests above have done, deaths and cancels included."""

    def held() -> tuple[int, int]:
        rows = [row for row in broker.status()["sessions"] if row["library"] == "broker.worker"]
        return sum(row["plans"] for row in rows), max(row["regions"] for row in rows)

    list(
        client.stream(
            "twice", {"IN": np.array([2], np.int32), "DELAY": np.zeros(1, np.uint32), "WAIT": np.zeros(1, np.uint32)}
        )
    )
    assert held()[0] > 0
    for name in ("far", "behind", "twice", "either"):
        client.unload(name)
    eventually(lambda: held()[0] == 0 and held()[1] <= 1, "plans are released, and memory but for one region each")
