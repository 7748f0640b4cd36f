"""The C module reads and writes its own memory alone, as AddressSanitizer sees it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ("test_c_module.py", "test_replay.py", "test_eager.py")


def library(name: str) -> str:
    """Return the path of a library of the C compiler, or its name where there is none."""
    if (compiler := shutil.which("gcc")) is None:
        return name
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
    return found.stdout.strip()


@pytest.mark.skipif(
    not Path(library("libasan.so")).is_absolute(), reason="needs gcc with AddressSanitizer"
)
def test_the_tests_of_the_c_module_under_the_sanitizer(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(HERE.parents[1] / name) for name in ("src", "tests")),
        "TRITON_CACHE_DIR": str(tmp_path),
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
    }
    plugins = ("-p", "helpers.sanitizer", "-p", "no:xdist", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *plugins)
    done = subprocess.run(
        [*command, *(str(HERE / file) for file in FILES)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert " passed" in done.stdout
