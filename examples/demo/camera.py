"""One camera: a process that plays a clip, asks the broker for the faces of every frame and reports on stdout.

    python -m examples.demo.camera ADDRESS CLIP --start FRAME --picture FILE

Started by the demo. Runs until its standard input ends, so it never outlives the demo however that ends. Frames keep
coming at the clip's pace: one that finds no free slot is dropped, as a camera would, and counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

import clientlib
from examples.demo import records
from examples.demo.cascade import SLOTS, Cascade
from examples.demo.detector import Faces
from examples.demo.models import HEIGHT, LAYOUT, WIDTH
from examples.demo.video import Clip, View

REPORT_SECONDS = 0.5
DRAIN_SECONDS = 10.0


class Log:
    """Collects what happened and turns it into reports."""

    def __init__(self) -> None:
        self._clear()
        self._due = time.monotonic() + REPORT_SECONDS

    def _clear(self) -> None:
        self.frames: list[int] = []
        self.durations: defaultdict[str, list[int]] = defaultdict(list)
        self.copied: defaultdict[str, int] = defaultdict(int)
        self.faces = self.dropped = self.errors = 0
        self.error = ""

    def request(self, model: str, nanoseconds: int, copied_bytes: int) -> None:
        """One request has ended."""
        self.durations[model].append(nanoseconds // 1000)
        self.copied[model] += copied_bytes

    def failed(self, error: Exception) -> None:
        """A frame ended with an error."""
        self.errors += 1
        self.error = str(error)

    def emit(self, *, now: bool = False) -> None:
        """Writes a report if one is due."""
        if not now and time.monotonic() < self._due:
            return
        requests = {
            model: records.Requests(microseconds=durations, copied_bytes=self.copied[model])
            for model, durations in self.durations.items()
        }
        _write(
            records.Report(
                frame_microseconds=self.frames,
                requests=requests,
                faces=self.faces,
                dropped=self.dropped,
                errors=self.errors,
                error=self.error,
            )
        )
        self._clear()
        self._due = time.monotonic() + REPORT_SECONDS


def _write(record: records.Record) -> None:
    sys.stdout.buffer.write(records.encode(record) + b"\n")
    sys.stdout.buffer.flush()


class Camera:
    """Frames into slots, at the clip's pace; up to `SLOTS` of them in detection at the same time."""

    def __init__(self, clip: Clip, cascade: Cascade, log: Log) -> None:
        self._clip = clip
        self._cascade = cascade
        self._log = log
        self._view = View(WIDTH, HEIGHT, LAYOUT)
        self._free = deque(range(SLOTS))  # in turn: consecutive frames lie side by side
        self._running: set[asyncio.Task[None]] = set()
        self.best: tuple[int, av.VideoFrame, Faces] | None = None

    async def play(self, start: int, stop: asyncio.Event) -> None:
        """Plays until `stop`, then waits for the frames in flight."""
        period = 1 / self._clip.rate
        due = time.monotonic()
        for number, frame in self._clip.frames(start):
            if stop.is_set():
                break
            self._dispatch(number, frame)
            self._log.emit()
            due = max(due + period, time.monotonic() - 1)  # do not catch up with more than a second
            # A missed beat still has to let the answers in.
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        if self._running:
            await asyncio.wait(self._running, timeout=DRAIN_SECONDS)

    def _dispatch(self, number: int, frame: av.VideoFrame) -> None:
        if not self._free:
            self._log.dropped += 1
            return
        slot = self._free.popleft()
        arrived = time.monotonic_ns()
        pixels = self._view.pixels(frame)
        self._view.write_canvas(pixels, self._cascade.canvas(slot))
        task = asyncio.create_task(self._detect(number, frame, pixels, slot, arrived))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _detect(
        self, number: int, frame: av.VideoFrame, pixels: NDArray[np.uint8], slot: int, arrived: int
    ) -> None:
        try:
            faces = await self._cascade.detect(pixels, LAYOUT, slot)
        except clientlib.InferError as error:
            self._log.failed(error)
        else:
            self._log.frames.append((time.monotonic_ns() - arrived) // 1000)
            self._log.faces += len(faces.boxes)
            if len(faces.scores) and (self.best is None or faces.scores[0] > self.best[2].scores[0]):
                self.best = (number, frame, faces)
        finally:
            self._free.append(slot)

    def save_best(self, picture: Path) -> None:
        """Saves the frame with the surest face and tells where the faces are; nothing if none was found."""
        if self.best is None:
            return
        number, frame, faces = self.best
        frame.to_image().save(picture)
        corners = self._view.to_frame(frame, faces.boxes.reshape(-1, 2, 2)).reshape(-1, 4)
        _write(
            records.Best(
                picture=str(picture),
                frame=number,
                boxes=[(x1, y1, x2, y2) for x1, y1, x2, y2 in corners.tolist()],
                scores=faces.scores.tolist(),
                points=self._view.to_frame(frame, faces.points).tolist(),
            )
        )


async def run(address: str, path: Path, start: int, picture: Path) -> None:
    """Plays `path` through the broker at `address` until standard input ends."""
    stop = asyncio.Event()
    _watch_stdin(stop)
    log = Log()
    clip = Clip(path)
    client = await clientlib.connect_async(address)
    try:
        cascade = await Cascade.open(client, log.request)
        camera = Camera(clip, cascade, log)
        await camera.play(start, stop)
        log.emit(now=True)
        camera.save_best(picture)
    finally:
        await client.close()
        clip.close()


def _watch_stdin(stop: asyncio.Event) -> None:
    """Sets `stop` when standard input ends."""
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stop.set()

    loop.add_reader(stdin, readable)


def main() -> None:
    """The process's entry point."""
    parser = argparse.ArgumentParser(description="One camera of the demo.")
    parser.add_argument("address")
    parser.add_argument("clip", type=Path)
    parser.add_argument("--start", type=int, default=0, metavar="FRAME")
    parser.add_argument("--picture", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.address, arguments.clip, arguments.start, arguments.picture))


if __name__ == "__main__":
    main()
