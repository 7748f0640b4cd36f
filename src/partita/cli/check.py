"""`partita check`: the ops against fp64 on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..ops.cross_entropy.api import cross_entropy
from ..runtime.backend import current_backend, resolve
from ..testing import contract_errors, edge_rows
from .check_ops import CHECKS, COLUMNS, ROWS, Check, labels
from .console import DTYPES, Progress, Table, UsageError, first_line, print_table
from .info import FLOORS, no_gpu

DENSE_EDGES = ("plain", "offset", "leading_inf")
THOROUGH = (
    "bf16",
    "fp32",
)  # with every layout and size; the others share their code, and compiling it again for each would take a minute more

DESCRIPTION = """\
Run the ops that have a gradient, forward and backward, and compare them with fp64: on the CPU and on the current GPU.
An error may be twice that of PyTorch, or 2 ulp."""

EPILOG = """\
examples:
  partita check                    on the CPU and on the current GPU
  partita check --device cuda:1    there alone

exit codes:
  0  all passed          1  something failed
  2  wrong arguments   130  interrupted"""


@dataclass(frozen=True)
class Backend:
    """What serves a device, by the name that the table shows."""

    name: str
    device: torch.device

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"

    def of(self, check: Check) -> Backend:
        """What serves this op there."""
        return Backend(
            FLOORS[resolve(current_backend(), self.device, has_cpu=check.numba)], self.device
        )


@dataclass(frozen=True)
class Line:
    """A line of the table, as it is printed."""

    op: str
    backend: str
    dtype: str
    error: str
    torch_error: str
    passed: bool
    note: str = ""


def _inputs(check: Check, dtype: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Logits with their names."""
    thorough = dtype in THOROUGH or device.type == "cpu"
    for rows, columns in check.sizes if thorough else check.sizes[:1]:
        for edge in check.edges if columns == COLUMNS else ("plain",):
            if thorough or edge in DENSE_EDGES:
                yield (
                    f"{edge} {rows} × {columns}",
                    edge_rows(edge, rows, columns, dtype=DTYPES[dtype], device=device),
                )


def run(check: Check, backend: Backend, dtype: str) -> Line:
    """The worst of all inputs, forward and backward."""
    backend, worst = backend.of(check), 0.0
    line = Line(check.op, str(backend), dtype, "0", "0", True)
    try:
        for name, x in _inputs(check, dtype, backend.device):
            errors = contract_errors(
                check.ours,
                check.theirs,
                x,
                *check.others(x),
                scale=check.scale,
                grad_scale=check.grad_scale,
            )
            for part in ("forward", "backward"):
                for error in getattr(errors, part):
                    if error.ulp / error.budget > worst:
                        worst = error.ulp / error.budget
                        note = "" if error.passed else f"{name}, {part}: {error}"
                        line = Line(
                            check.op,
                            str(backend),
                            dtype,
                            f"{error.ulp:.2g}",
                            f"{error.baseline:.2g}",
                            error.passed,
                            note,
                        )
    except Exception as error:
        return Line(check.op, str(backend), dtype, "", "", False, first_line(error))
    return line


def run_bad_label(backend: Backend, dtype: str) -> Line:
    """A label out of range: an error where values are checked, else NaN in its row and the other rows as ever."""
    op = "cross_entropy, bad label"
    try:
        x = edge_rows("plain", ROWS, COLUMNS, dtype=DTYPES[dtype], device=backend.device)
        good = labels(x)
        bad = good.clone()
        bad[1] = COLUMNS
        expected = cross_entropy(x, good, reduction="none")
        try:
            result = cross_entropy(x, bad, reduction="none")
        except IndexError:
            return Line(op, str(backend), dtype, "IndexError", "", True)
        wrong = result.isnan() != (torch.arange(ROWS, device=x.device) == 1)
        wrong |= (result != expected) & ~result.isnan()
    except Exception as error:
        return Line(op, str(backend), dtype, "", "", False, first_line(error))
    failed = wrong.nonzero().flatten().tolist()
    return Line(
        op,
        str(backend),
        dtype,
        "NaN in its row",
        "",
        not failed,
        f"wrong rows: {failed}" if failed else "",
    )


def devices(name: str | None) -> list[torch.device]:
    """The CPU and the current GPU, or the one that is named."""
    if name is not None:
        return [torch.empty(0, device=name).device]
    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpus]


@dataclass(frozen=True)
class Served:
    """What serves each device, and a line for each that the chosen backend cannot serve."""

    backends: list[Backend]
    left_out: list[str]


def served(name: str | None) -> Served:
    """On the CPU and the current GPU, or on the device that is named.

    Raises:
        UsageError: it cannot be used.
    """
    try:
        chosen = devices(name)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device: cannot use {name!r}: {first_line(error)}") from None
    result = Served([], [])
    for device in chosen:
        try:
            result.backends.append(
                Backend(FLOORS[resolve(current_backend(), device, has_cpu=False)], device)
            )
        except (RuntimeError, ValueError) as error:
            result.left_out.append(f"{device} is left out: {error}")
    return result


def run_all(chosen: Sequence[Backend]) -> list[Line]:
    """Every check, with a progress bar; in the order of the table."""
    lines = []
    with Progress(
        len(chosen) * (sum(len(check.dtypes) for check in CHECKS) + len(DTYPES))
    ) as progress:
        for backend in chosen:
            for dtype in DTYPES:
                for check in [check for check in CHECKS if dtype in check.dtypes]:
                    progress.say(f"{check.op} {dtype}, {backend}")
                    lines.append(run(check, backend, dtype))
                    progress.advance()
                lines.append(run_bad_label(backend, dtype))
                progress.advance()
    return sorted(
        lines, key=lambda line: (line.backend, line.op)
    )  # a stable sort: the dtypes keep their order


def table(lines: Sequence[Line]) -> Table:
    header = ["op", "backend", "dtype", "error, ulp", "torch's, ulp", "result", ""]
    return Table(
        "Against fp64",
        header,
        [
            [
                x.op,
                x.backend,
                x.dtype,
                x.error,
                x.torch_error,
                "pass" if x.passed else "FAIL",
                x.note,
            ]
            for x in lines
        ],
        left=3,
    )


def verdict(lines: Sequence[Line]) -> str:
    failures = sum(not line.passed for line in lines)
    return f"{len(lines) - failures} passed, {failures} failed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--device", metavar="NAME", help="one device alone: cpu, cuda, cuda:1")


def main(args: argparse.Namespace) -> int:
    """Check, print; the exit code."""
    try:
        chosen = served(args.device)
    except UsageError as error:
        print(f"partita check: {error}", file=sys.stderr)
        return 2
    for message in chosen.left_out:
        print(message)
    if not chosen.backends:
        print("partita check: nothing is left to check", file=sys.stderr)
        return 2
    lines = run_all(chosen.backends)
    print_table(*table(lines))
    if args.device is None and not torch.cuda.is_available():
        print(f"\n{no_gpu()}")
    print(f"\n{verdict(lines)}")
    return int(not all(line.passed for line in lines))
