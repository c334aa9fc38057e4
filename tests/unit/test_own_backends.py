"""What a backend of one's own may give for its outputs, and what it is told about the rest."""

from __future__ import annotations

import pytest

from broker.worker import binding
from shm import statistics
from shm.errors import Code
from tests.fakes.loaded import Loaded, spec, text_of
from tests.fakes.loading import run

CONFIG = """
backend: "own"
max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ -1 ] }
"""
BACKEND = """
import numpy as np
class Model:
    def bind(self, inputs, outputs):
        return self
    def run(self):
        pass
    def results(self):
        return RESULTS
    def close(self):
        pass
def load(context):
    return Model()
RESULTS = """


def gives(root, results: str, datatype: str = "INT32"):
    (root / "m" / "1").mkdir(parents=True)
    config = CONFIG.replace("TYPE_INT32", "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")
    (root / "m" / "config.pbtxt").write_text(config)
    (root / "m" / "backend.py").write_text(BACKEND + results)
    with Loaded(run(root)) as loaded:
        memory = loaded.memory()
        plan = loaded.plan(memory, [spec("x", (4,))], [spec("y", (-1,), datatype, offset=256, byte_size=64)])
        request = loaded.run(loaded.request(plan))
        return request, memory.get(256, (2,), "INT32").tolist()


@pytest.mark.parametrize("results", ["[np.array([7, 8], np.int32)]", "(np.array([7, 8], np.int32),)"])
def test_results_of_the_right_datatype_are_delivered(tmp_path, results):
    request, y = gives(tmp_path, results)
    assert (request.code, y) == (Code.OK, [7, 8])


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ("[np.array([1.5], np.float32)]", "output 'y' of model 'm' is INT32, the model gave an array of float32"),
        ("[np.array([1], np.int64)]", "output 'y' of model 'm' is INT32, the model gave an array of int64"),
        ("[np.array([b'a'], object)]", "output 'y' of model 'm' is INT32, the model gave an array of object"),
        ("[]", "model 'm' gave 0 results, 1 outputs wait for one"),
        (
            "[[[1], [2, 3]]]",
            "what model 'm' gave for output 'y', list, does not become an array: ValueError: setting an array element "
            "with a sequence. The requested array has an inhomogeneous shape after 1 dimensions. The detected shape "
            "was (2,) + inhomogeneous part.",
        ),
    ],
)
def test_others_are_an_error_of_the_model_and_nothing_is_written(tmp_path, results, text):
    request, y = gives(tmp_path, results)
    assert (request.code, text_of(request), y) == (Code.INTERNAL, text, [0, 0])


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ("[np.array([b'a', 7], object)]", "elements of BYTES are str or bytes, element 1 is int"),
        ("[['a', None]]", "elements of BYTES are str or bytes, element 1 is NoneType"),
        ("[['a', '\\ud800']]", "element 1 is not UTF-8 text: "),
    ],
)
def test_elements_that_are_no_strings_are_the_model_s_mistake(tmp_path, results, text):
    request, y = gives(tmp_path, results, "BYTES")
    assert (request.code, y) == (Code.INTERNAL, [0, 0])
    assert text_of(request).startswith(f"output 'y' of model 'm' is BYTES: {text}")


@pytest.mark.parametrize(
    ("results", "came"),
    [
        ("None", "None"),
        ("5", "int"),
        ("{'y': 1}", "dict"),
        ("iter([])", "list_iterator"),
        ("'y'", "str"),
        ("np.array([[7, 8]], np.int32)", "an array of int32 with the shape [1,2]"),
    ],
)
def test_results_that_are_no_list_are_named(tmp_path, results, came):
    request, y = gives(tmp_path, results)
    text = f"'results' of model 'm' returned {came}: it must return a list with one array for each output whose memory "
    assert (request.code, text_of(request), y) == (Code.INTERNAL, text + "is None, in order, here 1", [0, 0])


def test_no_binding_is_named(tmp_path):
    root = tmp_path / "bind"
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(CONFIG)
    (root / "m" / "backend.py").write_text(BACKEND.replace("return self", "pass") + "[]")
    with Loaded(run(root)) as loaded:
        plan = loaded.plan(loaded.memory(), [spec("x", (4,))], [spec("y", (-1,), "INT32", offset=256, byte_size=64)])
        request = loaded.run(loaded.request(plan))
        assert request.code == Code.INTERNAL
        assert text_of(request) == (
            "'bind' of the model's backend returned NoneType: it must return an object with 'run' and 'results'"
        )


WRITE_THERE = (
    "model 'm' gave 1 results, no output waits for one: each of those asked for (of 'y') has memory: write there "
    "('results' is for outputs whose memory is None)"
)


@pytest.mark.parametrize("results", ["[np.array([7, 8], np.int32)]", "[]", "None"])
@pytest.mark.parametrize("rows", [0, 1])
def test_results_for_outputs_that_have_memory_are_an_error_each_time(tmp_path, results, rows):
    (tmp_path / "m" / "1").mkdir(parents=True)
    config = CONFIG.replace("-1", "2")
    if rows:
        config = config.replace("max_batch_size: 0", "max_batch_size: 4\ndynamic_batching { }")
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    (tmp_path / "m" / "backend.py").write_text(BACKEND + results)
    batch = (1,) if rows else ()
    with Loaded(run(tmp_path)) as loaded:
        inputs, outputs = [spec("x", (*batch, 4))], [spec("y", (*batch, 2), "INT32", offset=256)]
        plans = [loaded.plan(loaded.memory(), inputs, outputs, rows=rows) for _ in range(2 if rows else 1)]
        for _ in range(2):
            alone = loaded.request(plans[0], rows=rows)
            loaded.run(alone)
            together = [loaded.request(plan, rows=rows) for plan in plans]
            loaded.run(*together)
            for request in (alone, *together):
                if results.startswith("[np"):
                    assert (request.code, text_of(request)) == (Code.INTERNAL, WRITE_THERE)
                else:
                    assert request.code == Code.OK


def test_a_binding_that_hangs_can_be_seen(tmp_path, monkeypatch):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "m" / "backend.py").write_text(BACKEND + "[np.array([7, 8], np.int32)]")
    with Loaded(run(tmp_path)) as loaded:
        (instance,) = loaded.model.instances
        seen = []

        def bind(inputs, outputs):
            seen.append((instance.block[statistics.BATCH], instance.block[statistics.STARTED]))
            raise RuntimeError("no")

        monkeypatch.setattr(instance.runtime, "bind", bind)
        memory = loaded.memory()
        plan = loaded.plan(memory, [spec("x", (4,))], [spec("y", (-1,), "INT32", offset=256, byte_size=64)])
        request = loaded.run(loaded.request(plan))
        assert text_of(request) == "RuntimeError: no"
        ((batch, started),) = seen
        assert batch == 1
        assert started
        assert instance.block[statistics.BATCH] == 0
        assert not instance.longest.get(0)


def test_results_that_hang_can_be_seen(tmp_path, monkeypatch):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "m" / "backend.py").write_text(BACKEND + "[np.array([7, 8], np.int32)]")
    with Loaded(run(tmp_path)) as loaded:
        (instance,) = loaded.model.instances
        seen, results = [], instance.runtime.results

        def watched():
            seen.append(instance.block[statistics.BATCH])
            return results()

        monkeypatch.setattr(instance.runtime, "results", watched)
        plan = loaded.plan(loaded.memory(), [spec("x", (4,))], [spec("y", (-1,), "INT32", offset=256, byte_size=64)])
        loaded.run(loaded.request(plan))
        assert seen
        assert all(seen)
        assert instance.block[statistics.BATCH] == 0


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ("[np.zeros((2, 2), np.int32)]", "output 'y' of model 'm' has the shape [2,2], its configuration says [-1]"),
        ("[np.int32(7)]", "output 'y' of model 'm' has the shape [], its configuration says [-1]"),
    ],
)
def test_results_of_another_rank_are_an_error_of_the_model(tmp_path, results, text):
    request, y = gives(tmp_path, results)
    assert (request.code, text_of(request), y) == (Code.INTERNAL, text, [0, 0])


def test_a_shape_is_looked_at_once(tmp_path, monkeypatch):
    """Until another one comes, or another number of rows."""
    looks = []
    monkeypatch.setattr(binding, "check_shape", lambda *what: looks.append(what[2:]))
    (tmp_path / "m" / "1").mkdir(parents=True)
    config = CONFIG.replace("max_batch_size: 0", "max_batch_size: 4")
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    (tmp_path / "m" / "backend.py").write_text(BACKEND + "[np.zeros((2, 3), np.int32)]")
    with Loaded(run(tmp_path)) as loaded:
        memory = loaded.memory()
        plan = loaded.plan(memory, [spec("x", (2, 4))], [spec("y", (2, -1), "INT32", offset=256, byte_size=64)], rows=2)
        for rows in (2, 2, 1, 1, 2):
            loaded.run(loaded.request(plan, rows=rows))
        assert looks == [((2, 3), 2), ((2, 3), 1), ((2, 3), 2)]
