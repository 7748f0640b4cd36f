"""The source lines of device functions, found by one parse of their file.

Triton asks `inspect` for the lines of each device function when a module of kernels is loaded. It
goes through them token by token, in Python, which takes a third of that time or more.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

PACKAGE = str(Path(__file__).parents[1])

Found = tuple[list[str], int]


@contextmanager
def quick_sources() -> Iterator[None]:
    """Let `inspect.getsourcelines` find the functions of this package quickly in the block.

    Its results are the same. Functions of others, and nested ones, are found as usual.
    """
    usual = inspect.getsourcelines
    if getattr(usual, "is_quick", False):  # of another thread, or of a block around this one
        yield
        return
    quick = _finder(usual)
    inspect.getsourcelines = quick  # type: ignore[assignment]
    try:
        yield
    finally:
        if inspect.getsourcelines is quick:
            inspect.getsourcelines = usual


def _finder(usual: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """Return a function like the usual `getsourcelines`, which parses each file once."""
    files: dict[str, dict[int, list[str]]] = {}

    def getsourcelines(object: Any) -> Found:
        if not isinstance(object, FunctionType) or hasattr(object, "__wrapped__"):
            return usual(object)
        file, line = object.__code__.co_filename, object.__code__.co_firstlineno
        if not file.startswith(PACKAGE):
            return usual(object)
        if file not in files:
            files[file] = _functions(file)
        lines = files[file].get(line)
        return usual(object) if lines is None else (lines, line)

    getsourcelines.is_quick = True  # type: ignore[attr-defined]
    return getsourcelines


def _functions(file: str) -> dict[int, list[str]]:
    """Return the lines of the functions of a module, by the number of the first line."""
    linecache.checkcache(file)
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # the file is not the one that was loaded
        return {}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[first] = lines[first - 1 : node.end_lineno]
    return found
