"""For all tests: garbage of one module's tests may not give its descriptors back in the middle of another's."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_of_others() -> Iterator[None]:
    gc.collect()
    yield
