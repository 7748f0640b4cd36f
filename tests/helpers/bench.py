"""Settings and runs that the tests of the benchmark share."""

import csv
import dataclasses
import importlib.metadata
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import partita
from partita.__main__ import main
from partita.bench import providers, report, runner
from partita.bench.case import Buffers, Case, Provider, Settings
from partita.bench.measure import Machine, Timing
from partita.cli.console import Progress, print_table

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


def bench(command: str, *arguments: str) -> int:
    """Run the benchmark with the words of a command and other arguments."""
    return main(["bench", *command.split(), *arguments])


def machine_with(device: str) -> Machine:
    return dataclasses.replace(CPU, device=torch.empty(0, device=device).device)


def inputs_of(case: Case) -> Any:
    return case.inputs(Buffers(CPU.device))


def run(cases: Iterable[Case], *who: Provider, machine: Machine = CPU) -> list[runner.Row]:
    progress = Progress(0)
    found = runner.run(list(cases), who, machine, SETTINGS.repetitions, progress)
    return list(itertools.chain.from_iterable(found))


def run_as(name: str, case: Case, function: Callable[..., Any]) -> list[runner.Row]:
    """Run a case with a function as the provider of this name."""
    return run([case], Provider(name, {case.op: lambda: function}))


def with_gradient_times(
    factor: float, function: Callable[..., Tensor], leaf: int = 0, where: Any = ...
) -> Callable[..., Tensor]:
    """Return the function with a gradient in one input that is `factor` times its own somewhere."""

    def changed(*inputs: Tensor) -> Tensor:
        x = inputs[leaf]
        factors = torch.ones_like(x)
        factors[where] = factor
        scaled = x.detach() + factors * (x - x.detach())
        return function(*inputs[:leaf], scaled, *inputs[leaf + 1 :])

    return changed


def note_of_wrong(case: Case, function: Callable[..., Any], name: str = "another") -> str:
    """Return what is said of a function whose result is wrong, which is not timed."""
    (row,) = run_as(name, case, function)
    assert row.timing is None and row.note.startswith("wrong: ")
    return row.note


def row_of(
    provider: str, case: Case, milliseconds: float | None, part: str = "total", memory: int = 0
) -> runner.Row:
    """Return a measurement of one repetition, or a refusal."""
    if milliseconds is None:
        return runner.Row(case, provider, "", None, 0.0, None, "refuses: no")
    timing = Timing.of([milliseconds])
    return runner.Row(case, provider, part, timing, 0.0, memory or None, "")


def settings_with(**changes: Any) -> Settings:
    """Return settings of a quick run of the usual sizes in fp32, with these changes."""
    usual = {"columns": (), "elements": None, "dtypes": (torch.float32,)}
    return dataclasses.replace(SETTINGS, **{**usual, **changes})


def print_tables(rows: list[runner.Row]) -> None:
    for table in report.summary(rows, CPU):
        print_table(table)


def installed(name: str) -> Provider:
    """Return the peer as if it were installed and took any inputs."""
    peer = providers.choose([name])[-1]
    ops = {op: getattr(served, "load", served) for op, served in peer.ops.items()}
    return dataclasses.replace(peer, packages=(), ops=ops)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Let a module with these members be there, for a package that is not installed."""
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))


def sparse_logz(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    semiring: partita.Semiring,
    slots: int,
) -> Tensor:
    """Stand in for log Z of koi and seqdist, which take these dtypes alone."""
    assert {scores.dtype, initial.dtype} == {torch.float32}
    assert (source.dtype, slots) == (torch.int32, 1)
    return partita.logz(scores, source, initial, final, semiring)


def texts_of(path: Path) -> set[str]:
    """Return the texts in a picture."""
    elements = ElementTree.parse(path).iter()
    return {element.text or "" for element in elements if element.tag.endswith("text")}


def read(path: Path) -> tuple[dict[str, float], list[dict[str, str]]]:
    """The bandwidths of the machine, and the measurements."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert ("torch", importlib.metadata.version("torch")) in {
        (row["provider"], row["note"]) for row in rows if row["op"] == "version"
    }
    machine = {row["part"]: float(row["gb_per_s"]) for row in rows if row["op"] == "machine"}
    assert set(machine) == {"copy", "read"}
    return machine, [row for row in rows if row["op"] not in ("machine", "version")]
