"""What a caller is told: responses from results, and errors in Triton's words. Used by `broker.gateway.inference`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from broker.gateway import correlation
from broker.gateway.classification import classify
from broker.gateway.kserve import DECOUPLED, InferRequest, InferResponse, OutputTensor
from broker.gateway.placed import Placed, reworded
from broker.gateway.plan_cache import Entry
from broker.gateway.regions import Alias
from broker.gateway.timeouts import EXPIRED
from clientlib.failures import ModelAbsent, PlanOutdated
from clientlib.results import InferResult
from shm.errors import Code, InferError

UNKNOWN_ID: Final = "<id_unknown>"
# What a request is told whose plan names something that is not there any more. It has not run.
_GONE: Final = re.compile(
    r"Unable to find shared memory region|the request names a plan that is not bound|the plan was released|"
    r"this plan was released|(?<!, )model '[^']*' is not loaded$"
)
_AS_IT_IS: Final = re.compile(f"^Request for unknown model|^failed to get model version|{DECOUPLED}$")
# Before a model has a request, it is the server that speaks; then it is the model, whose words stay as they are.
_SERVERS_WORD: Final = re.compile(f"^{EXPIRED}|^Exceeds maximum queue size")
_TOO_SMALL: Final = "shared memory size specified with the request for output"
# What the worker says of strings, which knows no model's name.
_STRINGS: Final = re.compile(r"(string (?:elements(?: \d+)?|data|length indicator) for inference input '.*?')(?=, )")


def response_of(entry: Entry, request: InferRequest, result: InferResult) -> InferResponse:
    """The outputs that `result` has, in the entry's order; what lies in the caller's regions is named only."""
    classes = {output.name: output.classes for output in request.outputs or () if output.classes > 0}
    outputs = []
    for name, datatype in entry.outputs:
        shape = result.shapes.get(name)
        if shape is None:
            continue  # a response of a decoupled model need not have all
        if name in entry.targets:
            outputs.append(OutputTensor(name, datatype, shape, None))
        elif name in classes:
            labels = entry.labels.get(name, ())
            data, shape = classify(result[name], datatype, shape, classes[name], batched=entry.batched, labels=labels)
            outputs.append(OutputTensor(name, "BYTES", shape, data))
        else:
            outputs.append(OutputTensor(name, datatype, shape, result[name].data))
    parameters = dict(result.parameters)
    if entry.ensemble and request.sequence_id:  # as in Triton, which says it of no other model
        parameters = {
            "sequence_id": request.sequence_id,
            "sequence_start": request.sequence_start,
            "sequence_end": request.sequence_end,
        }
    return InferResponse(request.model, entry.version, request.id, outputs, parameters)


def is_gone(error: InferError) -> bool:
    """Was what the plan names replaced or retired? Then the request has not run."""
    return isinstance(error, PlanOutdated | ModelAbsent) or _GONE.search(error.message) is not None


def is_about_the_model(error: InferError) -> bool:
    """Is it that there is no such model, or that it is decoupled?"""
    return _AS_IT_IS.search(error.message) is not None


def told(error: InferError, request: InferRequest, aliases: Iterable[Alias]) -> InferError:
    """`error` in Triton's words: with the request's id, and with the names that the caller knows."""
    code, message = error.code, error.message
    if is_about_the_model(error):
        return error
    if correlation.SAID.match(message):
        return InferError(code, correlation.in_words(message, request))
    for alias in aliases:
        message = message.replace(alias.region.name, alias.name)
    if message.startswith(_TOO_SMALL):
        code = Code.INTERNAL.name
    elif message.startswith(EXPIRED):
        return _expired(code, request)
    else:
        message = _STRINGS.sub(lambda found: f"{found[1]} for model '{request.model}'", message)
    return reworded(error, f"[request id: {request.id or UNKNOWN_ID}] {message}", code)


def _expired(code: str, request: InferRequest) -> Placed:
    """In Triton without the id, unlike a full queue; and nothing of what was waited for."""
    if request.timeout_us <= 0:
        place, problem = f"the queue of model '{request.model}'", "expected a turn within its policy's"
        return Placed(code, EXPIRED, place, f"{problem} default_timeout_microseconds, got none")
    problem = f"expected an answer of model '{request.model}' within {request.timeout_us} microseconds"
    less = "or within default_timeout_microseconds of its queue's policy, if that is less"
    return Placed(code, EXPIRED, "timeout", f"{problem}, {less}, got none")


def told_in_stream(error: InferError, request: InferRequest, aliases: Iterable[Alias]) -> InferError:
    """`error`, which came in the place of a response of a decoupled model."""
    if _SERVERS_WORD.match(error.message) or _STRINGS.match(error.message):
        return told(error, request, aliases)
    return error
