"""Configure the models of repositories without serving them: what `tensorbroker check DIR` prints.

Blocking counterpart of what the broker does with the same process and the same `LoadRun`; parses nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from broker.repository.config import LoadFailure, ModelConfig
from broker.repository.protocol import LoadRequest, LoadRun, encode_request
from broker.repository.requirements import check_requirements
from shm.errors import Code, InferError

LOADER_COMMAND = (sys.executable, "-P", "-m", "broker.repository.loader")  # -P: never import from the working directory
SILENCE_S = 120.0  # without a message for this long a parser hangs: the largest models take seconds
EXIT_S = 10.0
_CHUNK = 1 << 16


def check(
    repositories: Sequence[str],
    *,
    models: Sequence[str] = (),
    strict: bool = False,
    config_name: str = "",
    overrides: Mapping[str, str] = MappingProxyType({}),
    explain: bool = False,
    on: Callable[[LoadRequest], LoadRequest] | None = None,
    command: Sequence[str] = LOADER_COMMAND,
    silence_s: float = SILENCE_S,
) -> list[ModelConfig | LoadFailure]:
    """The outcome per model (`models` empty: all), in name order; `strict` to `explain` as in `LoadRequest`.
    `on`: puts the GPUs of this machine into the request. Failures have all their reasons.
    An unreadable repository fails under its own path.

    A loader (`command`) that dies, or says nothing for `silence_s`, costs the model it was reading; the rest goes to
    a new one. Raises InferError when the loader cannot run at all.
    """
    check_requirements()
    request = LoadRequest(
        repositories=tuple(repositories),
        models=tuple(models),
        strict=strict,
        config_name=config_name,
        overrides=dict(overrides),
        explain=explain,
        every=True,
    )
    request = request if on is None else on(request)
    results: dict[str, ModelConfig | LoadFailure] = {}
    while True:
        run, how = _run(request, command, silence_s)
        if run.plan is None:
            raise InferError(Code.INTERNAL, f"the loader process {how} before it had listed the models")
        for repository, reason in run.plan.errors.items():
            results[repository] = LoadFailure(name=repository, reason=reason)
        rest = run.ended(how)
        results.update(run.results)
        if not rest:
            return [results[name] for name in sorted(results)]
        request = replace(request, models=rest)


def describe_exit(status: int) -> str:
    """How a process ended, for `LoadRun.ended`; `status` as `Popen.returncode` has it."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _run(request: LoadRequest, command: Sequence[str], silence_s: float) -> tuple[LoadRun, str]:
    """One loader process from start to end, and how it ended."""
    run = LoadRun()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # A loader that died at once has closed the pipe: its exit status says more than that.
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(encode_request(request))
            problem = _receive(run, process.stdout.fileno(), silence_s)
            if not problem:
                # The stream has ended, so it is on its way out: let it end with its own status.
                process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            problem = f"closed its output and did not exit within {EXIT_S:.0f} s"
        finally:
            process.kill()  # does nothing to a process that was waited for
        process.wait()
    return run, problem or describe_exit(process.returncode)


def _receive(run: LoadRun, descriptor: int, silence_s: float) -> str:
    """Read until the end of the stream. Returns why reading stopped early, or ""."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not run.finished:
            if not selector.select(silence_s):
                return f"wrote nothing for {silence_s:g} s"
            data = os.read(descriptor, _CHUNK)
            if not data:
                return ""
            try:
                run.feed(data)
            except InferError as error:
                return f"failed: {error.message}"
    return ""
