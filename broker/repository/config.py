"""A model's final configuration, as plain data that crosses process boundaries (loader → broker → worker).

Field names are those of Triton's `config.pbtxt` (inference.ModelConfig). What only the loader can know (the model
file's own symbols, the zero-copy verdict per input) is added beside them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from broker.repository.scheduling import (
    BatchInput,
    BatchOutput,
    DynamicBatching,
    Ensemble,
    InitialState,
    Padding,
    Resource,
    SequenceBatching,
    WarmUp,
    WarmUpInput,
)
from shm.datatypes import BYTES, byte_size
from shm.errors import Code, InferError

CHANGED = "has changed since the configuration was read"
MAX_DATA_FILE = 16 << 20  # bytes of one initial state or warm-up input

_FileT = TypeVar("_FileT", InitialState, WarmUpInput)

SEQUENCES = ("sequence", "dyna_sequence", "iterative_sequence", "implicit_state")
SHARED = frozenset(("onnxruntime", "ensemble", "identity", "square", "repeat", *SEQUENCES))  # in one worker
YES_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}  # texts of such parameters


class TensorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An input or output. `dims` excludes the batch dimension when `max_batch_size` > 0; -1 is variable.

    `symbols` has one entry per entry of `dims`: "" for a fixed size, the model file's own name for a variable one, or
    "?NAME:AXIS" where the file gives none (or one that no input carries): unknown until the model has run.
    `zero_copy`: the runtime may read a client's memory directly (inputs only; `zero_copy_reason` says why or why not).
    `file_rank` is the rank in the model file, batch dimension included (-1 unknown); `file_shape` its shape there, as
    text with the file's own names for variable sizes ("[batch,3,640,640]", "" unknown).
    `labels` is what the label file had when the model was loaded: one class name a line (outputs only).
    """

    name: str
    datatype: str  # KServe name: "FP32", "BYTES", …
    dims: tuple[int, ...]
    symbols: tuple[str, ...] = ()
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    label_filename: str = ""
    labels: bytes = b""
    zero_copy: bool = False
    zero_copy_reason: str = ""
    file_rank: int = -1
    file_shape: str = ""


class InstanceGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`count` execution slots, on each of `gpus` when kind is KIND_GPU. `resources`, `priority`: the rate limiter's.

    `profiles`: numbers of a TensorRT engine's optimization profiles that they may use; (): all.
    """

    name: str
    kind: str = "KIND_CPU"
    count: int = 1
    gpus: tuple[int, ...] = ()
    resources: tuple[Resource, ...] = ()
    priority: int = 1
    profiles: tuple[int, ...] = ()


class RemoteMember(msgspec.Struct, frozen=True, kw_only=True):
    """The model of an ensemble's step that other workers serve, as much of it as the ensemble's worker needs.

    `workers`: their keys, ascending. `config`: without all that only running it takes.
    `sequences`: its requests are steps of sequences. `retry`: they may run twice.
    """

    workers: tuple[str, ...]
    config: ModelConfig
    sequences: bool = False
    retry: bool = True


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One model, completed and validated.

    `versions`: version number → absolute path of its directory, after the version policy, ascending.
    `stamps`: version number → `file_stamp` of the model file that was read; none for backends whose files are not read.
    `json`: the whole configuration in Triton's JSON form, for `GET /v2/models/M/config`.
    `notes`: what the loader changed or ignored, each reported once at load.
    `first_response_buckets`: of `model_metrics`, in ms, ascending; (): the default ones.
    `graph_level`: `optimization.graph.level`.
    `max_batch_size_completed`: nobody wrote `max_batch_size`, auto-completion chose it.
    `origins`: only when asked for. Field path ("input[x].dims") → "file", "model", "default" or "override".
    `explanation`: only when asked for. The configuration as config.pbtxt text, the origin beside every line.
    `remote`, `worker`: of an ensemble, by the number of the step, and the key of its own worker; the broker fills them
    in (`broker.ensemble_members`).
    """

    name: str
    platform: str
    backend: str
    directory: str
    versions: dict[int, str]
    default_model_filename: str
    max_batch_size: int
    input: tuple[TensorConfig, ...]
    output: tuple[TensorConfig, ...]
    instance_group: tuple[InstanceGroup, ...]
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: SequenceBatching | None = None
    ensemble: Ensemble | None = None
    batch_input: tuple[BatchInput, ...] = ()
    batch_output: tuple[BatchOutput, ...] = ()
    padding: Padding | None = None
    response_cache: bool = False
    warm_up: tuple[WarmUp, ...] = ()
    metric_tags: dict[str, str] = {}
    first_response_buckets: tuple[float, ...] = ()
    graph_level: int = 0
    decoupled: bool = False
    stateful: bool = False
    parameters: dict[str, str] = {}
    stamps: dict[int, str] = {}
    json: str = "{}"
    notes: tuple[str, ...] = ()
    max_batch_size_completed: bool = False
    origins: dict[str, str] = {}
    explanation: str = ""
    remote: dict[int, RemoteMember] = {}
    worker: str = ""

    @property
    def worker_groups(self) -> tuple[str, ...]:
        """Which models its instances share a worker process with, per device: one name per instance group, the last
        one for all that follow.
        """
        own = "default" if self.backend in SHARED else self.backend
        return tuple((self.parameters.get("worker_group") or own).split(","))

    @property
    def retryable(self) -> bool:
        """May a request that was running when its worker died be run once more?

        The parameter `retry` decides; without it, all may but those of Python code, which may do more than answer.
        """
        if self.stateful or self.decoupled:
            return False
        return YES_NO.get(self.parameters.get("retry", "").lower(), self.backend != "python")

    @property
    def steps_retryable(self) -> bool:
        """May a step of this ensemble run once more, where its member's requests may? Of a decoupled one, too, which
        itself may not: responses of it were sent.
        """
        return YES_NO.get(self.parameters.get("retry", "").lower(), True)

    @property
    def interface(self) -> str:
        """What the check of a prepared request depends on, but for how many rows there may be: equal for models whose
        plans are each other's."""
        tensors = [[(t.name, t.datatype, t.dims, t.optional) for t in side] for side in (self.input, self.output)]
        controls = self.sequence_batching.control_input if self.sequence_batching is not None else ()
        ids = [(each.name, each.datatype) for each in controls if each.kind == "CONTROL_SEQUENCE_CORRID"]
        return str((self.max_batch_size > 0, self.decoupled, tensors, ids))

    @property
    def for_worker(self) -> ModelConfig:
        """Without what may be larger than a message to the worker: class names, which it has no use for, and the
        bytes of data files, which it reads itself (`with_data`).
        """
        output = tuple(replace(tensor, labels=b"") for tensor in self.output)
        return _with_files(replace(self, output=output, origins={}, explanation=""), lambda item: b"")

    @property
    def for_reader(self) -> ModelConfig:
        """The same with the origins of its values."""
        return replace(self.for_worker, origins=self.origins, explanation=self.explanation)

    @property
    def as_remote(self) -> ModelConfig:
        """What an ensemble in another worker needs: names, datatypes and shapes."""

        def bare(tensors: tuple[TensorConfig, ...]) -> tuple[TensorConfig, ...]:
            return tuple(
                TensorConfig(
                    name=each.name, datatype=each.datatype, dims=each.dims, symbols=each.symbols, optional=each.optional
                )
                for each in tensors
            )

        return ModelConfig(
            name=self.name,
            platform=self.platform,
            backend=self.backend,
            directory="",
            versions={},
            default_model_filename="",
            max_batch_size=self.max_batch_size,
            input=bare(self.input),
            output=bare(self.output),
            instance_group=(),
            decoupled=self.decoupled,
        )

    def with_data(self) -> ModelConfig:
        """With the bytes of its data files again. Raises OSError; ValueError for one that has too few by now."""
        return _with_files(self, _read)

    def check_file(self, version: int, directory: str) -> None:
        """Raise InferError UNAVAILABLE when the model file is not the one that the configuration was made from.

        What is known of the file (tensors, which inputs may be used in place) holds for no other.
        """
        path = os.path.join(directory, self.default_model_filename)
        if version in self.stamps and file_stamp(path) != self.stamps[version]:
            raise InferError(Code.UNAVAILABLE, f"{path} {CHANGED}: load the model again")

    @property
    def max_queue_bytes(self) -> int:
        """How many bytes the inputs of requests that wait may have together; 0: any number."""
        return int(self.parameters.get("max_queue_bytes") or 0)

    @property
    def drop_oldest(self) -> bool:
        """Does a queue that is full let its oldest request go instead of the new one?"""
        return YES_NO.get(self.parameters.get("drop_oldest", "").lower(), False)

    @property
    def hang_timeout_s(self) -> float:
        """0.0 means: the default, derived from measured runs."""
        try:
            return max(0.0, float(self.parameters.get("hang_timeout_s", "0")))
        except ValueError:
            return 0.0


def file_stamp(path: str) -> str:
    """Says which file this is and when it was written last; "" when there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _with_files(config: ModelConfig, data: Callable[[InitialState | WarmUpInput], bytes]) -> ModelConfig:
    """Every initial state and warm-up input that comes from a file, with other `data`."""

    def filled(item: _FileT) -> _FileT:
        return replace(item, data=data(item)) if item.path else item

    warm_up = tuple(replace(sample, inputs=tuple(map(filled, sample.inputs))) for sample in config.warm_up)
    sequences = config.sequence_batching
    if sequences is not None:
        state = tuple(
            state if state.initial_state is None else replace(state, initial_state=filled(state.initial_state))
            for state in sequences.state
        )
        sequences = replace(sequences, state=state)
    return replace(config, warm_up=warm_up, sequence_batching=sequences)


def _read(item: InitialState | WarmUpInput) -> bytes:
    with open(item.path, "rb") as file:
        data = file.read(MAX_DATA_FILE + 1)
    if item.datatype == BYTES:
        return data
    needed = byte_size(item.datatype, item.dims)  # of what may be more
    if len(data) < needed:
        raise ValueError(f"{item.path} {CHANGED}: it has {len(data)} bytes now")
    return data[:needed]


class LoadFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A model that could not be configured: `reason` is for the start-up table and the index.

    `versions`: those that it is about, if the configuration itself is not to blame but what it needs to be served.
    `cause`: the one of them that has failed, if the others only go with it; else 0.
    `further`: what else is wrong, if that was asked for (`LoadRequest.every`).
    """

    name: str
    reason: str
    versions: tuple[int, ...] = ()
    cause: int = 0
    further: tuple[str, ...] = ()

    def by_version(self) -> dict[int, str]:
        """Why each version is not served."""
        first, *_ = self.reason.splitlines() or ("",)
        others = f"because version {self.cause} failed: {first}"
        return {number: others if self.cause not in (0, number) else self.reason for number in self.versions}
