"""The client library and processes: what it imports, forks, threads, and brokers that die, with a real broker."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clientlib
from shm.errors import InferError
from tests.fakes import models
from tests.fakes.broker import Broker

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_repository(tmp_path_factory.mktemp("repository"), {"add1": models.add1()})


@pytest.fixture(scope="module")
def broker(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(repository, tmp_path_factory.mktemp("run")) as broker:
        yield broker.ready()


def url(broker: Broker) -> str:
    return f"ipc://{broker.directory}"


def adding(client, size=4):
    region = client.create_region("r", 1 << 16)
    x, y = region.tensor((1, size), "FP32"), region.tensor((1, size), "FP32", offset=1 << 15)
    return region, client.prepare("add1", {"x": x}, {"y": y}, slots=(1, 32))


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = {
    "onnxruntime",
    "onnx",
    "grpc",
    "zmq",
    "aiohttp",
    "cuda",
    "torch",
    "google",
    "tritonclient",
    "broker",
    "multiprocessing",
}


def test_the_client_alone_is_installed_with_little():
    """`pip install tensorbroker` without extras; numpy may be any that is new enough."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=!~; \[]", each, maxsplit=1)[0]: each for each in project["dependencies"]}
    assert set(needed) == {"numpy", "msgspec", "posix-ipc"}
    assert re.fullmatch(r"numpy>=[0-9.]+", needed["numpy"])


def test_importing_it_costs_little():
    loaded = run("import clientlib, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    assert {"numpy", "msgspec"} <= set(loaded)
    assert HEAVY.isdisjoint(loaded)


def test_a_native_client_imports_no_other_transport(broker):
    code = (
        "import sys, asyncio, clientlib, numpy as np\n"
        "x = {'x': np.ones((1, 2), np.float32)}\n"
        f"with clientlib.connect({url(broker)!r}) as client: client.infer('add1', x)\n"
        "async def main():\n"
        f"    async with await clientlib.connect_async({url(broker)!r}) as client: await client.infer('add1', x)\n"
        "asyncio.run(main())\n"
        "print(*sys.modules)"
    )
    loaded = run(code).split()
    assert HEAVY.isdisjoint(name.partition(".")[0] for name in loaded)
    assert not [name for name in loaded if name.startswith("clientlib.remote")]


@pytest.mark.parametrize(
    ("scheme", "package", "extra"), [("grpc", "grpc", "grpc"), ("zmq+ipc", "zmq", "zmq"), ("http", "aiohttp", "http")]
)
def test_a_transport_whose_package_is_not_installed_says_what_to_install(scheme, package, extra):
    url = "zmq+ipc:///nowhere" if scheme == "zmq+ipc" else f"{scheme}://127.0.0.1:1"
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "import asyncio, clientlib\n"
        "try:\n"
        f"    asyncio.run(clientlib.connect_async({url!r}))\n"
        "except clientlib.InferError as error:\n"
        "    print(error)"
    )
    said = run(code)
    assert said.startswith("[UNSUPPORTED] the ")
    assert f"pip install 'tensorbroker[{extra}]'" in said


def test_the_default_client(broker, monkeypatch):
    code = (
        "import clientlib, numpy as np\n"
        "print(clientlib.infer('add1', {'x': np.ones((1, 2), np.float32)})['y'].tolist(), clientlib.regions() != [])\n"
        "region = clientlib.create_region('r', 64)\n"
        "print(sorted(clientlib.models()), region.name)"
    )
    monkeypatch.setenv("TENSORBROKER_DIR", str(broker.directory))
    assert run(code) == "[[2.0, 2.0]] True\n['add1'] r\n"


def test_after_fork_everything_says_connect_again(broker):
    client = clientlib.connect(url(broker))
    region, plan = adding(client)
    plan.infer(timeout=30)
    pending = plan.submit(output_slot=1)
    view = region.array((4,), np.float32)
    view[:] = 4
    calls = [
        plan.infer,
        plan.submit,
        client.models,
        lambda: client.infer("add1", {"x": view.reshape(1, 4)}),
        lambda: region.array((1,), np.float32),
        lambda: region.tensor((1,), "FP32"),
        region.share,
        pending.result,
        pending.done,
    ]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in calls:
                with pytest.raises(clientlib.ForkedError, match="connect again after fork"):
                    call()
            assert view.tolist() == [4] * 4
            client.close()
            with clientlib.connect(url(broker)) as fresh:
                assert fresh.infer("add1", {"x": np.ones((1, 1), np.float32)})["y"].tolist() == [[2]]
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pending.result(30)["y"].shape == (1, 4)
    assert plan.infer(timeout=30)["y"].tolist() == [[5] * 4]
    client.close()


def test_one_client_for_many_threads(broker):
    with clientlib.connect(url(broker)) as client:
        _, plan = adding(client)
        wrong = []

        def work(k):
            for _ in range(50):
                x = np.full((1, 8), k, np.float32)
                if not (client.infer("add1", {"x": x}, timeout=60)["y"] == k + 1).all():
                    wrong.append(k)
                plan.infer(60, output_slot=k)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_more_threads_than_channels(broker):
    with clientlib.connect(url(broker)) as client:
        client.infer("add1", {"x": np.ones((1, 1), np.float32)})
        right = []
        start = threading.Barrier(80)

        def work(k):
            start.wait(60)
            for _ in range(5):
                x = np.full((1, 8), k, np.float32)
                right.append((client.infer("add1", {"x": x}, timeout=60)["y"] == k + 1).all())

        threads = [threading.Thread(target=work, args=(k,)) for k in range(80)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(right) == 400
        assert all(right)


def test_hundreds_awaited_at_once(broker):
    async def main():
        async with await clientlib.connect_async(url(broker)) as client:
            for _ in range(2):
                asked = (client.infer("add1", {"x": np.full((1, 8), k, np.float32)}) for k in range(500))
                answers = await asyncio.gather(*asked)
                assert all((answer["y"] == k + 1).all() for k, answer in enumerate(answers))

    asyncio.run(main())


class Calls:
    """A client of either kind, whose functions are called by `now` and return when they are done."""

    def __init__(self, kind: str, runner: asyncio.Runner) -> None:
        self.connect = clientlib.connect if kind == "threads" else clientlib.connect_async
        self._runner = runner if kind == "loop" else None

    def now(self, function, *args, **kwargs):
        async def run():
            return await function(*args, **kwargs)

        return function(*args, **kwargs) if self._runner is None else self._runner.run(run())


@pytest.mark.parametrize("kind", ["threads", "loop"])
def test_a_broker_that_is_killed_costs_one_error_at_most(repository, tmp_path, kind):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    ones = {"x": np.ones((1, 1), np.float32)}
    with asyncio.Runner() as runner:
        calls = Calls(kind, runner)
        now = calls.now
        with Broker(repository, directory) as first:
            first.ready()
            client = now(calls.connect, f"ipc://{directory}")
            region = now(client.create_region, "r", 4096)
            x, y = region.tensor((1, 4), "FP32"), region.tensor((1, 4), "FP32", offset=1024)
            plan = now(client.prepare, "add1", {"x": x}, {"y": y})
            view = region.array((4,), np.float32)
            now(plan.infer)
            now(client.infer, "add1", ones)
            os.kill(first.pid, signal.SIGKILL)
            first.process.wait()
        with Broker(repository, directory) as second:
            second.ready()
            codes = []
            for k in range(20):
                view[:] = k
                try:
                    assert now(plan.infer, timeout=30)["y"].tolist() == [[k + 1] * 4]
                    assert now(client.infer, "add1", ones)["y"].tolist() == [[2]]
                except InferError as error:
                    codes.append(error.code)
            assert codes in ([], ["UNAVAILABLE"])
            assert "r" in [record.name for record in now(client.regions)]
            now(client.close)
