"""`keep_loaded`: leases on models, which the broker does not unload while they are held.

Made by `Native` for the clients of the native transport. A lease has a number that the client chose, so that one whose
taking was not waited for to its end can be given back; it is taken again on every new session.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, final

from clientlib.arguments import model_text, version_text
from clientlib.session import Call, Procedure
from shm.errors import Code, ConnectionLost, InferError
from shm.lease_messages import KeepLoaded, LetGo

if TYPE_CHECKING:
    from clientlib.async_client import AsyncClient
    from clientlib.callable_model import AsyncModel, Model
    from clientlib.client import Client

Run = Callable[[Callable[[Any], Procedure[None]], float], None]
RunAsync = Callable[[Callable[[Any], Procedure[None]], float], Awaitable[None]]
LET_GO_S = 5.0  # for the broker to hear that a lease has ended; it also ends with the session
NOT_NATIVE = (
    "keep_loaded() is not available over this transport, whose protocol knows no leases: connect with ipc:// on the "
    "broker's host, or use load() and unload()"
)


@final
class Leases:
    """Those that one client holds, or is taking."""

    __slots__ = ("_held", "_numbers")

    def __init__(self) -> None:
        self._held: dict[int, KeepLoaded] = {}
        self._numbers = itertools.count(1)

    def new(self, model: str, version: str | int) -> int:
        """Its number. It is taken by `take`."""
        number = next(self._numbers)
        self._held[number] = KeepLoaded(lease=number, model=model_text(model), version=version_text(version))
        return number

    def take(self, number: int) -> Procedure[None]:
        """Returns when the model is loaded and kept. Raises InferError."""
        try:
            yield Call(self._held[number])
        except InferError as error:
            if not isinstance(error, ConnectionLost):
                self._held.pop(number, None)
            raise

    def attach(self) -> Procedure[None]:
        """Take them on a new session, which asking is enough for: whoever comes first need not wait for their loads.

        What is not there any more is found missing by whoever uses it.
        """
        for message in tuple(self._held.values()):
            try:
                yield Call(message)
            except ConnectionLost:
                raise
            except InferError:
                pass

    def let_go(self, number: int) -> Procedure[None]:
        """It has ended. A session that is lost took it along."""
        with contextlib.suppress(ConnectionLost):
            yield Call(LetGo(lease=number))

    def forget(self, number: int) -> None:
        """Do not take it again."""
        self._held.pop(number, None)


@contextlib.contextmanager
def kept(client: Client, run: Run, model: str, version: str | int, timeout: float) -> Iterator[Model]:
    """`Client.keep_loaded`; `run`: its own way to run a procedure within a time."""
    leases = client.native.leases
    number = leases.new(model, version)
    try:
        run(lambda link: leases.take(number), timeout)
        yield client.model(model, version)
    finally:
        leases.forget(number)
        with contextlib.suppress(InferError):
            if client.native.link is not None:
                run(lambda link: leases.let_go(number), LET_GO_S)


@contextlib.asynccontextmanager
async def kept_async(
    client: AsyncClient,
    run: RunAsync,
    model: str,
    version: str | int,
    timeout: float,  # noqa: ASYNC109  the client's own
) -> AsyncIterator[AsyncModel]:
    """The same on an event loop."""
    leases = client.native.leases
    number = leases.new(model, version)
    try:
        await run(lambda link: leases.take(number), timeout)
        yield await client.model(model, version)
    finally:
        leases.forget(number)
        with contextlib.suppress(InferError):
            if client.native.link is not None:
                await run(lambda link: leases.let_go(number), LET_GO_S)


def not_native() -> InferError:
    """For the clients of the other transports."""
    return InferError(Code.UNSUPPORTED, NOT_NATIVE)
