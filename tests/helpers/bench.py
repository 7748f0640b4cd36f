"""Settings and runs that the tests of the benchmark share."""

import csv
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from partita.bench import report, runner
from partita.bench.case import Case, Provider, Settings
from partita.bench.measure import Machine
from partita.cli.console import Progress

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
devices = pytest.mark.parametrize("device", DEVICES)
CPU = Machine(torch.device("cpu"), "a CPU", copy=4e9, read=2e9)
SETTINGS = Settings(
    (torch.float32, torch.bfloat16),
    (16, 33),
    2048,
    quick=True,
    sweep=True,
    repetitions=2,
    device=CPU.device,
)


def run(cases: Iterator[Case], *who: Provider, machine: Machine = CPU) -> list[runner.Row]:
    progress = Progress(0, quiet=True)
    return list(runner.run(list(cases), who, machine, SETTINGS.repetitions, progress))


def read(path: Path) -> tuple[dict[str, float], list[dict[str, str]]]:
    """The bandwidths of the machine, and the measurements."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(tuple(row) == report.COLUMNS for row in rows)
    assert ("torch", importlib.metadata.version("torch")) in {
        (row["provider"], row["note"]) for row in rows if row["op"] == "version"
    }
    machine = {row["part"]: float(row["gb_per_s"]) for row in rows if row["op"] == "machine"}
    assert set(machine) == {"copy", "read"}
    return machine, [row for row in rows if row["op"] not in ("machine", "version")]
