"""TensorRT: plans (`model.plan`) on clients' GPU memory, in place. Platform `tensorrt_plan`.

Needs `tensorrt`, or `tensorrt_lean` for plans that were built VERSION_COMPATIBLE. What is asked of either is listed in
tests/doubles/tensorrt.py and held against the real bindings there. Nothing of this has run on hardware.

Parameter `engine_host_code_allowed` ("true"): plans may bring a runtime of their own, which is code that runs here.
"""

from __future__ import annotations

import importlib
import os
import threading
import weakref
from typing import Any, Final, final

from broker.worker.backends import Context, GpuBinding, Operand
from broker.worker.backends.tensorrt_binding import Bound
from broker.worker.backends.tensorrt_engine import IoTensor, Log, check, io_tensors, profiles_of
from broker.worker.cuda.staging import Scratch, kept, no_strings
from broker.worker.cuda.streams import Lane
from shm.cuda.driver import Device, find_device
from shm.errors import Code, InferError, described

MODULES: Final = ("tensorrt", "tensorrt_lean")
_YES: Final = ("true", "1", "yes")


def load(context: Context) -> TensorRTModel:
    """One instance. Instances of one version share the engine, each has execution contexts and a stream of its own."""
    return load_with(runtime_module(), context)


def runtime_module() -> Any:
    """The first of the two packages that can be imported. Raises InferError UNAVAILABLE with the reasons."""
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except Exception as error:  # its libraries fail to load in many ways
            reasons.append(f"{name}: {described(error)}")
    raise InferError(
        Code.UNAVAILABLE,
        f"TensorRT cannot be imported ({'; '.join(reasons)}): pip install 'tensorbroker[tensorrt]', or "
        "'tensorbroker[tensorrt-lean]' for plans built with VERSION_COMPATIBLE",
    )


def load_with(trt: Any, context: Context) -> TensorRTModel:
    """The same with the module given: what tests do."""
    if not context.device:
        raise InferError(
            Code.INVALID_ARG,
            f"TensorRT runs on GPUs only, and instance '{context.name}' is on the CPU: put `instance_group {{ kind: "
            "KIND_GPU }` in config.pbtxt",
        )
    device = find_device(context.device, f"instance '{context.name}'")
    lane = Lane(device)
    try:
        engine = _engine(trt, context, device, lane)
        profiles = profiles_of(context.group, context.config, engine.path, engine.profiles)
        check(engine.tensors, context.config, engine.path, profiles)
        return TensorRTModel(engine, lane, profiles, Scratch(device.ordinal, kept(context.config)))
    except BaseException:
        lane.close()
        raise


@final
class Engine:
    """A plan, deserialized once per worker. `lock`: TensorRT's own objects of one engine are made one at a time."""

    __slots__ = ("__weakref__", "_runtime", "engine", "lock", "log", "path", "profiles", "tensors", "trt")

    def __init__(self, trt: Any, path: str, device: Device, host_code: bool) -> None:
        self.trt, self.path = trt, path
        self.lock = threading.Lock()
        self.log = Log(trt)
        who = f"{trt.__name__.rpartition('.')[2]} {trt.__version__}"
        runtime = self._runtime = trt.Runtime(self.log.logger)  # must outlive the engine
        if self.log.errors:  # it returns all the same, and crashes later
            raise InferError(Code.UNAVAILABLE, f"{who} does not run on {device.name}: {self.log.take()}")
        runtime.engine_host_code_allowed = host_code
        with open(path, "rb") as file:
            self.engine = runtime.deserialize_cuda_engine(file.read())
        if self.engine is None:
            major, minor = device.compute_capability
            raise InferError(
                Code.INTERNAL,
                f"unable to create TensorRT engine: {self.log.take() or 'no reason given'}. {path} was given to {who} "
                f"on {device.name}, compute capability {major}.{minor}: a plan fits the version and the kind of GPU it "
                "was built for; build it there, or with VERSION_COMPATIBLE and a hardware compatibility level",
            )
        self.profiles: int = self.engine.num_optimization_profiles
        self.tensors: dict[str, IoTensor] = io_tensors(trt, self.engine)


_engines: weakref.WeakValueDictionary[tuple[object, ...], Engine] = weakref.WeakValueDictionary()
_loading = threading.Lock()


def _engine(trt: Any, context: Context, device: Device, lane: Lane) -> Engine:
    config = context.config
    path = os.path.join(context.directory, config.default_model_filename or "model.plan")
    host_code = config.parameters.get("engine_host_code_allowed", "").lower() in _YES
    try:
        status = os.stat(path)
    except OSError as error:
        raise InferError(Code.NOT_FOUND, f"{path}: {error.strerror}") from None
    key = (id(trt), path, status.st_ino, status.st_mtime_ns, status.st_size, device.uuid, host_code)
    with _loading:
        found = _engines.get(key)
        if found is None:
            lane.enter()
            found = _engines[key] = Engine(trt, path, device, host_code)
        return found


@final
class TensorRTModel:
    """One instance: implements `broker.worker.backends.GpuModel`."""

    __slots__ = ("_contexts", "engine", "lane", "last", "profiles", "scratch")

    def __init__(self, engine: Engine, lane: Lane, profiles: tuple[int, ...], scratch: Scratch) -> None:
        self.engine, self.lane, self.profiles, self.scratch = engine, lane, profiles, scratch
        self._contexts: dict[int, Any] = {}  # by profile
        self.last: object = None  # the binding that the contexts know the places of
        self.context(
            profiles[0] if profiles else 0
        )  # what it takes of the GPU is taken now, not with the first request

    def bind(self, inputs: list[Operand], outputs: list[Operand]) -> GpuBinding:
        """Raises InferError for shapes that no profile has."""
        no_strings([*inputs, *outputs], "TensorRT")
        self.lane.enter()
        return Bound(self, inputs, outputs)

    def context(self, profile: int) -> Any:
        """The execution context of an optimization profile, made on first use."""
        found = self._contexts.get(profile)
        if found is not None:
            return found
        engine = self.engine
        self.lane.enter()
        with engine.lock:
            strategy = engine.trt.ExecutionContextAllocationStrategy.STATIC
            made = engine.engine.create_execution_context(strategy)
            if made is None:
                raise InferError(Code.UNAVAILABLE, f"unable to create TensorRT context: {engine.log.take()}")
            if profile and not made.set_optimization_profile_async(profile, self.lane.stream):
                raise InferError(Code.INTERNAL, f"optimization profile {profile} cannot be set: {engine.log.take()}")
        self.lane.finish()
        self._contexts[profile] = made
        return made

    def close(self) -> None:
        """Contexts first, then the stream they used."""
        self.lane.enter()  # what is freed belongs to this GPU
        self.last = None
        self._contexts.clear()
        self.scratch.close()
        self.lane.close()
