"""`tensorbroker status` and `check`: what the command line can tell without serving. `explain`: `broker.explanation`.

`status` asks the running broker over a session of its own; `check` runs the loader process.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from broker.gpus import Gpus
from broker.repository.check import check
from broker.repository.config import LoadFailure, ModelConfig
from broker.repository.ensemble_advice import advice
from broker.repository.ensembles import as_decoupled
from broker.repository.protocol import LoadRequest
from broker.repository.scan import misplaced
from broker.tables import ascii_table, printable
from shm import sockets
from shm.errors import InferError, ProtocolError
from shm.gateway_messages import Config, GetConfig
from shm.messages import (
    PROTOCOL,
    Failure,
    GetStatus,
    Goodbye,
    Hello,
    Large,
    Message,
    Reply,
    Starting,
    Status,
    Welcome,
    decode_reply,
    encode,
)
from shm.run_directory import SOCKET

TIMEOUT_S = 10.0
REGIONS = 10  # of one session that `status` shows one by one

T = TypeVar("T", bound=Message)


class NoAnswer(Exception):
    """The broker did not give what was asked for; the text is what the user is told."""


# --- status -------------------------------------------------------------------------------------------------------


def status(directory: str, *, as_json: bool) -> int:
    """Print the status of the broker in `directory`. Returns 0, or 1 when none is running there or it starts."""
    try:
        document = ask_status(directory)
    except NoAnswer as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(document, indent=2) if as_json else human(document))
    return 0


def ask_status(directory: str) -> dict[str, Any]:
    """The status document. Raises NoAnswer."""
    return _ask_broker("status", directory, GetStatus(id=2), Status).status


def ask_config(directory: str, model: str) -> Config:
    """What the broker in `directory` serves of the model, as a whole. Raises NoAnswer."""
    return _ask_broker("explain", directory, GetConfig(id=2, model=model, whole=True), Config)


def _ask_broker(command: str, directory: str, request: Message, expected: type[T]) -> T:
    with sockets.seqpacket() as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            with sockets.address(os.path.join(directory, SOCKET)) as address:
                connection.connect(address)
        except OSError as error:
            raise NoAnswer(f"no broker is running in {directory} ({error.strerror})") from error
        try:
            _ask(connection, Hello(id=1, protocol=PROTOCOL, library=f"tensorbroker {command}"), Welcome)
            return _ask(connection, request, expected)
        except (OSError, ProtocolError) as error:
            raise NoAnswer(f"the broker in {directory} does not answer: {error}") from error


def _ask(connection: socket.socket, request: Message, expected: type[T]) -> T:
    deadline = time.monotonic() + TIMEOUT_S
    connection.sendall(encode(request))
    while True:
        reply = _receive(connection, deadline)
        if isinstance(reply, expected):
            return reply
        match reply:
            case Starting():
                waits_for = f"; {reply.waits_for}" if reply.waits_for else ""
                raise NoAnswer(f"starting: {reply.done} of {reply.total} models{waits_for}")
            case Failure():
                raise NoAnswer(f"{reply.code}: {reply.message}")
            case Goodbye():
                raise NoAnswer(f"the broker hung up: {reply.reason}")


def _receive(connection: socket.socket, deadline: float) -> Reply:
    # `sockets.receive` never waits, so wait here: for readability, then take what there is.
    if not select.select([connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise NoAnswer(f"no answer for {TIMEOUT_S:.0f} s")
    datagram = sockets.receive(connection)
    if datagram is None:
        raise NoAnswer("the broker hung up")
    data, fds = datagram
    try:
        reply = decode_reply(data)
        if isinstance(reply, Large) and fds:
            reply = decode_reply(os.pread(fds[0], reply.byte_size, 0))
        return reply
    finally:
        sockets.close_all(fds)


def human(document: dict[str, Any]) -> str:
    """The document as tables."""
    broker, quotas, counters = document["broker"], document["quotas"], document["counters"]
    lines = [
        f"tensorbroker {broker['version']}, pid {broker['pid']}, up {broker['uptime_s']:.0f} s, in "
        f"{broker['directory']}",
        f"memory {quotas['memory_used']} of {quotas['memory_limit']} bytes, regions {quotas['regions']}, "
        f"sessions {quotas['sessions']} of {quotas['sessions_limit']}, refused {counters['sessions_refused']}, "
        f"protocol errors {counters['protocol_errors']}",
        *_about_gpus(document.get("cuda", {})),
    ]
    for title, columns in _TABLES.items():
        rows = document.get(title)  # a broker of an older version has fewer
        if rows:
            header = [title[:-1], *(name.removesuffix("_bytes") if name in _IN_MIB else name for name in columns[1:])]
            shown = _shortened(rows) if title == "regions" else rows
            lines += ["", ascii_table(header, ([_cell(row, name) for name in columns] for row in shown))]
    return "\n".join(lines)


def _about_gpus(cuda: dict[str, Any]) -> list[str]:
    gpus = cuda.get("gpus", [])
    lines = [f"GPU {gpu['ordinal']}: {gpu['name']}, {gpu['uuid']}, {gpu['total_memory']} bytes" for gpu in gpus]
    return lines or ([f"no GPU: {cuda['reason']}"] if cuda.get("reason") else [])


def _shortened(regions: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Session by session; of one that has many the first ones, and how many more there are."""
    by_session: dict[object, list[dict[str, Any]]] = {}
    for region in regions:
        by_session.setdefault(region.get("session"), []).append(region)
    for session, held in by_session.items():
        yield from held[:REGIONS]
        if more := held[REGIONS:]:
            total = sum(region.get("byte_size", 0) for region in more)
            yield {"name": f"… and {len(more)} more, {_mib(total)}", "session": session}


_IN_MIB = ("memory_bytes",)
_TABLES = {
    "workers": (
        "key",
        "state",
        "pid",
        "memory_bytes",
        "restarts",
        "in_flight",
        "requests",
        "lost_wakeups",
        "last_death",
    ),
    "gateways": ("index", "state", "pid", "restarts", "hangs"),
    "models": ("name", "version", "state", "pending", "success", "fail", "workers", "reason"),
    "sessions": ("id", "pid", "uid", "regions", "region_bytes", "channels", "plans"),
    "regions": ("name", "kind", "byte_size", "generation", "session", "owner_pid", "state"),
}


def _cell(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if name == "last_death" and value and "last_death_age_s" in row:  # a broker of an older version does not say
        return f"{value}, {row['last_death_age_s']:.0f} s ago"
    if name == "state" and row.get("silent_s"):  # of a worker
        return f"{value}, but silent for {row['silent_s']:.0f} s"
    if name in _IN_MIB and value is not None:
        return _mib(value)
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)


def _mib(byte_size: int) -> str:
    return f"{byte_size / (1 << 20):.{0 if byte_size >= 10 << 20 else 1}f} MiB"


# --- check --------------------------------------------------------------------------------------------


def check_repositories(repositories: Sequence[str], *, strict: bool, config_name: str = "") -> int:
    """Configure every model, serve none; print Triton's table and what was noted. Returns 1 if one fails."""
    try:
        results = check(repositories, strict=strict, config_name=config_name, on=with_gpus)
    except InferError as error:
        print(printable(error.message), file=sys.stderr)
        return 1
    rows: list[tuple[str, str, str]] = []
    notes: list[str] = []
    for result in map(_with_members(results, config_name), results):
        if isinstance(result, LoadFailure):
            rows += _failed(result)
        else:
            served = [(result.name, str(version), "OK") for version in result.versions]
            rows += served or [(result.name, "-", "Not loaded: No model version was found")]
            notes += [f"{result.name}: {note}" for note in result.notes]
    print(ascii_table(("Model", "Version", "Status"), rows))
    for note in (*notes, *filter(None, map(misplaced, repositories))):
        print(printable(note))
    return 0 if rows and all(status == "OK" for _, _, status in rows) else 1


def _failed(failure: LoadFailure) -> list[tuple[str, str, str]]:
    """Rows of the table; what else is wrong is in the last one."""
    reasons = {str(version): reason for version, reason in failure.by_version().items()} or {"-": failure.reason}
    *rows, (name, version, last) = [(failure.name, key, f"UNAVAILABLE: {reason}") for key, reason in reasons.items()]
    return [*rows, (name, version, "\nalso: ".join((last, *failure.further)))]


def with_gpus(request: LoadRequest) -> LoadRequest:
    """`request` with the GPUs of this machine, for a loader."""
    return asyncio.run(Gpus().known_to(request))


def _with_members(
    results: Sequence[ModelConfig | LoadFailure], config_name: str
) -> Callable[[ModelConfig | LoadFailure], ModelConfig | LoadFailure]:
    """Of an ensemble that does not fit its members it makes a failure that says why, else what they make of it."""
    configs = {result.name: result for result in results if isinstance(result, ModelConfig)}
    failures = {result.name: result.reason for result in results if isinstance(result, LoadFailure)}

    def checked(result: ModelConfig | LoadFailure) -> ModelConfig | LoadFailure:
        if isinstance(result, LoadFailure) or result.ensemble is None:
            return result
        problem = advice(result, configs, failures, {*configs, *failures}, config_name)
        return LoadFailure(name=result.name, reason=problem) if problem else as_decoupled(result, configs)

    return checked
