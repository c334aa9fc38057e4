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
# A stored error that is raised as it is, and why that keeps nothing alive.
RAISED_AS_THEY_ARE = {
    "broker.gateway.grpc.stream": "who ends the RPC has the frames of the whole group forgotten",
}
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


def _stored(tree: ast.AST) -> Iterator[tuple[ast.Raise, ast.expr]]:
    """What is raised and was not made there: an attribute, an element, or a name that is not the one of the handler.

    `finally: del name`, in the same function, lets go of a name.
    """

    def look(node: ast.AST, caught: frozenset[str], released: frozenset[str]) -> Iterator[tuple[ast.Raise, ast.expr]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            caught = released = frozenset()
        elif isinstance(node, ast.ExceptHandler) and node.name:
            caught |= {node.name}
        elif isinstance(node, ast.Try):
            deleted = [target for each in node.finalbody if isinstance(each, ast.Delete) for target in each.targets]
            released |= {target.id for target in deleted if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.IfExp):
            for arm in (node.exc.body, node.exc.orelse):
                yield from look(ast.copy_location(ast.Raise(arm), node), caught, released)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            error: ast.expr = node.exc
            if isinstance(error, ast.Call) and isinstance(error.func, ast.Attribute):  # `error.with_traceback(None)`
                error = error.func.value if error.func.attr == "with_traceback" else error
            roots = [part for part in ast.walk(error) if isinstance(part, ast.Name)]
            is_class = isinstance(error, ast.Name) and error.id[0].isupper()
            is_held = isinstance(error, ast.Name) and error.id not in caught
            is_part = isinstance(error, ast.Attribute | ast.Subscript)
            if (is_held or is_part) and not is_class and not {root.id for root in roots} <= released:
                yield node, error
        for child in ast.iter_child_nodes(node):
            yield from look(child, caught, released)

    yield from look(tree, frozenset(), frozenset())


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_stored_errors_are_not_raised(path: pathlib.Path) -> None:
    """A raised error refers to all frames that it came through; one that is held makes a cycle of them: `fresh`."""
    found = [
        f"line {at.lineno}: {ast.unparse(error)}: raise fresh(…)" for at, error in _stored(ast.parse(path.read_text()))
    ]
    assert bool(found) == (module_name(path) in RAISED_AS_THEY_ARE), found or "it raises none: take it off the list"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_errors_that_were_caught_are_not_kept(path: pathlib.Path) -> None:
    """The same of one that was caught, and that another name or an attribute is given: its frames hold that name."""
    for handler in ast.walk(ast.parse(path.read_text())):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for node in ast.walk(handler):
            kept = isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == handler.name
            assert not kept, f"line {getattr(node, 'lineno', 0)}: keep fresh({handler.name}), or its text"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("raise self.error", 1),
        ("raise errors[0] from None", 1),
        ("raise self._end.with_traceback(None)", 1),
        ("raise error", 1),
        ("raise closed() if self.closed else self.error", 1),
        ("try:\n    f()\nexcept ValueError as error:\n    raise error from None", 0),
        ("try:\n    f()\nexcept ValueError as error:\n    raise other", 1),
        ("try:\n    f()\nexcept ValueError as error:\n    raise error.inner", 1),
        ("try:\n    raise error\nfinally:\n    del error", 0),
        ("try:\n    raise errors[0]\nfinally:\n    del errors", 0),
        ("raise fresh(self.error)\nraise ValueError\nraise self.problem()", 0),
    ],
)
def test_what_a_stored_error_is(code: str, count: int) -> None:
    assert len(list(_stored(ast.parse(code)))) == count
