"""A short run of the kill test (`make stress` has the long one): workers and clients die, nothing is lost."""

from __future__ import annotations

import pytest

from tests.stress import kill


@pytest.mark.timeout(300)
def test_nothing_is_lost_doubled_or_mixed_up_when_workers_and_clients_die(tmp_path):
    wanted = kill.options(
        ["--kills", "60", "--seconds", "200", "--hostile", "--client-kills", "3", "--zygote-kills", "40"]
    )
    results = kill.run(wanted, tmp_path)
    assert kill.verdict(results, timed=False) == [], results
    assert results["kills"] >= 60
    assert results["answered"] > results["kills"]
    assert min(results[name] for name in ("retried", "recovered", "attacks", "expired", "cancelled")) > 0, results
