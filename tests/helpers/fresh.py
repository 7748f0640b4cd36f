"""Processes that have imported PyTorch and nothing else.

They are forks of one process, as the import takes seconds.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src"
TIMEOUT = 300  # seconds, after which a process is killed


class Finished(NamedTuple):
    """Exit code and output of a process."""

    code: int
    stdout: str
    stderr: str


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the process that imports PyTorch and forks."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen([sys.executable, __file__], env=environment, cwd="/", **pipes)
    atexit.register(server.communicate)  # ends its input, and waits
    return server


def run_fresh(code: str, environment: Mapping[str, str] | None = None) -> Finished:
    """Run code in a process without this one's modules, and return its exit code and output.

    The process runs in the folder `/`. Its variables are those of `environment`, by default those
    of this process with the sources of the package as PYTHONPATH.
    """
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "code": code,
            "environment": {**os.environ, "PYTHONPATH": str(SOURCE)}
            if environment is None
            else dict(environment),
            "folder": folder,
        }
        print(json.dumps(job), file=server.stdin, flush=True)
        exit_code = int(server.stdout.readline())
        outputs = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
    return Finished(exit_code, *outputs)


def _run(code: str, environment: Mapping[str, str], folder: str) -> None:
    """Turn this process, a fork, into one that runs the code."""
    signal.alarm(TIMEOUT)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    exit_code = 1
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _serve() -> None:
    sys.path.remove(str(Path(__file__).parent))
    import torch  # noqa: F401

    for line in sys.stdin:
        if not (child := os.fork()):
            _run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
