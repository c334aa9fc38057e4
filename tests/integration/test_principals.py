"""Gateways' sessions on a real broker core: socket pairs, shared memory, a real worker; messages packed by hand."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

from broker.channels import Channels
from broker.control import Control
from broker.listener import Sessions
from broker.models import Models
from broker.plans import Plans
from broker.quota import Quota
from broker.records import CLIENT, GATEWAY
from broker.registry import Registry
from broker.repository.protocol import LoadRequest
from broker.statistics_blocks import StatisticsBlocks
from broker.workers import Workers
from shm.client_channel import ClientChannel
from shm.errors import Code
from shm.message_values import IndexEntry
from shm.statistics import StatisticsPage
from tests.fakes.broker import LIMIT_S, Ending, HandClient, eventually, reap, tensor
from tests.fakes.lone_worker import WAIT, Gate
from tests.fakes.models import add1, write_model
from tests.fakes.processes import descriptors, subreaper, until

pytestmark = pytest.mark.timeout(120)

ME = {"uid": os.getuid(), "scope": "kserve"}
BYTES = 4096
CONFIG = """
backend: "gate"
max_batch_size: 0
input [ {{ name: "x" data_type: TYPE_FP32 dims: [1, 4] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [1, 4] }} ]
parameters {{ key: "gate" value {{ string_value: "{0}/gate" }} }}
parameters {{ key: "told" value {{ string_value: "{0}/told" }} }}
"""


class End(HandClient):
    """The child's end of a socket pair, greeted."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(LIMIT_S)
        self.fds, self._last = [], 0


class Core:
    """What `broker.server` composes, without listeners; lives on the loop, its clients in a thread."""

    def __init__(self, root: Path) -> None:
        self.page = StatisticsPage.create()
        self.workers = Workers(StatisticsBlocks(self.page))
        self.models = Models(
            self.workers,
            LoadRequest(repositories=(str(root),)),
            control_mode="explicit",
            startup_models=("add1", "gate"),
        )
        quota = Quota(1 << 24)
        self.registry = Registry(quota)
        self.workers.plans = plans = Plans(self.models, self.registry)
        self.control = Control(
            models=self.models,
            registry=self.registry,
            plans=plans,
            channels=Channels(self.workers.of, quota),
            status=dict,
            epoch="e",
            version="0",
            metrics=lambda: {"answer": 42},
        )
        self.sessions = Sessions(self.control)
        self.loop = asyncio.get_running_loop()
        self.ends: list[End] = []

    def open(self, role: str = GATEWAY) -> End:
        """A session of that role. Called from the clients' thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends.append(End(theirs))

        async def adopt() -> None:
            self.sessions.adopt(ours, os.getpid(), os.pidfd_open(os.getpid()), role)

        asyncio.run_coroutine_threadsafe(adopt(), self.loop).result(LIMIT_S)
        assert self.ends[-1].ask("Hello", protocol=1)["type"] == "Welcome"
        return self.ends[-1]


Body = Callable[[Core, Gate, "Names"], None]


class Names:
    """POSIX objects of a test."""

    def __init__(self) -> None:
        self.made: dict[str, int] = {}

    def make(self) -> str:
        key = f"/tb-{secrets.token_hex(8)}"
        self.made[key] = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=BYTES).fd
        return key

    def put(self, key: str, value: float) -> None:
        os.pwrite(self.made[key], np.full(4, value, np.float32).tobytes(), 0)

    def result(self, key: str) -> list[float]:
        return np.frombuffer(os.pread(self.made[key], 16, 64), np.float32).tolist()


@pytest.fixture
def names() -> Iterator[Names]:
    names = Names()
    yield names
    for key, fd in names.made.items():
        os.close(fd)
        posix_ipc.unlink_shared_memory(key)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    with subreaper():
        yield


def on_core(body: Body) -> Callable[..., None]:
    """Run `body` in a thread beside a broker core; afterwards nothing may be left in it."""

    async def main(root: Path, gate: Gate, names: Names) -> None:
        core = Core(root)
        try:
            await core.models.start(lambda done, total: None)
            core.control.started()
            try:
                await asyncio.to_thread(body, core, gate, names)
            finally:
                for end in core.ends:
                    end.close()
                await until(lambda: not len(core.sessions))
                await core.sessions.end_all("the test is over")
            for principal in list(core.control.principals._peers):
                await core.control.principals.unregister(principal, "", "")
            assert list(core.registry) == []
            assert core.registry.quota.total == 0
        finally:
            await core.workers.stop(10.0)
            core.registry.close()
            os.close(core.page.fd)

    @functools.wraps(body)
    def test(tmp_path: Path, names: Names) -> None:
        gate = Gate(tmp_path / "gate")
        (tmp_path / "gate" / "config.pbtxt").write_text(CONFIG.format(tmp_path / "gate"))
        write_model(tmp_path, "add1", add1())
        write_model(tmp_path, "spare", add1())
        before = descriptors()
        try:
            asyncio.run(main(tmp_path, gate, names))
        finally:
            gate.close()
        gc.collect()  # a mapping keeps a descriptor
        left = descriptors() - before
        assert {int(one.split()[0]) for one in left} <= set(names.made.values())

    del test.__wrapped__  # type: ignore[attr-defined]  # its parameters are not fixtures
    return test


def register(gateway: End, name: str, key: str, **more: int) -> dict[str, Any]:
    return gateway.ask("RegisterFor", principal=ME, name=name, key=key, **{"byte_size": BYTES, **more})


def listed(gateway: End) -> list[tuple[str, str]]:
    return [(row["name"], row["state"]) for row in gateway.ask("ListFor", principal=ME)["regions"]]


class Runner:
    """A plan of x at byte 0 and y at byte 64 of a principal's region, and a channel for it."""

    def __init__(self, gateway: End, name: str, model: str) -> None:
        self.alias = gateway.ask("UseRegion", principal=ME, name=name)
        assert self.alias["type"] == "RegionInfo", self.alias
        inputs = [tensor("x", self.alias["name"], (1, 4))]
        outputs = [tensor("y", self.alias["name"], (1, 4), offset=64)]
        self.prepared = gateway.ask("Prepare", model=model, inputs=inputs, outputs=outputs)
        assert self.prepared["type"] == "Prepared", self.prepared
        channel = gateway.ask("OpenChannel", worker=self.prepared["worker"], slots=4)
        memory, bell, pipe = gateway.fds
        gateway.fds = []
        self.channel = ClientChannel(memory, bell, pipe, channel["slots"], 0.0)

    def submit(self) -> Ending:
        ending = Ending()
        word = self.prepared["index"] | self.prepared["generation"] << 32
        assert self.channel.submit(ending, word, 0, 0, 0, 0)
        return ending

    def code(self, ending: Ending) -> int:
        reap(self.channel, [ending])
        assert ending.entry is not None
        return ending.entry[2] & 0xFFFFFFFF


# --- regions ------------------------------------------------------------------------------------------------------


@on_core
def test_what_one_gateway_registers_another_uses(core: Core, gate: Gate, names: Names) -> None:
    one, two = core.open(), core.open()
    key = names.make()
    info = register(one, "r", key)
    assert (info["type"], info["name"], info["byte_size"], one.fds) == ("RegionInfo", "r", BYTES, [])
    assert register(two, "r", key)["message"] == "shared memory region 'r' already in manager"
    one.close()
    eventually(lambda: len(core.sessions) == 1, "the gateway has ended")
    assert listed(two) == [("r", "active")]
    runner = Runner(two, "r", "add1")
    again = two.ask("UseRegion", principal=ME, name="r", descriptor=True)
    assert again["name"] == runner.alias["name"]
    assert again["inode"] == os.fstat(two.fds[0]).st_ino == os.fstat(names.made[key]).st_ino
    names.put(key, 5)
    assert runner.code(runner.submit()) == Code.OK
    assert names.result(key) == [6] * 4
    assert two.ask("UnregisterFor", principal=ME, name="r", kind="cuda")["type"] == "Done"
    assert listed(two) == [("r", "active")]
    assert two.ask("UnregisterFor", principal=ME, kind="system")["type"] == "Done"
    assert listed(two) == []
    assert runner.code(runner.submit()) == Code.NOT_FOUND
    assert two.ask("UseRegion", principal=ME, name="r")["code"] == "NOT_FOUND"
    runner.channel.close()


@on_core
def test_a_region_is_listed_until_the_last_answer_and_no_longer(core: Core, gate: Gate, names: Names) -> None:
    runs, asks = core.open(), core.open()
    key = names.make()
    register(asks, "idle", names.make())
    for _ in range(20):
        register(asks, "busy", key)
        runner = Runner(runs, "busy", "gate")
        names.put(key, WAIT)
        ending = runner.submit()
        gate.entered()
        assert asks.ask("UnregisterFor", principal=ME, name="busy", kind="system")["type"] == "Done"
        assert listed(asks) == [("busy", "draining"), ("idle", "active")]
        gate.let()
        assert runner.code(ending) == Code.OK
        assert listed(asks) == [("idle", "active")], "at once: the answer is there"
        assert names.result(key) == [0] * 4
        runner.channel.close()


@on_core
def test_a_region_drains_when_its_worker_dies(core: Core, gate: Gate, names: Names) -> None:
    gateway = core.open()
    key = names.make()
    register(gateway, "r", key)
    runner = Runner(gateway, "r", "gate")
    names.put(key, WAIT)
    ending = runner.submit()
    gate.entered()
    assert gateway.ask("UnregisterFor", principal=ME)["type"] == "Done"
    assert listed(gateway) == [("r", "draining")]
    core.loop.call_soon_threadsafe(core.workers.of(runner.prepared["worker"]).kill, "by the test")
    assert runner.code(ending) != Code.OK
    eventually(lambda: listed(gateway) == [], "nobody uses it any more")
    runner.channel.close()


@on_core
def test_only_gateways_act_for_principals(core: Core, gate: Gate, names: Names) -> None:
    client, gateway = core.open(CLIENT), core.open()
    served: list[Any] = []
    core.control.on_serving = lambda peer, message: served.append((peer.pid, message.lines, message.error))
    key = names.make()
    for kind, fields in (
        ("RegisterFor", {"principal": ME, "name": "r", "key": key, "byte_size": 1}),
        ("UnregisterFor", {"principal": ME}),
        ("ListFor", {"principal": ME}),
        ("UseRegion", {"principal": ME, "name": "r"}),
        ("Serving", {"lines": ["forged"]}),
    ):
        answer = client.ask(kind, **fields)
        assert (answer["code"], answer["message"]) == ("INVALID_ARG", "only gateways act for principals")
    assert gateway.ask("Serving", lines=["Started HTTPService"])["type"] == "Done"
    assert served == [(os.getpid(), ("Started HTTPService",), "")]
    register(gateway, "r", key)
    assert client.ask("Unregister")["type"] == "Done"
    assert listed(gateway) == [("r", "active")]
    assert gateway.ask("UnregisterFor", principal=ME)["type"] == "Done"
    assert listed(gateway) == []


# --- what else KServe asks ----------------------------------------------------------------------------------------


@on_core
def test_requests_of_a_gateway_do_not_wait_for_each_other(core: Core, gate: Gate, names: Names) -> None:
    gateway = core.open()
    held = asyncio.Event()

    class Held:
        all, leases = core.models.all, core.models.leases

        async def index(self, *, ready: bool = False) -> list[IndexEntry]:
            await held.wait()
            return []

    core.control.models = Held()  # type: ignore[assignment]
    slow, quick = gateway.send("GetIndex"), gateway.send("GetServer")
    answers = [gateway.receive()]
    core.loop.call_soon_threadsafe(held.set)
    answers.append(gateway.receive())
    assert [answer["id"] for answer in answers if answer] == [quick, slow]


@on_core
def test_configuration_index_readiness_and_metrics(core: Core, gate: Gate, names: Names) -> None:
    gateway = core.open()
    config = json.loads(gateway.ask("GetConfig", model="add1")["config"])
    assert (config["name"], config["max_batch_size"], config["input"][0]["dims"]) == ("add1", 4, [-1])
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert gateway.ask("GetConfig", model="nope")["message"] == "Request for unknown model: 'nope' is not found"
    everything = gateway.ask("GetIndex")["models"]
    assert everything == [
        {"name": "add1", "version": "1", "state": "READY", "reason": ""},
        {"name": "gate", "version": "1", "state": "READY", "reason": ""},
        {"name": "spare", "version": "", "state": "", "reason": ""},
    ]
    assert gateway.ask("GetIndex", ready=True)["models"] == everything[:2]
    assert gateway.ask("GetServer").items() >= {"live": True, "ready": True}.items()
    assert gateway.ask("GetMetrics")["metrics"] == {"answer": 42}
    assert gateway.ask("UnloadModel", model="gate")["type"] == "Done"
    gate_row = {"name": "gate", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert gate_row in gateway.ask("GetIndex")["models"]
    assert gateway.ask("GetServer")["ready"] is True, "it was unloaded on purpose"
    for fields, text in (
        ({"model": "nope"}, "requested model 'nope' is not available"),
        ({"model": "add1", "version": "9"}, "requested model version is not available for model 'add1'"),
    ):
        answer = gateway.ask("GetStatistics", **fields)
        assert (answer["code"], answer["message"]) == ("INVALID_ARG", text)
    core.control.exiting = True
    assert gateway.ask("GetServer").items() >= {"live": False, "ready": False}.items()
    assert gateway.ask("GetIndex")["message"] == "Server exiting"
    assert gateway.ask("Serving")["type"] == "Done", "a gateway may be starting when the broker is told to stop"
    assert gateway.ask("Serving")["type"] == "Done", "a gateway may be starting when the broker is told to stop"
    core.control.exiting = False


@on_core
def test_log_and_trace_settings(core: Core, gate: Gate, names: Names) -> None:
    gateway = core.open()
    assert gateway.ask("LogSettings")["settings"]["log_info"] is True
    assert gateway.ask("LogSettings", update={"log_info": False})["settings"]["log_info"] is False
    answer = gateway.ask("LogSettings", update={"log_file": "x"})
    assert (answer["code"], answer["message"]) == (
        "UNSUPPORTED",
        "log file location can not be updated through network protocol",
    )
    changed = gateway.ask("TraceSettings", model="add1", update={"trace_rate": "5"})["settings"]
    assert changed == {
        "trace_level": ["OFF"],
        "trace_rate": "5",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    }
    assert gateway.ask("TraceSettings")["settings"]["trace_rate"] == "1000"
    assert gateway.ask("TraceSettings", model="add1", update={"trace_rate": None})["settings"]["trace_rate"] == "1000"
    answer = gateway.ask("TraceSettings", model="nope")
    assert (answer["code"], answer["message"]) == ("INVALID_ARG", "Request for unknown model : nope")
