"""Whether a request may end the way it did. Every other way is a "wrong" one, written to stderr."""

from __future__ import annotations

import sys
import time
from typing import Any, final

import numpy as np

from clientlib import InferError
from tests.stress.counters import Counters, Tally
from tests.stress.models import Served

DIED = "the worker died while it ran this request"
TWICE = "alone and for the second time"
NOT_TWICE = "does not allow it to run twice"
REFUSED = "are refused for another"
EXPIRED = "Request timeout expired"
UNPREPARED = ("no answer to ", "timeout expired while another ")  # … while the first request of its kind was prepared
SOON_NS = 100_000_000


@final
class Judge:
    """Counts endings. `renew` is set when the broker refuses this session's requests: go on with a new one.

    `prompt`: its owner hands over an ending as soon as there is one, so that the time until then tells something.
    """

    def __init__(self, counters: Counters, tally: Tally, *, prompt: bool = True) -> None:
        self.counters = counters
        self.tally = tally
        self.renew = False
        self._prompt = prompt

    def answer(self, served: Served, given: Any, got: Any) -> None:
        """A success: is it the answer to what was asked?"""
        if np.array_equal(served.expected(given), got):
            self.tally.add("answered")
        else:
            self.wrong(f"{served.name}({given.tolist()}) gave {got.tolist()}")

    def error(self, served: Served, error: InferError, *, deadline_ns: int | None = 0, cancelled: bool = False) -> None:
        """An error: was there a reason for it?"""
        text = error.message
        if text.startswith(DIED) and (TWICE if served.retryable else NOT_TWICE) in text:
            self.tally.add("died")
            if self._prompt and not served.retryable:
                soon = time.monotonic_ns() - self.counters.killed_at_ns <= SOON_NS
                self.tally.add("died_within_100ms" if soon else "died_later")
        elif REFUSED in text:
            self.tally.add("refused")
            self.renew = True
        elif text.startswith((EXPIRED, *UNPREPARED)) and deadline_ns and time.monotonic_ns() >= deadline_ns:
            self.tally.add("expired")
        elif error.code == "CANCELLED" and cancelled:
            self.tally.add("cancelled")
        else:
            self.wrong(f"{served.name} ended with {error.code}: {text}")

    def wrong(self, what: str) -> None:
        self.report("wrong", what)

    def report(self, counter: str, what: str) -> None:
        """Something that must not happen did."""
        self.tally.add(counter)
        if self.tally[counter] <= 5:
            print(f"{counter}: {what}", file=sys.stderr, flush=True)
