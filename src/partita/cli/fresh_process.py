"""Work in a fresh Python process, which neither shares caches nor takes this process down."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from .console import first_line

TIMEOUT = 1800.0  # seconds


def run_fresh(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Return what a function of a module computes in a new process, with these variables too.

    A RuntimeError has the first line of an error there.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, environment or {}, function, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIMEOUT):
            raise RuntimeError(f"no result after {TIMEOUT:.0f} seconds")
        result, problem = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if problem:
        raise RuntimeError(problem)
    return result


def _serve(
    results: Connection,
    environment: Mapping[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Send the result, or an error, and end this process at once.

    PyTorch's thread of a GPU may still release what the last backward pass held. If it waits for
    the interpreter lock while the interpreter ends, Python ends that thread inside C++ code, which
    aborts the process.
    """
    os.environ.update(environment)
    for stream in (1, 2):  # compilers warn there
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        results.send((function(*arguments), ""))
    except Exception as error:
        results.send((None, first_line(error)))
    os._exit(0)
