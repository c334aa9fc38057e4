"""The one access policy: Triton's restricted APIs, for every front end and every way a request can be spelled.

A front end knows the category of a request by the handler that will answer it, never by how its path is spelled, and
asks `Service.check`, which is `Access.check`, before it looks at anything else of it. Settings: --http-restricted-api
and --grpc-restricted-protocol.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import final, get_args

from broker.gateway.kserve import Caller, Category, Transport
from shm.errors import Code, InferError

CATEGORIES: tuple[Category, ...] = get_args(Category)
Rules = Mapping[str, tuple[str, str]]  # category → header, value


@final
class Restricted(InferError):
    """The request lacks the header that the server's operator asks for. HTTP answers 403, gRPC UNAVAILABLE."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message,))


@final
class Access:
    """What each front end may be asked without a word. Rules have header names in lower case, gRPC's with prefix.

    ZeroMQ has no flag of its own: a category that either flag restricts is restricted there too, and a message carries
    the header that HTTP would (else gRPC's) in its own headers.
    """

    def __init__(self, http: Rules, grpc: Rules) -> None:
        self._rules: Mapping[Transport, Rules] = {"http": http, "grpc": grpc, "zmq": {**grpc, **http}}

    def check(self, category: Category, caller: Caller) -> None:
        """Raises Restricted."""
        rule = self._rules[caller.transport].get(category)
        if rule is None:
            return
        header, value = rule
        came = caller.headers.get(header)
        if came is None or not hmac.compare_digest(came.encode(errors="surrogateescape"), value.encode()):
            what = "protocol" if caller.transport == "grpc" else "API"
            raise Restricted(f"This {what} is restricted, expecting header '{header}'")
