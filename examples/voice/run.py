"""One run of the example: starts the broker, plays all streams at once, compares, prints a table, stops the broker."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import clientlib
from examples import assets
from examples.demo.processes import START_SECONDS, Broker, DemoError
from examples.voice import audio, model
from examples.voice.streams import Stream

TOLERANCE = 1e-4
SPEECH = 0.5  # the probability from which a window counts as speech, as in the model's own package
STEP = 1.3  # seconds between the places of the recording where two streams begin


def run(streams: int, remote: int, seconds: float) -> bool:
    """Do all streams agree with the reference? Raises DemoError or AssetError; leaves no process and no file."""
    files = assets.fetch_all(("silero-vad", "speech"))
    recording = audio.read(files["speech"])
    made = [_stream(number, number > streams - remote, recording, seconds) for number in range(1, streams + 1)]
    with _broker(files["silero-vad"]) as (broker, grpc):
        began = time.monotonic()
        try:
            asyncio.run(_play(made, broker.address, grpc))
        except (clientlib.InferError, InferenceServerException) as error:
            raise DemoError(f"a stream broke off: {error}") from error
        took = time.monotonic() - began
        with broker.connect() as client:
            statistics = client.statistics(model.NAME)[0]
    differences = [_difference(stream, files["silero-vad"]) for stream in made]
    print(f"\n{_table(made, differences)}\n")
    steps, runs = statistics["inference_count"], statistics["execution_count"]
    seconds_of_audio = sum(len(stream.samples) for stream in made) / model.RATE
    print(f"{steps} windows in {runs} runs of the model ({steps / runs:.1f} streams per run)")
    print(f"{seconds_of_audio:.0f} s of audio in {took:.1f} s")
    return max(differences) <= TOLERANCE


def _stream(number: int, remote: bool, recording: audio.Samples, seconds: float) -> Stream:
    begin = (number - 1) * STEP % max(STEP, len(recording) / model.RATE - seconds)
    first = int(begin * model.RATE)
    samples = recording[first : first + int(seconds * model.RATE)]
    return Stream(number, "grpc" if remote else "native", begin, samples)


async def _play(streams: list[Stream], native: str, grpc: str) -> None:
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.play(native if stream.transport == "native" else grpc))


@contextlib.contextmanager
def _broker(original: Path) -> Iterator[tuple[Broker, str]]:
    """A broker that serves the model, with its gRPC address."""
    with tempfile.TemporaryDirectory(prefix="tensorbroker-voice-") as name:
        scratch = Path(name)
        model.write_repository(scratch / "models", original)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        flags = ("--allow-http=false", "--allow-metrics=false", f"--grpc-port={port}")
        broker = Broker(scratch / "models", scratch / "run", scratch / "broker.log", flags)
        try:
            print(f"broker starting: {broker.command}")
            broker.connect().close()
            _wait_for_grpc(broker, f"127.0.0.1:{port}")
            yield broker, f"127.0.0.1:{port}"
        finally:
            status = broker.stop()
        if status:
            raise DemoError(f"the broker ended with status {status}")


def _wait_for_grpc(broker: Broker, address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    with triton.InferenceServerClient(address) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(InferenceServerException):
                if client.is_model_ready(model.NAME):
                    return
            broker.check(0.1)
    raise DemoError(f"nobody answers at {address} after {START_SECONDS:.0f} s")


def _difference(stream: Stream, original: Path) -> float:
    expected = audio.reference(original, stream.samples)
    if len(expected) != len(stream.probabilities):
        return float("inf")
    return float(np.abs(expected - np.array(stream.probabilities, np.float32)).max())


def _table(streams: list[Stream], differences: list[float]) -> str:
    lines = [f"{'stream':>6}  {'over':<6}  {'audio':>11}  {'windows':>7}  {'speech':>6}  {'p50':>7}  difference"]
    for stream, difference in zip(streams, differences, strict=True):
        end = stream.begin + len(stream.samples) / model.RATE
        part = f"{stream.begin:.1f}-{end:.1f} s"
        share = float(np.mean(np.array(stream.probabilities) >= SPEECH))
        median = 1000 * float(np.median(stream.latencies))
        verdict = "" if difference <= TOLERANCE else "  WRONG"
        lines.append(
            f"{stream.number:>6}  {stream.transport:<6}  {part:>11}  {len(stream.probabilities):>7}  {share:>6.0%}  "
            f"{median:>4.1f} ms  {difference:.1e}{verdict}"
        )
    return "\n".join(lines)
