"""Requests by transport and copied bytes, counted by a gateway in memory that the broker made: it survives the gateway.

One memfd per gateway, kept by `broker.gateways` over the gateway's deaths and handed to each of its processes, the only
writer. Counters sent in messages would lose what was counted since the last one, or count it twice after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, final

from shm.memory import PAGE, map_words, sealed_memfd
from shm.statistics import LATENCIES, bucket

TRANSPORTS = ("http", "grpc", "zmq")
_REQUESTS, _FAILED, _NS, _LATENCY = 0, 1, 2, 3  # of a transport's words; failed ones are in all of them
_WORDS = _LATENCY + LATENCIES
# Why a gateway copies tensors' bytes, beside what workers copy (`shm.statistics.REASONS`).
COPIES = {
    reason: len(TRANSPORTS) * _WORDS + at  # its word
    for at, reason in enumerate(
        (
            "request",  # a body that came in pieces was put together
            "inline_input",  # from a message to the memory that workers read
            "shared_output",  # to a region, after the model had run
            "kept_output",  # out of the memory that workers write, which the next request needs
            "response",  # into a message
        )
    )
}
_BEATS = len(TRANSPORTS) * _WORDS + len(COPIES)
assert (_BEATS + 1) * 8 <= PAGE
BEAT_S = 5.0  # between two signs of life of a gateway's event loop


@final
class GatewayCounters:
    """Maps the counters: made by the broker (`create`), opened by the gateway from the descriptor it inherits."""

    __slots__ = ("_memory", "_words", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory, self._words = map_words(fd, PAGE)

    @classmethod
    def create(cls) -> GatewayCounters:
        """All zero."""
        return cls(sealed_memfd("tensorbroker-gateway-counters", PAGE))

    def close(self) -> None:
        """Unmap and close. Nobody counts or asks any more."""
        self._words.release()
        self._memory.close()
        os.close(self.fd)

    def count(self, transport: str, ns: int, failed: bool) -> None:
        """One inference request has ended, `ns` after the front end had decoded it. Of the gateway's one thread."""
        words, at = self._words, TRANSPORTS.index(transport) * _WORDS
        words[at + _REQUESTS] += 1
        words[at + _FAILED] += failed
        words[at + _NS] += ns
        words[at + _LATENCY + bucket(ns)] += 1

    def copied(self, reason: str, byte_size: int) -> None:
        """Bytes of tensors were copied for one of `COPIES`. Of the gateway's one thread."""
        self._words[COPIES[reason]] += byte_size

    def beat(self) -> None:
        """The gateway's event loop goes round: called every BEAT_S. Not a message, which would wait behind others."""
        self._words[_BEATS] += 1

    @property
    def beats(self) -> int:
        """How often it has."""
        return self._words[_BEATS]


def totals(counters: Iterable[GatewayCounters]) -> dict[str, dict[str, Any]]:
    """By transport: `requests`, `failed`, `ns`, `latency` (requests by duration, see shm.statistics.BOUNDS_NS)."""
    pages = [page._words for page in counters]

    def total(transport: int, word: int) -> int:
        return sum(words[transport * _WORDS + word] for words in pages)

    return {
        name: {
            "requests": total(at, _REQUESTS),
            "failed": total(at, _FAILED),
            "ns": total(at, _NS),
            "latency": [total(at, _LATENCY + each) for each in range(LATENCIES)],
        }
        for at, name in enumerate(TRANSPORTS)
    }


def copied_bytes(counters: Iterable[GatewayCounters]) -> dict[str, int]:
    """By reason."""
    pages = [page._words for page in counters]
    return {reason: sum(words[at] for words in pages) for reason, at in COPIES.items()}
