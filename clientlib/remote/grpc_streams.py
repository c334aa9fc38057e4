"""Several responses to one request over gRPC: one call of ModelStreamInfer per request, read as the application reads.

What it does not read waits at the server, as far as HTTP/2 lets it. Made by `clientlib.remote.grpc_transport`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, final

import grpc
from tritonclient.grpc import service_pb2

from clientlib import details
from clientlib.remote.grpc_codec import decode_infer, encode_infer
from clientlib.remote.transport import InferAnswer, InferRequest, cancelled, plain
from clientlib.streams import expired
from shm.errors import Code, InferError, forget_frames, fresh

ErrorOf = Callable[[Any], InferError]  # of a call that ended with a status


def encode_stream(request: InferRequest) -> Any:
    """The message of a request; the end of its responses is to be said."""
    message = encode_infer(request)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


def decode_stream(reply: Any) -> tuple[InferAnswer | InferError | None, bool]:
    """What a `ModelStreamInferResponse` says: a response, an error in its place, or nothing; and is it the last?

    Triton's errors have no code here: without our gateways' those of a deadline are UNAVAILABLE, all others UNKNOWN.
    """
    assert isinstance(reply, service_pb2.ModelStreamInferResponse)
    response = reply.infer_response
    last = "triton_final_response" in response.parameters and response.parameters["triton_final_response"].bool_param
    if reply.error_message:
        text = plain(reply.error_message)
        name = response.parameters[details.CODE].string_param if details.CODE in response.parameters else ""
        if name not in Code.__members__:
            name = (Code.UNAVAILABLE if text.startswith("Request timeout expired") else Code.UNKNOWN).name
        return InferError(name, text), last
    if last and not response.outputs:
        return None, True
    try:
        return decode_infer(response), last
    except InferError as error:
        return error, last


def _ending(error: Any, error_of: ErrorOf) -> InferError:
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return expired()
    if error.code() == grpc.StatusCode.CANCELLED:
        return cancelled()
    return error_of(error)


@final
class GrpcAnswers:
    """The answers to one request, for threads."""

    def __init__(self, call: Any, error_of: ErrorOf, ended: Callable[[], None]) -> None:
        """`ended` is called once, from any thread, when the call is over."""
        self._call = call
        self._error_of = error_of
        self._reading = threading.Lock()
        self._over = False
        if not call.add_callback(ended):  # it has ended already
            ended()

    def next(self) -> InferAnswer | None:
        """As `Answers.next`."""
        with self._reading:
            while not self._over:
                try:
                    reply = next(self._call)
                except StopIteration:
                    self._over = True
                    break
                except grpc.RpcError as error:
                    self._over = True
                    forget_frames(error)  # it is the call itself
                    raise _ending(error, self._error_of) from None
                answer, _ = decode_stream(reply)
                if isinstance(answer, InferError):
                    raise fresh(answer)
                if answer is not None:
                    return answer
        return None

    def cancel(self) -> bool:
        """As `Answers.cancel`."""
        return bool(self._call.cancel())


@final
class AsyncGrpcAnswers:
    """The answers to one request, for an event loop."""

    def __init__(self, call: Any, error_of: ErrorOf, ended: Callable[[], None]) -> None:
        """`ended` is called once, on the loop, when the call is over."""
        self._call = call
        self._error_of = error_of
        self._over = False
        self.final = False  # nothing follows what was read last, as it said itself
        call.add_done_callback(lambda _: ended())

    async def next(self) -> InferAnswer | None:
        """As `AsyncAnswers.next`."""
        while not self._over:
            try:
                reply = await self._call.read()
            except grpc.RpcError as error:
                self._over = self.final = True
                raise _ending(error, self._error_of) from None
            except asyncio.CancelledError:  # of this task, or what gRPC makes of a call that was cancelled
                self._over = self.final = True
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise cancelled() from None
            if reply is grpc.aio.EOF:
                self._over = True
                break
            answer, self.final = decode_stream(reply)
            if isinstance(answer, InferError):
                raise fresh(answer)
            if answer is not None:
                return answer
        return None

    def cancel(self) -> bool:
        """As `AsyncAnswers.cancel`."""
        return bool(self._call.cancel())
