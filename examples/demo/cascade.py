"""From a frame to its faces through the broker: three plans over one region, and the three requests of a frame.

Owns the camera's region: for every tensor of the three models a ring of `SLOTS` positions. A frame holds one
position of all rings from the moment its pixels are written until its faces are known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from examples.demo import detector
from examples.demo.models import MODELS, ONET, RNET, Model

if TYPE_CHECKING:
    import clientlib

SLOTS = 4  # frames in flight for each camera
ALIGNMENT = 64  # bytes; of each ring's beginning. Positions lie close, so neighbours can be one batch in place
TIMEOUT = 5.0  # seconds; a frame that is older interests nobody

Observe = Callable[[str, int, int], None]
"""Called after each request with the model's name, nanoseconds and copied bytes."""


def _tensors(model: Model) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, (model.rows, *shape)) for name, shape in (model.input, *model.outputs.items())]


def _ring_bytes(shape: tuple[int, ...]) -> int:
    return -(-SLOTS * 4 * math.prod(shape) // ALIGNMENT) * ALIGNMENT


def region_bytes() -> int:
    """Bytes that the rings of all tensors need."""
    return sum(_ring_bytes(shape) for model in MODELS for _, shape in _tensors(model))


class Stage:
    """One model's plan. `inputs[slot]` is the array to fill before `run(slot)`: memory of the region."""

    def __init__(self, model: Model, plan: Any, inputs: NDArray[np.float32], observe: Observe) -> None:
        self.inputs = inputs
        self._model = model
        self._plan = plan
        self._observe = observe

    async def run(self, slot: int, rows: int) -> dict[str, NDArray[np.float32]]:
        """The model's outputs for the first `rows` rows of position `slot`: views of the region."""
        started = time.monotonic_ns()
        result = await self._plan.infer(input_slot=slot, output_slot=slot, rows=rows, timeout=TIMEOUT)
        self._observe(self._model.name, time.monotonic_ns() - started, result.copied_bytes)
        return {name: result[name][:rows] for name in self._model.outputs}


class Cascade:
    """PNet, RNet and ONet one after the other. Frames in different slots run at the same time."""

    def __init__(self, stages: dict[str, Stage]) -> None:
        self._pnet, self._rnet, self._onet = (stages[model.name] for model in MODELS)

    @classmethod
    async def open(cls, client: clientlib.AsyncClient, observe: Observe) -> Cascade:
        """Creates the region and prepares the plans: everything about a request is checked here, once."""
        region = await client.create_region("rings", region_bytes())
        stages = {}
        offset = 0
        for model in MODELS:
            input_name, input_shape = model.input
            inputs = region.array((SLOTS, model.rows, *input_shape), np.float32, offset=offset)
            tensors = {}
            for name, shape in _tensors(model):
                tensors[name] = region.tensor(shape, "FP32", offset=offset)
                offset += _ring_bytes(shape)
            plan = await client.prepare(
                model.name,
                inputs={input_name: tensors.pop(input_name)},
                outputs=tensors,
                slots=SLOTS,
            )
            stages[model.name] = Stage(model, plan, inputs, observe)
        return cls(stages)

    def canvas(self, slot: int) -> NDArray[np.float32]:
        """Where the pyramid of the frame in `slot` is to be written: [canvas width, canvas height, 3]."""
        canvas: NDArray[np.float32] = self._pnet.inputs[slot, 0]
        return canvas

    async def detect(self, pixels: NDArray[np.uint8], layout: detector.Pyramid, slot: int) -> detector.Faces:
        """The faces of the view `pixels` whose pyramid lies on the canvas of `slot`. Raises `InferError`."""
        answer = await self._pnet.run(slot, 1)
        boxes, _ = detector.candidates(answer["softmax"][0], answer["conv2d_4"][0], layout)
        boxes = detector.square(boxes[: RNET.rows])
        if not len(boxes):
            return detector.Faces.none()

        detector.crops(pixels, boxes, self._rnet.inputs[slot, : len(boxes)])
        answer = await self._rnet.run(slot, len(boxes))
        boxes = detector.narrowed(boxes, answer["dense_2"], answer["softmax_1"])[: ONET.rows]
        if not len(boxes):
            return detector.Faces.none()

        detector.crops(pixels, boxes, self._onet.inputs[slot, : len(boxes)])
        answer = await self._onet.run(slot, len(boxes))
        return detector.faces(boxes, answer["dense_5"], answer["dense_6"], answer["softmax_2"])
