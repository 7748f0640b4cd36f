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
from .arguments import device_named
from .check_decode import DECODERS, Decoder, decoder_error
from .check_ops import CHECKS, COLUMNS, ROWS, Check, labels
from .console import DTYPES, Progress, Table, UsageError, first_line, print_table
from .info import BACKEND_NAMES, no_gpu

DENSE_EDGES = ("plain", "offset", "leading_inf")
# These dtypes run with all layouts and sizes. The others share their code, and compiling it for
# each of them would take a minute more.
THOROUGH = ("bf16", "fp32")

DESCRIPTION = """\
Run the ops that have a gradient, forward and backward, and the decoders, and compare them with
fp64, on the CPU and on the current GPU. Decoded tokens and steps must be equal. Each error stands
beside its bound, which is two times that of PyTorch, or 2 ulp. Errors are in ulp of the result's
dtype. A sum whose terms cancel can be off by many ulp of its small result: then PyTorch's own error
is as large, and so is the bound."""

EPILOG = """\
examples:
  partita check                    on the CPU and on the current GPU
  partita check --device cuda:1    there alone

exit codes:
  0  all passed          1  something failed
  2  wrong arguments   130  interrupted"""


@dataclass(frozen=True)
class Backend:
    """The backend that serves a device.

    Fields:
        name: the name in the table.
        device: the device.
    """

    name: str
    device: torch.device

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"

    def of(self, check: Check | Decoder) -> Backend:
        """Return the backend that serves this op on the device."""
        return Backend(
            BACKEND_NAMES[resolve(current_backend(), self.device, has_cpu=check.numba)], self.device
        )


@dataclass(frozen=True)
class Line:
    """A line of the table with its cells as text."""

    op: str
    backend: str
    dtype: str
    error: str
    bound: str
    torch_error: str
    passed: bool
    note: str = ""


def _inputs(check: Check, dtype: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and the logits of the inputs."""
    thorough = dtype in THOROUGH or device.type == "cpu"
    for rows, columns in check.sizes if thorough else check.sizes[:1]:
        for edge in check.edges if columns == COLUMNS else ("plain",):
            if thorough or edge in DENSE_EDGES:
                yield (
                    f"{edge} {rows} × {columns}",
                    edge_rows(edge, rows, columns, dtype=DTYPES[dtype], device=device),
                )


def run(check: Check, backend: Backend, dtype: str) -> Line:
    """Return the line with the worst error of all inputs, forward and backward."""
    backend, worst = backend.of(check), 0.0
    line = Line(check.op, str(backend), dtype, "0", "2", "0", True)
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
                            f"{error.budget:.2g}",
                            f"{error.baseline:.2g}",
                            error.passed,
                            note,
                        )
    except Exception as error:
        return Line(check.op, str(backend), dtype, "", "", "", False, first_line(error))
    return line


def run_decoder(check: Decoder, backend: Backend, dtype: str) -> Line:
    """Return the line with the worst error of the scores; an error if other tokens were found."""
    backend = backend.of(check)
    lines = []
    try:
        for edge in check.edges:
            x = edge_rows(edge, ROWS, COLUMNS, dtype=DTYPES[dtype], device=backend.device)
            error = decoder_error(check, x)
            found, bound, own = (
                f"{value:.2g}" for value in (error.ulp, error.budget, error.baseline)
            )
            note = "" if error.passed else f"{edge} {ROWS} × {COLUMNS}: {error}"
            line = Line(check.op, str(backend), dtype, found, bound, own, error.passed, note)
            lines.append((error.ulp / error.budget, line))
    except Exception as error:
        return Line(check.op, str(backend), dtype, "", "", "", False, first_line(error))
    return max(lines, key=lambda each: each[0])[1]


def run_bad_label(backend: Backend, dtype: str) -> Line:
    """Check a label that is out of range.

    It raises where values are checked. Elsewhere its row is NaN and the other rows are unchanged.
    """
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
            return Line(op, str(backend), dtype, "IndexError", "", "", True)
        mismatch = result.isnan() != (torch.arange(ROWS, device=x.device) == 1)
        mismatch |= (result != expected) & ~result.isnan()
    except Exception as error:
        return Line(op, str(backend), dtype, "", "", "", False, first_line(error))
    failed = mismatch.nonzero().flatten().tolist()
    return Line(
        op,
        str(backend),
        dtype,
        "NaN in its row",
        "",
        "",
        not failed,
        f"wrong rows: {failed}" if failed else "",
    )


def devices(name: str | None) -> list[torch.device]:
    """Return the named device, or the CPU and the current GPU."""
    if name is not None:
        return [device_named(name)]
    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *gpus]


@dataclass(frozen=True)
class Served:
    """The backends of the devices.

    Fields:
        backends: one for each device that is served.
        left_out: a message for each device that the chosen backend cannot serve.
    """

    backends: list[Backend]
    left_out: list[str]


def served(name: str | None) -> Served:
    """Return the backends of the named device, or of the CPU and the current GPU.

    Raises:
        UsageError: the device cannot be used.
    """
    result = Served([], [])
    for device in devices(name):
        try:
            result.backends.append(
                Backend(BACKEND_NAMES[resolve(current_backend(), device, has_cpu=False)], device)
            )
        except (RuntimeError, ValueError) as error:
            result.left_out.append(f"{device} is left out: {error}")
    return result


def run_all(chosen: Sequence[Backend]) -> list[Line]:
    """Run all checks with a progress bar and return them in the order of the table."""
    lines = []
    each = sum(len(check.dtypes) for check in CHECKS) + sum(len(one.dtypes) for one in DECODERS)
    with Progress(len(chosen) * (each + len(DTYPES))) as progress:
        for backend in chosen:
            for dtype in DTYPES:
                for check in [check for check in CHECKS if dtype in check.dtypes]:
                    progress.say(f"{check.op} {dtype}, {backend}")
                    lines.append(run(check, backend, dtype))
                    progress.advance()
                for decoder in [decoder for decoder in DECODERS if dtype in decoder.dtypes]:
                    progress.say(f"{decoder.op} {dtype}, {backend}")
                    lines.append(run_decoder(decoder, backend, dtype))
                    progress.advance()
                lines.append(run_bad_label(backend, dtype))
                progress.advance()
    # The sort is stable, so the dtypes stay in their order.
    return sorted(lines, key=lambda line: (line.backend, line.op))


def table(lines: Sequence[Line]) -> Table:
    """Return one table of all backends."""
    header = ["op", "backend", "dtype", "error, ulp", "bound", "torch's", "result", ""]
    rows = [[x.op, x.backend, *_cells(x)] for x in lines]
    return Table("Against fp64", header, rows, left=3)


def tables(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield a narrow table for each backend and device."""
    header = ["op", "dtype", "error, ulp", "bound", "torch's", "result", ""]
    for backend in dict.fromkeys(line.backend for line in lines):
        rows = [[x.op, *_cells(x)] for x in lines if x.backend == backend]
        yield Table(f"{backend}, against fp64", header, rows, left=2)


def _cells(x: Line) -> list[str]:
    return [x.dtype, x.error, x.bound, x.torch_error, "pass" if x.passed else "FAIL", x.note]


def verdict(lines: Sequence[Line]) -> str:
    failures = sum(not line.passed for line in lines)
    return f"{len(lines) - failures} passed, {failures} failed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--device", metavar="NAME", help="one device alone: cpu, cuda, cuda:1")


def main(args: argparse.Namespace) -> int:
    """Run and print the checks, and return the exit code."""
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
    for shown in tables(lines):
        print_table(*shown)
    if args.device is None and not torch.cuda.is_available():
        print(f"\n{no_gpu()}")
    print(f"\n{verdict(lines)}")
    return int(not all(line.passed for line in lines))
