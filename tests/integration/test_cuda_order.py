"""A run sees what was enqueued before its request was sent: by an event, by waiting, or because all is waited for.

Each way is tried with a stream that stops at a gate before it writes; a request that waits for nothing shows that the
others would see it if they did not wait. All the way through a real broker; the model is a double of TensorRT's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shm.errors import InferError
from tests.doubles import tensorrt as double
from tests.fakes import models
from tests.fakes.broker import Broker, eventually
from tests.fakes.cuda import ROOT, CudaEnv
from tests.fakes.cuda_children import Child
from tests.fakes.cuda_worker import BACKEND
from tests.integration.test_cuda_served import ADDER, GPU_PIPE, IDENTITY, PIPE, PLAN, worker_of

pytestmark = pytest.mark.timeout(120)
EVENTS = 64  # clientlib.cuda_order's
PATIENCE_S = 4  # of the workers: enough to open a gate meanwhile on a busy machine
SQUARE = """backend: "square" max_batch_size: 0 model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
VAIN = f"the event of this request did not happen within {PATIENCE_S} s"


@pytest.fixture(scope="module")
def broker(cuda_sim: CudaEnv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    directory = tmp_path_factory.mktemp("order")
    repository = directory / "repository"
    models.write_model(repository, "on_cpu", config=IDENTITY % "KIND_CPU")
    models.write_model(repository, "square", config=SQUARE)
    models.write_model(repository, "pipe", config=PIPE)
    models.write_model(repository, "gpu_pipe", config=GPU_PIPE)
    models.write_model(repository, "add", config=ADDER)
    (repository / "add" / "backend.py").write_text(BACKEND)
    (repository / "add" / "1" / "model.plan").write_bytes(double.plan("add", *PLAN))
    (directory / "run").mkdir()

    def before() -> None:
        patience = str(1000 * PATIENCE_S)
        os.environ.update(cuda_sim.environ, PYTHONPATH=str(ROOT), TENSORBROKER_EVENT_PATIENCE_MS=patience)

    with Broker(repository, directory / "run", before=before) as running:
        yield running.ready()


def producer(broker: Broker, env: CudaEnv) -> Child:
    return Child(env, "tests.fakes.cuda_producer:Producer", f"ipc://{broker.directory}")


def prepared(child: Child, name: str = "r", model: str = "add", slots: int = 1) -> Child:
    """With a plan whose output is 1 + 2 once, or 1 for the model on the CPU."""
    child.call("allocate", name, "gpu")
    inputs = {"INPUT0": name, "INPUT1": name} if model == "add" else {"INPUT0": name}
    child.call("prepare", model, inputs, {"OUTPUT0": name}, [1, 4], slots)
    child.call("infer", {tensor: at + 1 for at, tensor in enumerate(inputs)}, "OUTPUT0")
    return child


@pytest.fixture(scope="module")
def shared(broker: Broker, cuda_sim: CudaEnv) -> Iterator[Child]:
    with producer(broker, cuda_sim) as child:
        yield child


@pytest.fixture
def user(shared: Child) -> Iterator[Child]:
    yield prepared(shared)
    shared.call("open_gate")
    shared.call("unregister", "r")


@pytest.fixture
def pid(broker: Broker) -> int:
    """Of the worker on the GPU."""
    found: int = worker_of(broker, "gpu0/tensorrt")["pid"]  # type: ignore[assignment]
    return found


def test_a_request_that_waits_for_nothing_reads_what_was_there_before(user: Child) -> None:
    """So the tests below would see it if a wait did nothing."""
    user.call("write_late", {"INPUT0": 10, "INPUT1": 20})
    assert user.call("run", "none", "OUTPUT0") == 3


def submit_and_wait_for(child: Child, env: CudaEnv, worker: int) -> None:
    """Returns when the worker has looked at the event several times."""
    before = env.calls(worker).get("cuEventQuery", 0)
    child.call("submit", "event")
    eventually(lambda: env.calls(worker).get("cuEventQuery", 0) > before + 3, "the worker waits")
    assert not child.call("done")


def test_the_worker_waits_for_an_event(user: Child, cuda_sim: CudaEnv, pid: int) -> None:
    user.call("write_late", {"INPUT0": 10, "INPUT1": 20})
    submit_and_wait_for(user, cuda_sim, pid)
    user.call("open_gate")
    assert user.call("result", "OUTPUT0") == 30


@pytest.mark.parametrize("order", ["", "synchronize"])
def test_the_client_waits_where_there_is_no_event(user: Child, order: str) -> None:
    user.call("write_late", {"INPUT0": 10, "INPUT1": 20})
    user.call("open_later")
    assert user.call("run", order, "OUTPUT0") == 30


IN_VAIN = r"^\[UNAVAILABLE\] timeout expired while waiting for work of .* on GPU-.*; it was not sent\. "


@pytest.mark.parametrize("without", ["", "cuCtxRecordEvent"])
@pytest.mark.parametrize("order", ["", "synchronize"])
def test_the_client_waits_no_longer_than_the_timeout_and_sends_nothing(
    broker: Broker, cuda_sim: CudaEnv, pid: int, order: str, without: str
) -> None:
    """Also with a driver that has no events of a context."""
    with producer(broker, cuda_sim.with_settings(CUSIM_WITHOUT=without)) as child:
        prepared(child)
        for value in (10, 20):
            runs = cuda_sim.calls(pid)["cuLaunchHostFunc"]
            child.call("write_late", {"INPUT0": value, "INPUT1": 5})
            with pytest.raises(InferError, match=IN_VAIN):
                child.call("run_within", order, 0.05)
            child.call("open_gate")
            assert child.call("run_within", "none", 30) is None
            assert cuda_sim.calls(pid)["cuLaunchHostFunc"] == runs + 1
            child.call("write_late", {"INPUT0": value, "INPUT1": 5})
            child.call("open_later")
            child.call("run_within", order, 30)
            assert child.call("read", "OUTPUT0") == value + 5


@pytest.mark.parametrize("order", ["", "synchronize"])
def test_nor_does_a_client_on_an_event_loop(broker: Broker, shared: Child, order: str) -> None:
    with pytest.raises(InferError, match=IN_VAIN):
        shared.call("run_async", f"ipc://{broker.directory}", order, 0.05, True)


def test_waits_on_an_event_loop_that_are_cancelled_leave_nothing(broker: Broker, cuda_sim: CudaEnv) -> None:
    """More of them than a loop has threads: a deadline is kept behind them, and their events are used again."""
    with producer(broker, cuda_sim) as child:
        told = child.call("cancel_async", f"ipc://{broker.directory}", 40, 3)
        assert [free for _, free, _ in told] == [0, 0, 0]
        assert all("timeout expired while waiting for work of this process" in text for text, _, _ in told), told
        assert len({events for _, _, events in told}) == 1


@pytest.mark.parametrize("on_loop", [False, True])
def test_nor_does_a_stream_of_responses(broker: Broker, user: Child, on_loop: bool) -> None:
    url = f"ipc://{broker.directory}"
    user.call("write_late", {"INPUT0": 0})
    with pytest.raises(InferError, match=IN_VAIN):
        user.call("stream_within", url, 0.05, on_loop)
    user.call("open_gate")
    assert user.call("stream_within", url, 30, on_loop) == 0


@pytest.mark.parametrize("timeout", [None, 30])
@pytest.mark.parametrize("order", ["event", "synchronize", ""])
def test_so_does_a_client_on_an_event_loop(broker: Broker, shared: Child, order: str, timeout: float | None) -> None:
    assert shared.call("run_async", f"ipc://{broker.directory}", order, timeout) == 23


def test_so_does_one_whose_driver_is_old(broker: Broker, cuda_sim: CudaEnv) -> None:
    with producer(broker, cuda_sim.with_settings(CUSIM_WITHOUT="cuCtxRecordEvent")) as child:
        assert child.call("run_async", f"ipc://{broker.directory}", "", None) == 23


def test_a_model_on_the_cpu_gets_its_copy_after_the_event(broker: Broker, shared: Child, cuda_sim: CudaEnv) -> None:
    user = prepared(shared, "c", "on_cpu")
    user.call("write_late", {"INPUT0": 10})
    submit_and_wait_for(user, cuda_sim, worker_of(broker, "cpu/default")["pid"])  # type: ignore[arg-type]
    user.call("open_gate")
    assert user.call("result", "OUTPUT0") == 10
    user.call("unregister", "c")


@pytest.mark.parametrize(("model", "times"), [("pipe", 2), ("gpu_pipe", 3)])
def test_an_ensemble_begins_after_the_event(broker: Broker, cuda_sim: CudaEnv, model: str, times: int) -> None:
    """Also one whose members are in several workers: then its inputs are copied at its beginning."""
    with producer(broker, cuda_sim) as child:
        child.call("allocate", "e", "gpu")
        child.call("prepare", model, {"IN": "e"}, {"OUT": "e"}, [1, 4])
        for value in (1, 2):
            child.call("infer", {"IN": value}, "OUT")
            child.call("write_late", {"IN": 10 * value})
            child.call("submit", "event")
            child.call("open_later")
            assert child.call("result", "OUT") == 10 * value * times
        child.call("write_late", {"IN": 5})
        child.call("submit", "event")
        with pytest.raises(InferError, match=f"in ensemble '{model}', {VAIN}"):
            child.call("result", "OUT")
        child.call("open_gate")
        assert child.call("run", "", "OUT") == 5 * times


def test_a_ring_is_opened_once_and_its_events_are_used_again(
    broker: Broker, user: Child, cuda_sim: CudaEnv, pid: int
) -> None:
    user.call("run", "event", "OUTPUT0")
    ours, theirs = cuda_sim.calls(user.pid), cuda_sim.calls(pid)
    assert user.call("run_many", 2 * EVENTS) == [number + 2 for number in range(2 * EVENTS)]
    after_ours, after_theirs = cuda_sim.calls(user.pid), cuda_sim.calls(pid)
    assert after_ours["cuEventCreate"] == ours["cuEventCreate"]
    assert after_theirs["cuIpcOpenEventHandle"] == theirs["cuIpcOpenEventHandle"]
    assert after_theirs["cuEventQuery"] >= theirs["cuEventQuery"] + 2 * EVENTS


def test_an_event_is_not_recorded_again_before_its_request_has_ended(broker: Broker, cuda_sim: CudaEnv) -> None:
    """Where all are under way the client waits for its stream instead."""
    with producer(broker, cuda_sim) as child:
        child.call("events", 1)
        prepared(child, slots=2)
        child.call("run", "event", "OUTPUT0")
        records = cuda_sim.calls(child.pid)["cuEventRecord"]
        child.call("write_late", {"INPUT0": 10, "INPUT1": 20})
        child.call("submit", "event")
        child.call("open_when_it_waits")
        child.call("submit", "event", None, 1)
        assert [child.call("result", "OUTPUT0", slot) for slot in (0, 1)] == [30, 30]
        assert cuda_sim.calls(child.pid)["cuEventRecord"] == records + 1
        assert child.call("run_many", 1) == [20]
        assert cuda_sim.calls(child.pid)["cuEventRecord"] == records + 2


def test_a_replacement_of_the_worker_has_the_events_too(
    broker: Broker, user: Child, cuda_sim: CudaEnv, pid: int
) -> None:
    assert user.call("run_many", 1) == [2]
    os.kill(pid, 9)

    def replaced() -> bool:
        row = worker_of(broker, "gpu0/tensorrt")
        return row["state"] == "ready" and row["pid"] != pid

    eventually(replaced, "it is replaced")
    user.call("write_late", {"INPUT0": 10, "INPUT1": 20})
    submit_and_wait_for(user, cuda_sim, worker_of(broker, "gpu0/tensorrt")["pid"])  # type: ignore[arg-type]
    user.call("open_gate")
    assert user.call("result", "OUTPUT0") == 30


def test_a_request_that_waits_for_its_event_holds_up_no_other(broker: Broker, cuda_sim: CudaEnv) -> None:
    """Not even for a while. On a busy machine the wait may be over before the others are asked: then once more."""

    def passes(late: Child, other: Child) -> bool:
        prepared(late)
        late.call("write_late", {"INPUT0": 10, "INPUT1": 20})
        late.call("submit", "event")
        assert other.call("run_many", 2) == [2, 3]
        waits = not late.call("done")
        late.call("open_gate")
        if waits:
            assert late.call("result", "OUTPUT0") == 30
        return waits

    with producer(broker, cuda_sim) as other:
        prepared(other)
        for _ in range(3):
            with producer(broker, cuda_sim) as late:  # a new one: who was waited for in vain has less time
                if passes(late, other):
                    return
    pytest.fail("others came first in none of three tries")


def test_an_event_that_does_not_happen_ends_its_request_and_no_other(broker: Broker, cuda_sim: CudaEnv) -> None:
    """The next one is waited for less long: what came before has kept everybody waiting in vain."""
    with producer(broker, cuda_sim) as late:
        prepared(late)
        late.call("write_late", {"INPUT0": 10, "INPUT1": 20})
        late.call("submit", "event")
        with pytest.raises(InferError, match=rf"\[UNAVAILABLE\] {VAIN}"):
            late.call("result", "OUTPUT0")
        late.call("submit", "event")
        with pytest.raises(InferError, match="did not happen within") as again:
            late.call("result", "OUTPUT0")
        assert VAIN not in again.value.message
        late.call("open_gate")
        assert late.call("run", "synchronize", "OUTPUT0") == 30
    row = broker.client().ask("GetMetrics")["metrics"]["gpu_memory"]["gpu0/tensorrt"]
    assert (row["waits"] >= 2, row["wait_ns"] > PATIENCE_S * 10**9) == (True, True)


def test_the_deadline_of_a_request_holds_while_its_event_is_waited_for(user: Child) -> None:
    user.call("write_late", {"INPUT0": 10, "INPUT1": 20})
    user.call("submit", "event", 0.05)
    with pytest.raises(InferError, match="Request timeout expired"):
        user.call("result", "OUTPUT0")


def test_events_of_a_client_that_was_killed_are_closed(broker: Broker, cuda_sim: CudaEnv, pid: int) -> None:
    before = cuda_sim.calls(pid)
    with producer(broker, cuda_sim) as child:
        prepared(child)
        child.call("write_late", {"INPUT0": 10, "INPUT1": 20})
        child.call("submit", "event")
        eventually(lambda: _opened(cuda_sim, pid) > _opened_in(before), "the worker has them open")
        child.kill()

    def closed() -> bool:
        return cuda_sim.calls(pid).get("cuEventDestroy", 0) >= before.get("cuEventDestroy", 0) + EVENTS

    eventually(closed, "they are closed")
    assert worker_of(broker, "gpu0/tensorrt")["pid"] == pid, "and the worker lives"


def _opened_in(calls: dict[str, int]) -> int:
    return calls.get("cuIpcOpenEventHandle", 0)


def _opened(env: CudaEnv, pid: int) -> int:
    return _opened_in(env.calls(pid))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes came"), (63, "63 bytes came"), (64 * 257, "16448 bytes came"), (64, "no events of another process")],
)
def test_handles_of_no_events_are_refused(broker: Broker, cuda_sim: CudaEnv, size: int, text: str) -> None:
    asked = {"device": cuda_sim.devices()[0], "handles": bytes(size)}
    answer = broker.client().ask("RegisterEvents", name="e", events=asked)
    assert (answer["type"], answer["code"]) == ("Failure", "INVALID_ARG")
    assert text in answer["message"]


def test_events_of_a_gpu_without_a_worker_are_refused(broker: Broker) -> None:
    asked = {"device": "GPU-00000000-0000-0000-0000-000000000000", "handles": bytes(64)}
    answer = broker.client().ask("RegisterEvents", name="e", events=asked)
    assert (answer["code"], "this broker has no worker on GPU-0" in answer["message"]) == ("UNSUPPORTED", True)


def test_only_a_ring_of_the_session_itself_can_be_named(broker: Broker, user: Child, cuda_sim: CudaEnv) -> None:
    user.call("run", "event", "OUTPUT0")
    (ring,) = user.call("rings")
    with producer(broker, cuda_sim) as other:
        prepared(other)
        with pytest.raises(InferError, match=f"Unable to find shared memory region: '{ring}'"):
            other.call("name_ring", ring)
        with pytest.raises(InferError, match="'r' is a cuda region, no ring of events"):
            other.call("name_ring", "r")
    for code, text, number in (
        ("INVALID_ARG", f"there is no event {EVENTS} in a ring of {EVENTS}", EVENTS + 1),
        ("INVALID_ARG", "there is no event 65534", 65535),
    ):
        with pytest.raises(InferError, match=text) as raised:
            user.call("forge", number)
        assert raised.value.code == code


def test_a_plan_without_a_ring_takes_no_event(broker: Broker, cuda_sim: CudaEnv) -> None:
    with producer(broker, cuda_sim) as child:
        child.call("allocate", "h", "host")
        child.call("allocate", "g", "gpu")
        child.call("prepare", "add", {"INPUT0": "h", "INPUT1": "g"}, {"OUTPUT0": "g"}, [1, 4])
        with pytest.raises(InferError, match="the request names event 0, and its plan no ring of events"):
            child.call("forge", 1)
        child.call("prepare", "on_cpu", {"INPUT0": "h"}, {"OUTPUT0": "h"}, [1, 4])
        with pytest.raises(InferError, match=r"after\(\) is for plans on GPU memory"):
            child.call("refused", 0, "event")


@pytest.mark.parametrize(
    ("stream", "order", "text"),
    [("x", "event", "after= takes a stream"), (-1, "event", "got -1"), (0, "x", "order must")],
)
def test_what_is_no_stream_or_order_is_refused(user: Child, stream: object, order: str, text: str) -> None:
    with pytest.raises(InferError, match=text):
        user.call("refused", stream, order)
