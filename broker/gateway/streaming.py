"""The responses to one request as they come: of decoupled models any number of them, of others one.

Implements `broker.gateway.kserve.Responses`. Made by `broker.gateway.inference`, which knows plans and regions; what
is here knows only when a request begins, when it has ended, and that an error is a response too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, Self, final

from broker.gateway.answers import is_gone, told_in_stream
from broker.gateway.kserve import InferRequest, InferResponse
from broker.gateway.lasting import Holder, Lasting
from broker.gateway.regions import Alias
from clientlib.results import InferResult
from shm.errors import InferError


class Results(Protocol):
    """What the client library gives for a request of a decoupled model.

    `final`: nothing follows the result, or the error, that came last. `unread_bytes`: of results nobody has taken.
    """

    @property
    def final(self) -> bool:
        """See the class."""

    @property
    def unread_bytes(self) -> int:
        """See the class."""

    async def __anext__(self) -> InferResult:
        """The next one; raises InferError for a response that is an error, after which others may come."""

    def close(self) -> None:
        """Cancel what still runs. Again: nothing."""


class Run(NamedTuple):
    """A request that was submitted: its `aliases` are those of regions that errors may name; `failed` is told of each
    response that is an error.
    """

    results: Results
    aliases: Sequence[Alias]
    deliver: Callable[[InferResult], Awaitable[InferResponse]]
    failed: Callable[[InferError], None]


class Begin(Protocol):
    """Submits the request; `anew`: once more, since what it named was gone. Raises InferError as callers see it."""

    async def __call__(self, *, anew: bool) -> Run:
        """See the class."""


class ResponseStream:
    """What both kinds have in common. `on_end` is called once, with whether anything went wrong."""

    decoupled = False

    def __init__(self, request: InferRequest) -> None:
        self._request = request
        self._failed = False
        self._ended = False
        self._version = ""  # of the model, as the responses say
        self.on_end: Callable[[bool], None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferResponse:
        if self._ended:
            raise StopAsyncIteration
        try:
            response = await self._next()
        except StopAsyncIteration:
            self._end()
            raise
        self._request.inputs = []  # it runs: they were copied to where the model reads them
        self._version = response.version
        if self._request.trace is not None:
            self._request.trace.mark("INFER_RESPONSE_COMPLETE")
        self._failed = self._failed or response.error is not None
        if response.final:
            self._end()
        return response

    async def aclose(self) -> None:
        """Cancel what still runs."""
        if not self._ended:
            self._failed = True
            self._end()

    async def _next(self) -> InferResponse:
        """One response; raises StopAsyncIteration at an end without one, and never InferError."""
        raise NotImplementedError

    def _end(self) -> None:
        self._ended = True
        if (trace := self._request.trace) is not None:
            trace.ended(self._version)
            trace.write()
        if self.on_end is not None:
            self.on_end(self._failed)

    def _error(self, error: InferError, *, final: bool) -> InferResponse:
        request = self._request
        return InferResponse(request.model, request.version, request.id, [], final=final, error=error)


@final
class OneResponse(ResponseStream):
    """Of a model with one response to each request; `run` makes it."""

    def __init__(self, request: InferRequest, run: Callable[[], Awaitable[InferResponse]]) -> None:
        super().__init__(request)
        self._run = run

    async def _next(self) -> InferResponse:
        try:
            return await self._run()
        except InferError as error:
            return self._error(error, final=True)


@final
class AnyResponses(ResponseStream):
    """Of a decoupled model. A request that has had no response may begin anew when its plan was gone."""

    decoupled = True

    def __init__(self, request: InferRequest, begin: Begin, lasting: Lasting, holder: Holder) -> None:
        super().__init__(request)
        self.holder = holder
        self._begin = begin
        self._lasting = lasting
        self._run: Run | None = None
        self._settled = False  # it has had a response, or has begun anew
        self._cut: InferError | None = None

    @property
    def unread_bytes(self) -> int:
        """Of the responses that wait for whoever takes them from here."""
        return 0 if self._run is None else self._run.results.unread_bytes

    def cut(self, error: InferError) -> None:
        """Cancel it and drop what waits; whoever comes for the next response gets `error`."""
        self._cut = error
        self._close()

    async def aclose(self) -> None:
        """Cancel what still runs."""
        await super().aclose()
        self._close()

    async def _next(self) -> InferResponse:
        if self._run is None:
            try:
                await self._lasting.enter(self)
                if (trace := self._request.trace) is not None:
                    trace.submitted()
                self._run = await self._begin(anew=False)
            except InferError as error:
                return self._error(error, final=True)
        return await self._of(self._run)

    async def _of(self, run: Run) -> InferResponse:
        try:
            result = await anext(run.results)
            self._settled = True
            response = await run.deliver(result)
        except StopAsyncIteration:
            if self._cut is not None:
                return self._error(self._cut, final=True)
            raise
        except InferError as error:
            final = run.results.final
            if final and not self._settled and is_gone(error):
                return await self._anew(run)
            self._settled = True
            run.failed(error)
            return self._error(told_in_stream(error, self._request, run.aliases), final=final)
        response.final = run.results.final
        return response

    async def _anew(self, run: Run) -> InferResponse:
        run.results.close()
        self._settled = True
        try:
            run = self._run = await self._begin(anew=True)
        except InferError as error:
            return self._error(error, final=True)
        return await self._of(run)

    def _end(self) -> None:
        self._lasting.leave(self)
        super()._end()

    def _close(self) -> None:
        if self._run is not None:
            self._run.results.close()
