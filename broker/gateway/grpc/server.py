"""gRPC's front end: grpc's asyncio server with Triton's `inference.GRPCInferenceService` and `grpc.health.v1.Health`.

Used by the gateway process. Messages travel as bytes between grpc and the handlers here, so that what does not parse
ends as a status, and large tensors are not copied by protobuf. Methods are found by one generic handler: with
registered ones grpc waits on a future per method for every request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import grpc
from grpc import aio

from broker.gateway.grpc.arrivals import Arrivals
from broker.gateway.grpc.calls import CALLS, Call
from broker.gateway.grpc.codec import decode_request, encode_response, parse, takes_long
from broker.gateway.grpc.limits import MAX_RPCS, Budget, message_budget, server_options
from broker.gateway.grpc.stream import Stream
from broker.gateway.kserve import Caller, InferRequest, Responses, Service, check_answers_once
from broker.gateway.options import GatewayOptions, header_pattern
from broker.gateway.placed import DETAIL, Placed
from clientlib.details import asked
from shm.errors import Code, InferError, forget_frames

_log = logging.getLogger(__name__)

Identify = Callable[[str, Mapping[str, str]], Caller]
Unary = Callable[[bytes, Any], Coroutine[Any, Any, bytes]]

STATUS: Final = {
    "UNKNOWN": grpc.StatusCode.UNKNOWN,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "INVALID_ARG": grpc.StatusCode.INVALID_ARGUMENT,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "UNSUPPORTED": grpc.StatusCode.UNIMPLEMENTED,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "CANCELLED": grpc.StatusCode.CANCELLED,
    "RESOURCE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,  # no code of Triton's: `grpc.limits.Budget`
}
MAX_DETAILS: Final = 2048  # bytes of an error's text: clients refuse trailers of more than 8 KiB, percent-encoded

# Responses of fewer bytes are not followed until they are sent: MAX_RPCS bounds them.
_FOLLOWED = 64 << 10
_RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
_EXITING = "GRPC server is shutting down and has stopped accepting new requests."
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"  # grpc.health.v1.HealthCheckResponse{status}


class GrpcServer:
    """The listener. `identify(peer, metadata)` says who asks: `peer` as grpc writes it ("ipv4:127.0.0.1:4711",
    "unix:"), `metadata` of the request with text values, names in lower case.
    """

    def __init__(self, service: Service, options: GatewayOptions, identify: Identify) -> None:
        self._service = service
        self._options = options
        self._identify = identify
        self._forward = header_pattern(options.grpc_header_forward_pattern or r"(?!)")
        self.budget: Budget = message_budget()
        self.arrivals = Arrivals(options.grpc_port)
        self._server: aio.Server | None = None
        # One: more would not be faster, and each may need several times the memory of its message.
        self._decoder = ThreadPoolExecutor(1, "grpc-decode")

    async def start(self) -> list[str]:
        """Listen; what to log, one line per address. Raises InferError when an address cannot be had."""
        if not self._options.grpc_port:
            return []
        logging.getLogger("grpc").setLevel(logging.WARNING)  # below that, it logs every RPC
        credentials = self._credentials()
        server = aio.server(
            options=server_options(self._options, self.budget),
            maximum_concurrent_rpcs=MAX_RPCS,
        )
        server.add_generic_rpc_handlers((self._inference_handler(), self._health_handler()))
        addresses = []
        try:
            addresses.append(self._listen_tcp(server, credentials))
            if self._options.index == 0 and self._options.directory:
                addresses.append(self._listen_unix(server))
        except InferError:
            await server.start()  # a server that was never started keeps the ports that it has
            await server.stop(None)
            raise
        await server.start()
        self._server = server
        self.arrivals.start()
        return [f"Started GRPCInferenceService at {address}" for address in addresses]

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more; what still runs after `grace_s` seconds is cancelled."""
        self.arrivals.stop()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)
        self._decoder.shutdown(wait=False, cancel_futures=True)

    # --- addresses ---------------------------------------------------------------------------------------------

    def _credentials(self) -> Any:
        certificate, key, root = self._options.grpc_ssl
        if not certificate:
            return None
        return grpc.ssl_server_credentials(
            [(_read(key), _read(certificate))], _read(root) if root else None, require_client_auth=bool(root)
        )

    def _listen_tcp(self, server: Any, credentials: Any) -> str:
        host = self._options.grpc_address
        address = f"[{host}]:{self._options.grpc_port}" if ":" in host else f"{host}:{self._options.grpc_port}"
        try:
            if credentials is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, credentials)
        except RuntimeError:
            raise InferError(Code.UNAVAILABLE, f"Socket '{address}' already in use ") from None
        return address

    def _listen_unix(self, server: Any) -> str:
        """Mode 0600 from the start: gRPC has no peer credentials, so whoever connects is the broker's uid."""
        path = Path(self._options.directory, "grpc.sock")
        mask = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix:{quote(str(path))}")
        except RuntimeError:
            raise InferError(
                Code.UNAVAILABLE, f"cannot listen at 'unix:{path}': it is no socket, or longer than 107 bytes"
            ) from None
        finally:
            os.umask(mask)
        return f"unix:{path}"

    # --- handlers ----------------------------------------------------------------------------------------------

    def _inference_handler(self) -> Any:
        handlers = {name: _unary(self._answering(call)) for name, call in CALLS.items()}
        handlers["ModelInfer"] = _unary(self._model_infer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._model_stream_infer)
        return grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)

    def _health_handler(self) -> Any:
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": _unary(self._health_check)})

    def _answering(self, call: Call) -> Unary:
        async def answer(raw: bytes, context: Any) -> bytes:
            try:
                caller, _ = self._admitted(call.category, context)
                self.arrivals.whole(caller.connection, len(raw))
                if self._service.exiting:
                    raise InferError(Code.UNAVAILABLE, "Server exiting")
                response = await call.answer(self._service, parse(call.request, raw), caller)
                encoded: bytes = response.SerializeToString()
            except Exception as error:
                del raw  # see `_end`
                return await _end(context, error)
            return encoded

        return answer

    async def _health_check(self, raw: bytes, context: Any) -> bytes:
        """Of whatever service the request names: there is one server."""
        try:
            self._admitted("health", context)
            if self._service.exiting:
                raise InferError(Code.UNAVAILABLE, "Server exiting")
            return _SERVING if await self._service.ready() else _NOT_SERVING
        except Exception as error:
            return await _end(context, error)

    async def _model_infer(self, raw: bytes, context: Any) -> bytes:
        try:
            caller, metadata = self._admitted("inference", context)
            encoded = await self._infer(raw, caller, metadata, context)
        except Exception as error:
            del raw  # see `_end`
            return await _end(context, error)
        size = len(encoded)
        if size >= _FOLLOWED:
            self.budget.add(size)
            context.add_done_callback(lambda _: self.budget.give(size))
        return encoded

    async def _model_stream_infer(self, requests: Any, context: Any) -> None:
        try:
            _, metadata = self._admitted("inference", context)
            peer = context.peer()

            async def ask(raw: bytes, understood: list[InferRequest]) -> Responses:
                self.arrivals.whole(peer, len(raw))
                request = await self._understand(raw, metadata, understood)
                caller = self._identify(peer, metadata)
                if self._service.traces.on:
                    self._trace(request)
                if peer.startswith("unix:"):
                    caller.connection = context  # those of a Unix socket all have the same name
                return await self._service.stream(request, caller)

            strict = metadata.get("triton_grpc_error") == "true"
            await Stream(context, ask, self.budget, self._service.copied, strict=strict, coded=asked(metadata)).run()
        except Exception as error:
            await _end(context, error)

    async def _infer(self, raw: bytes, caller: Caller, metadata: Mapping[str, str], context: Any) -> bytes:
        """One request from wire to wire."""
        self.arrivals.whole(caller.connection, len(raw))
        self.budget.take(len(raw))
        try:
            understood: list[InferRequest] = []
            try:
                request = await self._understand(raw, metadata, understood)
            except InferError:
                for known in understood:
                    await check_answers_once(self._service, known.model, known.version, "grpc")
                raise
            if self._service.traces.on:
                self._trace(request, context)
            response = await self._service.infer(request, caller)
            encoded = encode_response(response)
            self._service.copied("response", response.byte_size)
            if request.trace is not None:
                request.trace.mark("GRPC_SEND_START")
            return encoded
        finally:
            self.budget.give(len(raw))

    async def _understand(
        self, raw: bytes, metadata: Mapping[str, str], understood: list[InferRequest] | None = None
    ) -> InferRequest:
        """The request in a message. `understood`: see `decode_request`."""
        if self._service.exiting:
            raise InferError(Code.UNAVAILABLE, _EXITING)
        if not takes_long(raw):
            request = decode_request(raw, understood)
        else:
            loop = asyncio.get_running_loop()
            request = await loop.run_in_executor(self._decoder, decode_request, raw, understood)
        if self._options.grpc_header_forward_pattern:
            self._forward_metadata(request, metadata)
        return request

    def _trace(self, request: InferRequest, context: Any = None) -> None:
        """Sample it. `context`: of the RPC that is all its own; what comes in a stream is written by the core."""
        trace = request.trace = self._service.traces.sample(request.model)
        if trace is None:
            return
        now = time.monotonic_ns()
        trace.mark("GRPC_WAITREAD_START", now)
        trace.mark("GRPC_WAITREAD_END", now)

        def sent(_: Any) -> None:
            trace.mark("GRPC_SEND_END")
            trace.write()

        if context is not None:
            context.add_done_callback(sent)

    def _admitted(self, category: Any, context: Any) -> tuple[Caller, Mapping[str, str]]:
        """Who asks, if the policy lets them: before anything of the request is looked at."""
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        caller = self._identify(context.peer(), metadata)
        self._service.check(category, caller)
        return caller, metadata

    def _forward_metadata(self, request: InferRequest, metadata: Mapping[str, str]) -> None:
        for key, value in metadata.items():
            if self._forward.search(key):
                if key in _RESERVED or key.startswith("triton_"):
                    raise InferError(
                        Code.INVALID_ARG, f"Header '{key}' is reserved for Triton usage and cannot be forwarded."
                    )
                request.parameters[key] = value


async def _end(context: Any, error: Exception) -> bytes:
    """End the RPC with the error's status. Never returns; what nobody expected is logged and says nothing.

    grpc keeps what `abort` raises in a cycle, with it `error` and all frames that either came through. They must not
    hold the request, since Python may look for cycles very late.
    """
    if isinstance(error, aio.BaseError):  # grpc's own: the RPC or the server has ended
        forget_frames(error)
        try:
            raise error
        finally:
            del error
    if isinstance(error, InferError):
        _log.debug("gRPC request failed: %s", error.message)
    else:
        _log.error("gRPC request failed", exc_info=error)
    forget_frames(error)
    if not isinstance(error, InferError):
        error = InferError(Code.INTERNAL, "internal error")
    details = error.message.encode(errors="replace")[:MAX_DETAILS].decode(errors="ignore")
    place = ((DETAIL.lower(), error.detail),) if isinstance(error, Placed) else ()
    await context.abort(STATUS.get(error.code, grpc.StatusCode.UNKNOWN), details, place)
    raise AssertionError("abort does not return")


def _unary(handler: Unary) -> Any:
    return grpc.unary_unary_rpc_method_handler(handler)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InferError(Code.INVALID_ARG, f"cannot read '{path}' for gRPC's TLS: {error.strerror}") from None
