"""The kernels on the CPU, under Triton's interpreter: the tests marked `interpreted`, in a process of their own that starts with it."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MARKS = re.compile(
    "mark.interpreted|KERNEL_DEVICES|kernel_devices"
)  # or those of `rows`, which have the mark
FILES = sorted(
    str(path.relative_to(TESTS))
    for path in TESTS.rglob("test_*.py")
    if MARKS.search(path.read_text(encoding="utf-8")) and path != Path(__file__)
)
LONGEST = (
    "test_chain_kernels.py",
    "test_ctc_kernels.py",
    "test_derivatives.py",
    "test_linear_cross_entropy.py",
    "test_opcheck.py",
)
FILES.sort(
    key=lambda name: Path(name).name in LONGEST, reverse=True
)  # first, so that the other worker is not left without work while one of them runs


def installed(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version(package).split(".")[:2])
    except PackageNotFoundError:
        return ()


# The interpreter of triton 3.6 fails on the numpy that made a conversion an error.
pytestmark = pytest.mark.skipif(
    not installed("triton") or (installed("triton") <= (3, 6) and installed("numpy") >= (2, 4)),
    reason="needs triton, and a numpy that its interpreter takes",
)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the inner process")
@pytest.mark.parametrize("name", FILES)
def test_kernels(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PARTITA_BACKEND": "triton"}
    for variable in [key for key in environment if key.startswith(("PYTEST_", "PARTITA_CHECK"))]:
        del environment[variable]
    arguments = [
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "interpreted and not gpu",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore",
        str(TESTS / name),
    ]
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
