"""What a failed request says about itself, in classes: some failures are reasons to ask again in another way.

Made of the worker's words by `clientlib.layout`; the clients and the gateways look at the class.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from clientlib.arena import Bank
from shm.errors import Code, InferError, is_too_small

# What workers say, see `shm.admission`, `broker.worker.models`, `.plans` and `.answers`.
_OUTDATED = "prepare the plan again"
_NOT_SERVED = re.compile(r"model '[^']*' is not loaded|the request names a plan that is not bound here.*")
_ABSENT = "Request for unknown model: "  # Triton's words, see `broker.catalogue`
_NO_CHANNEL = re.compile(r"too many channels|for a channel of \d+ slots")  # see `broker.channels`, `broker.quota`
_WANTS_SEQUENCE = "must specify a non-zero or non-empty correlation ID"  # Triton's words
NO_CUDA = (  # over a wire
    "CUDA regions are not available over this transport: connect with ipc:// on the GPU's host, or use create_region() "
    "or register_system_shm() and let the data be copied"
)
_IN_USE = re.compile(r"still in flight|in flight on plans that share memory")


class RoomNeeded(InferError):
    """An output was larger than the room the client had reserved for it: reserve `byte_size` and ask again."""

    def __init__(self, code: Code, message: str, output: str, byte_size: int) -> None:
        super().__init__(code, message)
        self.output = output
        self.byte_size = byte_size


class Crowded(Exception):
    """No place is free of a plan that `infer` made. It has a successor with more (`bank.outgrown`), or should get one;
    the request was not sent.
    """

    def __init__(self, bank: Bank) -> None:
        super().__init__()
        self.bank = bank


class RangeInUse(InferError):
    """A live request reads or writes memory that this one would write, or writes what it would read."""


class NotServed(InferError):
    """The worker that a request was sent to does not serve the model; another one may. Or it has not its plan, which
    another thread may have prepared anew meanwhile. The request has not run.
    """


class ModelAbsent(InferError):
    """The broker's word on a model that a prepared plan was made for: nobody serves it now. The request has not run."""


class PlanOutdated(InferError):
    """The model was reloaded with other inputs or outputs since the plan was made. The request has not run."""


def is_absent(error: InferError) -> bool:
    """Does the broker say that a model is not there, or none of its versions?"""
    return error.message.startswith(_ABSENT)


def is_out_of_channels(error: InferError) -> bool:
    """Does the broker refuse a channel because of those that there are, and not because of its worker?"""
    return _NO_CHANNEL.search(error.message) is not None


def with_remedy(error: InferError) -> InferError:
    """An error of `infer` on arrays, which has no sequence to give: for a model that wants one, with the verb that has.

    Not for the gateways' callers, who have a parameter for it.
    """
    if not error.message.endswith(_WANTS_SEQUENCE):
        return error
    return InferError(
        error.code,
        f"{error.message}. infer() with arrays is for models without sequences: plan = client.prepare(…) once, then "
        "plan.infer(sequence_id=1, sequence_start=True) for the first step, sequence_end=True for the last",
    )


def error_of(code: Code, text: str, growing: Collection[str]) -> InferError:
    """The error for a worker's words. `growing`: the outputs that the client can give more room."""
    small = is_too_small(text)
    if small is not None and small.output in growing:
        return RoomNeeded(code, text, *small)
    if text.endswith(_OUTDATED):
        return PlanOutdated(code, text)
    if _NOT_SERVED.fullmatch(text):
        return NotServed(code, text)
    if _IN_USE.search(text):
        return RangeInUse(code, text)
    return InferError(code, text)
