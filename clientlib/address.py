"""Where is the broker? URLs and environment to a run directory or a server behind a wire, or an error that helps.

Called by both clients when they connect. Says nothing over the socket.
"""

from __future__ import annotations

import os
import re
import socket
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

from clientlib.arguments import shown
from shm import sockets
from shm.errors import Code, InferError
from shm.run_directory import SOCKET, default_directory

_PLAIN = re.compile(r"[!-~]+")
_WIRES = ("grpc", "grpcs", "http", "https", "zmq+ipc")
MAX_HEADERS = 16  # as many as a ZeroMQ greeting has room for
_HEADER_NAME = re.compile(r"(?!.*-bin$)[a-z0-9_.-]{1,256}")  # gRPC's rule; values of names in -bin would be bytes
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]{0,4094}[!-~])?")
_OWN_HEADERS = (
    *("accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host", "te"),
    *("inference-header-content-length", "tensorbroker-details", "trailer", "transfer-encoding", "upgrade"),
    "user-agent",
)


@final
@dataclass(frozen=True, slots=True)
class Address:
    """A server behind a wire. `url` is for messages; `path` is http's prefix, or zmq+ipc's run directory.

    `headers`: sent with every request, for the server's restricted APIs; names in lower case. Their values are secret.
    """

    url: str
    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def secure(self) -> bool:
        """Is the connection encrypted?"""
        return self.scheme in ("grpcs", "https")

    @property
    def target(self) -> str:
        """host:port, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def wire_of(url: object) -> Address | None:
    """The server that `url` names, None when it names a run directory (or nothing that is known).

    Raises InferError for a URL of a wire that is not complete.
    """
    if not isinstance(url, str):
        return None
    scheme, separator, rest = url.partition("://")
    if not separator or not scheme.startswith(("grpc", "http", "zmq")):
        return None
    if scheme == "zmq+ipc" and rest.startswith("/") and "\0" not in rest:
        return Address(f"{scheme}://{rest}", scheme, path=os.path.normpath(rest))
    if scheme in ("zmq+ipc", "zmq+tcp"):
        raise InferError(
            Code.UNSUPPORTED if scheme == "zmq+tcp" else Code.INVALID_ARG,
            f"cannot connect to {shown(url)}: ZeroMQ reaches a broker on this host by its run directory, as "
            "'zmq+ipc:///run/directory'; grpc:// and http:// reach others",
        )
    if scheme not in _WIRES:
        return None
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    path = parts.path.rstrip("/") if host else ""
    whole = host and port and parts.username is None and not parts.query and not parts.fragment
    if not whole or not _PLAIN.fullmatch(url) or (path and not scheme.startswith("http")):
        form = "'grpc://host:8001'" if scheme.startswith("grpc") else "'http://host:8000'"
        raise InferError(
            Code.INVALID_ARG,
            f"cannot connect to {shown(url)}: expected host and port, as in {form.replace(scheme[:4], scheme)}",
        )
    assert host is not None
    assert port is not None
    return Address(f"{scheme}://{parts.netloc}{path}", scheme, host, port, path)


def with_headers(address: Address | None, headers: Mapping[str, str] | None) -> Address | None:
    """`address` with headers for every request. None: a run directory, where nothing is restricted.

    Raises InferError INVALID_ARG for what cannot be sent; no value is shown.
    """
    if not headers:
        return address
    if not isinstance(headers, Mapping) or len(headers) > MAX_HEADERS:
        raise InferError(Code.INVALID_ARG, f"headers must map at most {MAX_HEADERS} names to values")
    if address is None:
        raise InferError(
            Code.INVALID_ARG,
            "headers are for grpc://, http:// and zmq+ipc://: leave them out, nothing is restricted for a client that "
            "names the broker's run directory",
        )
    found = {}
    for name, value in headers.items():
        lower = name.lower() if isinstance(name, str) else ""
        if not _HEADER_NAME.fullmatch(lower) or lower in _OWN_HEADERS or lower.startswith("grpc-"):
            raise InferError(
                Code.INVALID_ARG,
                f"headers: {shown(name)} cannot be sent: a name has 1 to 256 letters, digits, _ . -, does not end in "
                "-bin, and is none that the client or its wire sends itself",
            )
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise InferError(
                Code.INVALID_ARG,
                f"headers: the value of {shown(name)} must be a string of 1 to 4096 printable ASCII characters, "
                "without spaces around it",
            )
        found[lower] = value
    return replace(address, headers=tuple(found.items()))


def directory_of(url: str | os.PathLike[str] | None) -> str:
    """The run directory that `url` names; None is the default one. Raises InferError for other kinds of URL."""
    if url is None:
        return default_directory()
    place = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(place, str) or "\0" in place:
        raise _unknown(url)
    scheme, separator, rest = place.partition("://")
    if separator and scheme == "ipc" and rest.startswith("/"):
        return os.path.normpath(rest)
    if not separator and (place.startswith(("/", "./", "../")) or (place and isinstance(url, os.PathLike))):
        return os.path.abspath(place)
    raise _unknown(url)


def _unknown(url: object) -> InferError:
    return InferError(
        Code.INVALID_ARG,
        f"cannot connect to {shown(url)}: expected the run directory of a broker (what it was given as --directory) as "
        "'/run/directory', as a pathlib.Path or as 'ipc:///run/directory'; a server as 'grpc://host:8001', "
        "'http://host:8000' or 'zmq+ipc:///run/directory'; or nothing for the default one",
    )


@final
class Absent(Exception):
    """Nobody answers there; `error` is what to tell the user when it is not worth waiting."""

    def __init__(self, error: InferError) -> None:
        super().__init__(error.message)
        self.error = error


def dial(directory: str) -> socket.socket | None:
    """A socket connected to the broker of `directory`; None when its backlog is full: try again soon.

    Raises Absent when no broker listens there, InferError when it may not be asked.
    """
    path = os.path.join(directory, SOCKET)
    sock = sockets.seqpacket()
    try:
        with sockets.address(path) as address:
            sock.connect(address)
        if directory == default_directory():
            _check_owner(sock, path)
    except BlockingIOError:
        sock.close()
        return None
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        sock.close()
        raise Absent(
            InferError(
                Code.UNAVAILABLE,
                f"no broker at {path} ({error.strerror}): start one with 'tensorbroker serve --model-repository DIR "
                f"--directory {directory}', or name its run directory by TENSORBROKER_DIR or connect('ipc://…')",
            )
        ) from None
    except OSError as error:
        sock.close()
        raise InferError(
            Code.UNAVAILABLE,
            f"cannot connect to the broker at {path}: {error.strerror} (this process is uid {os.getuid()})",
        ) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _check_owner(sock: socket.socket, path: str) -> None:
    # Anyone can make a directory of that name below the temporary one and wait for our memory there.
    if "TENSORBROKER_DIR" in os.environ or "XDG_RUNTIME_DIR" in os.environ:
        return
    _, uid, _ = sockets.peer_credentials(sock)
    if uid not in (0, os.getuid()):
        raise InferError(
            Code.UNAVAILABLE,
            f"the broker at {path} runs as uid {uid}, this process as uid {os.getuid()}: name its directory by "
            "TENSORBROKER_DIR if you mean that one",
        )
