"""Models that two workers serve: where requests go, what a death of one of the two costs, reloads; real brokers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clientlib
from shm import messages
from shm.errors import InferError
from tests.fakes import models, spread
from tests.fakes.broker import Broker, eventually, steady
from tests.fakes.gateways import Gateway
from tests.fakes.lone_worker import Gate
from tests.fakes.processes import kill_new

pytestmark = pytest.mark.timeout(120)
LEFT, RIGHT = "cpu/left", "cpu/right"
TWO = """instance_group [ { count: 1 kind: KIND_CPU }, { count: 1 kind: KIND_CPU } ]
parameters { key: "worker_group" value { string_value: "left,right" } }
"""
ONE = """instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "worker_group" value { string_value: "%s" } }
"""
SUMS = (
    "max_batch_size: 4 "
    + spread.tensors("input", "INPUT INT32 1")
    + spread.tensors("output", "OUTPUT INT32 1")
    + spread.SEQUENCE.replace("{ direct", "{ max_sequence_idle_microseconds: 60000000 direct")
)
REPEAT = """backend: "repeat" max_batch_size: 0 model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
"""


def write(root: Path) -> Gate:
    """A repository; the gate is that of its model "slow"."""
    gate = Gate(root / "slow")
    models.write_model(root, "add1", models.add1(), config=f"max_batch_size: 4 {TWO}")
    models.write_model(root, "sums", config=SUMS + TWO)
    models.write_model(root, "repeat", config=REPEAT + TWO)
    fp32 = spread.tensors("input", "x FP32 4") + spread.tensors("output", "y FP32 4")
    held = f"""max_batch_size: 4 backend: "gate" {fp32} {TWO}
parameters {{ key: "gate" value {{ string_value: "{root / "slow"}/gate" }} }}
parameters {{ key: "told" value {{ string_value: "{root / "slow"}/told" }} }}"""
    models.write_model(root, "slow", config=held)
    models.write_model(root, "fatal", config=f'max_batch_size: 4 backend: "fatal" {fp32} {TWO}')
    (root / "fatal" / "backend.py").write_text(spread.FATAL)
    one = (["IN FP32 -1"], ["OUT FP32 -1"])
    spread.ensemble(root, "both", *one, spread.step("add1", "x=IN", "y=a"), spread.step("add1", "x=a", "y=OUT"))
    return gate


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with contextlib.closing(write(tmp_path_factory.mktemp("repository"))) as gate:
        yield gate


@pytest.fixture(scope="module")
def broker(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """For tests that leave its models as they are. Its workers may be new ones."""
    with Broker(gate.directory.parent, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


@pytest.fixture
def client(broker: Broker) -> Iterator[clientlib.Client]:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        eventually(lambda: all(row["state"] == "ready" for row in workers(client).values()), "both are up")
        yield client


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    """Of the test's own."""
    with contextlib.closing(write(tmp_path / "repository")):
        yield tmp_path / "repository"


@pytest.fixture
def control(repository: Path, tmp_path: Path) -> Iterator[clientlib.Client]:
    """A client of a broker of the test's own, which loads what it is told to."""
    flags = ("--model-control-mode=explicit", "--load-model=add1")
    with (
        Broker(repository, tmp_path / "run", *flags) as broker,
        clientlib.connect(f"ipc://{broker.ready().directory}") as client,
    ):
        yield client


def status(client: clientlib.Client) -> dict[str, Any]:
    reply, _ = client._run(lambda link: client.native.call(link, messages.GetStatus(), 0))
    assert isinstance(reply, messages.Status)
    return reply.status


def workers(client: clientlib.Client) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in status(client)["workers"]}


def state(client: clientlib.Client, model: str) -> tuple[str, list[str]]:
    row = next(row for row in status(client)["models"] if row["name"] == model)
    return row["state"], row["workers"]


def requests(client: clientlib.Client) -> dict[str, int]:
    """How many each worker has taken, counted when it pauses."""
    return {key: row["requests"] for key, row in workers(client).items()}


def successes(client: clientlib.Client) -> int:
    """Of the model "add1"."""
    (stats,) = client.statistics("add1")
    return int(stats["inference_stats"]["success"]["count"])


def kill(client: clientlib.Client, key: str, gone: set[int]) -> None:
    def named() -> int:
        row = workers(client)[key]
        return int(row["pid"]) if row["state"] == "ready" else 0

    kill_new(named, gone)


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


def test_it_is_ready_in_both_and_both_are_used(client: clientlib.Client) -> None:
    assert state(client, "add1") == ("READY", [LEFT, RIGHT])
    before, succeeded = steady(lambda: (requests(client), successes(client)))
    for number in range(100):
        assert client.infer("add1", {"x": row(number, 2)})["y"].tolist() == [[number + 1, 3]]
    eventually(lambda: sum(requests(client).values()) - sum(before.values()) == 100, "all are counted")
    used = {key: count - before[key] for key, count in requests(client).items()}
    assert min(used.values()) >= 1, used
    eventually(lambda: successes(client) - succeeded == 100, "those of both are added up")


def test_requests_that_wait_in_one_send_others_to_the_other(client: clientlib.Client, gate: Gate) -> None:
    """A worker whose only instance is held has more in flight: the next requests are answered by the other."""
    region = client.create_region("r", 4096)
    plan = client.prepare(
        "slow",
        {"x": region.tensor((1, 4), "FP32", offset=0, stride=64)},
        {"y": region.tensor((1, 4), "FP32", offset=1024, stride=64)},
        slots=4,
    )
    data = region.array((4, 16), np.float32)
    data[:] = 7
    for position in range(3):  # both are known to be quick
        plan.infer(input_slot=position, output_slot=position, timeout=30)
    data[3] = -1
    held = plan.submit(input_slot=3, output_slot=3)
    gate.entered()

    def others_are_quick() -> bool:
        try:
            return all(plan.infer(input_slot=0, output_slot=0, timeout=5)["y"][0, 0] == 8 for _ in range(10))
        except InferError as late:  # a busy machine made the other's last request take longer than this one so far
            if "timeout expired" not in late.message:
                raise
            return False

    eventually(others_are_quick, "none goes where one is held")
    assert not held.done()
    gate.let()
    assert held.result(timeout=30)["y"][0, 0] == 0


@pytest.mark.parametrize("key", [LEFT, RIGHT])
def test_a_death_of_one_under_load_loses_and_doubles_nothing(
    broker: Broker, client: clientlib.Client, key: str
) -> None:
    stop = threading.Event()
    counts = [0] * 4
    outcomes: list[tuple[int, float]] = []
    gone: set[int] = set()

    def ask(first: int) -> int:
        count = 0
        with clientlib.connect(f"ipc://{broker.directory}") as mine:
            while not stop.is_set():
                value = first * 1_000_000 + count
                result = mine.infer("add1", {"x": row(value)}, timeout=60)["y"][0, 0]
                outcomes.append((value, float(result)))
                counts[first] = count = count + 1
        return count

    def answered(more: int) -> None:
        """Wait for so many more of each: so that none is killed twice."""
        before = [*counts]
        eventually(lambda: all(now >= then + more for now, then in zip(counts, before, strict=True)))

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, first) for first in range(4)]
        try:
            for _ in range(3):
                answered(50)
                kill(client, key, gone)
            answered(50)
        finally:
            stop.set()
        total = sum(each.result(60) for each in asked)
    assert len(outcomes) == total
    assert all(result == np.float32(np.float32(value) + 1) for value, result in outcomes)
    eventually(lambda: workers(client)[key]["restarts"] >= 1, "it was replaced")
    eventually(lambda: state(client, "add1") == ("READY", [LEFT, RIGHT]), "and serves again")


def test_while_one_is_replaced_the_other_answers(client: clientlib.Client) -> None:
    """A worker that is stopped, and so can neither answer nor be replaced at once, is avoided after its death."""
    for _ in range(20):
        client.infer("add1", {"x": row(1)})
    gone: set[int] = set()
    for _ in range(3):
        kill(client, LEFT, gone)
        answers = [client.infer("add1", {"x": row(number)}, timeout=30)["y"][0, 0] for number in range(50)]
        assert answers == [number + 1 for number in range(50)]


def test_who_kills_workers_is_refused_by_all(client: clientlib.Client) -> None:
    for _ in range(2):  # whichever of the two it was
        with pytest.raises(InferError, match="alone and for the second time"):
            client.infer("fatal", {"x": row(-1, 0, 0, 0)}, timeout=60)
    refused = 0

    def refused_again() -> bool:
        nonlocal refused
        text = ""
        try:
            client.infer("fatal", {"x": row(1, 0, 0, 0)}, timeout=60)
        except InferError as error:
            text = error.message
        refused = refused + 1 if "are refused for another" in text else 0
        return refused == 20

    eventually(refused_again, "both have been told, and none lets anything pass any more")
    assert client.infer("add1", {"x": row(1)}, timeout=30)["y"].tolist() == [[2]], "other models are not"


def test_steps_of_a_sequence_stay_where_it_began(client: clientlib.Client) -> None:
    def step(number: int, value: int, start: bool, end: bool) -> int:
        region.array((16, 16), np.int32)[number - 1, 0] = value
        answer = plan.infer(
            input_slot=number - 1,
            output_slot=number - 1,
            sequence_id=number,
            sequence_start=start,
            sequence_end=end,
            timeout=30,
        )
        return int(answer["OUTPUT"][0, 0])

    region = client.create_region("r", 4096)
    plan = client.prepare(
        "sums",
        {"INPUT": region.tensor((1, 1), "INT32", offset=0, stride=64)},
        {"OUTPUT": region.tensor((1, 1), "INT32", offset=2048, stride=64)},
        slots=16,
    )
    before = steady(lambda: requests(client))
    with ThreadPoolExecutor(4) as pool:
        for at in range(1, 6):
            asked = [pool.submit(step, number, number * at, at == 1, at == 5) for number in range(1, 9)]
            got = [each.result(60) for each in asked]
            assert got == [sum(number * k for k in range(1, at + 1)) for number in range(1, 9)]
    eventually(lambda: sum(requests(client).values()) - sum(before.values()) == 40, "all are counted")
    assert all(count % 5 == 0 for count in ({k: v - before[k] for k, v in requests(client).items()}).values())


def test_streams_of_a_decoupled_model(client: clientlib.Client) -> None:
    for count in (1, 5, 3):
        inputs = {
            "IN": np.arange(count, dtype=np.int32),
            "DELAY": np.zeros(count, np.uint32),
            "WAIT": np.zeros(1, np.uint32),
        }
        with client.stream("repeat", inputs) as stream:
            assert [int(each["OUT"][0]) for each in stream] == list(range(count))


def test_an_ensemble_runs_where_its_member_is(client: clientlib.Client) -> None:
    assert state(client, "both")[1] == [LEFT]
    assert client.infer("both", {"IN": row(1, 2)}, timeout=30)["OUT"].tolist() == [[3, 4]]


def test_reloads_move_what_clients_have_prepared(control: clientlib.Client, repository: Path) -> None:
    client = control
    region = client.create_region("r", 4096)
    plan = client.prepare(
        "add1", {"x": region.tensor((1, 4), "FP32")}, {"y": region.tensor((1, 4), "FP32", offset=1024)}
    )
    x = region.array((1, 4), np.float32)

    def answers() -> None:
        for _ in range(20):
            x[:] += 1
            assert (plan.infer(timeout=30)["y"] == x + 1).all()
            assert client.infer("add1", {"x": x.copy()}, timeout=30)["y"].tolist() == (x + 1).tolist()

    answers()
    for config, serving in (
        (ONE % "right", [RIGHT]),
        (ONE % "left", [LEFT]),
        (TWO, [LEFT, RIGHT]),
        (TWO.replace("count: 1", "count: 2"), [LEFT, RIGHT]),
        (TWO, [LEFT, RIGHT]),
        (ONE % "left", [LEFT]),
    ):
        models.write_model(repository, "add1", models.add1(), config=f"max_batch_size: 4 {config}")
        client.load("add1")
        assert state(client, "add1") == ("READY", serving)
        answers()
    client.unload("add1")
    with pytest.raises(InferError, match="add1"):
        plan.infer(timeout=30)
    client.load("add1")
    answers()


def test_a_load_that_fails_in_one_leaves_both_as_they_were(control: clientlib.Client, repository: Path) -> None:
    """The second worker cannot load what does not fit into the statistics page; the first has by then."""
    client = control
    before = client.infer("add1", {"x": row(1)})["y"].tolist()
    config = TWO.replace("count: 1 kind: KIND_CPU }, { count: 1", "count: 1 kind: KIND_CPU }, { count: 600")
    (repository / "add1" / "config.pbtxt").write_text(f"max_batch_size: 4 {config}")
    with pytest.raises(InferError, match="statistics blocks"):
        client.load("add1")
    assert state(client, "add1") == ("READY", [LEFT, RIGHT])
    for _ in range(20):
        assert client.infer("add1", {"x": row(1)}, timeout=30)["y"].tolist() == before


def test_asyncio_clients_use_both(broker: Broker, client: clientlib.Client) -> None:
    gone: set[int] = set()

    async def run() -> None:
        other = await clientlib.connect_async(f"ipc://{broker.directory}")
        try:
            for _ in range(3):
                got = await asyncio.gather(*(other.infer("add1", {"x": row(n)}, timeout=60) for n in range(200)))
                assert [int(each["y"][0, 0]) for each in got] == list(range(1, 201))
                kill(client, LEFT, gone)
        finally:
            await other.close()

    before = steady(lambda: requests(client))
    asyncio.run(run())
    eventually(lambda: all(count > before[key] for key, count in requests(client).items()), "both had some")


def post(broker: Gateway, model: str, **fields: Any) -> Any:
    status, answer = broker.post(f"/v2/models/{model}/infer", fields)
    assert status == 200, answer
    return answer["outputs"][0]["data"]


def test_gateways_use_both_and_agree_where_sequences_are(repository: Path, tmp_path: Path) -> None:
    with Gateway(repository, tmp_path / "run", gateways=2) as broker:
        broker.ready()
        x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
        for at in range(1, 7):  # each by a connection of its own: to this gateway, or to that one
            for number in (11, 12, 13, 16):  # of which two are for each
                given = {"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [at]}
                parameters = {"sequence_id": number, "sequence_start": at == 1, "sequence_end": at == 6}
                assert post(broker, "sums", inputs=[given], parameters=parameters) == [at * (at + 1) // 2]
            assert post(broker, "add1", inputs=[x]) == [2, 3, 4, 5]

        def fewest() -> int:
            used = {row["key"]: int(row["requests"]) for row in broker.status()["workers"]}
            return min(used[LEFT], used[RIGHT])

        eventually(lambda: fewest() >= 12, "two sequences each")
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(post, broker, "add1", inputs=[x]) for _ in range(100)]
            for key in (LEFT, RIGHT):
                kill_new(lambda: next(row["pid"] for row in broker.status()["workers"] if row["key"] == key), set())  # noqa: B023 (called at once)
            assert all(each.result(60) == [2, 3, 4, 5] for each in asked)
