"""What one camera has reported so far, and the figures made of it. Pure: time is an argument."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence

from examples.demo.records import Best, Report

WINDOW = 3.0  # seconds that the live figures look back


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` (0 to 1) of `values` do not exceed; 0 of nothing."""
    if not values:
        return 0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Tally:
    """Totals of a camera and, for live figures, its last seconds."""

    def __init__(self, name: str, clip: str) -> None:
        self.name = name
        self.clip = clip
        self.frame_microseconds: list[int] = []
        self.request_microseconds: defaultdict[str, list[int]] = defaultdict(list)
        self.copied_bytes: defaultdict[str, int] = defaultdict(int)
        self.seconds: list[tuple[float, list[int]]] = []  # (time of the report, its frames): for the plot
        self.faces = self.dropped = self.errors = 0
        self.error = ""
        self.best: Best | None = None
        self._recent: deque[tuple[float, Report]] = deque()

    def add(self, report: Report, now: float) -> None:
        """Counts a report that arrived at `now`."""
        self.frame_microseconds += report.frame_microseconds
        for model, requests in report.requests.items():
            self.request_microseconds[model] += requests.microseconds
            self.copied_bytes[model] += requests.copied_bytes
        self.faces += report.faces
        self.dropped += report.dropped
        self.errors += report.errors
        self.error = report.error or self.error
        self.seconds.append((now, report.frame_microseconds))
        self._recent.append((now, report))
        while self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    @property
    def requests(self) -> int:
        """Requests that ended well."""
        return sum(map(len, self.request_microseconds.values()))

    @property
    def copied_per_request(self) -> float:
        """Bytes that the broker copied for a request, on average."""
        return sum(self.copied_bytes.values()) / max(1, self.requests)

    def recent_frames(self) -> list[int]:
        """Microseconds of the frames in the window."""
        return [value for _, report in self._recent for value in report.frame_microseconds]

    def recent_requests(self) -> list[int]:
        """Microseconds of the requests in the window."""
        return [v for _, report in self._recent for r in report.requests.values() for v in r.microseconds]

    def recent_rate(self) -> float:
        """Frames per second in the window; 0 until two reports have come."""
        if len(self._recent) < 2:
            return 0.0
        # What the oldest report counts happened before it came.
        frames = sum(len(report.frame_microseconds) for _, report in list(self._recent)[1:])
        return frames / (self._recent[-1][0] - self._recent[0][0])

    def rate(self) -> float:
        """Frames per second over all reports."""
        if len(self.seconds) < 2:
            return 0.0
        frames = len(self.frame_microseconds) - len(self.seconds[0][1])
        return frames / max(1e-9, self.seconds[-1][0] - self.seconds[0][0])
