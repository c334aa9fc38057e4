"""When something ends: models that hang, decoupled or not, and a broker that is told to stop while streams run."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

import clientlib
from shm.errors import InferError
from tests.fakes.broker import LIMIT_S, Broker, eventually
from tests.fakes.gateways import Gateway, url_of
from tests.fakes.streaming import acts, write_models

CUT = "Server is stopping, and this request had not ended within the exit timeout (--exit-timeout-secs)"
FOREVER = """
import time

class Model:
    def execute(self, streams):
        (stream,) = streams
        while int(stream.inputs["X"][0]) == 1 and not stream.cancelled:
            time.sleep(0.005)  # it lives
        while int(stream.inputs["X"][0]) == 2:
            time.sleep(0.005)  # it hangs
        stream.send({"Y": stream.inputs["X"]}, final=True)

    bind = close = lambda self, *_: None

def load(context):
    return Model()
"""
STUCK = """
import time

class Run:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def run(self):
        if self.x.memory.view("int32")[0] == 2:
            time.sleep(3600)
        self.y.memory[:] = self.x.memory

    def results(self):
        return []

class Model:
    def bind(self, inputs, outputs):
        return Run(inputs[0], outputs[0])

    def close(self):
        pass

def load(context):
    return Model()
"""
CONFIG = """
backend: "own"
max_batch_size: 0
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
parameters { key: "hang_timeout_s" value { string_value: "2" } }
"""
ONCE = 'parameters { key: "retry" value { string_value: "false" } }'
DECOUPLED = "model_transaction_policy { decoupled: true }"


def repository(root: Path) -> Path:
    write_models(root)
    for name, config, code in (("forever", CONFIG + DECOUPLED, FOREVER), ("stuck", CONFIG + ONCE, STUCK)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        (root / name / "backend.py").write_text(code)
    return root


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    models, directory = repository(tmp_path / "models"), tmp_path / "run"
    directory.mkdir(mode=0o700)
    return lambda kind, *flags: kind(models, directory, *flags)


HUNG = (
    r"model '%s' version 1 hung: it had run a batch of 1 for \d+\.\d s without a sign of life, the limit is 2.0 s "
    r"\(model parameter hang_timeout_s\); the worker died while it ran this request, (alone, )?and its model does "
    r"not allow"
)


def x(value: int) -> dict[str, np.ndarray]:
    return {"X": np.array([value], np.int32)}


def test_an_execute_that_hangs_is_seen_and_one_that_asks_whether_it_is_wanted_is_not(start) -> None:
    with start(Broker) as broker, clientlib.connect(broker.ready().directory) as client:
        with pytest.raises(InferError, match="Request timeout expired"):
            next(client.stream("forever", x(1), timeout=3.5))
        with pytest.raises(InferError, match=HUNG % "forever"):
            next(client.stream("forever", x(2), timeout=LIMIT_S))
        eventually(lambda: "hung: model 'forever' version 1" in broker.log())
        assert broker.log().count("hung:") == 1
        assert next(client.stream("forever", x(3), timeout=LIMIT_S))["Y"][0] == 3


def test_who_waits_for_a_model_that_hangs_is_told_so_everywhere(start) -> None:
    with start(Gateway) as broker:
        broker.ready()
        for wire in ("native", "http", "grpc", "zmq"):
            with clientlib.connect(url_of(broker, wire)) as client:
                with pytest.raises(InferError, match=HUNG % "stuck") as caught:
                    client.infer("stuck", x(2), timeout=LIMIT_S)
                assert caught.value.code == "UNAVAILABLE"
                assert client.infer("stuck", x(3), timeout=LIMIT_S)["Y"][0] == 3


def test_a_stop_waits_for_the_last_response(start) -> None:
    with start(Broker) as broker, clientlib.connect(broker.ready().directory) as client:
        stream = client.stream("acts", acts(40, delay_ms=100))
        next(stream)
        broker.process.send_signal(signal.SIGTERM)
        assert sum(1 for _ in stream) == 39
        assert broker.process.wait(LIMIT_S) == 0
        assert "Found 1 model versions that have in-flight inferences" in broker.log()
        assert "Model 'acts' (version 1) has 1 in-flight inferences" in broker.log()


def test_what_a_stop_cannot_wait_for_is_told_so(start) -> None:
    told: queue.Queue[Any] = queue.Queue()
    with start(Gateway, "--exit-timeout-secs=2") as broker, clientlib.connect(broker.ready().directory) as client:
        streams = [client.stream("acts", acts(10_000, delay_ms=50)) for _ in range(2)]
        for stream in streams:
            next(stream)
        with triton.InferenceServerClient(url_of(broker, "grpc").split("//")[1]) as remote:
            remote.start_stream(lambda result, error: told.put((result, error)))
            act = triton.InferInput("ACT", [5], "INT32")
            act.set_data_from_numpy(np.array([10_000, 4, 50, -1, -1], np.int32))
            remote.async_stream_infer("acts", [act])
            assert told.get(timeout=LIMIT_S)[1] is None
            broker.process.send_signal(signal.SIGTERM)
            for stream in streams:
                with pytest.raises(InferError) as caught:
                    list(stream)
                assert (caught.value.code, caught.value.message) == ("UNAVAILABLE", CUT)
            error = None
            while error is None:
                _, error = told.get(timeout=LIMIT_S)
            assert CUT in str(error)
            assert broker.process.wait(LIMIT_S) == 1
        eventually(lambda: "Model 'acts' (version 1) has 3 in-flight inferences" in broker.log())
        assert "failed to stop server: Internal - Exit timeout expired. Exiting immediately." in broker.log()
