"""Decoupled models in a worker: what they may send, where it lies, who is waited for, and how it ends."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.statistics_blocks import StatisticsBlocks
from broker.worker import answers
from broker.worker.execute import run_batch
from broker.worker.stream import Stream
from shm import datatypes, statistics
from shm.errors import Code, InferError
from shm.layout import CODE_MASK, FINAL, NOTED, SEQUENCE_START
from shm.responses import Extent, part_count, unpack
from shm.statistics import BLOCKS
from tests.fakes.channel import Twin
from tests.fakes.loaded import Loaded, spec
from tests.fakes.loading import run

BACKEND = """
class Model:
    def __init__(self):
        self.streams = []
    def execute(self, streams):
        self.streams += streams
        if streams[0].inputs["x"].reshape(-1)[0] == 666:
            raise RuntimeError("beast")
    def bind(self, inputs, outputs):
        raise NotImplementedError
    def close(self):
        pass
def load(context):
    return Model()
"""
CONFIG = """
backend: "own"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "x" data_type: TYPE_INT32 dims: [ -1 ] }
output [
  { name: "y" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "text" data_type: TYPE_STRING dims: [ -1 ] }
]
"""
ROOM, RESPONSES, OUTPUTS = 64, 4, {"y": 4096, "text": 8192}


class Reader:
    """What a client does: reads parts where they lie, as they come."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._parts = 0
        self._bytes = [b"", b""]
        self._left = 0
        self.responses: list[dict[str, Any]] = []
        self.errors: list[tuple[int, str]] = []
        self.copied = 0
        self.ending: tuple[int, str] | None = None

    def settle(self, entry: tuple[int, ...], note: bytes) -> None:
        assert self.ending is None, "something came after the end"
        code, text = entry[2] & CODE_MASK, note.rstrip(b"\0").decode(errors="replace")
        self.copied += entry[7]
        if entry[2] & NOTED and not code:
            self._part(unpack(note, 2))
        elif code and not entry[2] & FINAL:
            self.errors.append((code, text))
        if entry[2] & FINAL:
            assert self._left == 0, "a response is not whole"
            self.ending = (code, text if code else "")

    def _part(self, extents: list[Extent | None]) -> None:
        if not self._left:
            self._left, self._bytes = part_count(extents, [ROOM, ROOM]), [b"", b""]
        place = self._parts % RESPONSES
        self._parts += 1
        for index, (extent, start) in enumerate(zip(extents, OUTPUTS.values(), strict=True)):
            if extent is not None:
                size = min(extent.byte_size - len(self._bytes[index]), ROOM)
                at = start + place * ROOM
                self._bytes[index] += self._lab.memory.bytes[at : at + size].tobytes()
        self._left -= 1
        if not self._left:
            self.responses.append(self._whole(extents))

    def _whole(self, extents: list[Extent | None]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        y, text = extents
        if y is not None:
            found["y"] = np.frombuffer(self._bytes[0], np.int32).reshape(y.shape).tolist()
        if text is not None:
            raw = np.frombuffer(self._bytes[1], np.uint8)
            found["text"] = datatypes.decode_bytes(raw, text.shape[0], "text").tolist()
        return found


class Lab:
    """A decoupled model, a channel, and a client's memory."""

    def __init__(self, root: Path, slots: int = 4, config_text: str = CONFIG) -> None:
        (root / "m" / "1").mkdir(parents=True)
        (root / "m" / "config.pbtxt").write_text(config_text)
        (root / "m" / "backend.py").write_text(BACKEND)
        config = run(root)
        self.loaded = Loaded(config)
        self.memory = self.loaded.memory()
        outputs = [
            spec(name, (-1,), "INT32" if name == "y" else "BYTES", offset=at, byte_size=RESPONSES * ROOM)
            for name, at in OUTPUTS.items()
        ]
        self.plan = self.loaded.plan(self.memory, [spec("x", (2,), "INT32")], outputs, responses=RESPONSES)
        self.twin = Twin(slots)
        self.client = self.twin.client()
        self.worker = self.twin.worker({self.plan.key: self.plan})

    @property
    def streams(self) -> Any:
        return self.loaded.model.streams

    def start(self, x: int = 1, sequence_id: int = 0, flags: int = 0) -> tuple[Stream, Reader, int]:
        self.memory.put(0, np.array([x, 2], np.int32))
        reader = Reader(self)
        ident = self.client.submit(reader, self.plan.key, 0, 0, 0, 0, flags=flags, sequence_id=sequence_id)
        taken: list[Any] = []
        assert self.worker.take(10, 1, taken) == []
        self.worker.start(taken)
        run_batch(self.loaded.model.instances[0], taken)
        return self.loaded.model.instances[0].runtime.streams.pop(), reader, ident

    def read(self) -> None:
        self.client.reap()

    def close(self) -> None:
        self.twin.close()
        self.loaded.__exit__(None, None, None)


SEQUENCE = """
sequence_batching {
  control_input [
    { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
    { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
  ]
}
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def y(*values: int) -> dict[str, np.ndarray]:
    return {"y": np.array(values, np.int32)}


def test_responses_arrive_whole_and_in_order(lab):
    stream, reader, _ = lab.start()
    assert stream.inputs["x"].tolist() == [1, 2]
    stream.send(y(1))
    stream.send({"text": np.array([b"a", b"bc"], object)})
    lab.read()
    stream.send(y(2, 3) | {"text": np.array([b""], object)}, final=True)
    lab.read()
    assert reader.responses == [{"y": [1]}, {"text": [b"a", b"bc"]}, {"y": [2, 3], "text": [b""]}]
    assert reader.ending == (Code.OK, "")
    assert len(lab.streams) == 0
    assert lab.loaded.count(statistics.SUCCESS) == 1
    assert lab.loaded.copied() == {"policy": 8, "output": reader.copied - 8}


def test_a_stream_may_end_without_a_response(lab):
    stream, reader, _ = lab.start()
    stream.send(final=True)
    lab.read()
    assert (reader.responses, reader.ending) == ([], (Code.OK, ""))


def test_an_end_without_a_response_after_others_brings_none(lab):
    stream, reader, _ = lab.start()
    stream.send(y(1))
    stream.send(final=True)
    lab.read()
    assert (reader.responses, reader.ending) == ([{"y": [1]}], (Code.OK, ""))


def test_an_error_may_come_between_responses_or_at_the_end(lab):
    stream, reader, _ = lab.start()
    stream.send(error="not this one")
    stream.send(y(1))
    stream.send(error=InferError(Code.UNAVAILABLE, "no more"), final=True)
    lab.read()
    assert reader.errors == [(Code.INTERNAL, "not this one")]
    assert reader.responses == [{"y": [1]}]
    assert reader.ending == (Code.UNAVAILABLE, "no more")
    assert lab.loaded.count(statistics.FAIL) == 1


def test_a_response_larger_than_its_room_comes_in_parts(lab):
    stream, reader, _ = lab.start()
    values = list(range(5 * ROOM // 4 // 2))
    stream.send(y(*values) | {"text": np.array([b"x" * 100], object)})  # 2.5 rooms and 1.6
    lab.read()
    stream.send(y(7), final=True)
    lab.read()
    assert reader.responses == [{"y": values, "text": [b"x" * 100]}, {"y": [7]}]


def test_what_cannot_be_sent_is_said_and_changes_nothing(lab):
    stream, reader, _ = lab.start()
    with pytest.raises(InferError, match="must be provided when the response flags is set to zero"):
        stream.send()
    with pytest.raises(InferError, match="model 'm' has no output 'z'"):
        stream.send({"z": np.zeros(1)})
    with pytest.raises(InferError, match="output 'y' of model 'm' is INT32, got an array of float64"):
        stream.send({"y": np.zeros(1)})
    with pytest.raises(InferError, match=r"output 'text' of model 'm' is BYTES: .* element 1 is int") as raised:
        stream.send({"text": np.array([b"a", 1], object)})
    assert raised.value.code == Code.INTERNAL.name
    stream.send(y(1), final=True)
    with pytest.raises(InferError, match=r"Unable to send response. Response sender has been closed\."):
        stream.send(y(2))
    lab.read()
    assert reader.responses == [{"y": [1]}]


def test_a_model_that_raises_ends_all_its_requests(lab):
    stream, reader, _ = lab.start(x=666)
    lab.read()
    assert reader.ending == (Code.INTERNAL, "RuntimeError: beast")
    with pytest.raises(InferError, match="has been closed"):
        stream.send(y(1))


def test_a_stream_that_is_dropped_ends(lab):
    stream, reader, _ = lab.start()
    del stream
    gc.collect()
    lab.streams.look()
    lab.read()
    assert reader.ending == (Code.INTERNAL, "the model let go of the request without a final response")


def test_a_cancelled_stream_ends_although_its_model_does_not_look(lab):
    stream, reader, ident = lab.start()
    assert not stream.cancelled
    lab.client.cancel(ident)
    lab.worker.take(10, 1, [])
    assert stream.cancelled
    lab.streams.look()
    lab.read()
    assert reader.ending == (Code.CANCELLED, "the request was cancelled")
    stream.send(y(1))
    stream.send(final=True)  # no mistake, and nothing happens
    lab.read()
    assert reader.responses == []
    assert lab.loaded.count(statistics.CANCELLED) == 1


def test_a_sender_waits_for_the_client_to_read(lab):
    stream, reader, _ = lab.start()
    sent = []

    def send() -> None:
        for number in range(20):
            stream.send(y(number))
            sent.append(number)
        stream.send(final=True)

    thread = threading.Thread(target=send)
    thread.start()
    while thread.is_alive():
        assert len(sent) <= len(reader.responses) + RESPONSES + 1
        lab.read()
    thread.join()
    lab.read()
    assert reader.responses == [{"y": [number]} for number in range(20)]


def test_a_client_that_never_reads_is_given_up(lab, monkeypatch):
    monkeypatch.setattr(answers, "PATIENCE_NS", 1_000_000)
    stream, reader, _ = lab.start()
    for number in range(RESPONSES + 1):
        stream.send(y(number))
    assert stream.cancelled
    lab.read()
    assert reader.responses == [{"y": [number]} for number in range(RESPONSES)]
    assert reader.ending is not None
    assert reader.ending[0] == Code.UNAVAILABLE
    assert "did not read its responses" in reader.ending[1]


def test_a_request_that_waits_for_credit_can_be_cancelled(lab):
    stream, reader, ident = lab.start()
    for number in range(RESPONSES):
        stream.send(y(number))
    lab.client.cancel(ident)
    lab.worker.take(10, 1, [])
    stream.send(y(99))
    lab.read()
    assert reader.ending == (Code.CANCELLED, "the request was cancelled")


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_sent_arrives(tmp_path, seed):
    random_ = random.Random(seed)
    lab = Lab(tmp_path)
    stream, reader, _ = lab.start()
    expected = []
    for _ in range(200):
        response: dict[str, Any] = {}
        if random_.random() < 0.8:
            response["y"] = np.arange(random_.choice((0, 1, 15, 16, 17, 40)), dtype=np.int32)
        if random_.random() < 0.3:
            response["text"] = np.array([b"t" * random_.choice((0, 5, 56, 60, 61))], object)
        thread = threading.Thread(target=stream.send, args=(response,))
        thread.start()
        while thread.is_alive():
            if random_.random() < 0.5:
                lab.read()
        expected.append({name: array.tolist() for name, array in response.items()})
    stream.send(final=True)
    lab.read()
    assert reader.responses == expected
    assert lab.worker.broken == ""
    lab.close()


def test_statistics_by_the_index_of_a_response(lab):
    stream, _, _ = lab.start()
    stream.send(y(1))
    stream.send(error="no")
    stream.send(final=True)
    stream, _, ident = lab.start()
    stream.send(y(1))
    lab.client.cancel(ident)
    lab.worker.take(10, 1, [])
    assert stream.cancelled
    stream.send(final=True)
    blocks = StatisticsBlocks(lab.loaded.page)
    block = next(index for index in range(BLOCKS) if lab.loaded.page.block(index)[statistics.SUCCESS])
    blocks._blocks["m", 1] = {"": [block]}
    stats = blocks.model_stats("m", 1)["response_stats"]
    counts = {index: {name: each["count"] for name, each in of.items() if each["count"]} for index, of in stats.items()}
    assert counts == {
        "0": {"compute_infer": 2, "compute_output": 2, "success": 2},
        "1": {"compute_infer": 1, "compute_output": 1, "fail": 1, "cancel": 1},
        "2": {"compute_infer": 1, "empty_response": 1},
    }
    total = {name: sum(of[name]["ns"] for of in stats.values()) for name in stats["0"]}
    assert (
        total["success"] + total["fail"] + total["empty_response"] == total["compute_infer"] + total["compute_output"]
    )


def test_a_sequence_s_controls_are_among_the_inputs(tmp_path):
    lab = Lab(tmp_path, config_text=CONFIG + SEQUENCE)
    for flags, start in ((SEQUENCE_START, 1), (0, 0)):
        stream, _, _ = lab.start(sequence_id=42, flags=flags)
        assert {name: stream.inputs[name].tolist() for name in ("START", "ID")} == {"START": [start], "ID": [42]}
        stream.send(final=True)
        lab.read()
    lab.close()
