"""A model whose answers are kept (`response_cache`): what was answered before ends a request without a run.

Two things a client could do to others must not happen. It may rewrite its memory at any time: what a key is made of,
and what is kept, is read from the worker's own copies of inputs and outputs, those that the model has seen and made.
And it may truncate its memory: the look-up reads shared regions by `pread`, which ends short where a mapping would
kill.
The loop looks up (`broker.worker.intake`), `broker.worker.execute` keeps. What lies on a GPU is looked up where it has
been copied from there (`broker.worker.cuda.execute`).
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Sequence
from typing import final

from broker.worker.cache import Input, Key, Parameters, Response, ResponseCache, key_of
from broker.worker.plans import Bytes, Plan
from shm import statistics
from shm.admission import Request
from shm.parameters import fits_beside
from shm.parameters import key_of as parameters_key

_now = time.monotonic_ns
_log = logging.getLogger(__name__)


@final
class Cached:
    """One loaded version's part of the worker's cache. `block` is its first instance's block of the statistics page."""

    __slots__ = ("_block", "_cache", "_lock", "_owner", "_told")

    def __init__(self, cache: ResponseCache, model: str, version: int, generation: int, block: memoryview) -> None:
        self._cache = cache
        self._owner = (model, version, generation)
        self._block = block
        self._told = False
        self._lock = threading.Lock()  # of the words that look-ups write

    def answer(self, request: Request, *, started: bool = False) -> bool:
        """Look `request` up, and end it if its answer is known; publishing that is the caller's. From any thread.

        `started`: it is marked so already.
        """
        plan = request.plan
        assert isinstance(plan, Plan)
        if plan.changed_size():
            return False  # the run will say so
        began = _now()
        found = self._cache.get(self._key(plan, request))
        hit = found is not None and _give(plan, request, found, started)
        took = _now() - began
        block = self._block
        self._cache.count(statistics.CACHE_LOOKUP_NS, took)
        if not hit:
            with self._lock:
                block[statistics.CACHE_MISSES] += 1
                block[statistics.CACHE_MISS_NS] += took
            self._cache.count(statistics.CACHE_ALL_MISSES, 1)
            return False
        self._cache.count(statistics.CACHE_ALL_HITS, 1)
        request.output_ns = took
        with self._lock:
            block[statistics.CACHE_HITS] += 1
            block[statistics.CACHE_HIT_NS] += took
            statistics.count_hit_latency(block, took)
            block[statistics.COPIED + statistics.REASONS.index("cache")] += request.copied
        return True

    def keep(self, plan: Plan, rows: int, inputs: Sequence[Bytes], response: Response, block: memoryview) -> None:
        """After a run: `inputs` is the worker's copy of what the model has seen, in the plan's order.

        `block` is that of the instance which ran.
        """
        began = _now()
        given = [
            Input(t.name, t.datatype, t.shape_of(rows), data.data) for t, data in zip(plan.inputs, inputs, strict=True)
        ]
        key = key_of(self._owner, given, (t.name for t in plan.outputs), _parameters(plan))
        if not self._cache.put(key, response) and not self._told:
            self._told = True
            model, version, _ = self._owner
            size = sum(len(each.data) for each in response.outputs)
            _log.error(
                "Failed to insert key [%s] into response cache: a response of %d bytes of model '%s' version %d is not"
                " cached, the cache has %d (--cache-config local,size=BYTES); others like it are not mentioned",
                key[1].hex(),
                size,
                model,
                version,
                self._cache.byte_size,
            )
        took = _now() - began
        block[statistics.CACHE_KEEP_NS] += took
        self._cache.count(statistics.CACHE_INSERTION_NS, took)

    def close(self) -> None:
        """The model is gone."""
        self._cache.drop(self._owner)

    def _key(self, plan: Plan, request: Request) -> Key:
        inputs = [
            Input(t.name, t.datatype, t.shape_of(request.rows), t.snapshot(request.input_position, request.rows))
            for t in plan.inputs
        ]
        return key_of(self._owner, inputs, (t.name for t in plan.outputs), _parameters(plan))


def _parameters(plan: Plan) -> Parameters:
    """Those that the answer may depend on."""
    model = plan.model
    if not plan.parameters or (model is not None and model.ensemble is None and not model.reads_parameters):
        return ()
    return parameters_key(plan.parameters)


def _give(plan: Plan, request: Request, response: Response, started: bool) -> bool:
    """Write the answer where the request wants it. False, and nothing is written, if it does not fit there."""
    known = {each.name: each for each in response.outputs}
    note: list[int] = []
    for tensor in plan.outputs:
        output = known[tensor.name]
        if not (tensor.open and tensor.make_room(len(output.data))) and len(output.data) > tensor.place.byte_size:
            return False
        if tensor.open:
            note.extend((len(output.shape), *output.shape))
        elif output.shape != tensor.shape_of(request.rows):
            return False
    packed = struct.pack(f"<{len(note)}Q", *note)
    if response.parameters and not fits_beside(packed, response.parameters):
        return False
    if not started:
        request.channel.start((request,))  # from here on a death is this request's
    for tensor in plan.outputs:
        data = known[tensor.name].data
        tensor.memory(request.output_position)[: len(data)] = memoryview(data)
        request.copied += len(data)
    request.note = packed
    request.give(response.parameters)
    return True
