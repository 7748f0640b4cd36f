"""Compilation of the CPU kernels by Numba, which keeps the machine code on disk.

A process loads in a fraction of a second what another has compiled in many. Numba stores the code
in `__pycache__` beside the source, or in the user's cache directory where that is read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types

# A division that may raise is a branch. No sum may be reordered.
FLAGS: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy"}


def _stamp_of_sources() -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of each file whose functions a kernel may have compiled in."""
    package = Path(__file__).parents[2]
    files = sorted([*package.glob("**/cpu/*.py"), *package.glob("**/cpu.py")])
    stats = ((str(file.relative_to(package)), file.stat()) for file in files)
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


STAMP = _stamp_of_sources()


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function at its first call, or load what an earlier process compiled.

    Numba compares the file of a function with that of its stored code, but not the files of the
    functions that it calls. Here a change of any file of the CPU kernels makes all stored code
    stale. Without a directory to write to, each process compiles.

    Numba compiles a function anew for each constant that its callers pass. Here one version serves
    all values of an argument, which takes a quarter less time.

    Args:
        function: the function; None to use this as a decorator with options.
        options: options of `numba.njit`.
    """
    if function is None:
        return lambda function: jit(function, **options)
    options = {**FLAGS, **options}
    try:
        dispatcher = njit(cache=True, **options)(function)
        stored = dispatcher._cache._cache_file
        stored._source_stamp = (stored._source_stamp, STAMP)
    except (AttributeError, RuntimeError):  # another version of Numba, or no such directory
        dispatcher = njit(**options)(function)
    return _for_all_values(dispatcher)


def _for_all_values(dispatcher: Any) -> Any:
    """Return a dispatcher whose callers in other kernels share one version of each type."""
    template_for = dispatcher.get_call_template

    def template_for_types(args: Any, kws: Any) -> Any:
        kws = {name: types.unliteral(kind) for name, kind in kws.items()}
        return template_for(tuple(types.unliteral(kind) for kind in args), kws)

    dispatcher.get_call_template = template_for_types
    return dispatcher
