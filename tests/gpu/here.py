"""Where the steps of check.sh run: on this machine's driver, or with --simulated on tests/cusim.

A step that cannot run prints why and ends with SKIPPED.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from tests.fakes.cuda import ROOT, CudaEnv

SKIPPED = 77
LIBRARY = os.environ.get("GPU_CHECK_LIBRARY", "")  # of the simulator; "": the machine's own driver
SIMULATED = bool(LIBRARY)


def environment(**settings: object) -> CudaEnv:
    """Of the processes of a step. `settings`: of the simulator, which the machine's driver does not read."""
    library = Path(LIBRARY) if LIBRARY else None
    made = CudaEnv(simulated=SIMULATED, library=library, directory=Path(tempfile.mkdtemp()))
    return made.with_settings(**settings) if SIMULATED else made


def skip(why: str) -> NoReturn:
    print(f"SKIPPED: {why}")
    raise SystemExit(SKIPPED)


@contextlib.contextmanager
def broker(env: CudaEnv, write: Callable[[Path], None]) -> Iterator[Any]:
    """A real one, on the repository that `write` fills; says why if that cannot be."""
    try:
        from tests.fakes.broker import Broker
    except ImportError as error:
        skip(f"a broker needs what is not here ({error}): bring wheels, see packages.py")
    from broker.repository.requirements import check_requirements
    from shm.errors import InferError

    try:
        check_requirements()
    except InferError as error:
        skip(error.message)
    with tempfile.TemporaryDirectory() as directory:
        repository, run = Path(directory, "repository"), Path(directory, "run")
        repository.mkdir()
        run.mkdir(mode=0o700)
        write(repository)
        started = Broker(
            repository,
            run,
            "--exit-on-error=false",
            before=lambda: os.environ.update(env.environ, PYTHONPATH=str(ROOT)),
        )
        with started as running:
            yield running.ready()


def report(target: str, figures: Mapping[str, Any]) -> None:
    """To the file, and to the log."""
    text = json.dumps({"simulated": SIMULATED, **figures}, indent=1)
    Path(target).write_text(text + "\n")
    print(text)
