"""A short run of the stress test of sequences (`make stress` has the long one)."""

from __future__ import annotations

import pytest

from tests.stress import sequences


@pytest.mark.timeout(180)
def test_no_sequence_sees_another_s_state(tmp_path):
    results = sequences.run(sequences.options(["--sequences", "200", "--steps", "6"]), tmp_path)
    wrong = [text for text in results["bad"] if "idle" not in text]  # how idle is for the long run, alone on its cores
    assert wrong == []
    assert [results[model]["steps"] for model in sequences.STRATEGIES] == [1200, 1200]
