"""Backend `repeat`: how long its client may keep an instance busy is bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broker.worker.backends import Operand
from broker.worker.backends.repeat import MAX_MS, Repeat
from shm.errors import InferError


def arrays(delay: int, wait: int) -> dict[str, Any]:
    return {
        "IN": np.array([7], np.int32),
        "DELAY": np.array([delay], np.uint32),
        "WAIT": np.array([wait], np.uint32),
    }


@pytest.mark.parametrize(("delay", "wait"), [(MAX_MS + 1, 0), (0, MAX_MS + 1), (0, 2**32 - 1)])
def test_a_longer_delay_is_refused_at_once(delay: int, wait: int) -> None:
    ended: list[tuple[str, bool]] = []
    stream: Any = SimpleNamespace(
        inputs=arrays(delay, wait),
        send=lambda **given: ended.append((given["error"].message, given["final"])),
    )
    Repeat().execute([stream])
    assert ended == [(f"expected DELAY and WAIT of at most {MAX_MS} ms, got {max(delay, wait)}", True)]
    datatypes = {"IN": "INT32", "DELAY": "UINT32", "WAIT": "UINT32"}
    operands = [Operand(k, datatypes[k], v.shape, v.view(np.uint8)) for k, v in arrays(delay, wait).items()]
    with pytest.raises(InferError, match="at most"):
        Repeat().bind(operands, []).run()
