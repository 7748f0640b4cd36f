"""One line on the error stream where the first calls of a family wait for a compiler."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

from .caches import register_cache

VARIABLE = "PARTITA_VERBOSE"
SECONDS = 2.0  # of compilation, summed over the kernels of a family; those of Triton are small

_spent: dict[str, float] = {}  # the seconds of each family's compilations in this process
_told: set[str] = set()  # the families whose line was printed
_is_compiling: ContextVar[bool] = ContextVar("partita_is_compiling", default=False)
register_cache("runtime.waiting.seconds", _spent.clear)
register_cache("runtime.waiting.told", _told.clear)


def _is_shown() -> bool:
    """Return whether somebody reads the error stream, or asks for the line."""
    stream = sys.stderr
    return stream is not None and (os.environ.get(VARIABLE) == "1" or stream.isatty())


def _tell(compiler: str, family: str) -> None:
    """Print the line of a family, over what a progress bar has on this line of a terminal."""
    _told.add(family)
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    line = (
        f"partita: {compiler} compiles the kernels of {family}, which takes a while, and keeps them"
        " on disk; `python -m partita warm` does so ahead of a job for the ops that it lists"
    )
    with contextlib.suppress(OSError, ValueError):  # of a stream that was closed meanwhile
        print(f"{start}{line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def compiling(compiler: str, module: str | None) -> Iterator[None]:
    """Tell the user if this compilation, with the earlier ones of its family, takes long.

    A timer prints the line, and is cancelled where the compilation ends before. There is none for a
    stream that nobody reads, or inside of another compilation.

    Args:
        compiler: the name of the compiler.
        module: the module of the kernel, whose folder in `ops` names the family. A function that
            comes from no file has none.
    """
    parts = (module or "").split(".")
    family = parts[2] if parts[:2] == ["partita", "ops"] and len(parts) > 2 else "partita"
    if _is_compiling.get() or family in _told or not _is_shown():
        yield
        return
    start, spent = time.monotonic(), _spent.get(family, 0.0)
    timer = threading.Timer(max(0.0, SECONDS - spent), _tell, (compiler, family))
    timer.start()
    token = _is_compiling.set(True)
    try:
        yield
    finally:
        _is_compiling.reset(token)
        timer.cancel()
        _spent[family] = spent + time.monotonic() - start
