"""Work in a fresh Python process, which neither shares caches nor takes this process down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PACKAGE = Path(__file__).parents[1]
TIMEOUT = 1800.0  # seconds


def end_process(code: int) -> NoReturn:
    """End this process at once with an exit code, after its output is written.

    PyTorch's thread of a GPU may still release what the last backward pass held. If it waits for
    the interpreter lock while the interpreter ends, Python ends that thread inside C++ code, which
    aborts the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Any:
    """Run `python -m partita.<module>` and return the JSON of the last line that it prints.

    Variables of the environment are added to those of this process. A RuntimeError has the last
    line of the errors of a process that failed.
    """
    # The package may have been imported from a folder that is not installed.
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"{PACKAGE.name}.{module}", *arguments],
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result after {TIMEOUT:.0f} seconds") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"the process ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
