"""Is a model's own `backend.py` Python at all? Said before a worker runs it, with file, line and column.

Called by `load`. The file is compiled, not run: what it does when it is imported shows in the worker.
"""

from __future__ import annotations

import ast
import os
import warnings

from broker.repository.loader.backend import CUSTOM_BACKEND
from broker.repository.loader.failure import ModelError
from broker.repository.loader.files import read_file
from broker.repository.scan import ModelDirectory

_MAX_CODE = 16 << 20  # bytes
_MAX_SHOWN = 200  # characters of a line


def check_code(model: ModelDirectory) -> None:
    """Raises ModelError unless there is none, or it compiles and has a `load`."""
    path = os.path.join(model.path, CUSTOM_BACKEND)
    if not os.path.isfile(path):
        return
    source = read_file(path, _MAX_CODE, "16 MiB")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are shown when it is imported
            tree = ast.parse(source, path)
            compile(tree, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ModelError(_shown(error, path)) from None
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL byte; nested too deeply
        raise ModelError(f"{path}: cannot be compiled: {error}") from None
    if not any(_binds_load(node) for node in ast.walk(tree)):
        raise ModelError(f"{path} has no function 'load'")


def _shown(error: SyntaxError, path: str) -> str:
    line, column = error.lineno or 1, max(1, error.offset or 1)
    text = (error.text or "").rstrip("\n")
    shown = f"\n    {text[:_MAX_SHOWN]}\n    {' ' * (column - 1)}^" if text and column <= _MAX_SHOWN else ""
    return f"{path}:{line}:{column}: {type(error).__name__}: {error.msg}{shown}"


def _binds_load(node: ast.AST) -> bool:
    """May it give the module a name `load`? (Wherever it stands: who looks closer must run it.)"""
    match node:
        case ast.FunctionDef(name="load") | ast.AsyncFunctionDef(name="load") | ast.ClassDef(name="load"):
            return True
        case ast.Name(id="load", ctx=ast.Store()):
            return True
        case ast.alias(name=name, asname=asname):
            return (asname or name) in ("load", "*")
        case ast.Call(func=ast.Name(id="globals" | "exec" | "setattr")):
            return True
    return False
