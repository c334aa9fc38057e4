"""Ensembles whose members are in two worker groups, in real brokers: values, limits, cancels, deadlines, reloads.

What happens when a worker dies is in `tests/integration/test_ensembles_spread_deaths.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes import spread
from tests.fakes.broker import Broker, eventually, steady
from tests.fakes.lone_worker import Gate

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    gate = Gate(tmp_path_factory.mktemp("repository") / "slow")
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def broker(gate: Gate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    root = gate.directory.parent
    spread.write(root)
    with Broker(root, tmp_path_factory.mktemp("run"), "--model-control-mode=explicit", "--load-model=*") as broker:
        yield broker.ready()


@pytest.fixture
def client(broker: Broker) -> Iterator[clientlib.Client]:
    with clientlib.connect(f"ipc://{broker.directory}") as client:
        yield client


def rows(count: int = 1, start: float = 0, width: int = 4) -> np.ndarray:
    return np.arange(start, start + width * count, dtype=np.float32).reshape(count, width)


FLOATS = {
    "chain": lambda x: 3 * (3 * x + 1),
    "first": lambda x: 3 * (x + 1),
    "last": lambda x: 3 * x + 1,
    "nested": lambda x: 3 * (3 * (3 * x + 1) + 1),
    "limited": lambda x: 3 * x + 1,
    "there": lambda x: 2 * (3 * (x + 1)),
    "relay": lambda x: 2 * (3 * (3 * x + 1)),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_through(client, name):
    for count, width in ((1, 4), (3, 4), (4, 7), (1, 4)):
        x = rows(count, 7, width)
        assert np.array_equal(client.infer(name, {"IN": x}, timeout=30)["OUT"], FLOATS[name](x))


def test_fan_out_and_a_subset_of_the_outputs(client):
    x = rows(2)
    expected = {"a": 3 * x, "b": x + 1, "c": 3 * x + 1, "d": 3 * (3 * x + 1)}
    for names in (["a", "b", "c", "d"], ["b"], ["d", "a"], ["c"]):
        found = client.infer("fan", {"IN": x}, outputs=names, timeout=30)
        assert {name: found[name].tolist() for name in names} == {name: expected[name].tolist() for name in names}


def test_sizes_that_only_a_run_tells(client):
    for size in (3, 3, 5000, 9):
        x = np.ones(size, np.float32)
        x[::2] = 0
        where = np.nonzero(x)[0].reshape(1, -1)
        names = ["where", "OUT"] if size < 64 else ["where"]  # more rows than there are
        found = client.infer("unknown", {"IN": x}, outputs=names, timeout=30)
        assert found["where"].tolist() == where.tolist()
        if size < 64:
            assert found["OUT"].tolist() == np.repeat(where[..., None], 4, axis=2).astype(np.float32).tolist()


def test_strings_of_any_length(client):
    for texts in (["a", "bb"], ["", "a longer one" * 900], ["ü"], ["x" * 100_000]):
        x = np.array([[text.encode() for text in texts]], object)
        assert client.infer("texts", {"IN": x}, timeout=30)["OUT"].tolist() == x.tolist()


def test_many_clients_get_their_own_rows(broker):
    wrong: list[str] = []

    def ask(number: int) -> None:
        order = np.random.default_rng(number)
        try:
            with clientlib.connect(f"ipc://{broker.directory}") as client:
                for turn in range(60):
                    name = list(FLOATS)[order.integers(len(FLOATS))]
                    x = rows(int(order.integers(1, 5)), 1000 * number + turn, int(order.integers(1, 9)))
                    y = client.infer(name, {"IN": x}, timeout=30)["OUT"]
                    if not np.array_equal(y, FLOATS[name](x)):
                        wrong.append(f"{name} of {x} is {y}")
        except InferError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_prepared_requests_many_at_a_time(client):
    positions, width = 32, 8
    x = client.create_region("x", positions * 4 * width)
    y = client.create_region("y", positions * 4 * width)
    given = x.array((positions, 1, width), np.float32)
    with client.prepare(
        "chain",
        inputs={"IN": x.tensor((1, width), "FP32")},
        outputs={"OUT": y.tensor((1, width), "FP32")},
        slots=(positions, positions),
    ) as plan:
        for turn in range(4):
            given[:] = np.arange(given.size).reshape(given.shape) + turn
            pending = [plan.submit(input_slot=at, output_slot=at) for at in range(positions)]
            for at, request in enumerate(pending):
                assert np.array_equal(request.result(30)["OUT"], FLOATS["chain"](given[at]))


def test_sequences_of_two_clients_with_equal_ids(broker):
    def connected(first: int):
        client = clientlib.connect(f"ipc://{broker.directory}")
        given, out = client.create_region("x", 4), client.create_region("y", 4)
        tensor = given.tensor((1, 1), "INT32")
        plan = client.prepare("summing", inputs={"IN": tensor}, outputs={"OUT": out.tensor((1, 1), "INT32")})
        return client, given.array((1,), np.int32), plan, [first]

    clients = [connected(100), connected(7)]
    for turn in range(6):
        for _, given, plan, said in clients:
            if turn:
                said.append(turn)
            given[0] = said[-1]
            flags = {"sequence_start": turn == 0, "sequence_end": turn == 5}
            found = int(plan.infer(sequence_id=5, timeout=30, **flags)["OUT"][0, 0])
            assert found == sum(said)
    for client, *_ in clients:
        client.close()


def test_what_goes_wrong_elsewhere_is_told_with_step_and_model(client):
    with pytest.raises(InferError) as raised:
        client.infer("limited", {"IN": np.zeros((5, 4), np.float32)}, timeout=30)
    assert "batch-size must be <= 4 for 'limited'" in raised.value.message
    x = np.arange(128, dtype=np.float32)
    with pytest.raises(InferError) as raised:
        client.infer("unknown", {"IN": x}, timeout=30)
    assert "in ensemble 'unknown'" in raised.value.message
    assert "step 1: model 'rows' on 'index' = 'where'" in raised.value.message


def test_clients_take_turns_at_a_step_elsewhere(broker, client, gate):
    """What a run for one client has prepared serves those for others, but not with its turns."""
    count = 8

    def plan_of(asks: clientlib.Client, name: str) -> clientlib.Plan:
        region = asks.create_region(name, 16 * (count + 2))
        region.array((1, 4), np.float32)[:] = -1  # the gate holds it
        places = {"IN": region.tensor((1, 4), "FP32")}, {"OUT": region.tensor((1, 4), "FP32", offset=16)}
        return asks.prepare("with_slow", *places, slots=(1, count + 1))

    def pass_one() -> None:
        gate.entered()
        gate.let()

    plan = plan_of(client, "turns")
    with clientlib.connect(f"ipc://{broker.directory}") as other:
        before = [plan.submit(output_slot=at) for at in range(count + 1)]  # so many are prepared now
        for _ in before:
            pass_one()
        for pending in before:
            pending.result(30)
        many = [plan.submit(output_slot=at) for at in range(count)]
        gate.entered()
        polite = plan_of(other, "turns.polite").submit()
        eventually(lambda: client.statistics("slow")[0]["pending"] == count, "all the others wait")
        gate.let()
        pass_one()
        polite.result(30)
        assert sum(pending.done() for pending in many) <= 2, "its turn came after what ran"
        for _ in range(count - 1):
            pass_one()
        for pending in many:
            pending.result(30)


def test_a_cancel_and_a_deadline_while_a_step_waits_elsewhere(client, gate):
    hold, quick = np.full((1, 4), -1, np.float32), rows(1, 1)
    x = client.create_region("cancel.x", 2 * 16)
    y = client.create_region("cancel.y", 4 * 16)
    given = x.array((2, 1, 4), np.float32)
    given[0], given[1] = hold, quick
    with client.prepare(
        "with_slow",
        inputs={"IN": x.tensor((1, 4), "FP32")},
        outputs={"OUT": y.tensor((1, 4), "FP32")},
        slots=(2, 4),
    ) as plan:
        running = plan.submit(input_slot=0, output_slot=0)
        gate.entered()
        waiting = plan.submit(input_slot=1, output_slot=1)
        late = plan.submit(input_slot=1, output_slot=2, timeout=0.2)
        waiting.cancel()
        with pytest.raises(InferError) as raised:
            waiting.result(30)
        assert raised.value.code == "CANCELLED"
        with pytest.raises(InferError) as raised:
            late.result(30)
        assert "Request timeout expired" in raised.value.message
        running.cancel()
        assert not running.done()
        gate.let()
        assert np.array_equal(running.result(30)["OUT"], 3 * hold + 1)  # what runs is not interrupted
        assert np.array_equal(plan.infer(input_slot=1, output_slot=3, timeout=30)["OUT"], 3 * quick + 1)


class Load:
    """Clients that ask one ensemble all the time."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.done = [0] * 3
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(broker, name, number)) for number in range(3)]

    def go_on(self) -> None:
        """Returns when each has been answered once more."""
        before = self.done.copy()
        eventually(lambda: all(now > then for now, then in zip(self.done, before, strict=True)), "all are answered")

    def _ask(self, broker: Broker, name: str, number: int) -> None:
        with clientlib.connect(f"ipc://{broker.directory}") as client:
            x = rows(1 + number, 10 * number)
            while not self._stop.is_set():
                try:
                    y = client.infer(name, {"IN": x}, timeout=30)["OUT"]
                    if not np.array_equal(y, FLOATS[name](x)):
                        self.failed.append(f"{y} of {x}")
                except InferError as error:
                    self.failed.append(str(error))
                self.done[number] += 1

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


@pytest.mark.parametrize("member", ["shift", "chain"])
def test_reloads_under_load_fail_nothing(broker, client, member):
    with Load(broker, "chain") as load:
        for _ in range(2):
            load.go_on()
            client.load(member)
        load.go_on()
    assert load.failed == []


def test_an_unloaded_member_elsewhere_takes_its_ensembles_along(client):
    x = rows()
    assert client.infer("with_fatal", {"IN": x}, timeout=30)
    client.unload("fatal")
    with pytest.raises(InferError, match=r"has no available versions|is not loaded"):
        client.infer("with_fatal", {"IN": x}, timeout=30)
    client.load("fatal")
    client.load("with_fatal")
    assert np.array_equal(client.infer("with_fatal", {"IN": x}, timeout=30)["OUT"], 3 * x)


def test_statistics_of_both_workers(client):
    def counts(name: str) -> tuple[int, int]:
        stats = client.statistics(name)[0]
        return stats["inference_count"], stats["inference_stats"]["success"]["count"]

    def all_counts() -> dict[str, tuple[int, int]]:
        return {name: counts(name) for name in ("fan", "scale", "shift")}

    before = steady(all_counts)
    client.infer("fan", {"IN": rows(3)}, timeout=30)

    def grown() -> dict[str, tuple[int, ...]]:
        return {name: tuple(np.subtract(now, before[name])) for name, now in all_counts().items()}

    eventually(lambda: grown() == {"fan": (3, 1), "scale": (6, 2), "shift": (6, 2)}, "each is counted where it ran")


def test_what_is_under_way_ends_as_usual_when_its_member_is_unloaded(broker, client, gate):
    hold = np.full((1, 4), -1, np.float32)
    with clientlib.connect(f"ipc://{broker.directory}") as other:
        x, y = other.create_region("x", 16), other.create_region("y", 16)
        x.array((1, 4), np.float32)[:] = hold
        with other.prepare(
            "with_slow", inputs={"IN": x.tensor((1, 4), "FP32")}, outputs={"OUT": y.tensor((1, 4), "FP32")}
        ) as plan:
            running = plan.submit()
            gate.entered()
            closed = gate.closed
            client.unload("slow")
            assert not running.done()
            gate.let()
            assert np.array_equal(running.result(30)["OUT"], 3 * hold + 1)
            gate.closed_are(closed + 1)  # the request was all that it was there for
    client.load("with_slow")
    assert np.array_equal(client.infer("with_slow", {"IN": rows()}, timeout=30)["OUT"], 3 * rows() + 1)


def test_an_ensemble_moves_with_its_members(broker, client, gate):
    def worker_of(name: str) -> list[str]:
        return next(row["workers"] for row in broker.status()["models"] if row["name"] == name)

    x = rows(2)
    assert worker_of("there") == ["cpu/other"]
    file = gate.directory.parent / "twice" / "config.pbtxt"
    config = file.read_text()
    for text, key in ((config.replace(spread.OTHER, ""), "cpu/default"), (config, "cpu/other")):
        file.write_text(text)
        client.load("twice")
        assert worker_of("there") == [key]
        for name in ("there", "relay"):
            assert np.array_equal(client.infer(name, {"IN": x}, timeout=30)["OUT"], FLOATS[name](x))


def test_nothing_is_left_of_an_ensemble_that_is_unloaded(broker, client):
    def held() -> tuple[int, int]:
        rows = [row for row in broker.status()["sessions"] if row["library"] == "broker.worker"]
        return sum(row["plans"] for row in rows), max(row["regions"] for row in rows)

    assert np.array_equal(client.infer("relay", {"IN": rows()}, timeout=30)["OUT"], FLOATS["relay"](rows()))
    for name in ("relay", "there", "chain", "first", "last", "nested", "limited", "fan", "texts", "unknown", "summing"):
        client.unload(name)
    for name in ("with_slow", "with_once", "with_fatal"):
        client.unload(name)
    eventually(lambda: held() == (0, 1), "plans are released, and memory but for one region each")
    for name in ("last", "chain"):
        client.load(name)
    assert np.array_equal(client.infer("chain", {"IN": rows()}, timeout=30)["OUT"], FLOATS["chain"](rows()))


def test_only_the_brokers_own_workers_prepare_steps(broker):
    client = broker.client()
    plan = {"type": "Prepare", "model": "shift", "inputs": [], "outputs": []}
    answer = client.ask("PrepareStep", plan=plan, owner=1)
    assert (answer["type"], answer["code"]) == ("Failure", "INVALID_ARG")
    assert answer["message"] == "only the broker's own workers prepare steps of ensembles"
