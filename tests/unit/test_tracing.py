"""Which requests are traced, and what the files look like, at any moment and after any mishap."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.gateway import trace_files
from broker.gateway.kserve import InferRequest
from broker.gateway.options import TraceSetting, TraceTable
from broker.gateway.trace_files import NumberedPart, TraceFiles
from broker.gateway.tracing import MAX_EVENTS, MAX_ID, Trace, Traces
from broker.options import parse_serve
from broker.settings import TraceState
from clientlib.results import Timing

OFF: TraceSetting = {"trace_level": ["OFF"], "trace_rate": "1", "trace_count": "-1", "log_frequency": "0"}
ON = OFF | {"trace_level": ["TIMESTAMPS"]}


def traces(tmp_path: Path, index: int = 0, began: int | None = None, **settings: TraceSetting) -> Traces:
    """`settings` by model; `all`: the global ones."""
    table = {"" if name == "all" else name: setting for name, setting in settings.items()}
    began = time.time_ns() if began is None else began
    return Traces(TraceTable(file=str(tmp_path / "t"), began=began, settings=table), index)


def sampled(of: Traces, model: str, count: int) -> list[int]:
    """Which of `count` requests were traced, and all of those written."""
    found = []
    for number in range(count):
        if (trace := of.sample(model)) is not None:
            write(trace, model)
            found.append(number)
    return found


def write(trace: Trace, model: str = "m", identifier: str = "") -> None:
    trace.mark("HTTP_RECV_START", 1)
    trace.begin(InferRequest(model, id=identifier))
    trace.computed(trace.submitted(), Timing(1, 2, 3, 4))
    trace.ended("3")
    trace.write()


def read(path: Path) -> list[dict[str, Any]]:
    document: list[dict[str, Any]] = json.loads(path.read_bytes())
    return document


def models(path: Path) -> list[str]:
    return [each["model_name"] for each in read(path) if "model_name" in each]


def test_nothing_is_traced_unless_asked_for(tmp_path: Path) -> None:
    assert not Traces(TraceTable()).on
    assert not traces(tmp_path, all=OFF).on
    assert not Traces(TraceTable(settings={"": ON})).on, "there is no file"
    assert not traces(tmp_path, all=ON | {"trace_rate": "0"}).on
    assert not traces(tmp_path, all=OFF | {"trace_level": ["TENSORS"]}).on
    of = traces(tmp_path, all=OFF, m=ON)
    assert of.on
    assert (sampled(of, "other", 3), sampled(of, "m", 3)) == ([], [0, 1, 2])


def test_rate_and_count(tmp_path: Path) -> None:
    of = traces(tmp_path, all=ON | {"trace_rate": "3", "trace_count": "2"})
    assert of.left("m") == of.left("") == 2
    assert sampled(of, "a", 4) + sampled(of, "b", 8) == [2, 1], "models without settings of their own share them"
    assert of.left("m") == 0
    of.apply("", {"": ON | {"trace_count": "2"}})
    assert (of.left("m"), sampled(of, "a", 4)) == (2, [0, 1])
    of.close()
    assert models(tmp_path / "t.0") == ["a", "b"]
    assert models(tmp_path / "t.1") == ["a", "a"]
    assert not (tmp_path / "t").exists()


def test_settings_of_another_model_begin_nothing_anew(tmp_path: Path) -> None:
    mine = ON | {"trace_rate": "2"}
    of = traces(tmp_path, all=OFF, m=mine)
    assert sampled(of, "m", 1) == []
    of.apply("n", {"": OFF, "m": mine, "n": ON})
    assert sampled(of, "m", 1) == [0]
    of.apply("m", {"": OFF, "n": ON})
    assert sampled(of, "m", 4) == []


def test_files_of_so_many_traces(tmp_path: Path) -> None:
    of = traces(tmp_path, all=ON, m=ON | {"log_frequency": "2"})
    for model in "mnmmnm":
        sampled(of, model, 1)
    sampled(of, "m", 1)
    of.close()
    assert [models(tmp_path / name) for name in ("t", "t.0", "t.1", "t.2")] == [["n"] * 2, ["m"] * 2, ["m"] * 2, ["m"]]
    other = traces(tmp_path, index=2, all=ON)
    sampled(other, "m", 1)
    other.close()
    assert models(tmp_path / "t-gateway2") == ["m"]
    assert models(tmp_path / "t") == ["n"] * 2


def test_what_a_trace_says(tmp_path: Path) -> None:
    of = traces(tmp_path, all=ON)
    first, second, third = (of.sample("m") for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    write(second, identifier='a"b\n' + "x" * 5000)
    write(first)
    third.begin(InferRequest("m"))
    third.write()  # nobody was asked
    of.close()
    found = read(tmp_path / "t")
    assert [each["id"] for each in found] == [2] * 9 + [1] * 9
    assert found[0] == {"id": 2, "timestamps": [{"name": "HTTP_RECV_START", "ns": 1}]}
    assert found[1] == {"id": 2, "model_name": "m", "model_version": 3, "request_id": 'a"b\n' + "x" * (MAX_ID - 4)}
    assert found[10] == {"id": 1, "model_name": "m", "model_version": 3}
    moments = {each["timestamps"][0]["name"]: each["timestamps"][0]["ns"] for each in found[11:]}
    assert list(moments) == [
        "REQUEST_START",
        "QUEUE_START",
        "COMPUTE_START",
        "COMPUTE_INPUT_END",
        "COMPUTE_OUTPUT_START",
        "COMPUTE_END",
        "REQUEST_END",
    ]
    begin = moments["QUEUE_START"]
    assert [moments[name] - begin for name in list(moments)[1:6]] == [0, 1, 3, 6, 10]


def test_a_trace_is_bounded(tmp_path: Path) -> None:
    of = traces(tmp_path, all=ON)
    trace = of.sample("m")
    assert trace is not None
    trace.begin(InferRequest("m"))
    trace.submitted()
    for _ in range(5000):
        trace.mark("INFER_RESPONSE_COMPLETE")
    trace.write()
    of.close()
    assert len(read(tmp_path / "t")) == 1 + MAX_EVENTS


class Said:
    def __init__(self, text: str, wait: threading.Event | None = None) -> None:
        self._text, self._wait = text, wait

    def text(self) -> str:
        if self._wait is not None:
            self._wait.wait(30)
        return self._text


class Whole:
    per_file = 0
    part = NumberedPart()


def test_a_slow_disk_loses_traces_and_holds_nobody_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, gate = TraceFiles(str(tmp_path / "t"), 0, waiting=3), threading.Event()
    for number in range(20):
        files.put(Said(str(number), gate), Whole())
    gate.set()
    files.close()
    assert read(tmp_path / "t")[0] == 0
    assert 3 <= len(read(tmp_path / "t")) <= 4
    assert [record.getMessage()[1:] for record in caplog.records] == [
        " traces were dropped: they come faster than they can be written"
    ]


def test_a_file_is_whole_after_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    fails: list[bool] = []

    def bad(fd: int, data: Any, position: int) -> int:
        if len(data) > 3 and fails:
            if fails.pop():
                raise OSError(28, "No space left on device")
            return pwrite(fd, bytes(data[:2]), position)  # a part of it
        return pwrite(fd, data, position)

    monkeypatch.setattr(trace_files.os, "pwrite", bad)
    files, said = TraceFiles(str(tmp_path / "t"), 0), []
    for number, mishap in enumerate(([], [True], [False], [True, False], [])):
        fails[:] = mishap
        text = str(number) * 3
        with pytest.raises(OSError, match="No space") if True in mishap else contextlib.nullcontext():
            files._write(f'"{text}"'.encode(), Whole())
        said += [] if True in mishap else [text]
        assert json.loads((tmp_path / "t").read_bytes()) == said


def test_a_file_that_cannot_be_made_is_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of = Traces(TraceTable(file=str(tmp_path / "none" / "t"), settings={"": ON}))
    sampled(of, "m", 3)
    of.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("failed creating trace file: [Errno 2] No such file")


def test_a_gateway_that_is_replaced_loses_no_traces(tmp_path: Path) -> None:
    began = time.time_ns()
    (tmp_path / "t").write_text("[of a broker before]")
    os.utime(tmp_path / "t", ns=(0, began - 10**9))
    began -= 10**8  # files' clock is a coarse one
    for _ in range(3):
        of = traces(tmp_path, began=began, all=ON, m=ON | {"log_frequency": "2"})
        sampled(of, "n", 2)
        sampled(of, "m", 3)
        of.close()
    assert models(tmp_path / "t") == ["n"] * 6
    assert [models(tmp_path / f"t.{number}") for number in range(6)] == [["m"] * 2, ["m"]] * 3
    found = [read(path) for path in tmp_path.iterdir()]
    assert len({each["id"] for file in found for each in file}) == 15
    other = traces(tmp_path, began=time.time_ns() + 10**9, all=ON)
    sampled(other, "new", 1)
    other.close()
    assert models(tmp_path / "t") == ["new"], "another broker begins anew"


def test_gateways_are_told_of_changes() -> None:
    told: list[Any] = []
    state = TraceState("t", {"trace_level": ["TIMESTAMPS"]})
    state.apply = lambda model, settings: told.append((model, settings))
    default = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0"}
    assert msgspec.structs.replace(state.table(), began=0) == TraceTable(file="t", settings={"": default})
    state.update("m", {})
    state.update("m", {"unknown": "1"})
    assert told == []
    state.update("m", {"trace_rate": "5"})
    state.update("", {"trace_count": "7"})
    state.update("m", {"trace_rate": None})
    everywhere = default | {"trace_count": "7"}
    assert told == [
        ("m", {"": default, "m": default | {"trace_rate": "5"}}),
        ("", {"": everywhere, "m": everywhere | {"trace_rate": "5"}}),
        ("m", {"": everywhere}),
    ]


def test_the_command_line_is_heard() -> None:
    arguments = ["--model-repository=/a", "--trace-config=triton,file=t", "--trace-config=level=TIMESTAMPS"]
    options = parse_serve([*arguments, "--trace-config=rate=2"])
    assert options.without_effect == []
    assert options.gateway.trace.file == "t"
    assert options.gateway.trace.settings == {"": ON | {"trace_rate": "2"}}
    for unheard in ("mode=opentelemetry", "level=TENSORS"):
        assert parse_serve([*arguments, f"--trace-config={unheard}"]).without_effect == [f"--trace-config {unheard}"]


def test_a_version_that_no_model_has_is_none(tmp_path):
    of = traces(tmp_path, all=ON)
    trace = of.sample("m")
    assert trace is not None
    trace.begin(InferRequest("m", version="9" * 5000))
    assert '"model_version":-1' in trace.text()
    of.close()
