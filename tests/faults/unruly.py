"""Models that end or hang their worker when asked to, and how to ask."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.fakes import models
from tests.faults import repository
from tests.faults.unruly_backend import ACTS

_CONFIG = """
backend: "unruly"
max_batch_size: 0
input [ { name: "act" data_type: TYPE_INT64 dims: [ 1 ] }, { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU count: %(count)d } ]
parameters { key: "worker_group" value { string_value: "default" } }
parameters { key: "retry" value { string_value: "%(retry)s" } }
parameters { key: "hang_timeout_s" value { string_value: "%(hang)s" } }
"""
HANG_S = 0.5  # of the model "hanger"


def write(root: Path) -> Path:
    """The lab's models, and on the same worker: unruly, unruly_pair (two instances), hanger, unrepeatable."""
    repository.write(root)
    for name, count, hang, retry in (
        ("unruly", 1, 0, "true"),
        ("unruly_pair", 2, 0, "true"),
        ("hanger", 1, HANG_S, "true"),
        ("unrepeatable", 1, 0, "false"),
    ):
        config = _CONFIG % {"count": count, "hang": hang, "retry": retry}
        directory = models.write_model(root, name, config=config)
        shutil.copy(Path(__file__).with_name("unruly_backend.py"), directory / "backend.py")
    return root


def inputs(act: str, tag: int, seconds: float = 0.0) -> dict[str, npt.NDArray]:
    """Of a request to do `act`; `tag` is what `runs` counts."""
    return {"act": np.array([list(ACTS).index(act)], np.int64), "x": np.array([tag, seconds, 0, 0], np.float32)}


def hold(root: Path, model: str) -> None:
    """Requests to "wait" that come from now on do."""
    (root / model / "1" / "go").unlink(missing_ok=True)


def let_go(root: Path, model: str) -> None:
    """Those that wait, and those that come later."""
    (root / model / "1" / "go").touch()


def runs(root: Path, model: str, tag: int) -> int:
    """How many times requests with this tag were run."""
    path = root / model / "1" / "runs"
    return path.read_text().split().count(str(tag)) if path.exists() else 0
