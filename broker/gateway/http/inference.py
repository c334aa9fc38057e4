"""The infer endpoint: a body in, one request to the service, a body out.

The hot path of this protocol: what goes wrong may cost more than what goes right.
"""

from __future__ import annotations

import re
from typing import final

from broker.gateway.http.codec import (
    HEADER_LENGTH,
    decode,
    decode_raw,
    encode,
    forward_headers,
    header_length,
    json_size,
)
from broker.gateway.http.compression import coding_of, compress, decompress, preferred
from broker.gateway.http.errors import invalid
from broker.gateway.http.json import unhurried
from broker.gateway.http.limits import ONE_WRITE
from broker.gateway.http.message import JSON, OCTETS, Reply, Request, error_reply
from broker.gateway.kserve import Buffer, InferRequest, Service, Trace, check_answers_once
from broker.gateway.options import GatewayOptions, header_pattern
from shm.errors import InferError


@final
class Inference:
    """The endpoint, on one service."""

    def __init__(self, service: Service, options: GatewayOptions) -> None:
        self._service = service
        self._limit = options.http_max_input_size
        self._forward = forward_pattern(options)

    async def infer(self, request: Request, model: str, version: str) -> Reply:
        """POST …/infer."""
        headers = request.headers
        try:
            coding = coding_of(headers.get("Content-Encoding"))
        except InferError as error:
            await check_answers_once(self._service, model, version, "http")
            reply = error_reply(error)
            reply.headers = (("Accept-Encoding", "gzip, deflate"),)
            return reply
        try:
            body = request.body
            if coding != "identity":
                body = await decompress(body, self._limit)
                request.reserve(len(body))
            wanted, binary = await self._read(request, body, model, version)
        except InferError:
            await check_answers_once(self._service, model, version, "http")
            raise
        if request.received[0]:
            wanted.trace = sampled(self._service, wanted.model, request)
        try:
            response = await self._service.infer(wanted, request.caller)
        except BaseException:
            if wanted.trace is not None:
                wanted.trace.write()
            raise
        size = json_size(response, wanted.outputs, binary)
        text, blobs = await unhurried(size, encode, response, wanted.outputs, binary)
        reply = Reply(parts=(text, *blobs), trace=wanted.trace)
        if blobs:
            reply.content_type = OCTETS
            reply.headers = ((HEADER_LENGTH, str(len(text))),)
        else:
            reply.content_type = JSON
        accepted = headers.get("Accept-Encoding")
        if accepted is not None and (coding := preferred(accepted)) != "identity":
            reply.parts = (await compress(reply.parts, coding),)
            reply.headers = (*reply.headers, ("Content-Encoding", coding))
        elif blobs and (size := sum(map(len, reply.parts))) <= ONE_WRITE:
            self._service.copied("response", size - len(text))  # the connection joins it
        return reply

    async def _read(self, request: Request, body: Buffer, model: str, version: str) -> tuple[InferRequest, bool]:
        length = header_length(request.headers.get(HEADER_LENGTH), len(body))
        if length or HEADER_LENGTH not in request.headers:
            wanted, binary = await unhurried(length, decode, model, version, body, length, self._limit)
            tensors = len(body) - length if length else 0
        else:
            wanted, binary = decode_raw(await self._service.metadata(model, version), body), True
            wanted.version = version
            tensors = len(body)
        if tensors and isinstance(body, bytearray):  # put together from pieces, or decompressed in pieces
            self._service.copied("request", tensors)
        if self._forward is not None:
            forward_headers(wanted, request.raw_headers, self._forward)
        return wanted, binary


def sampled(service: Service, model: str, request: Request) -> Trace | None:
    """What is noted of a request of `model`, if it is traced."""
    trace = service.traces.sample(model)
    if trace is not None:
        trace.mark("HTTP_RECV_START", request.received[0])
        trace.mark("HTTP_RECV_END", request.received[1])
    return trace


def forward_pattern(options: GatewayOptions) -> re.Pattern[str] | None:
    """--http-header-forward-pattern. Raises InferError when it is no regular expression."""
    if not options.http_header_forward_pattern:
        return None
    try:
        return header_pattern(options.http_header_forward_pattern)
    except re.error as error:
        raise invalid(f"--http-header-forward-pattern is no regular expression: {error}") from None
