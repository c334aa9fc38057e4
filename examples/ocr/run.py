"""One run of the example: the page read twice, by the package alone and with its three models in a broker."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import clientlib
from examples import assets
from examples.demo.processes import Broker, DemoError

PACKAGE = "rapidocr-onnxruntime==1.4.4"


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the package: whose session it is, its file, its output; images of any size, several in a request."""

    part: str
    attribute: str
    file: str
    output: str
    dims: str
    max_batch_size: int

    def config(self) -> str:
        """Its `config.pbtxt`."""
        return (
            'platform: "onnxruntime_onnx"\n'
            f"max_batch_size: {self.max_batch_size}\n"
            'input { name: "x" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }\n'
            f'output {{ name: "{self.output}" data_type: TYPE_FP32 dims: [ {self.dims} ] }}\n'
        )


MODELS = {
    "detect": Model("text_det", "infer", "ocr-det", "sigmoid_0.tmp_0", "1, -1, -1", 4),
    "classify": Model("text_cls", "infer", "ocr-cls", "save_infer_model/scale_0.tmp_1", "2", 16),
    "recognise": Model("text_rec", "session", "ocr-rec", "softmax_11.tmp_0", "-1, 6625", 16),
}
Lines = list[str]


class BrokerSession:
    """Answers as a session of the package does, by a request to the broker."""

    def __init__(self, client: clientlib.Client, model: str, output: str) -> None:
        self._client = client
        self._model = model
        self._output = output
        self.calls = 0

    def __call__(self, images: npt.NDArray[np.float32]) -> list[npt.NDArray[Any]]:
        """The model's only output."""
        self.calls += 1
        return [self._client.infer(self._model, {"x": images})[self._output]]


def run(picture: str) -> bool:
    """Is the text the same? Raises DemoError or AssetError; leaves no process and no file."""
    try:
        package: Any = importlib.import_module("rapidocr_onnxruntime")
    except ImportError as error:
        raise DemoError(f"this example needs the package {PACKAGE}: pip install {PACKAGE} ({error})") from error
    files = assets.fetch_all((picture, *(model.file for model in MODELS.values())))
    reader = package.RapidOCR()
    expected, alone = _read(reader, files[picture])
    with tempfile.TemporaryDirectory(prefix="tensorbroker-ocr-") as name:
        scratch = Path(name)
        _write_repository(scratch / "models", files)
        broker = Broker(scratch / "models", scratch / "run", scratch / "broker.log")
        try:
            print(f"broker starting: {broker.command}")
            with broker.connect() as client:
                sessions = _replace_sessions(reader, client)
                found, served = _read(reader, files[picture])
        except clientlib.InferError as error:
            raise DemoError(f"the broker refused: {error}") from error
        finally:
            broker.stop()
    print("\n" + "\n".join(f"    {line}" for line in found) + "\n")
    requests = ", ".join(f"{model} {session.calls}" for model, session in sessions.items())
    print(f"{len(found)} lines; requests: {requests}; {alone:.1f} s alone, {served:.1f} s with the broker")
    return bool(found) and found == expected


def _read(reader: Any, picture: Path) -> tuple[Lines, float]:
    """The lines of text, and how long that took in seconds."""
    began = time.monotonic()
    lines, _ = reader(str(picture))
    return [text for _, text, _ in lines or ()], time.monotonic() - began


def _replace_sessions(reader: Any, client: clientlib.Client) -> dict[str, BrokerSession]:
    sessions = {}
    for name, model in MODELS.items():
        sessions[name] = BrokerSession(client, name, model.output)
        setattr(getattr(reader, model.part), model.attribute, sessions[name])
    return sessions


def _write_repository(root: Path, files: dict[str, Path]) -> None:
    for name, model in MODELS.items():
        version = root / name / "1"
        version.mkdir(parents=True)
        shutil.copyfile(files[model.file], version / "model.onnx")
        (root / name / "config.pbtxt").write_text(model.config())
