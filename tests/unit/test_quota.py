"""The memory budget: charged, returned, refused with numbers."""

import pytest

from broker.quota import Quota
from shm.errors import InferError


def test_refusal_names_asked_used_and_limit():
    quota = Quota(1000)
    quota.take(7, 600, "region 'a'")
    with pytest.raises(
        InferError, match=r"region 'b': asked 500 bytes, used 600 \(by uid 8: 0\), limit 1000"
    ) as refusal:
        quota.take(8, 500, "region 'b'")
    assert refusal.value.code == "UNAVAILABLE"
    quota.give(7, 600)
    quota.take(8, 500, "region 'b'")
    assert quota.total == 500


def test_what_can_never_fit_is_an_invalid_argument():
    with pytest.raises(InferError) as refusal:
        Quota(1000).take(1, 64 << 40, "region 'sparse'")
    assert refusal.value.code == "INVALID_ARG"


def test_regions_are_counted_per_uid():
    quota = Quota(1000, max_regions=2)
    for uid in (1, 1, 2):
        quota.take_region(uid, "pool")
    with pytest.raises(InferError, match="uid 1 has 2, the limit is 2"):
        quota.take_region(1, "pool")
    quota.give_region(1, "pool")
    quota.take_region(1, "pool")


def test_a_system_region_counts_for_the_two_descriptors_it_takes_in_a_worker():
    quota = Quota(1000, max_descriptors=4)
    quota.take_region(1, "system")
    quota.take_region(1, "pool")
    with pytest.raises(
        InferError, match="uid 1 take 3 descriptors, a system region takes 2, the limit is 4"
    ) as refusal:
        quota.take_region(1, "system")
    assert refusal.value.code == "UNAVAILABLE"
    quota.take_region(1, "pool")
    quota.give_region(1, "system")
    quota.take_region(1, "system")
