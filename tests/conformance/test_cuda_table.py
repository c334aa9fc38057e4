"""The driver does what its recorded table says: on the simulator, and with --cuda=real on a GPU.

`cuda_simulated.json` is what tests/cusim does. It is UNVERIFIED ON HARDWARE until a GPU's table lies beside it as
`cuda_hardware.json` (python -m tests.conformance.cuda_table > table.json, wrapped as the other file is); from then on
the two must agree but for what `DIFFERS` names with its reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.cuda_table import CASES
from tests.fakes.cuda import CudaEnv

HERE = Path(__file__).parent
SIMULATED, HARDWARE = HERE / "cuda_simulated.json", HERE / "cuda_hardware.json"
# Facts in which the simulator cannot follow a GPU: "case.fact" → why that does no harm.
DIFFERS: dict[str, str] = {}


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads(path.read_text())["table"])


@pytest.mark.parametrize("case", CASES)
def test_the_driver_does_what_was_recorded(case: str, cuda_env: CudaEnv) -> None:
    path = SIMULATED if cuda_env.simulated or not HARDWARE.exists() else HARDWARE
    result = cuda_env.run("-m", "tests.conformance.cuda_table", case)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[case] == recorded(path)[case]


def test_the_simulator_is_held_to_hardware_or_says_that_it_is_not() -> None:
    document = json.loads(SIMULATED.read_text())
    assert "SIMULATED" in document["device"]
    assert set(document["table"]) == set(CASES)
    if not HARDWARE.exists():
        assert document["hardware"] == "unverified on hardware"
        return
    measured = recorded(HARDWARE)
    for case, facts in document["table"].items():
        for fact, value in facts.items():
            assert value == measured[case][fact] or f"{case}.{fact}" in DIFFERS
