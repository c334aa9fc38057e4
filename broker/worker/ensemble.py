"""An ensemble's requests: each is a run, whose steps are internal requests in the members' queues.

`Ensemble.begin` is called by the loop's leader (`broker.worker.intake`); steps end on any thread, which calls
`Run.complete` and thereby queues what can begin next. A run ends once, when nothing of it is queued or running.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from broker.worker.ensemble_graph import Graph, Needed, Progress
from broker.worker.ensemble_memory import Value, fitted, not_fitting, of_client, private, step_plan
from broker.worker.execute import run_batch
from broker.worker.model import LoadedModel
from broker.worker.plans import Plan
from broker.worker.running import check_sizes
from shm import statistics
from shm.admission import Request
from shm.errors import Code, InferError

MAX_PREPARED = 16  # per plan of a client, which chooses positions and rows: each holds the run's intermediate tensors
Submit = Callable[[list[Request]], None]
_now = time.monotonic_ns


@final
class Ensemble:
    """One loaded version. `bind` gives a plan its member (closed where there is none), `submit` queues steps."""

    def __init__(self, model: LoadedModel, bind: Callable[[Plan], None], submit: Submit) -> None:
        assert model.config.ensemble is not None
        self.model = model
        self.bind = bind
        self.graph = Graph(model.config.ensemble)
        self._submit = submit
        self._lock = threading.Lock()
        self._block = model.instances[0].block

    def begin(self, request: Request) -> None:
        """Start a client's (or an outer ensemble's) request; its ending is published when the run is over."""
        request.channel.start((request,))
        Run(self, request, self._submit, lambda: request.channel.complete((request,))).advance()

    def run_alone(self, request: Request) -> None:
        """Run all steps here and now, on members that nobody else uses; publishing the ending is the caller's."""
        waiting: list[Request] = []
        Run(self, request, waiting.extend, lambda: None).advance()
        while waiting:
            step = waiting.pop(0)
            plan = step.plan
            assert isinstance(plan, Plan)
            assert plan.model is not None
            run_batch(plan.model.instances[0], [step], [step])
            step.channel.complete((step,))

    def started(self) -> None:
        """A run has begun."""
        with self._lock:
            self._block[statistics.PENDING] += 1

    def ended(self, request: Request, took: int) -> None:
        """A run is over: `request` has its ending."""
        with self._lock:
            self._block[statistics.PENDING] -= 1
            if request.code == Code.OK:
                self.model.instances[0].count_batch(
                    1, request.rows, request.queue_ns, request.input_ns, request.infer_ns, request.output_ns
                )
                self.model.instances[0].count_copy("output", request.copied)
            elif request.code == Code.CANCELLED:
                self._block[statistics.CANCELLED] += 1
            else:
                self._block[statistics.FAIL] += 1
                self._block[statistics.FAIL_NS] += took


@final
class Prepared:
    """Plans and memory of one client plan's position, for one run after the other."""

    __slots__ = ("needed", "places", "plans", "sources")

    def __init__(self, needed: Needed) -> None:
        self.needed = needed
        self.plans: dict[int, Plan] = {}
        self.sources: dict[int, tuple[tuple[Value, ...], int]] = {}  # what the plan of a step was made from
        self.places: dict[str, Value] = {}


@final
class Run:
    """One request on its way. Implements `shm.admission.Publishes` for its steps."""

    def __init__(self, ensemble: Ensemble, request: Request, submit: Submit, publish: Callable[[], None]) -> None:
        self._ensemble, self._request = ensemble, request
        self._submit, self._publish = submit, publish
        self._lock = threading.Lock()
        self._ended: list[Request] = []
        self._advancing = False
        self._live = 0
        self._progress: Progress | None = None
        self._values: dict[str, Value] = {}
        self._prepared: Prepared | None = None
        self._began = _now()
        ensemble.started()
        request.note = b""
        request.queue_ns = request.input_ns = request.infer_ns = request.output_ns = request.copied = 0

    def start(self, requests: Sequence[Request]) -> None:
        """A step is about to run: nothing to mark, the ledger knows the client's request."""

    def complete(self, requests: Sequence[Request]) -> None:
        """Steps have ended, on whatever thread."""
        with self._lock:
            self._ended.extend(requests)
            if self._advancing:
                return
        self.advance()

    def advance(self) -> None:
        """Take note of what has ended and queue what can begin, until there is nothing to do."""
        with self._lock:
            if self._advancing:
                return
            self._advancing = True
        while True:
            with self._lock:
                ended, self._ended = self._ended, []
                if not ended and self._live:
                    self._advancing = False
                    return
            if not ended and self._progress is not None:
                break
            self._step(ended)
        self._finish()

    def _step(self, ended: list[Request]) -> None:
        request = self._request
        self._live -= len(ended)
        ready: list[Request] = []
        try:
            if self._progress is None:
                numbers = self._prepare()
            else:
                numbers = [at for step in ended for at in self._collect(step)]
            if request.ended and not request.code:
                request.fail(Code.CANCELLED, "the request was cancelled")
            if not request.code:
                ready = [self._request_of(at) for at in numbers]
        except Exception as error:
            self._fail(error)
            ready = []
        if ready:
            self._live += len(ready)
            self._submit(ready)

    def _prepare(self) -> list[int]:
        request, plan, model = self._request, self._request.plan, self._ensemble.model
        assert isinstance(plan, Plan)
        key = (-model.instances[0].number, request.input_position, request.output_position, request.rows)
        prepared = plan.bindings.pop(key, None)
        if prepared is None:
            prepared = Prepared(self._ensemble.graph.needed(t.name for t in plan.outputs))
        self._prepared, self._progress = prepared, Progress(prepared.needed)
        check_sizes(plan)
        for tensor in plan.inputs:
            shape = model.shape(tensor.name, tensor.shape_of(request.rows))
            self._values[tensor.name] = of_client(tensor, request.input_position, request.rows, shape)
        return self._progress.begin()

    def _request_of(self, at: int) -> Request:
        """The internal request of a step whose tensors exist."""
        assert self._prepared is not None
        step, prepared, client = self._ensemble.graph.steps[at], self._prepared, self._request
        given = tuple(self._values[tensor] for tensor in step.input_map.values() if tensor in self._values)
        plan = prepared.plans.get(at)
        if plan is not None and prepared.sources[at][0] == given:
            self._ensemble.bind(plan)
        if plan is None or plan.closed is not None or prepared.sources[at][0] != given:
            plan = self._plan_of(at)
            prepared.plans[at] = plan
            prepared.sources[at] = (given, plan.rows)
        entry = (*client.entry[:4], 0, 0, plan.rows, *client.entry[7:])
        request = Request(self, at, entry, plan, _now())
        request.started = True
        return request

    def _plan_of(self, at: int) -> Plan:
        assert self._prepared is not None
        step, client = self._ensemble.graph.steps[at], self._request.plan
        assert isinstance(client, Plan)
        probe = step_plan(client, step.model_name, step.model_version, {}, {}, 0)
        self._ensemble.bind(probe)
        member = probe.model
        if probe.closed is not None or member is None:
            raise InferError(Code.UNAVAILABLE, f"model '{step.model_name}' is not loaded")
        batch = (-1,) if member.config.max_batch_size else ()
        inputs: dict[str, Value] = {}
        rows = 0
        for tensor in member.config.input:
            name = step.input_map.get(tensor.name)
            value = None if name is None else self._values.get(name)
            if value is None:
                if tensor.optional:
                    continue
                raise InferError(Code.INVALID_ARG, f"input '{tensor.name}' of model '{member.name}' has no data")
            shape = fitted(value.shape, (*batch, *tensor.dims))
            if shape is None:
                raise not_fitting(tensor.name, value.shape, member.name, (*batch, *tensor.dims))
            rows = shape[0] if batch else 0
            if batch and not 0 < rows <= member.config.max_batch_size:
                raise InferError(
                    Code.INVALID_ARG,
                    f"batch-size must be <= {member.config.max_batch_size} for '{member.name}', got {rows}",
                )
            inputs[tensor.name] = value._replace(shape=shape)
        outputs: dict[str, Value] = {}
        for tensor in member.config.output:
            name = step.output_map.get(tensor.name)
            if name is not None and name in self._prepared.needed.wanted:
                dims = (rows, *tensor.dims) if batch else tensor.dims
                place = self._place(name, tensor.datatype, dims)
                outputs[tensor.name] = self._prepared.places[name] = place
        plan = step_plan(client, step.model_name, step.model_version, inputs, outputs, rows)
        self._ensemble.bind(plan)
        if plan.closed is not None:
            raise InferError(Code.UNAVAILABLE, f"model '{step.model_name}' is not loaded")
        return plan

    def _place(self, name: str, datatype: str, shape: tuple[int, ...]) -> Value:
        """The client's own range where its size is certain and it lies well, else memory of this worker."""
        client, request = self._request.plan, self._request
        assert isinstance(client, Plan)
        for tensor in client.outputs:
            if tensor.name == name and not tensor.open and tensor.aligned and -1 not in shape:
                place = of_client(tensor, request.output_position, request.rows, shape)
                if tensor.datatype == datatype and shape == self._ensemble.model.shape(
                    name, tensor.shape_of(request.rows)
                ):
                    return place
        return private(datatype, shape)

    def _collect(self, step: Request) -> list[int]:
        """A step has ended: what it wrote exists now."""
        request, prepared = self._request, self._prepared
        assert prepared is not None
        assert self._progress is not None
        if step.code:
            self._fail(InferError(Code(step.code), step.note.decode(errors="replace")), step.slot)
            return []
        request.queue_ns += step.queue_ns
        request.input_ns += step.input_ns
        request.infer_ns += step.infer_ns
        request.output_ns += step.output_ns
        plan = step.plan
        assert isinstance(plan, Plan)
        names = self._ensemble.graph.steps[step.slot].output_map
        note = list(struct.unpack(f"<{len(step.note) // 8}Q", step.note))
        written = []
        for tensor in plan.outputs:
            name = names[tensor.name]
            value = prepared.places[name]
            if tensor.open:
                rank = note.pop(0)
                shape, note = tuple(note[:rank]), note[rank:]
                value = value._replace(shape=shape, byte_size=tensor.place.byte_size)
            self._values[name] = value
            written.append(name)
        return self._progress.wrote(written)

    def _fail(self, error: Exception, at: int = -1) -> None:
        if self._request.code:
            return  # the first one tells
        code, text = Code.INTERNAL, f"{type(error).__name__}: {error}"
        if isinstance(error, InferError):
            code, text = Code[error.code], error.message
        where = f" (model '{self._ensemble.graph.steps[at].model_name}')" if at >= 0 else ""
        self._request.fail(code, f"in ensemble '{self._ensemble.model.name}', {text}{where}")

    def _finish(self) -> None:
        request, model = self._request, self._ensemble.model
        plan = request.plan
        assert isinstance(plan, Plan)
        if not request.code:
            try:
                self._deliver(plan)
            except Exception as error:
                self._fail(error)
        if plan.model is model and plan.closed is None and self._prepared is not None:
            key = (-model.instances[0].number, request.input_position, request.output_position, request.rows)
            if len(plan.bindings) >= MAX_PREPARED:
                plan.bindings.pop(next(iter(plan.bindings)), None)
            plan.bindings[key] = self._prepared
        self._ensemble.ended(request, _now() - self._began)
        self._publish()

    def _deliver(self, plan: Plan) -> None:
        """Copy what was not written in place; shapes of open outputs go into the note."""
        request, model = self._request, self._ensemble.model
        check_sizes(plan)
        note: list[int] = []
        for tensor in plan.outputs:
            value = self._values[tensor.name]
            reshape = model.reshapes.get(tensor.name)
            shape = value.shape if reshape is None else reshape.to_client(tensor.name, value.shape)
            wanted = tensor.shape_of(request.rows)
            shape = fitted(shape, wanted) or shape
            if tensor.open:
                note.extend((len(shape), *shape))
            elif shape != wanted:
                raise not_fitting(tensor.name, shape, model.name, wanted)
            if value.byte_size > tensor.place.byte_size and not tensor.make_room(value.byte_size):
                raise InferError(
                    Code.INVALID_ARG,
                    f"shared memory size specified with the request for output '{tensor.name}'"
                    f" ({tensor.place.byte_size} bytes) should be at least {value.byte_size} bytes to hold the results",
                )
            start = tensor.place.offset + request.output_position * tensor.place.stride
            if value.region is not tensor.region or value.offset != start:
                data = value.region.bytes[value.offset : value.offset + value.byte_size]
                tensor.memory(request.output_position)[: data.size] = data
                request.copied += data.size
        request.note = struct.pack(f"<{len(note)}Q", *note)
