"""What surrounds the demo's cameras: signals, the live view, the model repository."""

import io
import signal

import pytest

from examples.demo import dashboard, models
from examples.demo.interrupts import SIGNALS, Interrupts, Stopped
from examples.demo.tally import Tally


@pytest.fixture
def interrupts():
    before = [signal.getsignal(number) for number in SIGNALS]
    interrupts = Interrupts()
    interrupts.install()
    yield interrupts
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_raised_once(interrupts, number):
    with pytest.raises(Stopped) as caught:
        signal.raise_signal(number)
    assert caught.value.number == number
    signal.raise_signal(number)  # clean-up goes on


def start(interrupts, reached, error=None):
    with interrupts.held():
        signal.raise_signal(signal.SIGTERM)
        reached.append("after the signal")
        if error:
            raise error


def test_a_signal_waits_until_what_is_being_started_can_be_stopped(interrupts):
    reached = []
    with pytest.raises(Stopped):
        start(interrupts, reached)
    assert reached


def test_an_error_while_starting_is_not_replaced_by_a_signal(interrupts):
    with pytest.raises(OSError, match="no such program"):
        start(interrupts, [], OSError("no such program"))
    with pytest.raises(Stopped):
        interrupts.release()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_is_redrawn_in_place(monkeypatch):
    monkeypatch.setattr(dashboard, "TERMINAL_SECONDS", 0.0)
    output = Terminal()
    view = dashboard.Dashboard(output, "title", 60)
    tallies = [Tally("cam0", "carphone"), Tally("cam1", "bikes")]
    view.update(tallies, {"pnet": {1: 1}})
    first = output.getvalue()
    view.update(tallies, {"pnet": {1: 1}})
    lines = first.count("\n")
    assert lines == 2 + len(tallies) + 1
    assert output.getvalue() == first + f"\x1b[{lines}A" + first


def test_without_a_terminal_lines_are_printed_plain(monkeypatch):
    monkeypatch.setattr(dashboard, "PLAIN_SECONDS", 0.0)
    output = io.StringIO()
    dashboard.Dashboard(output, "title", 60).update([Tally("cam0", "carphone")], {})
    assert "\x1b" not in output.getvalue()
    assert "cam0  carphone" in output.getvalue()


def test_the_repository_has_triton_s_layout(tmp_path):
    file = tmp_path / "any.onnx"
    file.write_bytes(b"onnx")
    models.write_repository(tmp_path / "models", {model.name: file for model in models.MODELS})
    found = sorted(str(path.relative_to(tmp_path / "models")) for path in (tmp_path / "models").glob("*/**/*.*"))
    assert found == sorted(f"{m}/{f}" for m in ("pnet", "rnet", "onet") for f in ("1/model.onnx", "config.pbtxt"))
    config = (tmp_path / "models/onet/config.pbtxt").read_text()
    assert '{ name: "input_3" data_type: TYPE_FP32 dims: [ 48, 48, 3 ] }' in config
    assert "max_batch_size: 32" in config
