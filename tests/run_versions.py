"""Test the package with pairs of PyTorch and Triton, each in an environment of its own.

`make test-versions` runs this. pyproject.toml lists the supported pairs, from the oldest on, as
`torch+triton`. In the environment of a pair the tests run on the CPU, and the kernels are compiled
for one GPU, with a bound on spills. A later run uses the environments again.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-versions"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SUPPORTED = PROJECT["tool"]["partita"]["versions"]
TARGET = "sm_90"
# The kernels of this Triton are compiled by `make test-kernels`.
(OF_DEVELOPMENT,) = re.findall(r"triton==([\d.]+)", str(PROJECT["dependency-groups"]["dev"]))


class Pair(NamedTuple):
    """A version of PyTorch and one of Triton."""

    torch: str
    triton: str

    @property
    def environment(self) -> Path:
        return FOLDER / f"torch-{self.torch}-triton-{self.triton}"

    def __str__(self) -> str:
        return f"{self.torch}+{self.triton}"


class Outcome(NamedTuple):
    """What one run of pytest found: its exit code, numbers of tests, seconds, and largest spill."""

    code: int
    passed: int
    failed: int
    skipped: int
    seconds: float
    spill: int | None

    def __str__(self) -> str:
        spill = "" if self.spill is None else f", largest spill {self.spill} bytes"
        return (
            f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
            f" in {self.seconds:.0f} s{spill}"
        )


def pair_of(text: str) -> Pair:
    """Return the pair that a text names: `oldest`, `newest`, or both versions, as in `2.14+3.9`."""
    if text in ("oldest", "newest"):
        return Pair(*SUPPORTED[0 if text == "oldest" else -1].split("+"))
    torch, _, triton = text.partition("+")
    for known in SUPPORTED:
        pair = Pair(*known.split("+"))
        if f"{pair.torch}.".startswith(f"{torch}.") and f"{pair.triton}.".startswith(f"{triton}."):
            return pair
    if not triton:
        raise SystemExit(f"VERSIONS: expected pairs like {SUPPORTED[-1]}, got {text}")
    return Pair(torch, triton)


def make_environment(pair: Pair) -> Path:
    """Make the environment of a pair unless it is there, and return its Python.

    The build of PyTorch without CUDA is small, but only some indices have it. Triton is installed
    by itself, since it need not be the version that PyTorch asks for.
    """
    python = pair.environment / "bin/python"
    stamp = pair.environment / "ready"
    wanted = "\n".join(PROJECT["dependency-groups"]["test"])
    if stamp.exists() and stamp.read_text() == wanted:
        return python

    def run(module: str, *arguments: str, quiet: bool = False) -> bool:
        command = [str(python), "-m", module, *arguments]
        stderr = subprocess.DEVNULL if quiet else None
        return subprocess.run(command, cwd=ROOT, stderr=stderr).returncode == 0

    def install(*arguments: str, quiet: bool = False) -> bool:
        return run("pip", "install", "--quiet", "--no-compile", *arguments, quiet=quiet)

    def install_torch() -> bool:
        torch = f"torch=={pair.torch}"
        if install(f"{torch}+cpu", quiet=True):
            return True
        uv = ("pip", "install", "--quiet", "--python", str(python), "--torch-backend", "cpu")
        if install("uv") and run("uv", *uv, torch, quiet=True):
            return True
        print(
            f"{pair}: no build without CUDA was found, and the other takes several GB", flush=True
        )
        return install(torch)

    subprocess.run([sys.executable, "-m", "venv", "--clear", pair.environment], check=True)
    done = (
        install("--upgrade", "pip>=25.1")
        and install_torch()
        and install("--group", "test")
        and install("--no-deps", f"triton=={pair.triton}")
        and install("--no-deps", "--editable", ".")
    )
    if not done:
        free = shutil.disk_usage(ROOT).free / 1e9
        raise SystemExit(f"{pair}: the environment could not be made ({free:.1f} GB are free)")
    stamp.write_text(wanted)
    return python


def run_tests(python: Path, report: Path, *arguments: str) -> Outcome:
    """Run pytest, and count from its report."""
    start = time.monotonic()
    report.unlink(missing_ok=True)
    options = ["-q", "-n", "2", "--dist", "worksteal", f"--junitxml={report}", *arguments]
    environment = {**os.environ, "PARTITA_TEST_TARGETS": TARGET}
    code = subprocess.run([python, "-m", "pytest", *options], cwd=ROOT, env=environment).returncode
    seconds = time.monotonic() - start
    if not report.exists():
        return Outcome(code, 0, 0, 0, seconds, None)
    root = ElementTree.parse(report).getroot()
    (suite,) = root.iter("testsuite")
    total, errors, failures, skipped = (
        int(suite.attrib[name]) for name in ("tests", "errors", "failures", "skipped")
    )
    failed = errors + failures
    spills = [int(item.attrib["value"]) for item in root.iter("property")]
    return Outcome(
        code, total - failed - skipped, failed, skipped, seconds, max(spills, default=None)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("pairs", nargs="*", default=SUPPORTED, help="as in 2.14+3.9, or oldest")
    parser.add_argument("--pytest", default="", help="options of the tests on the CPU")
    arguments = parser.parse_args()
    pairs = list(dict.fromkeys(map(pair_of, arguments.pairs)))
    found: list[tuple[Pair, str, Outcome]] = []
    for number, pair in enumerate(pairs, 1):
        title = f"{number} of {len(pairs)}, torch {pair.torch} with triton {pair.triton}"
        print(f"{title}: environment in {pair.environment.relative_to(ROOT)}", flush=True)
        python = make_environment(pair)
        runs = {"tests": ["--ignore", "tests/kernels", *shlex.split(arguments.pytest)]}
        if pair.triton != OF_DEVELOPMENT:
            runs["kernels"] = ["tests/kernels"]
        for kind, options in runs.items():
            print(f"{title}: {kind}", flush=True)
            outcome = run_tests(python, pair.environment / f"{kind}.xml", *options)
            found.append((pair, kind, outcome))
    print()
    for pair, kind, outcome in found:
        print(f"{pair!s:16} {kind:8} {outcome}")
    return int(any(outcome.code for _, _, outcome in found))


if __name__ == "__main__":
    sys.exit(main())
