"""What every test may use: the CUDA driver of --cuda (see tests/fakes/cuda.py). And --second-attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cusim.build import build, missing
from tests.fakes.cuda import STANDS_IN, CudaEnv
from tests.second_attempts import SecondAttempts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cuda", choices=("sim", "real"), default="sim", help="the driver of the CUDA tests: tests/cusim, or a GPU's"
    )
    parser.addoption(
        "--second-attempts", type=int, default=0, metavar="N", help="how many tests may have one in this run; printed"
    )


def pytest_configure(config: pytest.Config) -> None:
    if limit := config.getoption("--second-attempts"):
        config.pluginmanager.register(SecondAttempts(limit))


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--cuda") == "real":
        return "CUDA: the driver and the GPU of this machine"
    return f"CUDA: no tests of it: {missing()}" if missing() else f"CUDA: SIMULATED. {STANDS_IN}"


@pytest.fixture(scope="session")
def cuda_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The simulated driver's file, built once; None: the machine's own."""
    if request.config.getoption("--cuda") == "real":
        return None
    if missing():
        pytest.skip(f"the simulated CUDA driver cannot be used: {missing()}")
    return build(tmp_path_factory.mktemp("cusim"))


@pytest.fixture(scope="session")
def cuda_env(cuda_library: Path | None, tmp_path_factory: pytest.TempPathFactory) -> CudaEnv:
    """The environment of CUDA processes."""
    counts = tmp_path_factory.mktemp("cusim-calls")
    return CudaEnv(simulated=cuda_library is not None, library=cuda_library, directory=counts)


@pytest.fixture(scope="session")
def cuda_sim(cuda_env: CudaEnv) -> CudaEnv:
    """The same for what only a simulator can show: injected faults, several devices, counted calls."""
    if not cuda_env.simulated:
        pytest.skip("--cuda=real: this needs the simulated driver")
    return cuda_env
