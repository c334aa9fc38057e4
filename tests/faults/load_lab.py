"""A lab whose models may be loaded and unloaded, and what its rows share: the model `victim`, broken and mended."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import clientlib
from tests.fakes import models
from tests.faults import child, repository
from tests.faults.lab import Lab, eventually, visitors

FLAGS = ("--model-control-mode=explicit", "--load-model=*")


def write(root: Path) -> Path:
    """The lab's models and `victim` (add1); another of that name outside of the repository."""
    repository.write(root)
    models.write_model(root, "victim", models.add1())
    shutil.copytree(root / "victim", root.parent / "outside" / "victim")
    return root


class LoadLab(Lab):
    """Model control mode explicit."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, *FLAGS, models=write)

    def _warm_up(self) -> None:
        super()._warm_up()
        # A worker keeps a thread for every instance that it ever had at once: more of them than any row loads.
        count = {"instance_group": [{"count": 16, "kind": "KIND_CPU"}]}
        assert self.offend(load, model="victim", config=count)[0] == ["OK", ""]
        assert self.offend(load, model="victim")[0] == ["OK", ""]
        self.end_offenders()
        eventually(lambda: len(visitors(self.status())) == 2, "the sessions of the warm-up ended")


def mend(lab: Lab) -> Path:
    """Make the files of `victim` what they were. Returns its directory."""
    shutil.rmtree(lab.repository / "victim")
    return models.write_model(lab.repository, "victim", models.add1())


def settled(lab: Lab, **options: Any) -> None:
    """`lab.settled()`; and `victim`, mended, loads."""
    mend(lab)
    assert lab.offend(load, model="victim") == [["OK", ""], True]
    lab.settled(**options)


def load(model: str, **override: Any) -> list[Any]:
    """[what came of the load, whether `victim` answers right afterwards]. Whoever may load is told of paths."""
    with clientlib.connect() as client:
        code, message = child.refusal(client.load, model, **override)
        x = np.ones((1, 4), np.float32)
        right = bool((client.infer("victim", {"x": x}, timeout=50)["y"] == 2).all())
        return [[code, without_paths(message)], right]


def without_paths(message: str) -> str:
    """What S6 need not look at in the answer to a load."""
    root = os.path.join(os.path.dirname(os.environ["TENSORBROKER_DIR"]), "repository")
    return message.replace(root, "REPOSITORY").replace("model.py", "model-py")
