"""Triton's trace of single requests: which are traced, and what was noted of each (mode "triton", level TIMESTAMPS).

Front ends ask `Traces` for a `Trace` when it is `on`, note what they know, and hand it on with the request; the
gateway's core notes the rest. What has ended goes to the file by a thread of its own (`broker.gateway.trace_files`).
While nothing is traced a request costs one look at `on`. Each gateway samples what it serves itself.

The moments inside the worker follow from the durations that a result comes with, counted from when the request was
submitted: they are as exact as those, and each may be early by what the request took to reach the worker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Final, final

from broker.gateway.kserve import InferRequest
from broker.gateway.options import TraceSetting, TraceTable
from broker.gateway.trace_files import TraceFiles
from clientlib.results import Timing

MAX_EVENTS: Final = 1000  # of one trace: a decoupled model may send any number of responses
MAX_ID: Final = 1024  # characters of a request's id
_LEVEL: Final = "TIMESTAMPS"


@final
class Trace:
    """What was noted of one request, in nanoseconds of the monotonic clock."""

    __slots__ = ("_began", "_events", "_head", "_id", "_sampling", "_submitted")

    def __init__(self, number: int, sampling: Sampling) -> None:
        self._id = number
        self._sampling = sampling
        self._events: list[tuple[str, int]] = []
        self._head: dict[str, int | str] = {}
        self._began = 0  # how many events were before the request
        self._submitted = False

    def mark(self, name: str, ns: int = 0) -> None:
        """It is the moment that Triton calls `name`, or was at `ns`."""
        if len(self._events) < MAX_EVENTS:
            self._events.append((name, ns or time.monotonic_ns()))

    def begin(self, request: InferRequest) -> None:
        """The core has got the request."""
        self._began = len(self._events)
        self._head = {"id": self._id, "model_name": request.model, "model_version": _version(request.version)}
        if request.id:
            self._head["request_id"] = request.id[:MAX_ID]
        self.mark("REQUEST_START")

    def submitted(self) -> int:
        """The model is asked, now."""
        self._submitted = True
        now = time.monotonic_ns()
        self.mark("QUEUE_START", now)
        return now

    def computed(self, submitted: int, timing: Timing) -> None:
        """It was: when, and how long it took."""
        moment = submitted + timing.queue_ns
        self.mark("COMPUTE_START", moment)
        self.mark("COMPUTE_INPUT_END", moment := moment + timing.input_ns)
        self.mark("COMPUTE_OUTPUT_START", moment := moment + timing.infer_ns)
        self.mark("COMPUTE_END", moment + timing.output_ns)

    def ended(self, version: str) -> None:
        """The core has answered, with this version of the model."""
        if version:
            self._head["model_version"] = _version(version)
        self.mark("REQUEST_END")

    def write(self) -> None:
        """Nothing more is noted. As in Triton, what no model was asked leaves no trace. Once."""
        if self._submitted:
            self._sampling.files.put(self, self._sampling)

    def text(self) -> str:
        """JSON objects with commas between them, as they stand in Triton's array."""
        moments = [
            f'{{"id":{self._id},"timestamps":[{{"name":"{name}","ns":{moment}}}]}}' for name, moment in self._events
        ]
        moments.insert(self._began, json.dumps(self._head, separators=(",", ":")))
        return ",".join(moments)


@final
class Sampling:
    """Which requests of a model, or of all that have no settings of their own, are traced: one for each change.

    `left`: how many more, -1 for any number. `per_file`: traces in each numbered file, 0: one file for all.
    """

    __slots__ = ("_rate", "_seen", "files", "left", "on", "part", "per_file")

    def __init__(self, setting: TraceSetting, files: TraceFiles) -> None:
        self.files = files
        self._rate = int(str(setting["trace_rate"]))
        self._seen = 0
        self.left = int(str(setting["trace_count"]))
        self.per_file = int(str(setting["log_frequency"])) or max(0, self.left)
        self.part = files.part()
        self.on = bool(files.path) and _LEVEL in setting["trace_level"] and self._rate > 0

    def sample(self) -> bool:
        """Is the next request traced?"""
        if not self.on or not self.left:
            return False
        self._seen += 1
        if self._seen % self._rate:
            return False
        self.left -= self.left > 0
        return True


@final
class Traces:
    """Those of one gateway, on its event loop. `on`: some request may be traced."""

    __slots__ = ("_files", "_numbers", "_samplings", "on")

    def __init__(self, table: TraceTable, index: int = 0) -> None:
        """`index`: the gateway's. Those after the first have files of their own."""
        path = table.file
        self._files = TraceFiles(f"{path}-gateway{index}" if path and index else path, table.began)
        # Numbers of a gateway that was replaced are no others': nobody traces one request in a microsecond.
        self._numbers = time.monotonic_ns() // 1000 if self._files.goes_on() else 0
        self._samplings: dict[str, Sampling] = {}
        self.on = False
        self.apply("", table.settings)

    def apply(self, model: str, settings: Mapping[str, TraceSetting]) -> None:
        """The settings by model, "" the global ones, after those of `model` were changed: it is counted anew."""
        kept = {name: sampling for name, sampling in self._samplings.items() if model and name != model}
        self._samplings = {name: kept.get(name) or Sampling(setting, self._files) for name, setting in settings.items()}
        self.on = any(sampling.on for sampling in self._samplings.values())

    def sample(self, model: str) -> Trace | None:
        """What is noted of a request of `model`, if it is traced."""
        sampling = self._of(model)
        if sampling is None or not sampling.sample():
            return None
        self._numbers += 1
        return Trace(self._numbers, sampling)

    def left(self, model: str) -> int | None:
        """How many requests of a model, "" of those without settings of their own, are still traced; -1: any number."""
        sampling = self._of(model)
        return None if sampling is None else sampling.left

    def close(self) -> None:
        """Write what waits. Blocks, for some seconds at most."""
        self._files.close()

    def _of(self, model: str) -> Sampling | None:
        return self._samplings.get(model) or self._samplings.get("")


def _version(text: str) -> int:
    """As a number; -1 for none, as in Triton, and for what no model has as a version: the request will be refused."""
    return int(text) if text.isdecimal() and len(text) < 20 else -1
