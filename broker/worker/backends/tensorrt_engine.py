"""What a TensorRT engine says of its tensors, and whether a model's configuration says the same.

Called by `broker.worker.backends.tensorrt` when a plan is loaded. TensorRT's module comes as an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from broker.repository.config import InstanceGroup, ModelConfig, TensorConfig
from shm.datatypes import shape_text
from shm.errors import Code, InferError

Shape = tuple[int, ...]
MAX_LINES: Final = 8  # of the log, in an error
# tensorrt.DataType → KServe. Our own, because tensorrt.nptype refuses what numpy lacks. KServe has no name for the
# others: FP8, INT4, FP4, E8M0.
DATATYPES: Final = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "BOOL": "BOOL",
    "UINT8": "UINT8",
}


@final
class Log:
    """TensorRT's logger: keeps the last warnings and errors, which are the only reasons it gives."""

    def __init__(self, trt: Any) -> None:
        lines: deque[str] = deque(maxlen=MAX_LINES)
        self._lines = lines
        severities = trt.ILogger.Severity
        bad = (severities.INTERNAL_ERROR, severities.ERROR)
        kept = (*bad, severities.WARNING)
        self.errors = 0
        owner = self

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()

            def log(self, severity: Any, msg: str) -> None:
                owner.errors += severity in bad
                if severity in kept:
                    lines.append(" ".join(msg.split()))

        self.logger = Logger()

    def take(self) -> str:
        """What was said since this was last asked, in one line."""
        said = "; ".join(self._lines)
        self._lines.clear()
        return said


@final
@dataclass(frozen=True, slots=True)
class IoTensor:
    """A tensor of an engine. `shape`: -1 where it is dynamic. `host`: a shape tensor, which lies on the host.

    `ranges`: of an input, by profile, its smallest and largest shape, `best` the one it was built for; `values`: of a
    shape tensor, its smallest and largest elements.
    """

    name: str
    is_input: bool
    datatype: str
    shape: Shape
    host: bool
    ranges: tuple[tuple[Shape, Shape], ...]
    best: tuple[Shape, ...]
    values: tuple[tuple[Shape, Shape], ...]

    def fits(self, shape: Shape, profile: int) -> bool:
        """Is `shape` within a profile?"""
        if len(shape) != len(self.shape):
            return False
        low, high = self.ranges[profile]
        return all(a <= dim <= b for a, dim, b in zip(low, shape, high, strict=True))

    def distance(self, shape: Shape, profile: int) -> int:
        """How far a shape that fits is from what a profile was built for."""
        return sum(abs(dim - best) for dim, best in zip(shape, self.best[profile], strict=True))


def io_tensors(trt: Any, engine: Any) -> dict[str, IoTensor]:
    """All of them. Raises InferError UNSUPPORTED for layouts and datatypes that no client could use."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    return {name: _tensor(trt, engine, name) for name in names}


def _tensor(trt: Any, engine: Any, name: str) -> IoTensor:
    kind = engine.get_tensor_dtype(name).name
    datatype = DATATYPES.get(kind)
    if datatype is None:
        raise InferError(
            Code.UNSUPPORTED,
            f"tensor '{name}' of the engine is {kind}, for which there is no datatype; build the plan with "
            f"{', '.join(DATATYPES)} at its inputs and outputs (quantize inside, by Q/DQ layers)",
        )
    described = engine.get_tensor_format_desc(name)
    if engine.get_tensor_vectorized_dim(name) != -1 or "linear" not in described.lower():
        raise InferError(
            Code.UNSUPPORTED,
            f"tensor '{name}' of the engine has the format '{described}': clients' tensors are row major and linear; "
            "build the plan with TensorFormat.LINEAR for its inputs and outputs",
        )
    is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    shape = tuple(engine.get_tensor_shape(name))
    host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
    ranges: list[tuple[Shape, Shape]] = []
    best: list[Shape] = []
    values: list[tuple[Shape, Shape]] = []
    for profile in range(engine.num_optimization_profiles if is_input else 0):
        if -1 in shape:
            low, middle, high = engine.get_tensor_profile_shape(name, profile)
            ranges.append((tuple(low), tuple(high)))
            best.append(tuple(middle))
        else:
            ranges.append((shape, shape))
            best.append(shape)
        if host:
            known = engine.get_tensor_profile_values(profile, name)
            values.append((tuple(known[0]), tuple(known[2])) if known else ((), ()))
    return IoTensor(name, is_input, datatype, shape, host, tuple(ranges), tuple(best), tuple(values))


# --- the configuration ----------------------------------------------------------------------------------------------


def profiles_of(group: InstanceGroup, config: ModelConfig, path: str, count: int) -> tuple[int, ...]:
    """The optimization profiles that instances of a group use. Raises InferError INVALID_ARG for one that is not."""
    for profile in group.profiles:
        if profile >= count:
            has = f"{count}, numbered from 0" if count > 1 else "one, number 0"
            raise _wrong(config, f"instance group {group.name} names optimization profile {profile}, {path} has {has}")
    return group.profiles or tuple(range(count))


def check(tensors: dict[str, IoTensor], config: ModelConfig, path: str, profiles: Sequence[int]) -> None:
    """Raises InferError INVALID_ARG that shows both sides of what does not fit."""
    for side, configured in ((True, config.input), (False, config.output)):
        what = "input" if side else "output"
        known = {tensor.name: tensor for tensor in tensors.values() if tensor.is_input == side}
        for tensor in configured:
            if tensor.name not in known:
                names = ", ".join(f"'{name}'" for name in known)
                raise _wrong(config, f"{what} '{tensor.name}' is not in {path}, whose {what}s are {names or 'none'}")
            _check_tensor(config, tensor, known[tensor.name], what)
        missing = sorted(set(known) - {tensor.name for tensor in configured} - _internal(config))
        if side and missing:
            raise _wrong(config, f"input '{missing[0]}' of {path} is not configured")
    _check_batch(tensors, config, path, profiles)


def _internal(config: ModelConfig) -> set[str]:
    """Inputs that no client sends: controls, states, what batches have of themselves."""
    names = {name for made in config.batch_input for name in made.target_name}
    sequence = config.sequence_batching
    if sequence is not None:
        names |= {control.name for control in sequence.control_input}
        names |= {state.input_name for state in sequence.state}
    return names


def _check_tensor(config: ModelConfig, given: TensorConfig, engine: IoTensor, what: str) -> None:
    if given.datatype != engine.datatype:
        raise _wrong(
            config, f"{what} '{given.name}' is {given.datatype} in the configuration, {engine.datatype} in the engine"
        )
    dims = given.reshape if given.reshape is not None else given.dims
    batched = config.max_batch_size > 0 and not given.is_shape_tensor
    shape = (-1, *dims) if batched else tuple(dims)
    fits = len(shape) == len(engine.shape) and all(
        a == b or -1 in (a, b) for a, b in zip(shape, engine.shape, strict=True)
    )
    if not fits:
        raise _wrong(
            config,
            f"{what} '{given.name}' has shape {shape_text(shape)} in the configuration"
            f"{' (with the batch dimension)' if batched else ''}, {shape_text(engine.shape)} in the engine",
        )


def _check_batch(tensors: dict[str, IoTensor], config: ModelConfig, path: str, profiles: Sequence[int]) -> None:
    """Some of the profiles must have the largest batch; what decides shapes must be the same for all of a batch."""
    if config.max_batch_size < 1:
        return
    for shape in (tensor.name for tensor in tensors.values() if tensor.host):
        raise _wrong(
            config,
            f"'{shape}' of {path} is a shape tensor, which is one for all of a batch and not a row of each request: "
            "max_batch_size: 0",
        )
    for tensor in config.input:
        engine = tensors[tensor.name]
        most = max((engine.ranges[profile][1][0] for profile in profiles), default=config.max_batch_size)
        if most < config.max_batch_size:
            raise _wrong(
                config,
                f"max_batch_size is {config.max_batch_size}, but input '{tensor.name}' of {path} takes batches of at "
                f"most {most}: max_batch_size: {most}, or an optimization profile with more",
            )


def _wrong(config: ModelConfig, why: str) -> InferError:
    return InferError(Code.INVALID_ARG, f"unable to load model '{config.name}': {why}")
