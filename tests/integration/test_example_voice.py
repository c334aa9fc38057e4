"""The voice example as a user runs it: a real model with state, real speech, native and gRPC clients."""

from __future__ import annotations

import subprocess
import sys

import pytest

from examples import assets

pytestmark = pytest.mark.timeout(300)


def test_streams_of_speech_agree_with_the_model_alone() -> None:
    try:
        assets.fetch_all(("silero-vad", "speech"))
    except assets.AssetError as error:
        pytest.skip(f"no model or no speech here: {error}")
    command = [sys.executable, "-m", "examples.voice", "--streams", "6", "--grpc", "2", "--seconds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("63  ") == 6  # windows of each
