"""The demo's figures: percentiles, rates over time that is an argument, what a camera's lines become."""

import msgspec
import pytest

from examples.demo import dashboard, records
from examples.demo.tally import WINDOW, Tally, percentile


def report(frames=(), *, copied=0, requests=(), **totals):
    counts = {"faces": 0, "dropped": 0, "errors": 0} | totals
    by_model = {"pnet": records.Requests(microseconds=list(requests), copied_bytes=copied)} if requests else {}
    return records.Report(frame_microseconds=list(frames), requests=by_model, **counts)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.501, 51), (0.99, 99), (0.991, 100), (1.0, 100)]
)
def test_percentile_is_the_smallest_value_that_the_share_does_not_exceed(share, expected):
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_percentile_of_one_and_of_none():
    assert percentile([7], 0.99) == 7
    assert percentile([], 0.5) == 0


def test_rates_do_not_count_what_happened_before_the_first_report():
    tally = Tally("cam0", "carphone")
    tally.add(report([1] * 100), 10.0)
    assert tally.rate() == tally.recent_rate() == 0.0
    tally.add(report([1] * 15), 10.5)
    tally.add(report([1] * 15), 11.0)
    assert tally.rate() == pytest.approx(30)
    assert tally.recent_rate() == pytest.approx(30)


def test_live_figures_forget_and_totals_do_not():
    tally = Tally("cam0", "carphone")
    tally.add(report([900], requests=[800], copied=80), 0.0)
    tally.add(report([100], requests=[50, 60], copied=10), 1 + WINDOW)
    assert tally.recent_frames() == [100]
    assert tally.recent_requests() == [50, 60]
    assert tally.frame_microseconds == [900, 100]
    assert tally.request_microseconds["pnet"] == [800, 50, 60]
    assert tally.requests == 3
    assert tally.copied_per_request == 30


def test_totals_add_up_and_the_last_error_stays():
    tally = Tally("cam0", "carphone")
    tally.add(report(faces=2, dropped=1, errors=1, error="[UNAVAILABLE] gone"), 0.0)
    tally.add(report(faces=3), 0.5)
    assert (tally.faces, tally.dropped, tally.errors, tally.error) == (5, 1, 1, "[UNAVAILABLE] gone")
    assert "1 errors: [UNAVAILABLE] gone" in dashboard.camera_line(tally)
    assert tally.copied_per_request == 0


@pytest.mark.parametrize(
    "record",
    [
        report([1, 2], requests=[3], copied=4, faces=1),
        records.Best(picture="a.png", frame=3, boxes=[(0, 1, 2, 3)], scores=[0.5], points=[[(1, 2)] * 5]),
    ],
)
def test_records_survive_the_line(record):
    line = records.encode(record)
    assert b"\n" not in line
    assert records.decode(line) == record


@pytest.mark.parametrize("line", [b"", b"Traceback", b"{}", b'{"type":"Report"}', b"\xff"])
def test_what_is_no_record_is_refused(line):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        records.decode(line)


def test_batch_line_gives_the_mean_and_the_shares():
    line = dashboard.batch_line({1: 2, 4: 6, 2: 2})
    assert "10 batches" in line
    assert "of 3.0 rows" in line
    assert "1: 20%  2: 20%  4: 60%" in line
    assert dashboard.batch_line({}) == "no batch yet"
