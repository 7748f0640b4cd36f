"""The kept digests of results, `tests/digests/*.txt`: `python -m helpers.digests "the reason"`."""

import os
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from partita.cli import digest
from partita.cli.console import DTYPES
from partita.testing.samples import CALLS

FOLDER = Path(__file__).parents[1] / "digests"
COMMAND = 'make digests REASON="why the bits are others"'


def path_of(machine: str) -> Path:
    """Return the file of a machine, as `digest.machine` describes it."""
    return FOLDER / (re.sub(r"[^a-z0-9.]+", "-", machine.lower()) + ".txt")


def computed(
    device: torch.device, jobs: int, dtypes: Iterable[str] = tuple(DTYPES)
) -> dict[str, str]:
    """Return the digests of a device, computed in fresh processes, `jobs` at a time."""
    found: dict[str, str] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        tasks = [(name, device, dtype) for name, dtype in product(CALLS, dtypes)]
        for part in pool.map(digest.digests_of, *zip(*tasks, strict=True)):
            found |= part
    return found


def renew(device: torch.device, reason: str, jobs: int) -> None:
    """Compute the digests two times, and write them into the file of this machine."""
    machine = digest.machine(device)
    path, found, again = path_of(machine), computed(device, jobs), computed(device, jobs)
    if different := digest.changes(again, found):
        sys.exit("two runs differ, and nothing is written:\n" + "\n".join(different))
    known = digest.read(path)[1] if path.exists() else {}
    path.write_text(digest.text_of(machine, found, reason), encoding="utf-8")
    for line in digest.changes(found, known):
        print(line)
    print(f"{path}: {len(found)} samples had the same bits in two runs; before: {len(known)}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].strip() or sys.argv[1].startswith("-"):
        sys.exit(f"expected one reason in quotation marks, got {sys.argv[1:]}: {COMMAND}")
    gpu = torch.cuda.is_available()
    chosen = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    renew(chosen, " ".join(sys.argv[1].split()), min(16, os.cpu_count() or 1))
