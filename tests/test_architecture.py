"""The import rules and size budgets of ARCHITECTURE.md, as a test."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MAX_FILE, MAX_FUNCTION = 400, 60
FIRST_PARTY = ("shm", "clientlib", "broker")

# Module or package → first-party prefixes it may import; the longest key wins.
MAY_IMPORT = {
    "shm": ("shm",),
    "clientlib": ("shm", "clientlib"),
    "broker": ("shm", "broker"),
    "broker.repository": ("shm", "broker.repository"),
    "broker.worker": ("shm", "broker.repository.config", "broker.repository.scheduling", "broker.worker"),
    "broker.gateway": ("shm", "clientlib", "broker.gateway", "broker.logs"),
}
# Only the named modules may import these first-party packages.
GUARDED = {
    "broker.worker": ("broker.worker", "broker.zygote"),
    "broker.repository.loader": ("broker.repository.loader",),
    "broker.gateway": ("broker.gateway",),
    "clientlib.remote": ("clientlib.remote", "clientlib.opening"),
}
# … except for these, which are plain messages, and rules for what is in them.
UNGUARDED = ("broker.worker.messages", "broker.gateway.options", "broker.gateway.setting_rules")

# Third-party packages → the only places that may import them. A native client imports numpy and msgspec, nothing more.
HEAVY = {
    "onnxruntime": ("broker.worker.backends",),
    "onnx": ("broker.repository.loader",),
    "google": ("broker.repository.loader", "broker.gateway"),
    "tritonclient": ("broker.repository.loader", "broker.gateway", "clientlib.remote"),
    "grpc": ("broker.gateway", "clientlib.remote"),
    "zmq": ("broker.gateway", "clientlib.remote"),
    "aiohttp": ("broker.gateway", "clientlib.remote"),
    "prometheus_client": ("broker.gateway",),
    "cuda": ("shm.cuda.driver",),
    "tensorrt": ("broker.worker.backends",),
    "tensorrt_lean": ("broker.worker.backends",),
    "torch": (),
    "multiprocessing": (),
}
# Deadlines, pauses and ages are of the monotonic clock: the other one jumps. Who reads that one, and what it is for.
WALL_CLOCK = {
    "broker.logs": "the date of a line",
    "broker.worker.counting": "when a model was last used, in its statistics",
    "broker.worker.answers": "the same, of answers from the cache",
    "broker.model_memory": "the same, beside when it was loaded or kept",
    "broker.settings": "which trace files are of this broker's life, by their own dates",
}
WALL_CLOCK_CALLS = {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "clock_gettime", "clock_gettime_ns"}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "marshal", "dill", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}

FILES = [path for top in FIRST_PARTY for path in sorted((ROOT / top).rglob("*.py"))]
ALL_FILES = FILES + [path for top in ("tests", "bench", "examples") for path in sorted((ROOT / top).rglob("*.py"))]


def inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only: they make the rules greppable"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_follow_the_arrows(path: pathlib.Path) -> None:
    me = module_name(path)
    allowed = MAY_IMPORT[max((key for key in MAY_IMPORT if inside(me, key)), key=len)]
    for target in imports(ast.parse(path.read_text())):
        top = target.split(".")[0]
        if top in FIRST_PARTY:
            assert any(inside(target, prefix) for prefix in allowed), f"{me} may not import {target}"
            for guarded, users in GUARDED.items():
                if inside(target, guarded) and not any(inside(target, free) for free in UNGUARDED):
                    assert any(inside(me, user) for user in users), f"{me} may not import {target}"
        elif top in HEAVY:
            assert any(inside(me, user) for user in HEAVY[top]), f"{me} may not import {target}"


@pytest.mark.parametrize("path", ALL_FILES, ids=module_name)
def test_files_and_functions_stay_small(path: pathlib.Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION, f"{node.name} is too long"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_nothing_dangerous_is_used(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text())
    for target in imports(tree):
        assert target.split(".")[0] not in FORBIDDEN_MODULES, target
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"{node.func.id} at line {node.lineno}"
        for keyword in node.keywords:
            assert keyword.arg != "allow_pickle", f"allow_pickle at line {node.lineno}"
            dangerous = keyword.arg == "shell" and isinstance(keyword.value, ast.Constant) and keyword.value.value
            assert not dangerous, f"a shell at line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_cuda_is_imported_when_it_is_used(path: pathlib.Path) -> None:
    """Never with a module: a driver that is missing or broken is no reason not to start."""
    tree = ast.parse(path.read_text())
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {target.split(".")[0] for target in imports(node)}
            assert "cuda" not in names or id(node) in lazy
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not node.value.startswith("cuda.") or "\n" in node.value, "nor behind the back of the rules above"


def test_every_module_says_what_it_is() -> None:
    silent = [module_name(path) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_time_is_monotonic(path: pathlib.Path) -> None:
    """[F-08] a clock that is set by an hour, or stepped by NTP, changes no deadline."""
    names = set(imports(ast.parse(path.read_text())))
    found = [name for name in names if name == "datetime" or name.startswith("datetime.")]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [name.name for name in node.names if name.name in WALL_CLOCK_CALLS]
        # `loop.time()` is the event loop's, which is monotonic
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            found += [node.attr] if node.attr in WALL_CLOCK_CALLS or node.attr == "CLOCK_REALTIME" else []
    allowed = module_name(path) in WALL_CLOCK
    assert bool(found) == allowed, found or f"{module_name(path)} reads no wall clock: take it off the list"
