"""A gateway process that lends its session to the test, and the broker that starts such ones.

`python -m tests.fakes.lender serve …` is `tensorbroker serve` whose gateway is this module: the first one says by
itself that it serves, each later one passes its session to whoever listens on `lend.sock` in the run directory, and
ends with the connection. `Lending` is the test's side.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from tests.fakes.broker import LIMIT_S, Broker

SOCKET = "lend.sock"


class Lending(Broker):
    """A broker without front ends; `session()` is a gateway's session, one at a time."""

    module = "tests.fakes.lender"

    def __init__(self, repository: Path, directory: Path, *flags: str) -> None:
        self.repository = repository
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(directory / SOCKET))
        self._listener.listen(8)
        self._listener.settimeout(LIMIT_S)
        off = ("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false")
        super().__init__(repository, directory, "--gateways=1", *off, *flags)

    def ready(self) -> Lending:
        super().ready()
        self._listener.accept()[0].close()  # the first one, which has served enough
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.close()
        super().__exit__(*exception)

    @contextlib.contextmanager
    def session(self) -> Iterator[socket.socket]:
        """A fresh session; it, and the gateway process that it belongs to, end with the block."""
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(LIMIT_S)
            _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(4))
            (fd,) = array.array("i", ancillary[0][2])
            with socket.socket(fileno=fd) as session:
                yield session


def lend(fd: int, options: dict[str, Any]) -> None:
    """The life of one gateway process."""
    session = socket.socket(fileno=fd)
    session.setblocking(True)
    borrower = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):
        borrower.connect(f"{options['directory']}/{SOCKET}")
        mark = Path(options["directory"]) / "lent"
        if not mark.exists():
            mark.touch()
            session.sendall(msgpack.packb({"type": "Hello", "id": 1, "protocol": 1}))
            while msgpack.unpackb(session.recv(65536))["type"] != "Welcome":
                pass
            session.sendall(msgpack.packb({"type": "Serving", "id": 2, "lines": ["Started nothing"]}))
        else:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            borrower.sendmsg([b"s"], ancillary)
            session.close()
        borrower.recv(1)


def main() -> int:
    """A gateway's arguments are two descriptors; the broker's are those of `tensorbroker`."""
    if sys.argv[1].isdigit():
        lend(int(sys.argv[1]), json.load(sys.stdin))
        return 0
    from broker.__main__ import main as command
    from broker.gateways import Gateways

    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # gateways do not look into the current directory
    Gateways.__init__.__kwdefaults__["entry"] = "tests.fakes.lender"
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
