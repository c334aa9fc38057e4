"""tests/gpu: how long its steps may take, and what a machine is told that lacks packages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from tests.gpu import packages

CHECK = Path(packages.__file__).with_name("check.sh")
STEP = re.compile(r"^ *step (\w+) (\d+) (.*)$", re.MULTILINE)
AFTER_S = 3  # until what does not end is killed


def test_all_steps_together_take_eight_minutes_at_most() -> None:
    steps = STEP.findall(CHECK.read_text())
    assert {"environment", "table", "race", "ort", "paths", "kill"} <= {name for name, _, _ in steps}
    assert f"--kill-after={AFTER_S} " in CHECK.read_text()
    assert sum(int(limit) + AFTER_S for _, limit, _ in steps) <= 480


def test_what_steps_run_is_there() -> None:
    text = CHECK.read_text()
    modules = re.findall(r"-m (tests\.gpu\.\w+)", text)
    assert len(set(modules)) >= 7
    for module in modules:
        assert importlib.util.find_spec(module), module
    files = re.findall(r"test_cuda_\w+\.py", text)
    assert files
    for name in files:
        assert (packages.ROOT / "tests" / "integration" / name).exists(), name
    assert not subprocess.run(["bash", "-n", str(CHECK)], check=False).returncode


def test_what_lacks_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(packages, "NEEDED", {"sys": ("python", "all"), "no_such.thing": ("thing", "step x")})
    assert packages.check() == 0
    assert capsys.readouterr().out == "thing is not installed, which step x cannot do without\n"
    monkeypatch.setattr(packages, "NEEDED", {"no_such": ("thing", packages.EVERYTHING)})
    assert packages.check() == 1


def test_an_environment_has_what_was_there_and_what_was_brought(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packages, "NEEDED", {"sys": ("python", "all")})
    assert packages.install(str(tmp_path), str(tmp_path)) == 0
    (tmp_path / "packages" / "brought.py").write_text("")
    program = (
        "import brought, msgspec\n"
        "from importlib.metadata import entry_points\n"
        "print(*(entry.name for entry in entry_points(group='tensorbroker.backends', name='tensorrt')))"
    )
    python = str(tmp_path / "venv" / "bin" / "python")
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("tensorrt\n", "")
