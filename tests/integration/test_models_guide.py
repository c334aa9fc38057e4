"""docs/models.md: its configurations load, and its clients print what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fakes.broker import Broker
from tests.integration.test_readme import ROOT, run_script

GUIDE = (ROOT / "docs" / "models.md").read_text()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("guide")
    files = re.findall(r"`(models/\S+)`:\n\n```\w*\n(.*?)```", GUIDE, re.DOTALL)
    assert len(files) == 8
    for name, text in files:
        path = root / name
        (path.parent / "1").mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "run").mkdir(mode=0o700)
    (flags,) = re.findall(r"tensorbroker serve --model-repository models (--.*)\n", GUIDE)
    with Broker(root / "models", root / "run", *re.split(r"[ ]", flags)) as broker:
        yield broker.ready()


def test_the_guides_models_answer_as_it_says(broker: Broker) -> None:
    python = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    clients = [block for block in python if "client." in block]
    assert len(clients) == 6
    (printed,) = re.findall(r"```text\n(.*?)```", GUIDE, re.DOTALL)
    assert run_script("\n".join(clients), Path(broker.directory)) == printed
