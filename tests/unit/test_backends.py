"""How a model finds its backend, and what ONNX Runtime is asked for and says."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from msgspec.structs import replace
from onnx import helper

from broker.repository.config import InstanceGroup, ModelConfig
from broker.worker import backends
from broker.worker.backends import Context, Operand
from broker.worker.backends import onnxruntime as backend
from shm.errors import InferError
from tests.fakes import models

X, Y = models.tensor("x", [1]), models.tensor("y", [1])


def config(directory: Path, name: str = "onnxruntime", **parameters: str) -> ModelConfig:
    return ModelConfig(
        name="m",
        platform="",
        backend=name,
        directory=str(directory),
        versions={1: str(directory / "1")},
        default_model_filename="model.onnx",
        max_batch_size=0,
        input=(),
        output=(),
        instance_group=(InstanceGroup(name="m"),),
        parameters=parameters,
    )


def context(directory: Path, **parameters: str) -> Context:
    made = config(directory, **parameters)
    return Context(made, 1, made.versions[1], made.instance_group[0], "m_0")


def own_backend(directory: Path, text: str) -> ModelConfig:
    (directory / "backend.py").write_text(text)
    return config(directory, "own")


# --- finding one ----------------------------------------------------------------------------------------------------


def test_an_installed_backend_is_found_by_its_entry_point(tmp_path):
    assert backends.find(config(tmp_path)) is backend


def test_a_model_may_bring_its_own(tmp_path):
    made = own_backend(tmp_path, "def load(context):\n    return f'{context.name} of {context.config.name}'\n")
    assert backends.find(made).load(context(tmp_path)) == "m_0 of m"
    assert backends.find(replace(made, backend="onnxruntime")) is not backend, "its own comes first"


def test_models_own_backends_do_not_mix(tmp_path):
    found = []
    for name in ("a", "b"):
        directory = tmp_path / name
        directory.mkdir()
        found.append(backends.find(own_backend(directory, f"def load(context):\n    return {name!r}\n")))
    assert [module.load(context(tmp_path)) for module in found] == ["a", "b"]


def test_a_backend_that_is_not_there(tmp_path):
    with pytest.raises(InferError) as raised:
        backends.find(config(tmp_path, "tensorrt_llm"))
    assert raised.value.code == "INVALID_ARG"
    names = sorted({entry.name for entry in importlib.metadata.entry_points(group="tensorbroker.backends")})
    assert {"identity", "onnxruntime", "repeat"} <= set(names)
    assert raised.value.message == (
        f"unable to find backend library for backend 'tensorrt_llm' of model 'm'; installed: {names}"
    )


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("load = 5\n", "INVALID_ARG", "backend.py has no function 'load'"),
        ("import nowhere_to_be_found\n", "INTERNAL", "backend.py raised ModuleNotFoundError: No module named"),
        ("def load(:\n", "INTERNAL", "backend.py raised SyntaxError"),
        ("raise SystemError('no')\n", "INTERNAL", "backend.py raised SystemError: no"),
        ("import sys\nsys.exit(3)\n", "INTERNAL", "backend.py raised SystemExit: 3"),
    ],
)
def test_a_models_own_backend_that_cannot_be_imported(tmp_path, text, code, expected):
    with pytest.raises(InferError) as raised:
        backends.find(own_backend(tmp_path, text))
    assert raised.value.code == code
    assert expected in raised.value.message
    assert "Traceback" not in raised.value.message


@pytest.fixture(autouse=True)
def _imports_nothing_of_another_test() -> Iterator[None]:
    yield
    sys.modules.pop("extra_backend", None)


def installed(directory: Path, text: str) -> None:
    """A distribution in `directory` that has a backend named `extra` whose module has this text."""
    (directory / "extra_backend.py").write_text(text)
    metadata = directory / "extra_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-backend\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tensorbroker.backends]\nextra = extra_backend\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nowhere_to_be_found\n", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise OSError('libextra.so: cannot open')\n", "OSError: libextra.so: cannot open"),
    ],
)
def test_an_installed_backend_that_cannot_be_imported(tmp_path, monkeypatch, text, reason):
    installed(tmp_path, text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InferError) as raised:
        backends.find(config(tmp_path, "extra"))
    assert raised.value.code == "UNAVAILABLE"
    assert raised.value.message == f"backend 'extra' of model 'm' cannot be imported: {reason}"


def test_an_installed_backend_is_anyones(tmp_path, monkeypatch):
    installed(tmp_path, "def load(context):\n    return 'extra'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert backends.find(config(tmp_path, "extra")).load(context(tmp_path)) == "extra"


# --- ONNX Runtime ---------------------------------------------------------------------------------------------------


def test_options_follow_tritons_parameters(tmp_path):
    plain = backend._options(context(tmp_path))
    assert plain.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    assert plain.enable_cpu_mem_arena
    assert plain.enable_mem_pattern
    assert plain.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    options = backend._options(
        context(
            tmp_path,
            intra_op_thread_count="3",
            inter_op_thread_count="2",
            execution_mode="1",
            enable_mem_arena="0",
            enable_mem_pattern="0",
            allow_spinning="1",
            **{"session.use_device_allocator_for_initializers": "1"},
        )
    )
    assert options.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert not options.enable_cpu_mem_arena
    assert not options.enable_mem_pattern
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"


def test_levels_of_graph_optimization_are_tritons(tmp_path):
    names = {
        -1: "ORT_ENABLE_BASIC",
        0: "ORT_ENABLE_ALL",
        1: "ORT_ENABLE_EXTENDED",
        2: "ORT_DISABLE_ALL",
        7: "ORT_ENABLE_ALL",
    }
    for level, name in names.items():
        made = context(tmp_path)
        options = backend._options(made._replace(config=replace(made.config, graph_level=level)))
        assert options.graph_optimization_level == getattr(onnxruntime.GraphOptimizationLevel, name)


@pytest.mark.parametrize(("level", "nodes"), [(0, 1), (2, 3)])
def test_a_level_decides_what_becomes_of_the_graph(tmp_path, monkeypatch, level, nodes):
    """The runtime itself writes what it has made of three identities in a row."""
    written = tmp_path / "optimized.onnx"
    options_of = backend._options

    def options(context):
        made = options_of(context)
        made.optimized_model_filepath = str(written)
        return made

    chain = [helper.make_node("Identity", [a], [b]) for a, b in (("x", "a"), ("a", "b"), ("b", "y"))]
    models.write_model(tmp_path, "m", models.build(chain, [X], [Y]))
    monkeypatch.setattr(backend, "_options", options)
    made = context(tmp_path / "m")
    backend.load(made._replace(config=replace(made.config, graph_level=level)))
    assert len(onnx.load(written).graph.node) == nodes


@pytest.mark.parametrize("value", ["-1", "two", "", "1.5", "²"])
def test_a_thread_count_that_is_none_is_refused(tmp_path, value):
    with pytest.raises(InferError, match="'intra_op_thread_count' must be a number of threads, got") as raised:
        backend._options(context(tmp_path, intra_op_thread_count=value))
    assert raised.value.code == "INVALID_ARG"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (b"garbage", "Protobuf parsing failed"),
        (None, "File doesn't exist"),
        (models.build([helper.make_node("Nope", ["x"], ["y"])], [X], [Y]), "No Op registered for Nope"),
    ],
)
def test_a_model_that_cannot_be_loaded(tmp_path, model, expected):
    models.write_model(tmp_path.parent, tmp_path.name, model)
    with pytest.raises(InferError) as raised:
        backend.load(context(tmp_path))
    assert raised.value.code == "INTERNAL"
    assert raised.value.message.startswith("onnx runtime error: ")
    assert expected in raised.value.message


def memory(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).view(np.uint8)


def bind(tmp_path: Path, model, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray | None]):
    models.write_model(tmp_path.parent, tmp_path.name, model)
    loaded = backend.load(context(tmp_path))
    return loaded.bind(
        [Operand(name, "FP32", value.shape, memory(value)) for name, value in inputs.items()],
        [
            Operand(name, "FP32", (1, 4) if value is None else value.shape, None if value is None else memory(value))
            for name, value in outputs.items()
        ],
    )


def test_a_failed_run_tells_the_reason_and_not_the_runtimes_source(tmp_path):
    inputs = {"a": np.ones((1, 3), np.float32), "b": np.ones((1, 4), np.float32)}
    binding = bind(tmp_path, models.two_input(), inputs, {"total": None})
    with pytest.raises(InferError) as raised:
        binding.run()
    assert raised.value.code == "INTERNAL"
    text = raised.value.message
    assert text.startswith("onnx runtime error: Non-zero status code returned while running ")
    assert "Attempting to broadcast an axis by a dimension other than 1. 3 by 4" in text
    for internal in ("onnxruntime_src", ".h:", "::", "ONNXRuntimeError", "\n"):
        assert internal not in text


def test_what_the_runtime_says_over_several_lines_is_kept(tmp_path):
    binding = bind(tmp_path, models.matmul(), {"x": np.ones((1, 5), np.float32)}, {"y": None})
    with pytest.raises(InferError, match=r"invalid dimensions for input: x .* index: 1 Got: 5 Expected: 4"):
        binding.run()


def test_an_operand_that_the_model_does_not_have(tmp_path):
    with pytest.raises(InferError, match=r"onnx runtime error: .*nope"):
        bind(tmp_path, models.matmul(), {"nope": np.ones((1, 4), np.float32)}, {"y": None}).run()


def test_open_and_placed_outputs_beside_each_other(tmp_path):
    a, b = np.full((1, 4), 5, np.float32), np.ones((1, 4), np.float32)
    difference = np.zeros((1, 4), np.float32)
    binding = bind(tmp_path, models.two_input(), {"a": a, "b": b}, {"total": None, "difference": difference})
    for value in (5, 7):
        a[:] = value
        binding.run()
        (total,) = binding.results()
        assert total.tolist() == [[value + 1] * 4]
        assert difference.tolist() == [[value - 1] * 4]


def test_results_are_their_arrays_own_and_the_binding_keeps_none(tmp_path):
    models.write_model(tmp_path.parent, tmp_path.name, models.unique())
    x = np.arange(1000, dtype=np.float32)
    operands = [Operand("x", "FP32", (1000,), x.view(np.uint8))], [Operand("y", "FP32", (-1,), None)]
    binding = backend.load(context(tmp_path)).bind(*operands)
    binding.run()
    (first,) = binding.results()
    assert not binding._io.get_outputs()[0].has_value()
    x[:] = 7
    binding.run()
    (second,) = binding.results()
    assert second.tolist() == [7]
    assert first.tolist() == list(range(1000))


def test_a_closed_model_lets_go_of_its_session(tmp_path):
    models.write_model(tmp_path.parent, tmp_path.name, models.matmul())
    loaded = backend.load(context(tmp_path))
    binding = loaded.bind(
        [Operand("x", "FP32", (1, 4), memory(np.ones((1, 4), np.float32)))], [Operand("y", "FP32", (1, 4), None)]
    )
    loaded.close()
    binding.run()
    assert binding.results()[0].tolist() == [models.MATMUL_WEIGHTS.sum(0).tolist()]
