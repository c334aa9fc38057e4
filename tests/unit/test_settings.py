"""Log and trace settings: Triton's rules and texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.flags import UsageError
from broker.gateway.http.settings import trace_update
from broker.gateway.options import LogOptions
from broker.settings import LogState, TraceState
from broker.trace_flags import TraceOptions, check_file
from shm.errors import InferError

TRACE = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


def test_log_settings_are_shown_and_changed() -> None:
    applied: list[LogOptions] = []
    state = LogState(LogOptions(log_file="x.log"), applied.append)
    expected = {
        "log_file": "x.log",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert state.update({}) == expected
    assert applied == []
    expected |= {"log_info": False, "log_verbose_level": 3, "log_format": "ISO8601"}
    assert state.update({"log_info": False, "log_verbose_level": 3, "log_format": "ISO8601", "unknown": 1}) == expected
    assert applied == [LogOptions(log_file="x.log", log_info=False, log_verbose_level=3, log_format="ISO8601")]
    assert state.update({"log_format": "default"}) == expected | {"log_format": "default"}


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        (
            {"log_file": "y.log"},
            "UNSUPPORTED",
            "log file location can not be updated through network protocol",
        ),
        ({"log_info": 1}, "INVALID_ARG", "expect boolean for 'log_info'"),
        ({"log_error": "yes"}, "INVALID_ARG", "expect boolean for 'log_error'"),
        ({"log_verbose_level": True}, "INVALID_ARG", "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": -1}, "INVALID_ARG", "expect int32 for 'log_verbose_level'"),
        ({"log_format": 5}, "INVALID_ARG", "expect string for 'log_format'"),
        ({"log_format": "invalid"}, "INVALID_ARG", "invalid argument for log_format, got: invalid"),
    ],
)
def test_refused_log_settings_change_nothing(changes: dict[str, bool | int | str], code: str, text: str) -> None:
    applied: list[LogOptions] = []
    state = LogState(LogOptions(), applied.append)
    with pytest.raises(InferError) as refusal:
        state.update({"log_warning": False, **changes})
    assert (refusal.value.code, refusal.value.message) == (code, text)
    assert (applied, state.options) == ([], LogOptions())


def test_a_file_that_cannot_be_applied_changes_nothing() -> None:
    def fail(_: LogOptions) -> None:
        raise OSError(28, "No space left on device")

    state = LogState(LogOptions(), fail)
    with pytest.raises(OSError, match="No space"):
        state.update({"log_info": False})
    assert state.options == LogOptions()


def test_trace_settings_of_a_model_follow_the_global_ones_until_set() -> None:
    state = TraceState("t.log", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    first = TRACE | {"trace_file": "t.log", "trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
    assert state.of("") == state.of("m") == first
    assert state.update("m", {"trace_rate": "12", "log_frequency": "34"}) == first | {
        "trace_rate": "12",
        "log_frequency": "34",
    }
    changed = {"trace_rate": "56", "trace_count": "78", "trace_level": ["OFF"]}
    assert state.update("", changed) == first | changed
    assert state.of("m") == first | changed | {"trace_rate": "12", "log_frequency": "34"}
    assert state.update("", {"trace_rate": None, "trace_count": []}) == first | {"trace_level": ["OFF"]}
    assert state.of("m") == first | {"trace_level": ["OFF"], "trace_rate": "12", "log_frequency": "34"}
    assert state.update("m", {"trace_rate": None, "trace_level": None}) == first | {
        "trace_level": ["OFF"],
        "log_frequency": "34",
    }
    assert state.update("m", {"log_frequency": None}) == state.of("")


def test_trace_levels_come_in_tritons_order_and_unknown_ones_are_ignored() -> None:
    state = TraceState("t.log")
    assert state.update("", {"trace_level": ["TENSORS", "MAX", "TIMESTAMPS"]})["trace_level"] == [
        "TIMESTAMPS",
        "TENSORS",
    ]
    assert state.update("", {"trace_level": ["MIN"], "unknown": "1"})["trace_level"] == ["TIMESTAMPS", "TENSORS"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [("missing/t", "there is no directory '{}/missing'"), ("", "Is a directory"), ("file/t", "no directory '{}/file'")],
)
def test_a_trace_file_that_cannot_be_written_is_refused(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "file").touch()
    state = TraceState(f"{tmp_path}/{path}")
    state.update("", {"trace_rate": "1"})
    for model in ("", "m"):
        with pytest.raises(InferError) as refusal:
            state.update(model, {"trace_level": ["TIMESTAMPS"]})
        assert refusal.value.message.startswith("Attempting to set invalid trace setting :trace file '")
        assert reason.format(tmp_path) in refusal.value.message
        assert state.of(model)["trace_level"] == ["OFF"]
    with pytest.raises(UsageError, match="cannot be written"):
        check_file(TraceOptions(f"{tmp_path}/{path}", {"trace_level": ["TIMESTAMPS"]}, frozenset()))
    check_file(TraceOptions(f"{tmp_path}/t", {"trace_level": ["TIMESTAMPS"]}, frozenset()))
    assert not Path(tmp_path, "t").exists()


def test_what_is_ignored_as_in_triton_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert trace_update({"trace_levels": ["TIMESTAMPS"], "trace_level": ["TIMESTAMP", "TENSORS"]}) == {
        "trace_level": ["TENSORS"]
    }
    assert "settings that there are not were ignored: 'trace_levels'; there are ('trace_level'" in caplog.text
    assert "levels that there are not were ignored: 'TIMESTAMP'; there are ('OFF'" in caplog.text


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        (
            {"trace_file": "f"},
            "UNSUPPORTED",
            "trace file location can not be updated through network protocol",
        ),
        ({"trace_level": ["OFF", "TENSORS"]}, "INVALID_ARG", "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": "often"}, "INVALID_ARG", "Unable to parse 'trace_rate', got: often"),
        (
            {"log_frequency": "9999999999999999999999"},
            "INVALID_ARG",
            "Unable to parse 'log_frequency', value is out of range [ 0, 4294967295 ], got: 9999999999999999999999",
        ),
        ({"trace_count": "-2"}, "INVALID_ARG", "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        ({"trace_count": ["1", "2"]}, "INVALID_ARG", "expect only 1 value for 'trace_count'"),
        (
            {"trace_level": ["TIMESTAMPS"]},
            "INVALID_ARG",
            "Attempting to set invalid trace setting :trace file name is not given",
        ),
        (
            {"trace_level": ["TIMESTAMPS"], "trace_rate": "0"},
            "INVALID_ARG",
            "Attempting to set invalid trace setting :sample rate must be non-zero",
        ),
    ],
)
def test_refused_trace_settings_change_nothing(changes: dict[str, str | list[str]], code: str, text: str) -> None:
    state = TraceState()
    for model in ("", "m"):
        with pytest.raises(InferError) as refusal:
            state.update(model, {"trace_count": "5", **changes})
        assert (refusal.value.code, refusal.value.message) == (code, text)
    assert state.of("") == state.of("m") == TRACE
