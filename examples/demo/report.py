"""What the demo leaves behind: the table, the annotated frames and the latency plot."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.demo.dashboard import Batches, batch_line, milliseconds
from examples.demo.tally import Tally, percentile

TILE_HEIGHT = 360
CAPTION_HEIGHT = 26
BOX_COLOUR, POINT_COLOUR = (64, 255, 96), (255, 224, 64)


def table(tallies: Sequence[Tally], batches: Batches) -> str:
    """One row for each camera, then one for each model over all cameras. Latencies in ms, p50 / p99."""
    lines = [
        f"{'':<5} {'clip':<12} {'frames':>6} {'frames/s':>8} {'dropped':>7} {'faces':>6} {'errors':>6} {'frame ms':>11}"
        f" {'requests':>8} {'request ms':>11} {'copied/req':>10}"
    ]
    for tally in tallies:
        requests = [value for values in tally.request_microseconds.values() for value in values]
        lines.append(
            f"{tally.name:<5} {tally.clip:<12} {len(tally.frame_microseconds):>6} {tally.rate():>8.1f}"
            f" {tally.dropped:>7} {tally.faces:>6} {tally.errors:>6} {milliseconds(tally.frame_microseconds):>11}"
            f" {len(requests):>8} {milliseconds(requests):>11} {tally.copied_per_request / 1000:>7,.0f} kB"
        )
    lines += [
        f"{tally.name}: {tally.errors} frames failed, the last one by {tally.error}"
        for tally in tallies
        if tally.errors
    ]
    lines.append("")
    for model, sizes in batches.items():
        values = [value for tally in tallies for value in tally.request_microseconds.get(model, ())]
        copied = sum(tally.copied_bytes[model] for tally in tallies) / max(1, len(values)) / 1000
        lines.append(
            f"{model:<5} {len(values):>6} requests {milliseconds(values):>11} ms {copied:>7,.0f} kB copied each   "
            f"{batch_line(sizes)}"
        )
    return "\n".join(lines)


REASONS = {
    "gather": "inputs of several requests brought together for one execution",
    "scatter": "outputs of such an execution taken to the requests' own places",
    "output": "outputs whose size only running the model tells",
    "policy": "inputs that the model's first operators must not read in shared memory",
    "align": "tensors at an address that is no multiple of their element size",
    "transfer": "tensors between the host and a GPU",
}


def copy_table(copies: Mapping[str, Mapping[str, int]]) -> str:
    """What the broker copied, by model and reason, and why; `copies` in bytes."""
    lines = [
        f"  {model:<5} {reason:<8} {size / 1e6:>9,.1f} MB   {REASONS.get(reason, '')}"
        for model, reasons in copies.items()
        for reason, size in reasons.items()
        if size
    ]
    if not lines:
        return "the broker copied nothing: every request ran in place"
    return "\n".join(["what the broker copied (a request that runs alone is not copied at all):", *lines])


def annotate(tallies: Sequence[Tally], path: Path) -> bool:
    """Draws every camera's best frame with its faces into one picture; False if there was none."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(15)
    tiles: list[Image.Image] = []
    for tally in tallies:
        best = tally.best
        if best is None:
            continue
        with Image.open(best.picture) as picture:
            scale = TILE_HEIGHT / picture.height
            size = (round(picture.width * scale), TILE_HEIGHT)
            tile = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        draw = ImageDraw.Draw(tile)
        for box, score, points in zip(best.boxes, best.scores, best.points, strict=True):
            left, top, right, bottom = (value * scale for value in box)
            draw.rectangle((left, top, right, bottom), outline=BOX_COLOUR, width=2)
            label = f"face {score:.3f}"
            place = (left, max(0, top - 20))
            draw.rectangle(draw.textbbox(place, label, font=font), fill=(0, 0, 0))
            draw.text(place, label, fill=BOX_COLOUR, font=font)
            for x, y in points:
                centre = (x * scale, y * scale)
                draw.circle(centre, 2.5, fill=POINT_COLOUR)
        whole = Image.new("RGB", (tile.width, tile.height + CAPTION_HEIGHT), (24, 24, 24))
        whole.paste(tile, (0, CAPTION_HEIGHT))
        caption = f"{tally.name}  {tally.clip}, frame {best.frame}"
        ImageDraw.Draw(whole).text((8, 4), caption, fill=(235, 235, 235), font=font)
        tiles.append(whole)
    if not tiles:
        return False
    rows = [tiles[at : at + 2] for at in range(0, len(tiles), 2)]
    sheet = Image.new(
        "RGB", (max(sum(t.width for t in row) for row in rows), len(rows) * tiles[0].height), (24, 24, 24)
    )
    for number, row in enumerate(rows):
        x = 0
        for tile in row:
            sheet.paste(tile, (x, number * tile.height))
            x += tile.width
    sheet.save(path)
    return True


def plot(tallies: Sequence[Tally], batches: Batches, path: Path) -> None:
    """Latency over time for each camera, distribution for each model, and the batch sizes, as one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (over_time, by_model, sizes) = pyplot.subplots(1, 3, figsize=(17, 5), width_ratios=(2, 1.4, 1.4))
    start = min((tally.seconds[0][0] for tally in tallies if tally.seconds), default=0.0)
    for tally in tallies:
        points = [(at - start, frames) for at, frames in tally.seconds if frames]
        at = [x for x, _ in points]
        (line,) = over_time.plot(at, [percentile(f, 0.5) / 1000 for _, f in points], label=f"{tally.name} {tally.clip}")
        worst = [max(frames) / 1000 for _, frames in points]
        over_time.plot(at, worst, color=line.get_color(), alpha=0.35, linewidth=0.8)
    over_time.set(title="frame to faces: p50 (strong) and worst (pale) of each half second", xlabel="s", ylabel="ms")
    over_time.set_ylim(0, over_time.get_ylim()[1] * 1.2)
    over_time.legend(loc="upper center", ncol=2)

    for model in batches:
        values = sorted(v for tally in tallies for v in tally.request_microseconds.get(model, ()))
        shares = [(index + 1) / len(values) for index in range(len(values))]
        p50, p99 = percentile(values, 0.5) / 1000, percentile(values, 0.99) / 1000
        by_model.plot([v / 1000 for v in values], shares, label=f"{model}: p50 {p50:.1f}, p99 {p99:.1f} ms")
    by_model.set(title="requests of all cameras", xlabel="latency, ms", ylabel="share of requests", xscale="log")
    by_model.grid(alpha=0.3)
    by_model.legend(loc="lower right")

    for model, counts in batches.items():
        total = sum(counts.values()) or 1
        rows = sorted(counts)
        below = list(itertools.accumulate(counts[n] / total for n in rows))
        sizes.step(rows, below, where="post", label=f"{model}: {total} batches")
    sizes.set(title="batches", xlabel="rows", ylabel="share of batches with at most so many rows", xscale="log")
    sizes.grid(alpha=0.3)
    sizes.legend(loc="lower right")

    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
