"""Entry point of the loader process: `python -m broker.repository.loader`.

Started by the broker with a `LoadRequest` on stdin; answers on stdout as `broker.repository.protocol` says, logs to
stderr, exits 0 when `Finished` was written.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import BinaryIO

from msgspec.structs import replace

from broker.repository.config import LoadFailure
from broker.repository.protocol import (
    MAX_REQUEST,
    Begun,
    Failed,
    Finished,
    Loaded,
    LoadRequest,
    Plan,
    decode_request,
    frame,
)
from broker.repository.scan import Repositories, scan
from shm.errors import InferError

_log = logging.getLogger("tensorbroker.loader")


def _answer(request: LoadRequest, out: BinaryIO) -> None:
    # protobuf and onnx take a quarter of a second, and may print: only now, with stdout out of their reach.
    from broker.repository.loader.load import load

    found = scan(request.repositories)
    names = request.models or tuple(sorted({*found.models, *found.failures}))
    out.write(frame(Plan(models=names, errors=found.errors)))
    for name in names:
        out.write(frame(Begun(name=name)))
        result = _refusal(name, found, request.repositories) or load(found.models[name], request)
        if isinstance(result, LoadFailure):
            if request.every and name in found.models:
                from broker.repository.loader.further import further

                result = replace(result, further=further(found.models[name], request, result))
            out.write(frame(Failed(failure=result)))
        else:
            out.write(frame(Loaded(config=result)))
    out.write(frame(Finished()))


def _refusal(name: str, found: Repositories, repositories: Sequence[str]) -> LoadFailure | None:
    if name in found.failures:
        return LoadFailure(name=name, reason=found.failures[name])
    if name not in found.models:
        looked_for = " or ".join(os.path.join(repository, name) for repository in repositories)
        polled = f"failed to load '{name}', failed to poll from model repository"
        return LoadFailure(name=name, reason=f"{polled}: there is no directory {looked_for}")
    return None


def main() -> int:
    """Serve one request. Status 2: the request could not be read."""
    # A library that prints must not damage the stream: descriptor 1 becomes stderr before any of them is imported.
    stream = os.dup(1)
    os.dup2(2, 1)
    logging.basicConfig(stream=sys.stderr, format="loader: %(levelname)s: %(message)s")
    try:
        request = decode_request(sys.stdin.buffer.read(MAX_REQUEST + 1))
    except InferError as error:
        _log.error("%s", error.message)
        return 2
    try:
        with open(stream, "wb", buffering=0) as out:
            _answer(request, out)
    except BrokenPipeError:
        return 1  # nobody wants the answer any more
    return 0


if __name__ == "__main__":
    sys.exit(main())
