"""What a model must not give: other datatypes, ranks, sizes and numbers of outputs than its configuration says.

However its requests are run, the error names the model and the output, says what was expected and what came, and
nothing is written.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from broker.worker.cache import ResponseCache
from broker.worker.cached import Cached
from broker.worker.execute import run_batch
from broker.worker.sequence import Sequence
from shm.admission import Request
from shm.errors import Code
from shm.layout import SEQUENCE_START
from tests.fakes import models
from tests.fakes.loaded import Loaded, spec, text_of
from tests.fakes.loading import config_of, run

BACKEND = """
import numpy as np
class Binding:
    def __init__(self, outputs):
        self.rows, self.names = outputs[0].shape[0], [each.name for each in outputs if each.memory is None]
    def run(self):
        pass
    def results(self):
        rows = self.rows
        return RESULTS
class Model:
    def bind(self, inputs, outputs):
        return Binding(outputs)
    def close(self):
        pass
def load(context):
    return Model()
"""
CONFIG = """
backend: "own"
max_batch_size: 8
%s
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] %s }
output [ { name: "y" data_type: TYPE_INT32 dims: [ %s ] }, { name: "z" data_type: TYPE_INT32 dims: [ 2 ] } ]
"""
# How requests are run, and what the configuration has for it.
WAYS = {
    "alone": ("", "", "-1"),
    "gathered": ("dynamic_batching { }", "", "-1"),
    "other outputs": ("dynamic_batching { }", "", "-1"),
    "assembled": ("dynamic_batching { }", "allow_ragged_batch: true", "-1"),
    "cached": ("response_cache { enable: true }", "", "2"),  # where nothing is made in place
}
WRONG = {
    "np.zeros((rows, 2), np.float32)": "output 'y' of model 'm' is INT32, the model gave an array of float32",
    "np.zeros((rows, 2), object)": "output 'y' of model 'm' is INT32, the model gave an array of object",
    "np.zeros((rows, 2, 1), np.int32)": "output 'y' of model 'm' has the shape [1,2,1], its configuration says [1,%s]",
    "np.zeros(rows, np.int32)": "output 'y' of model 'm' has the shape [1], its configuration says [1,%s]",
    "np.zeros((rows + 1, 2), np.int32)": None,  # as there is no row of the request's own
}


def load(root: Path, way: str, results: str) -> Loaded:
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "config.pbtxt").write_text(CONFIG % WAYS[way])
    (root / "m" / "backend.py").write_text(BACKEND.replace("RESULTS", results))
    loaded = Loaded(run(root))
    if way == "cached":
        cache = ResponseCache(1 << 16, [0] * 32)
        loaded.model.keep_answers(Cached(cache, "m", 1, 1, loaded.page.block(0)))
    return loaded


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_outputs_are_refused_however_they_are_made(tmp_path, way, wrong):
    with load(
        tmp_path, way, f"[{wrong} if name == 'y' else np.zeros((rows, 2), np.int32) for name in self.names]"
    ) as m:
        memory = m.memory()
        memory.put(1024, np.full(256, 7, np.uint8))
        y_shape = (1, 2) if way == "cached" else (1, -1)
        requests = []
        for at in range(1 if way in ("alone", "cached") else 3):
            outputs = [spec("y", y_shape, "INT32", offset=1024 + 64 * at, byte_size=8)]
            if way == "other outputs" and at:
                outputs.append(spec("z", (1, 2), "INT32", offset=1280 + 64 * at))
            requests.append(m.request(m.plan(memory, [spec("x", (1, 2), offset=64 * at)], outputs, rows=1), rows=1))
        m.run(*requests)
        for request in requests:
            assert request.code == Code.INTERNAL
            text = text_of(request)
            if WRONG[wrong] is not None:
                dims = "2" if way == "cached" else "-1"
                assert text == (WRONG[wrong].replace("%s", dims))
            else:
                assert text.startswith("output 'y' of model 'm' has the shape [")
                assert "[1," in text
        assert (memory.bytes[1024:1280] == 7).all()


@pytest.mark.parametrize("way", WAYS)
def test_so_are_too_few_and_too_many(tmp_path, way):
    with load(tmp_path, way, "[np.zeros((rows, 2), np.int32)] * (len(self.names) + 1)") as m:
        memory = m.memory()
        outputs = [spec("y", (1, 2) if way == "cached" else (1, -1), "INT32", offset=1024, byte_size=8)]
        plan = m.plan(memory, [spec("x", (1, 2))], outputs, positions=1, rows=1)
        request = m.run(m.request(plan, rows=1))
        assert (request.code, text_of(request)) == (Code.INTERNAL, "model 'm' gave 2 results, 1 outputs wait for one")


STATE = """
backend: "own"
max_batch_size: 4
sequence_batching { state { input_name: "in" output_name: "out" data_type: TYPE_INT32 dims: [ 2 ]
  initial_state { name: "zero" data_type: TYPE_INT32 dims: [ 2 ] zero_data: true } } }
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_INT32 dims: [ 2 ] }
"""


@pytest.mark.parametrize(
    ("state", "came"),
    [
        ("np.zeros((rows, 2), np.float32)", "float32 [1,2]"),
        ("np.zeros((rows, 3), np.int32)", "int32 [1,3]"),
        ("np.zeros((rows, 2, 2), np.int32)", "int32 [1,2,2]"),
    ],
)
def test_a_wrong_state_is_refused_and_the_earlier_one_stays(tmp_path, state, came):
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(STATE)
    made = f"[{state} if name == 'out' else np.zeros((rows, 2), np.int32) for name in self.names]"
    (tmp_path / "m" / "backend.py").write_text(BACKEND.replace("RESULTS", made))
    with Loaded(run(tmp_path)) as loaded:
        memory = loaded.memory()
        plan = loaded.plan(memory, [spec("x", (1, 2))], [spec("y", (1, 2), "INT32", offset=1024)], rows=1)
        request = Request(None, 0, (1, plan.key, 0, 0, 0, 0, 1, 5, SEQUENCE_START, 0, 0, 0, 0), plan, 1)
        request.sequence = record = Sequence(5)
        before = dict(record.states)
        run_batch(loaded.model.instances[0], [request], [request])
        assert text_of(request) == f"state 'out' of model 'm' is INT32 [1,2], got {came}"
        assert list(record.states) in (list(before), ["in"])
        assert all((array == 0).all() for array in record.states.values())


@pytest.mark.parametrize("dims", [3, 5])
def test_a_file_that_gives_another_size_than_the_configuration_says(tmp_path, dims):
    """Nothing in the file says how many columns there are: that the configuration is wrong only a run shows."""
    node = helper.make_node("Concat", ["x", "x"], ["y"], axis=1)
    made = models.build([node], [models.tensor("x", ["B", 2])], [models.tensor("y", ["B", "N"])])
    config = 'max_batch_size: 4\ninput { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }\n'
    config += f'output {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }}\n'
    with Loaded(config_of(tmp_path, made, config)) as loaded:
        memory = loaded.memory()
        memory.put(1024, np.full(256, 7, np.uint8))
        plans = [
            loaded.plan(memory, [spec("x", (1, 2), offset=64 * at)], [spec("y", (1, dims), offset=1024)], rows=1)
            for at in range(2)
        ]
        for together in (plans[:1], plans):
            requests = [loaded.request(plan, rows=1) for plan in together]
            loaded.run(*requests)
            for request in requests:
                assert text_of(request) == (
                    f"output 'y' of model 'm' has shape [1,4], the plan says [1,{dims}]: leave the dimension open "
                    "(-1), in config.pbtxt too if that fixes it, and give it room by byte_size"
                )
        assert (memory.bytes[1024:1280] == 7).all()
