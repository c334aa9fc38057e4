"""Counters that a gateway writes and the broker keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shm.gateway_counters import COPIES, TRANSPORTS, GatewayCounters, copied_bytes, totals
from shm.statistics import BOUNDS_NS, LATENCIES, bucket


@pytest.fixture
def counters() -> Iterator[GatewayCounters]:
    made = GatewayCounters.create()
    yield made
    made.close()


def test_what_one_process_counts_another_goes_on_with(counters: GatewayCounters) -> None:
    counters.count("grpc", 15_000, False)
    again = GatewayCounters(counters.fd)  # as the next process of the gateway maps it
    again.count("grpc", 3_000_000_000, True)
    found = totals([counters])
    assert found["grpc"] == {
        "requests": 2,
        "failed": 1,
        "ns": 3_000_015_000,
        "latency": [int(at in (bucket(15_000), bucket(3_000_000_000))) for at in range(LATENCIES)],
    }
    assert all(found[name]["requests"] == 0 for name in ("http", "zmq"))


def test_gateways_are_added_up(counters: GatewayCounters) -> None:
    other = GatewayCounters.create()
    for at, name in enumerate(TRANSPORTS, 1):
        for _ in range(at):
            counters.count(name, BOUNDS_NS[-1] + 1, False)
        other.count(name, 1, False)
    found = totals([counters, other])
    assert [found[name]["requests"] for name in TRANSPORTS] == [2, 3, 4]
    assert [(found[name]["latency"][0], found[name]["latency"][-1]) for name in TRANSPORTS] == [(1, 1), (1, 2), (1, 3)]
    other.close()


def test_copies_have_words_of_their_own(counters: GatewayCounters) -> None:
    other = GatewayCounters.create()
    for at, reason in enumerate(COPIES, 1):
        counters.copied(reason, at)
        counters.copied(reason, 1 << 40)
        other.copied(reason, 7)
    assert copied_bytes([counters, other]) == {reason: (1 << 40) + at + 7 for at, reason in enumerate(COPIES, 1)}
    assert not any(count for row in totals([counters]).values() for count in (row["requests"], *row["latency"]))
    for name in TRANSPORTS:
        counters.count(name, BOUNDS_NS[-1] + 1, True)
    assert copied_bytes([counters])["request"] == (1 << 40) + 1, "nor do requests touch them"
    other.close()


def test_without_gateways_there_are_zeros() -> None:
    assert copied_bytes([]) == dict.fromkeys(COPIES, 0)
    assert {name: row["requests"] for name, row in totals([]).items()} == {"http": 0, "grpc": 0, "zmq": 0}
