"""Deadlines shorter than what a first request needs: what the broker made for it goes back, but for one channel."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import clientlib
from broker.channels import MAX_CHANNELS
from tests.stress.broker import running
from tests.stress.models import COLUMNS, QUICK, numbers, write_repository


def test_requests_without_time_to_open_a_channel_do_not_use_up_the_sessions_channels(tmp_path):
    with running(write_repository(tmp_path / "models"), tmp_path / "run") as broker:
        client = broker.connect()
        region = client.create_region("r", 4096)
        x = region.array((1, COLUMNS), np.float32)
        x[:] = numbers(1, 1)
        plan = client.prepare(
            QUICK.name,
            inputs={"x": region.tensor((1, COLUMNS), "FP32")},
            outputs={"y": region.tensor((1, COLUMNS), "FP32", offset=2048)},
        )
        worker = broker.worker()
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        try:
            for _ in range(MAX_CHANNELS + 1):
                with pytest.raises(clientlib.InferError) as caught:
                    plan.infer(timeout=0.002)
                assert caught.value.code == "UNAVAILABLE"
        finally:
            os.kill(worker, signal.SIGCONT)
        # Models are listed after everything that was asked before, so all of that has been answered by now.
        client.models()
        while broker.status()["sessions"][0]["channels"] > 1:  # one is kept for the next request
            client.models()
        assert np.array_equal(plan.infer(timeout=30)["y"], QUICK.expected(x))
        assert broker.status()["sessions"][0]["channels"] == 1
        client.close()
