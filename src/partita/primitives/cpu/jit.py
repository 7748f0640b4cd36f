"""Compilation of the CPU kernels by Numba, which keeps the machine code on disk.

A process loads in a fraction of a second what another has compiled in many. Numba stores the code
in `__pycache__` beside the source, or in the user's cache directory where that is read-only.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core.compiler import Compiler

from ...runtime.caches import register_cache
from ...runtime.private_names import numba_without_counts
from ...runtime.waiting import compiling


class AnnouncedCompiler(Compiler):  # type: ignore[misc]
    """Numba's compiler, which tells the user when it takes long."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        with compiling("Numba", func.__module__):
            return super().compile_extra(func)


# A division that may raise is a branch. No sum may be reordered. No code in C calls a kernel, so it
# needs no wrapper for that, which would take a twentieth of the compilation or more.
FLAGS: dict[str, Any] = {
    "fastmath": {"contract"},
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "pipeline_class": AnnouncedCompiler,
}
# Numba compiles a function anew for each literal that a kernel passes to it, such as 1 or True, but
# not for a number of NumPy. LLVM knows the value of both.
MINUS_ONE: Any = np.int64(-1)
ZERO: Any = np.int64(0)
ONE: Any = np.int64(1)
PACKAGE = Path(__file__).parents[2]
KERNELS: list[Any] = []  # the functions of this process that Python calls, and that are on disk
STAMP = "partita-sources.txt"  # beside stored code: the hash of the sources that it is from


@functools.lru_cache(maxsize=1)
def sources_hash(package: Path) -> bytes:
    """Return the hash of all files whose functions a kernel may have compiled in."""
    found = sha256()
    patterns = "**/cpu/*.py", "**/cpu.py", "**/*_tables.py"  # the last have constants and tuples
    for file in sorted(file for pattern in patterns for file in package.glob(pattern)):
        text = file.read_bytes()
        found.update(f"{file.relative_to(package)} {len(text)}\n".encode() + text)
    return found.hexdigest().encode()


@functools.lru_cache(maxsize=64)
def discard_stale_code(folder: Path, package: Path) -> None:
    """Delete the code that Numba stored in a folder if a file of the CPU kernels has changed since.

    Numba compares the contents of a function's file with those that its stored code is from, but
    not the files of the functions that it calls, even after an update of the whole package.

    Args:
        folder: where Numba stores the code of one folder of sources, and of no other.
        package: the folder of all sources.
    """
    # Other processes may do the same at this moment. Where nothing can be written, Numba has not
    # stored anything either.
    with contextlib.suppress(OSError):
        stamp, current = folder / STAMP, sources_hash(package)
        if stamp.exists() and stamp.read_bytes() == current:
            return
        for file in [*folder.glob("*.nbi"), *folder.glob("*.nbc")]:
            file.unlink(missing_ok=True)
        # The stamp comes last, so that a process that ends before leaves none on stale code.
        written = folder / f"{STAMP}.{os.getpid()}"
        written.write_bytes(current)
        written.replace(stamp)


register_cache("primitives.cpu.jit.sources_hash", sources_hash.cache_clear)
register_cache("primitives.cpu.jit.checked_folders", discard_stale_code.cache_clear)


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function at its first call, or load what an earlier process compiled.

    A change of any file of the CPU kernels makes all stored code stale. Without a directory to
    write to, each process compiles.

    Args:
        function: the function; None to use this as a decorator with options.
        options: options of `numba.njit`.
    """
    if function is None:
        return lambda function: jit(function, **options)
    options = {**FLAGS, **options}
    try:
        dispatcher = njit(cache=True, **options)(function)
    except RuntimeError:  # no such directory
        return njit(**options)(function)
    discard_stale_code(Path(dispatcher.stats.cache_path), PACKAGE)
    if options.get("nogil"):
        KERNELS.append(dispatcher)
    return dispatcher


def jit_in_place(function: Callable[..., Any]) -> Any:
    """Compile a function that allocates no arrays, as `jit` does, without counts of references.

    Numba counts the references to each array of each tuple and view, atomically. A search that
    passes tuples of 40 arrays to small functions takes 3 to 10 times as long with them.
    """
    return jit(function, **numba_without_counts())
