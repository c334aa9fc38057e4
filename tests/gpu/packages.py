"""Packages for a machine with a GPU that has no network: brought along as wheels, used by an environment of their own.

    python -m tests.gpu.packages fetch WHEELS [3.12]       where there is a network; 3.12: the other machine's Python
    python -m tests.gpu.packages install WHEELS FOLDER     there: FOLDER/venv/bin/python has it and what was there
    python -m tests.gpu.packages check                     what lacks now, and what cannot be looked at for it

Imports nothing but Python's own: this is what finds out that nothing else is there.
"""

from __future__ import annotations

import importlib.util
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
# By the name they are imported by: the package, and what needs it. Those with a version are too large to bring along.
EVERYTHING, BROKER, FRONT_ENDS, TESTS = "everything", "steps with a broker", "front ends", "steps that are tests"
NEEDED = {
    "numpy": ("numpy", EVERYTHING),
    "msgspec": ("msgspec", EVERYTHING),
    "cuda.bindings": ("cuda-bindings", EVERYTHING),
    "cuda.pathfinder": ("cuda-pathfinder", EVERYTHING),
    "posix_ipc": ("posix-ipc", EVERYTHING),
    "msgpack": ("msgpack", BROKER),
    "onnx": ("onnx", BROKER),
    "grpc": ("grpcio", BROKER),
    "google.protobuf": ("protobuf", BROKER),
    "tritonclient": ("tritonclient", BROKER),
    "rapidjson": ("python-rapidjson", FRONT_ENDS),
    "aiohttp": ("aiohttp", FRONT_ENDS),
    "aiohappyeyeballs": ("aiohappyeyeballs", FRONT_ENDS),
    "aiosignal": ("aiosignal", FRONT_ENDS),
    "attr": ("attrs", FRONT_ENDS),
    "frozenlist": ("frozenlist", FRONT_ENDS),
    "multidict": ("multidict", FRONT_ENDS),
    "propcache": ("propcache", FRONT_ENDS),
    "yarl": ("yarl", FRONT_ENDS),
    "idna": ("idna", FRONT_ENDS),
    "gevent": ("gevent", FRONT_ENDS),
    "geventhttpclient": ("geventhttpclient", FRONT_ENDS),
    "greenlet": ("greenlet", FRONT_ENDS),
    "zope.event": ("zope.event", FRONT_ENDS),
    "zope.interface": ("zope.interface", FRONT_ENDS),
    "brotli": ("brotli", FRONT_ENDS),
    "certifi": ("certifi", FRONT_ENDS),
    "urllib3": ("urllib3", FRONT_ENDS),
    "zmq": ("pyzmq", FRONT_ENDS),
    "prometheus_client": ("prometheus-client", FRONT_ENDS),
    "pytest": ("pytest", TESTS),
    "pytest_timeout": ("pytest-timeout", TESTS),
    "onnxruntime": ("onnxruntime-gpu", "step ort"),
    "torch": ("torch", "step arrays"),
    "cupy": ("cupy", "step arrays"),
}
# Of the machine's own kind, or larger than all others together.
NOT_BROUGHT = {"numpy", "onnx", "grpcio", "protobuf", "onnxruntime-gpu", "torch", "cupy"}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def lacking() -> dict[str, tuple[str, str]]:
    """Those of NEEDED that cannot be imported here."""
    found = {}
    for name, what in NEEDED.items():
        try:
            there = importlib.util.find_spec(name) is not None
        except ImportError:  # of a package above it
            there = False
        if not there:
            found[name] = what
    return found


def pip(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode


def fetch(wheels: str, version: str = "3.12") -> int:
    packages = sorted({package for package, _ in NEEDED.values()} - NOT_BROUGHT)
    where = [flag for platform in PLATFORMS for flag in ("--platform", platform)]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", version, *where]
    return pip("download", "--quiet", "--dest", wheels, *options, *packages)


def install(wheels: str, folder: str) -> int:
    """Nothing that is there already: it may be built for this machine."""
    packages = sorted({package for package, _ in lacking().values()} - NOT_BROUGHT)
    target, environment = Path(folder, "packages"), Path(folder, "venv")
    _describe(target)
    venv.create(environment, clear=True, symlinks=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    folders = (target, ROOT, *site.getsitepackages())
    lines = (f"import site; site.addsitedir({str(each)!r})" for each in folders)
    (site_packages / "brought.pth").write_text("\n".join(lines) + "\n")
    if not packages:
        return 0
    options = ["--quiet", "--no-index", "--no-deps", "--find-links", wheels, "--target", str(target)]
    return pip("install", *options, *packages)


def _describe(folder: Path) -> None:
    """Let the working tree pass for an installed package: its backends are entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    place = folder / f"{project['name']}-{project['version']}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (place / "entry_points.txt").write_text("\n".join(lines) + "\n")


def check() -> int:
    found = lacking()
    for package, what in found.values():
        print(f"{package} is not installed, which {what} cannot do without")
    return int(any(what == EVERYTHING for _, what in found.values()))


if __name__ == "__main__":
    sys.exit({"fetch": fetch, "install": install, "check": check}[sys.argv[1]](*sys.argv[2:]))
