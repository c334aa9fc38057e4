"""A short run of the leak test (`make stress` has the long one)."""

from __future__ import annotations

import pytest

from tests.stress import leaks


@pytest.mark.timeout(180)
def test_nothing_piles_up_and_a_killed_client_leaves_nothing(tmp_path):
    wanted = leaks.options(["--cycles", "3000", "--requests", "8000", "--victims", "4", "--gone", "8"])
    assert leaks.run(wanted, tmp_path)["bad"] == []
