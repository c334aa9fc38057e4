"""What is the broker's own in a model directory: parameters and `backend.py`, looked at before a worker does."""

from __future__ import annotations

import pytest

from broker.commands import check_repositories
from tests.fakes import models
from tests.fakes.loading import config_of, reason_of, run

CODE = """backend: "own"
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""


def test_whose_code_is_used_is_said_where_the_configuration_names_an_installed_backend(tmp_path):
    for backend, notes in (
        ("identity", ["its own backend.py is used, not the installed backend 'identity'"]),
        ("own", []),
    ):
        directory = models.write_model(tmp_path, "m", config=CODE.replace("own", backend))
        (directory / "backend.py").write_text("def load(context):\n    pass\n")
        assert [note.partition(" that its")[0] for note in run(tmp_path).notes] == notes


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("hang_timeout_s", "soon", "model parameter 'hang_timeout_s' must be a number of seconds, got 'soon'"),
        ("hang_timeout_s", "-1", "model parameter 'hang_timeout_s' must be a number of seconds, got '-1'"),
        ("hang_timeout_s", "nan", "model parameter 'hang_timeout_s' must be a number of seconds, got 'nan'"),
        ("hang_timeout_s", "", "model parameter 'hang_timeout_s' must be a number of seconds, got ''"),
        ("intra_op_thread_count", "two", "model parameter 'intra_op_thread_count' must be a number of threads, got"),
        ("inter_op_thread_count", "-1", "model parameter 'inter_op_thread_count' must be a number of threads, got"),
        ("allow_spinning", "yes", "model parameter 'allow_spinning' must be 0 or 1, got 'yes'"),
        ("enable_mem_arena", "2", "model parameter 'enable_mem_arena' must be 0 or 1, got '2'"),
        ("retry", "maybe", "parameter retry 'maybe' must be one of: true, 1, yes, false, 0, no"),
        ("worker_group", "a b", "parameter worker_group 'a b' must have 1 to 64 letters, digits, _ . -"),
        ("max_queue_bytes", "2GB", "parameter max_queue_bytes '2GB' must be a number of bytes, 0 for no limit"),
        ("drop_oldest", "often", "parameter drop_oldest 'often' must be true or false"),
        ("gpu_mem_limit", "2GB", "model parameter 'gpu_mem_limit' must be a number of bytes, got '2GB'"),
        (
            "cudnn_conv_algo_search",
            "3",
            "model parameter 'cudnn_conv_algo_search' must be one of 0 (EXHAUSTIVE), 1 (HEURISTIC), 2 (DEFAULT), got",
        ),
    ],
)
def test_values_that_a_parameter_cannot_have(tmp_path, name, value, says):
    reason = reason_of(tmp_path, models.add1(), f"max_batch_size: 4\n{parameter(name, value)}")
    assert reason.startswith(says)
    if value and " " not in value:
        assert f"config.pbtxt:2: {parameter(name, value)}".strip() in reason


def test_values_that_parameters_may_have(tmp_path):
    allowed = {
        "hang_timeout_s": "0.5",
        "intra_op_thread_count": "2",
        "allow_spinning": "1",
        "retry": "NO",
        "worker_group": "a.b-c",
        "drop_oldest": "True",
        "max_queue_bytes": "67108864",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "2",
        "of_nobody": "anything",
    }
    config = config_of(tmp_path, models.add1(), "".join(parameter(*each) for each in allowed.items()))
    assert config.parameters == allowed
    assert not [note for note in config.notes if "parameter" in note]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hang_timeout", "hang_timeout_s"),
        ("hang-timeout-s", "hang_timeout_s"),
        ("intra_op_threads_count", "intra_op_thread_count"),
        ("worker_goup", "worker_group"),
        ("zero_copy", "zero_copy_inputs"),
        ("gpu_memory_limit", "gpu_mem_limit"),
        ("Drop_Oldest", "drop_oldest"),
        ("max_queue_byte", "max_queue_bytes"),
    ],
)
def test_misspelt_names_of_parameters(tmp_path, capsys, name, meant):
    config_of(tmp_path, models.add1(), "max_batch_size: 4\n" + parameter(name, "1"))
    assert check_repositories([str(tmp_path)], strict=False) == 0
    says = f"m: parameter '{name}' has no meaning to the broker: did you mean '{meant}'?"
    assert says in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("sequence_batching { }", "a step that is refused would be missing"),
        ("ensemble_scheduling { }", "its requests wait in its members"),
    ],
)
def test_where_a_limit_on_bytes_cannot_be(tmp_path, field, why):
    limit = "max_batch_size: 4\n" + parameter("max_queue_bytes", "100")
    reason = reason_of(tmp_path, models.add1(), limit + field)
    assert reason.startswith(f"parameter max_queue_bytes cannot be combined with {field[:-4]} for m: {why}")


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        ("", True),
        ("dynamic_batching { }", True),
        ("sequence_batching { }", True),
        (parameter("max_queue_bytes", "0"), True),
        (parameter("max_queue_bytes", "100"), False),
        ("dynamic_batching { default_queue_policy { max_queue_size: 1 } }", False),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1"
            " priority_queue_policy { key: 2 value { max_queue_size: 1 } } }",
            False,
        ),
    ],
)
def test_drop_oldest_where_no_queue_can_be_full(tmp_path, more, noted):
    text = f"max_batch_size: 4\n{parameter('drop_oldest', 'true')}{more}"
    says = "parameter drop_oldest has no effect: no queue has a limit; add the parameter max_queue_bytes, or dynamic_"
    assert [note.startswith(says) for note in config_of(tmp_path, models.add1(), text).notes] == [True] * noted
    plain = text.replace('"true"', '"false"')
    assert not config_of(tmp_path, models.add1(), plain).notes


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def load(context:\n    pass\n", "backend.py:1:9: SyntaxError: '(' was never closed\n    def load(context:\n"),
        ("x = 1\n  y = 2\n", "backend.py:2:2: IndentationError: unexpected indent\n      y = 2\n     ^"),
        ("def load(c):\n    return 1 +\n", "backend.py:2:15: SyntaxError: invalid syntax\n        return 1 +\n"),
        ("def load(c):\n    break\n", "backend.py:2:5: SyntaxError: 'break' outside loop"),
        ("x = '\0'\n", "backend.py:1:1: SyntaxError: source code string cannot contain null bytes"),
        ("", "backend.py has no function 'load'"),
        ("def lode(context):\n    pass\n", "backend.py has no function 'load'"),
    ],
)
def test_code_that_cannot_be_a_backend(tmp_path, capsys, code, says):
    models.write_model(tmp_path, "m", config=CODE)
    (tmp_path / "m" / "backend.py").write_text(code)
    reason = run(tmp_path).reason
    assert reason.startswith(f"{tmp_path / 'm'}/{says}")
    assert check_repositories([str(tmp_path)], strict=False) == 1
    assert "| m     | 1       | UNAVAILABLE: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "code",
    [
        "def load(context):\n    pass\n",
        "from elsewhere import load\n",
        "from elsewhere import *\n",
        "import elsewhere\nload = elsewhere.Model\n",
        "try:\n    import fast as module\nexcept ImportError:\n    module = None\nclass load:\n    pass\n",
        "raise SystemExit('whoever imports this ends')\nload = 1\n",
        'pattern = "\\d"\nload = pattern\n',
    ],
)
def test_code_is_compiled_and_not_run(tmp_path, code):
    models.write_model(tmp_path, "m", config=CODE)
    (tmp_path / "m" / "backend.py").write_text(code)
    assert list(run(tmp_path).versions) == [1]
