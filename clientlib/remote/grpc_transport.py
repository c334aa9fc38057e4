"""The gRPC transport: one channel per client, which connects, reconnects and multiplexes by itself.

gRPC sends a request again only when it knows that the server has not seen it. Its own threads bring the answers of
submitted requests: there is no thread per request. `grpcs://` trusts the roots that gRPC ships, or those of
GRPC_DEFAULT_SSL_ROOTS_FILE_PATH.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, final

import grpc
from tritonclient.grpc import service_pb2_grpc

from clientlib.address import Address
from clientlib.remote.grpc_codec import DETAILED, decode_infer, encode, encode_infer, error_of
from clientlib.remote.grpc_streams import AsyncGrpcAnswers, GrpcAnswers, encode_stream
from clientlib.remote.transport import Ended, InferAnswer, InferRequest, Word, cancelled, lost
from shm.errors import Code, InferError, forget_frames, fresh

# A server that was away for a while is tried again within a second, not after gRPC's two minutes.
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_in_parent: list[object] = []  # in a forked child: channels that are never to be collected, their threads are not here


def connect(address: Address) -> GrpcTransport:
    """For threads. Connects when it is first used."""
    return GrpcTransport(address)


def connect_async(address: Address) -> AsyncGrpcTransport:
    """For the running event loop. Connects when it is first used."""
    return AsyncGrpcTransport(address)


@final
class GrpcTransport:
    """A server over gRPC, for threads."""

    wire = "gRPC"
    shares_memory = False

    def __init__(self, address: Address) -> None:
        self._address = address
        self._headers = address.headers
        if address.secure:
            self._channel = grpc.secure_channel(address.target, grpc.ssl_channel_credentials(), _OPTIONS)
        else:
            self._channel = grpc.insecure_channel(address.target, _OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def call(self, word: Word, deadline: float) -> Any:
        """As `Transport.call`."""
        rpc = encode(word)
        try:
            call = getattr(self._stub, rpc.method)
            return rpc.read(call(rpc.request, timeout=_patience(deadline), metadata=rpc.metadata + self._headers))
        except grpc.RpcError as error:
            raise self._error(error, word) from None
        except ValueError as error:  # "Cannot invoke RPC on closed channel!"
            raise lost(self._address, error) from None

    def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        """As `Transport.infer`."""
        try:
            return decode_infer(
                self._stub.ModelInfer(encode_infer(request), timeout=_patience(deadline), metadata=self._headers)
            )
        except grpc.RpcError as error:
            raise self._error(error, None) from None
        except ValueError as error:
            raise lost(self._address, error) from None

    def submit(self, request: InferRequest, deadline: float, ended: Ended) -> Callable[[], None]:
        """As `Transport.submit`."""
        try:
            future = self._stub.ModelInfer.future(
                encode_infer(request), timeout=_patience(deadline), metadata=self._headers
            )
        except ValueError as error:
            raise lost(self._address, error) from None

        def done(future: Any) -> None:
            end: InferAnswer | InferError
            try:
                end = decode_infer(future.result())
            except grpc.FutureCancelledError:
                end = cancelled()
            except grpc.RpcError as error:
                end = self._error(error, None)
                forget_frames(error)  # it is the call itself
            except InferError as error:
                end = fresh(error)
            except Exception as error:  # whoever waits must hear of it
                end = InferError(Code.INTERNAL, f"the server's answer cannot be read: {error!r}")
            ended(end)

        future.add_done_callback(done)
        cancel: Callable[[], None] = future.cancel
        return cancel

    def stream(self, request: InferRequest, deadline: float, ended: Callable[[], None]) -> GrpcAnswers:
        """As `Streams.stream`."""
        try:
            call = self._stub.ModelStreamInfer(
                iter((encode_stream(request),)), timeout=_patience(deadline), metadata=DETAILED + self._headers
            )
        except ValueError as error:
            raise lost(self._address, error) from None
        return GrpcAnswers(call, lambda error: self._error(error, None), ended)

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        """As `Transport.wait`: answers come on threads of their own."""
        return event.wait(timeout)

    def close(self) -> None:
        """As `Transport.close`."""
        self._channel.close()

    def leave_to_parent(self) -> None:
        """As `Transport.leave_to_parent`."""
        _in_parent.append(self)

    def _error(self, error: Any, word: Word | None) -> InferError:
        return error_of(self._address, error.code().value[0], error.details() or "", word)


@final
class AsyncGrpcTransport:
    """A server over gRPC, for one event loop."""

    wire = "gRPC"
    shares_memory = False

    def __init__(self, address: Address) -> None:
        self._address = address
        self._headers = address.headers
        if address.secure:
            self._channel = grpc.aio.secure_channel(address.target, grpc.ssl_channel_credentials(), _OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(address.target, _OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def call(self, word: Word, deadline: float) -> Any:
        """As `AsyncTransport.call`."""
        rpc = encode(word)
        try:
            call = getattr(self._stub, rpc.method)
            return rpc.read(await call(rpc.request, timeout=_patience(deadline), metadata=rpc.metadata + self._headers))
        except grpc.RpcError as error:
            raise self._error(error, word) from None
        except grpc.aio.UsageError as error:
            raise lost(self._address, error) from None

    async def infer(self, request: InferRequest, deadline: float) -> InferAnswer:
        """As `AsyncTransport.infer`."""
        try:
            return decode_infer(
                await self._stub.ModelInfer(encode_infer(request), timeout=_patience(deadline), metadata=self._headers)
            )
        except grpc.RpcError as error:
            raise self._error(error, None) from None
        except grpc.aio.UsageError as error:
            raise lost(self._address, error) from None

    def stream(self, request: InferRequest, deadline: float, ended: Callable[[], None]) -> AsyncGrpcAnswers:
        """As `AsyncStreams.stream`."""
        try:
            call = self._stub.ModelStreamInfer(
                iter((encode_stream(request),)), timeout=_patience(deadline), metadata=DETAILED + self._headers
            )
        except grpc.aio.UsageError as error:
            raise lost(self._address, error) from None
        return AsyncGrpcAnswers(call, lambda error: self._error(error, None), ended)

    async def close(self) -> None:
        """As `AsyncTransport.close`."""
        await self._channel.close()

    def drop(self) -> None:
        """As `AsyncTransport.drop`: gRPC closes a channel that nobody refers to."""

    def leave_to_parent(self) -> None:
        """As `Transport.leave_to_parent`."""
        _in_parent.append(self)

    def _error(self, error: Any, word: Word | None) -> InferError:
        return error_of(self._address, error.code().value[0], error.details() or "", word)


def _patience(deadline: float) -> float | None:
    return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)
