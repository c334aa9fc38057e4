"""The demo's model repository: which models there are, what they take and give, and their `config.pbtxt`.

The parent writes the repository, the cameras prepare their plans from the same descriptions.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.demo import detector

WIDTH, HEIGHT = 256, 144  # what the detector sees of every camera: equal shapes are what batches
LAYOUT = detector.pyramid(WIDTH, HEIGHT)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its shapes without the batch dimension; a request carries up to `rows` rows."""

    name: str
    input: tuple[str, Shape]
    outputs: Mapping[str, Shape]
    rows: int
    max_batch_size: int

    def config(self) -> str:
        """Its `config.pbtxt`. The delay lets cameras that are a little apart share a batch."""
        outputs = ",\n".join(_tensor(*output) for output in self.outputs.items())
        return (
            f'name: "{self.name}"\n'
            'platform: "onnxruntime_onnx"\n'
            f"max_batch_size: {self.max_batch_size}\n"
            f"input [\n{_tensor(*self.input)}\n]\n"
            f"output [\n{outputs}\n]\n"
            "dynamic_batching { max_queue_delay_microseconds: 2000 }\n"
        )


def _tensor(name: str, shape: Shape) -> str:
    return f'  {{ name: "{name}" data_type: TYPE_FP32 dims: [ {", ".join(map(str, shape))} ] }}'


PNET = Model(
    "pnet",
    ("input_1", (LAYOUT.width, LAYOUT.height, 3)),
    {"conv2d_4": (*LAYOUT.grid, 4), "softmax": (*LAYOUT.grid, 2)},
    rows=1,
    max_batch_size=8,
)
RNET = Model("rnet", ("input_2", (24, 24, 3)), {"dense_2": (4,), "softmax_1": (2,)}, rows=24, max_batch_size=96)
ONET = Model(
    "onet",
    ("input_3", (48, 48, 3)),
    {"dense_5": (4,), "dense_6": (10,), "softmax_2": (2,)},
    rows=8,
    max_batch_size=32,
)
MODELS = (PNET, RNET, ONET)


def write_repository(root: Path, files: Mapping[str, Path]) -> None:
    """Writes `<root>/<model>/1/model.onnx` and `config.pbtxt` for every model, from `files` by model name."""
    for model in MODELS:
        version = root / model.name / "1"
        version.mkdir(parents=True)
        shutil.copyfile(files[model.name], version / "model.onnx")
        (root / model.name / "config.pbtxt").write_text(model.config())
