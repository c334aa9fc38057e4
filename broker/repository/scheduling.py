"""How requests of a model are scheduled, as plain data: the parts of a configuration beside tensors and instances.

Field names are those of Triton's `config.pbtxt` (inference.ModelConfig); the loader fills them in, validated, and
workers obey them. `broker.repository.config` puts them together.
"""

from __future__ import annotations

import msgspec


class QueuePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to requests that wait too long or are too many, per priority level.

    `drop_oldest` (ours, model parameter `drop_oldest`): a full queue lets its oldest request go instead of the new one.
    """

    timeout_action: str = "REJECT"
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0
    drop_oldest: bool = False


class DynamicBatching(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are joined to batches; absent means that each runs alone."""

    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: dict[int, QueuePolicy] = {}


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """A control input of a sequence model. `kind`: CONTROL_SEQUENCE_START, _END, _READY or _CORRID.

    `datatype` is KServe's name. `off` and `on` are its values for flags (not for CORRID).
    """

    name: str
    kind: str
    datatype: str
    off: float = 0
    on: float = 1


class InitialState(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence starts with: `data` are the bytes of the file, b"" = zeros. `dims` without batch dimension.

    `path`: the file they come from.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    data: bytes = b""
    path: str = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Implicit state: output `output_name` of one step is input `input_name` of the next. -1 in `dims` is variable."""

    input_name: str
    output_name: str
    datatype: str
    dims: tuple[int, ...]
    initial_state: InitialState | None = None


class SequenceBatching(msgspec.Struct, frozen=True, kw_only=True):
    """`oldest` False is the strategy "direct": then `max_candidate_sequences` says nothing."""

    max_sequence_idle_microseconds: int = 1_000_000
    control_input: tuple[Control, ...] = ()
    state: tuple[State, ...] = ()
    oldest: bool = False
    max_candidate_sequences: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0
    preserve_ordering: bool = False
    iterative_sequence: bool = False


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an ensemble. Maps are from the model's tensor name to the ensemble's. `model_version` -1: the latest.

    `max_inflight_requests` 0: no limit.
    """

    model_name: str
    model_version: int = -1
    input_map: dict[str, str] = {}
    output_map: dict[str, str] = {}


class Ensemble(msgspec.Struct, frozen=True, kw_only=True):
    """The data flow of an ensemble model."""

    step: tuple[Step, ...]
    max_inflight_requests: int = 0


class BatchInput(msgspec.Struct, frozen=True, kw_only=True):
    """A helper input that is made for each batch. `kind` is Triton's BATCH_… name, `datatype` INT32 or FP32."""

    kind: str
    target_name: tuple[str, ...]
    datatype: str
    source_input: tuple[str, ...]


class BatchOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs that are cut by the shapes of an input (BATCH_SCATTER_WITH_INPUT_SHAPE)."""

    kind: str
    target_name: tuple[str, ...]
    source_input: tuple[str, ...]


class MadeInput(msgspec.Struct, frozen=True, kw_only=True):
    """An input that the broker makes and no client sends. `shape`: the model's, without batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Padding(msgspec.Struct, frozen=True, kw_only=True):
    """Ours: inputs whose variable dimension differs are padded with `value` to the smallest size of `to` (rising) that
    fits all of a batch.

    `inputs`, `outputs`: their variable axes, the batch dimension counted; outputs are cut back there. `mask`: 1 where
    there is no padding; `lengths`: how much of each row is none.
    """

    to: tuple[int, ...]
    value: int | float
    inputs: dict[str, int]
    outputs: dict[str, tuple[int, ...]]
    mask: MadeInput | None = None
    lengths: MadeInput | None = None


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance needs of the rate limiter. `is_global`: one pool for all devices."""

    name: str
    count: int
    is_global: bool = False


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is of a resource of the rate limiter. `device` None: on each device."""

    name: str
    count: int
    device: int | None = None


class WarmUpInput(msgspec.Struct, frozen=True, kw_only=True):
    """`dims` without batch dimension. `data` are the bytes of one batch element's file, for `kind` "file",
    and `path` is that file.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    kind: str  # "zero", "random", "file"
    data: bytes = b""
    path: str = ""


class WarmUp(msgspec.Struct, frozen=True, kw_only=True):
    """A request that every instance runs `count` times before the model is ready."""

    name: str
    batch_size: int
    inputs: tuple[WarmUpInput, ...]
    count: int = 1
