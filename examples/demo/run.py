"""One run of the demo from the files to the pictures.

Composition root: starts the broker and the cameras, gathers what they report, shows it, writes the pictures, and takes
everything down again, however it ends.
"""

from __future__ import annotations

import contextlib
import selectors
import shutil
import sys
import tempfile
import time
from pathlib import Path

import clientlib
from examples import assets
from examples.demo import models, records, report
from examples.demo.dashboard import Batches, Dashboard
from examples.demo.interrupts import Interrupts, Stopped
from examples.demo.processes import Broker, CameraProcess, DemoError
from examples.demo.tally import Tally

CLIPS = (("carphone", 0), ("bikes", 100), ("bigbuckbunny", 60), ("carphone", 60))  # (clip, first frame), in turn
STATISTICS_SECONDS = 0.5
FINISH_SECONDS = 15.0


class Scene:
    """The cameras at work: hears them, shows their figures, notices when a process ends."""

    def __init__(self, broker: Broker, client: clientlib.Client, dashboard: Dashboard) -> None:
        self._broker = broker
        self._client = client
        self._dashboard = dashboard
        self._selector = selectors.DefaultSelector()
        self._cameras: list[CameraProcess] = []
        self._statistics_due = 0.0
        self.tallies: list[Tally] = []
        self.batches: Batches = {}
        self.copies: dict[str, dict[str, int]] = {}  # bytes by model and reason

    def add(self, camera: CameraProcess, tally: Tally) -> None:
        """Takes a camera in that has just been started."""
        self._cameras.append(camera)
        self.tallies.append(tally)
        self._selector.register(camera, selectors.EVENT_READ, (camera, tally))

    def play(self, seconds: float) -> None:
        """Shows the figures for `seconds`. Raises `DemoError` if a process ends."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for camera in self._hear(min(0.1, left)):
                camera.check()
                raise DemoError(f"camera {camera.name} has ended by itself")
            self._broker.check()
            if time.monotonic() >= self._statistics_due:
                self._read_statistics()
            self._dashboard.update(self.tallies, self.batches)

    def finish(self) -> None:
        """Lets the cameras answer what is in flight and report for the last time. Raises `DemoError`."""
        for camera in self._cameras:
            camera.finish()
        end = time.monotonic() + FINISH_SECONDS
        while self._selector.get_map():
            if time.monotonic() > end:
                raise DemoError(f"cameras did not finish within {FINISH_SECONDS:.0f} s")
            for camera in self._hear(0.1):
                camera.check()
        self._read_statistics()

    def close(self) -> None:
        """Ends the cameras, whatever they are doing."""
        self._selector.close()
        for camera in self._cameras:
            camera.finish()  # all at once, so that they end side by side
        for camera in self._cameras:
            camera.stop()

    def _hear(self, seconds: float) -> list[CameraProcess]:
        """Takes in what the cameras say; returns those that will say no more."""
        ended = []
        for key, _ in self._selector.select(seconds):
            camera, tally = key.data
            lines = camera.lines()
            if lines is None:
                self._selector.unregister(camera)
                ended.append(camera)
            for record in map(records.decode, lines or ()):
                if isinstance(record, records.Best):
                    tally.best = record
                else:
                    tally.add(record, time.monotonic())
        return ended

    def _read_statistics(self) -> None:
        self._statistics_due = time.monotonic() + STATISTICS_SECONDS
        try:
            entries = {model.name: self._client.statistics(model.name)[0] for model in models.MODELS}
        except clientlib.InferError as error:
            self._broker.check(1.0)
            raise DemoError(f"the broker gives no statistics: {error}") from error
        self.batches = {
            model: {size["batch_size"]: size["compute_infer"]["count"] for size in entry["batch_stats"]}
            for model, entry in entries.items()
        }
        self.copies = {model: entry["copied_bytes"] for model, entry in entries.items()}


def run(cameras: int, seconds: float, output: Path, interrupts: Interrupts) -> None:
    """The whole demo. Raises `DemoError` or `AssetError`; leaves no process and no file but the pictures."""
    started = time.monotonic()
    files = assets.fetch_all(assets.DEMO)
    with contextlib.ExitStack() as stack:
        with interrupts.held():
            scratch = Path(tempfile.mkdtemp(prefix="tensorbroker-demo-"))
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        scene = _play(cameras, seconds, files, scratch, interrupts)
        print(f"\n{report.table(scene.tallies, scene.batches)}")
        print(f"\n{report.copy_table(scene.copies)}\n")
        _write_pictures(scene, output)
    print(f"done in {time.monotonic() - started:.0f} s")


def _play(cameras: int, seconds: float, files: dict[str, Path], scratch: Path, interrupts: Interrupts) -> Scene:
    """Starts, plays and ends all processes."""
    models.write_repository(scratch / "models", {model.name: files[model.name] for model in models.MODELS})
    with contextlib.ExitStack() as stack:
        try:
            with interrupts.held():
                broker = Broker(scratch / "models", scratch / "run", scratch / "broker.log")
                stack.callback(broker.stop)
            print(f"broker starting: {broker.command}")
            client = broker.connect()
            stack.callback(client.close)
            print(f"broker ready, models: {', '.join(client.models())}\n")
            title = f"{cameras} cameras, one broker"
            scene = Scene(broker, client, Dashboard(sys.stdout, title, seconds))
            stack.callback(scene.close)
            for number in range(cameras):
                clip, start = CLIPS[number % len(CLIPS)]
                name = f"cam{number}"
                with interrupts.held():
                    camera = CameraProcess(name, broker.address, files[clip], start, scratch)
                    scene.add(camera, Tally(name, clip))
            scene.play(seconds)
            scene.finish()
        except Stopped:
            print("\nstopping", flush=True)
            raise
        finally:
            interrupts.hold()  # what follows is bounded and must not be cut short
    interrupts.release()
    if status := broker.stop():
        raise DemoError(f"the broker ended with status {status}")
    return scene


def _write_pictures(scene: Scene, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    annotated, latency = output / "faces.png", output / "latency.png"
    if not report.annotate(scene.tallies, annotated):
        raise DemoError("no camera found a face")
    report.plot(scene.tallies, scene.batches, latency)
    print(f"annotated frames: {annotated}\nlatency plot:     {latency}")
