"""Plans and channels: what is bound where, what a plan word means, and that nothing outlives its session."""

import asyncio
import os
import time

import pytest

from broker import plans as plans_module
from broker.channels import MAX_CHANNELS, Channels
from broker.plans import Plans
from broker.quota import Quota
from broker.records import Peer
from broker.registry import Registry
from broker.repository.config import ModelConfig
from shm.errors import InferError
from shm.layout import Geometry
from shm.messages import ModelMetadata, Prepare, PrepareAt, TensorMetadata, TensorSpec
from shm.regions import create_pool

PEER = Peer(session=1, pid=101, uid=os.getuid())
OTHER = Peer(session=2, pid=102, uid=os.getuid())
ECHO = ModelMetadata(
    name="echo",
    version="3",
    inputs=(TensorMetadata(name="X", datatype="UINT8", shape=(-1,), symbols=("n",)),),
    outputs=(TensorMetadata(name="Y", datatype="UINT8", shape=(-1,), symbols=("n",)),),
)


class Recorder:
    """A worker at the seam: records what it is told, refuses when told to."""

    key, device, state = "cpu/default", "", "ready"

    def __init__(self):
        self.log = []
        self.refusal = None
        self.silent = False

    async def responds(self):
        return self.state == "ready" and not self.silent

    async def add_region(self, entry):
        self.log.append(("region", entry.name))

    async def retire_region(self, region, generation):
        self.log.append(("retire", generation))

    async def bind_plan(self, message):
        self.log.append(("bind", message))
        if self.refusal:
            raise self.refusal

    def drop_plan(self, session, index, generation):
        self.log.append(("drop", session, index, generation))

    async def attach_channel(self, record):
        self.log.append(("attach", record.channel))
        if self.refusal:
            raise self.refusal

    async def detach_channel(self, channel, *, ended=False):
        self.log.append(("detach", channel))
        if self.refusal:
            raise self.refusal


class OneModel:
    def __init__(self, worker, *, stateful=False):
        self.worker = worker
        self.stateful = stateful

    def metadata(self, model, version=""):
        if model != "echo":
            raise InferError("INVALID_ARG", f"Request for unknown model: '{model}' is not found")
        return ECHO

    def config(self, model, version=""):
        config = ModelConfig(
            name=model,
            platform="",
            backend="identity",
            directory="/",
            versions={3: "/3"},
            default_model_filename="",
            max_batch_size=0,
            input=(),
            output=(),
            instance_group=(),
            stateful=self.stateful,
        )
        return config, 3

    def workers_for(self, model, version):
        return [self.worker]


@pytest.fixture
def worker():
    return Recorder()


@pytest.fixture
def registry():
    registry = Registry(Quota(1 << 30))
    for peer in (PEER, OTHER):
        registry.register_pool(peer, "r", 4096, create_pool(4096))
    yield registry
    registry.close()


@pytest.fixture
def plans(worker, registry):
    return Plans(OneModel(worker), registry)


def echo(**fields):
    x = TensorSpec(name="X", region="r", datatype="UINT8", shape=(8,))
    y = TensorSpec(name="Y", region="r", datatype="UINT8", shape=(8,), offset=8)
    return Prepare(**{"model": "echo", "inputs": (x,), "outputs": (y,), **fields})


def test_prepare_maps_the_regions_before_it_binds_the_plan(plans, worker):
    prepared = asyncio.run(plans.prepare(1, echo()))
    assert (prepared.worker, prepared.model_version, prepared.rows) == ("cpu/default", "3", 0)
    assert [entry[0] for entry in worker.log] == ["region", "bind"]
    message = worker.log[1][1]
    assert (message.session, message.index, message.generation) == (1, prepared.index, prepared.generation)
    assert message.follow_latest
    assert message.retryable
    assert message.version == 3
    asyncio.run(plans.prepare(1, echo(version="3")))
    assert not worker.log[-1][1].follow_latest


def test_a_released_index_comes_back_with_another_generation(plans, worker):
    first = asyncio.run(plans.prepare(1, echo()))
    plans.release(1, first.index, first.generation)
    assert worker.log[-1] == ("drop", 1, first.index, first.generation)
    second = asyncio.run(plans.prepare(1, echo()))
    assert second.index == first.index
    assert second.generation != first.generation
    for index, generation in ((first.index, first.generation), (7, 1), (second.index + 2**32, second.generation)):
        with pytest.raises(InferError, match="no plan") as refusal:
            plans.release(1, index, generation)
        assert refusal.value.code == "NOT_FOUND"
    with pytest.raises(InferError):
        plans.release(2, second.index, second.generation)


def test_plan_words_mean_something_only_in_their_session_and_generation(plans):
    prepared = asyncio.run(plans.prepare(1, echo()))
    word = prepared.index | prepared.generation << 32
    assert plans.model_of(1, word) == plans.counted_for(1, word) == ("echo", 3)
    assert plans.retryable(1, word)
    for session, other in ((2, word), (1, word + (1 << 32)), (1, word + 1)):
        assert plans.model_of(session, other) is plans.counted_for(session, other) is None
        assert not plans.retryable(session, other)


def test_stateful_models_are_not_retried(worker, registry):
    plans = Plans(OneModel(worker, stateful=True), registry)
    prepared = asyncio.run(plans.prepare(1, echo()))
    assert not plans.retryable(1, prepared.index | prepared.generation << 32)


def test_a_plan_that_cannot_be_bound_leaves_nothing(plans, worker):
    worker.refusal = InferError("UNAVAILABLE", "no answer")
    with pytest.raises(InferError, match="no answer"):
        asyncio.run(plans.prepare(1, echo()))
    assert plans.count(1) == 0
    assert worker.log[-1][0] == "drop"


def test_the_wrong_worker_and_unknown_models_are_refused(plans):
    with pytest.raises(InferError, match="served by worker 'cpu/default', not 'gpu0/default'"):
        asyncio.run(plans.prepare(1, echo(worker="gpu0/default")))
    with pytest.raises(InferError, match="Request for unknown model: 'nope' is not found"):
        asyncio.run(plans.prepare(1, echo(model="nope")))


def test_the_table_is_bounded(plans, monkeypatch):
    monkeypatch.setattr(plans_module, "MAX_PLANS", 3)
    for _ in range(3):
        last = asyncio.run(plans.prepare(1, echo()))
    with pytest.raises(InferError, match="at most 3"):
        asyncio.run(plans.prepare(1, echo()))
    plans.release(1, last.index, last.generation)
    asyncio.run(plans.prepare(1, echo()))
    asyncio.run(plans.prepare(2, echo()))


def test_a_refused_pair_is_told_to_plans_made_later(plans, worker):
    asyncio.run(plans.prepare(1, echo()))
    asyncio.run(plans.prepare(2, echo()))
    plans.refuse(1, "echo", 2**62)
    asyncio.run(plans.prepare(1, echo()))
    assert worker.log[-1][1].refused_until_ns == 2**62
    asyncio.run(plans.prepare(2, echo()))
    assert worker.log[-1][1].refused_until_ns == 0
    plans.refuse(1, "echo", 1)  # long ago
    asyncio.run(plans.prepare(1, echo()))
    assert worker.log[-1][1].refused_until_ns == 0


def test_a_session_that_acts_for_many_is_no_client(plans):
    for session, owner in ((1, 1), (2, 0)):
        asyncio.run(plans.prepare(session, echo(), owner))
    assert [plans.is_one_client(session) for session in (1, 2, 3)] == [True, False, False]


def test_the_end_of_a_session_drops_its_plans_only(plans, worker):
    mine = [asyncio.run(plans.prepare(1, echo())) for _ in range(3)]
    theirs = asyncio.run(plans.prepare(2, echo()))
    worker.log.clear()
    plans.end(1)
    plans.end(1)
    assert worker.log == [("drop", 1, plan.index, plan.generation) for plan in mine]
    assert plans.model_of(2, theirs.index | theirs.generation << 32) == ("echo", 3)


# --- channels -----------------------------------------------------------------------------------------------------


@pytest.fixture
def quota():
    return Quota(1 << 30)


@pytest.fixture
def channels(worker, quota):
    def worker_of(key):
        if key != worker.key:
            raise InferError("NOT_FOUND", f"no worker '{key}'")
        return worker

    return Channels(worker_of, quota)


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (1024, 1024), (4096, 1024)])
def test_slots_are_rounded_to_a_power_of_two(channels, quota, asked, given):
    async def scenario():
        record, pipe_read = await channels.open(PEER, "cpu/default", asked)
        os.close(pipe_read)
        geometry = Geometry(given)
        assert record.slots == given
        assert os.fstat(record.memory).st_size == geometry.channel_bytes
        assert quota.total == geometry.channel_bytes + geometry.ledger_bytes
        await channels.end(PEER.session)
        assert quota.total == 0

    asyncio.run(scenario())


def test_the_client_sees_the_pipe_close_only_with_the_last_write_end(channels):
    async def scenario():
        record, pipe_read = await channels.open(PEER, "cpu/default", 1)
        with pytest.raises(BlockingIOError):
            os.read(pipe_read, 1)
        await channels.close(PEER.session, record.channel)
        assert os.read(pipe_read, 1) == b""
        os.close(pipe_read)

    asyncio.run(scenario())


def test_channels_belong_to_their_session(channels, worker):
    async def scenario():
        record, pipe_read = await channels.open(PEER, "cpu/default", 1)
        os.close(pipe_read)
        assert channels.session_of(record.channel) == PEER.session
        with pytest.raises(InferError, match="no channel"):
            await channels.close(OTHER.session, record.channel)
        await channels.end(OTHER.session)
        assert channels.of(PEER.session) == [record]
        await channels.close(PEER.session, record.channel)
        assert channels.session_of(record.channel) is None
        assert worker.log == [("attach", record.channel), ("detach", record.channel)]

    asyncio.run(scenario())


def test_refusals_leave_no_descriptor(channels, worker, quota):
    async def scenario():
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(InferError, match="no worker 'gpu'"):
            await channels.open(PEER, "gpu", 64)
        worker.refusal = InferError("UNAVAILABLE", "no answer")
        for _ in range(50):
            with pytest.raises(InferError, match="no answer"):
                await channels.open(PEER, "cpu/default", 64)
        quota.limit = 4096
        with pytest.raises(InferError, match="a channel of 64 slots"):
            await channels.open(PEER, "cpu/default", 64)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert channels.of(PEER.session) == []
        assert quota.total == 0

    asyncio.run(scenario())


def test_a_session_has_a_bounded_number_of_channels_and_ends_with_a_dead_worker(channels, worker, quota):
    async def scenario():
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(MAX_CHANNELS):
            os.close((await channels.open(PEER, "cpu/default", 1))[1])
        with pytest.raises(InferError, match="at most 64"):
            await channels.open(PEER, "cpu/default", 1)
        os.close((await channels.open(OTHER, "cpu/default", 1))[1])
        worker.refusal = InferError("UNAVAILABLE", "no answer for 30 s")
        await channels.end(PEER.session)
        assert channels.of(PEER.session) == []
        await channels.end(OTHER.session)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert quota.total == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("silent", "state", "expected"),
    [("", "ready", "a"), ("a", "ready", "b"), ("ab", "ready", "a"), ("a", "starting", "b"), ("ab", "backoff", "a")],
)
def test_a_plan_goes_to_a_worker_that_responds(registry, silent, state, expected):
    """The best of those, whatever the others are: stopped, stuck. Else one that will be up soon, or the best."""
    workers = {key: Recorder() for key in "ab"}
    for key, worker in workers.items():
        worker.key, worker.silent = key, key in silent
    workers["b"].state = state
    models = OneModel(workers["a"])
    models.workers_for = lambda model, version: list(workers.values())
    plans = Plans(models, registry)
    prepared = asyncio.run(plans.prepare(1, echo()))
    assert (prepared.worker, prepared.workers) == (expected, ("a", "b"))
    assert [key for key, worker in workers.items() if worker.log] == [expected], "nobody else is asked anything"
    other = "b" if expected == "a" else "a"
    at = PrepareAt(index=prepared.index, generation=prepared.generation, worker=other)
    if other in silent or state != "ready":
        how = "does not respond" if workers[other].state == "ready" else f"is {state}"
        with pytest.raises(InferError, match=f"worker '{other}' {how}"):
            asyncio.run(plans.prepare_at(1, at))
        assert workers[other].log == []


def test_a_plan_is_bound_to_other_workers_on_request(registry):
    one, other, third = Recorder(), Recorder(), Recorder()
    other.key, third.key, third.state = "cpu/other", "cpu/third", "backoff"
    models = OneModel(one)
    models.workers_for = lambda model, version: [one, other, third]
    plans = Plans(models, registry)
    prepared = asyncio.run(plans.prepare(1, echo()))
    assert (prepared.worker, prepared.workers) == ("cpu/default", ("cpu/default", "cpu/other", "cpu/third"))
    assert other.log == []

    def bind(worker, session=1, **fields):
        name = {"index": prepared.index, "generation": prepared.generation, "worker": worker}
        asyncio.run(plans.prepare_at(session, PrepareAt(**{**name, **fields})))

    plans.refuse(1, "echo", time.monotonic_ns() + 10**12)
    bind("cpu/other")
    assert [entry[0] for entry in other.log] == ["region", "bind"]
    message, here = other.log[1][1], one.log[1][1]
    assert (message.index, message.generation) == (here.index, here.generation), "under the same name"
    assert message.refused_until_ns > here.refused_until_ns == 0, "but what is refused by now is refused there, too"
    with pytest.raises(InferError, match="worker 'cpu/third' is backoff"):
        bind("cpu/third")
    bind("cpu/third", wait=True)
    for worker, fields, text in (
        ("cpu/nowhere", {}, "worker 'cpu/nowhere' does not serve model 'echo'"),
        ("cpu/other", {"index": 77}, "no plan 77 of generation"),
        ("cpu/other", {"session": 2}, "no plan 0 of generation"),
    ):
        with pytest.raises(InferError, match=text):
            bind(worker, **fields)
    plans.release(1, prepared.index, prepared.generation)
    assert all(worker.log[-1] == ("drop", 1, prepared.index, prepared.generation) for worker in (one, other, third))
    with pytest.raises(InferError, match="served by worker 'cpu/default', 'cpu/other', 'cpu/third', not 'gpu0/x'"):
        asyncio.run(plans.prepare(1, echo(worker="gpu0/x")))
