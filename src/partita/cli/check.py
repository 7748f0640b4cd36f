"""`partita check`: the ops against fp64 on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..runtime.backend import current_backend, resolve
from ..testing.samples import CALLS, Call, Draw, Sample
from . import digest
from .console import DTYPES, Progress, Table, UsageError, device_named, first_line, print_table
from .info import BACKEND_NAMES, no_gpu

DESCRIPTION = """\
Run the sample calls of every function, forward and backward, and compare them with fp64, on the
CPU and on the current GPU. Where a function has a counterpart in plain PyTorch, the error stands in
ulp of the result's dtype beside its bound, which is two times PyTorch's own error, or 2 ulp. A sum
whose terms cancel can be off by many ulp of its small result: then PyTorch's own error is as large,
and so is the bound. For the other functions the error is a share of the bound that the
documentation states, against the reference, and integers must be equal.

With --digest, hash the bits of the results and gradients instead, on one device: the current GPU
if there is one. Two files of digests that are equal are from the same bits."""

EPILOG = """\
examples:
  partita check                    on the CPU and on the current GPU
  partita check --device cuda:1    there alone
  partita check --digest > here.txt         what is computed here, as hashes
  partita check --digest there.txt          the same bits as on another machine?

exit codes:
  0  all passed          1  something failed
  2  wrong arguments   130  interrupted"""


def backend_of(device: torch.device, *, numba: bool = False) -> str:
    """Return what serves a call on a device, if the call has kernels of Numba or has none."""
    return f"{BACKEND_NAMES[resolve(current_backend(), device, has_cpu=numba)]} on {device}"


@dataclass(frozen=True)
class Line:
    """A line of the table with its cells as text."""

    op: str
    backend: str
    dtype: str
    error: str = ""
    bound: str = ""
    torch_error: str = ""
    passed: bool = False
    note: str = ""


def _compared(call: Call, draw: Draw) -> Iterator[Sample]:
    """Yield samples of larger sizes, with some extreme values and other layouts.

    In fp64 the errors of the reference are as large as ours.
    """
    if call.in_torch is None and draw.dtype == torch.float64:
        return
    values = ("plain", "offset") if call.in_torch is None else ("plain", "offset", "masked")
    for number, sizes in enumerate(call.checked):
        yield call.sample(draw, sizes=sizes)
        for name, changed in call.extreme_draws(draw):
            if number == 0 and changed.values in values:
                yield call.sample(changed, sizes=sizes, name=name)


class Comparison(NamedTuple):
    """A result or gradient beside fp64."""

    text: str  # what is compared, and where it is off the most
    error: float
    bound: float
    torch_error: float | None = None  # None where the error is a share of its bound

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def _comparisons(call: Call, draw: Draw) -> Iterator[Comparison]:
    """Compare larger samples with the counterpart in PyTorch, and others with the reference."""
    for sample in _compared(call, draw) if call.in_torch else ():
        errors = sample.errors_beside_torch()
        for name, parts in (("forward", errors.forward), ("backward", errors.backward)):
            for x in parts:
                yield Comparison(f"{sample.name}, {name}: {x}", x.ulp, x.budget, x.baseline)
    small = call.samples(draw) if draw.dtype == torch.float32 else [call.sample(draw)]
    for sample in (*small, *(() if call.in_torch else _compared(call, draw))):
        for part, share in sample.errors().items():
            yield Comparison(f"{sample.name}: {part} is beyond its bound", share, 1.0)


def run(call: Call, device: torch.device, dtype: str) -> Line:
    """Return the line with the worst error of the samples of a call, forward and backward.

    An error beside PyTorch's is shown rather than a share, if neither fails.
    """
    line = Line(call.name, backend_of(device, numba=call.numba), dtype)
    try:
        found = list(_comparisons(call, Draw(DTYPES[dtype], device=device)))
    except Exception as error:
        return replace(line, note=first_line(error))
    x = max(found, key=lambda x: (not x.passed, x.torch_error is not None, x.error / x.bound))
    return replace(
        line,
        error=f"{x.error:.2g}",
        bound=f"{x.bound:.2g}",
        torch_error="" if x.torch_error is None else f"{x.torch_error:.2g}",
        passed=x.passed,
        note="" if x.passed else x.text,
    )


def served(name: str | None) -> tuple[list[torch.device], list[str]]:
    """Return the named device, or the CPU and the current GPU.

    Messages follow for devices that the chosen backend cannot serve.
    """
    if name is not None:
        devices = [device_named(name)]
    else:
        devices = [torch.device("cpu")]
        if torch.cuda.is_available():
            devices.append(torch.device("cuda", torch.cuda.current_device()))
    chosen, left_out = [], []
    for device in devices:
        try:
            backend_of(device)
            chosen.append(device)
        except (RuntimeError, ValueError) as error:
            left_out.append(f"{device} is left out: {error}")
    return chosen, left_out


def run_all(devices: Sequence[torch.device]) -> list[Line]:
    """Run all checks with a progress bar and return them in the order of the table."""
    lines = []
    with Progress(len(devices) * len(CALLS) * len(DTYPES)) as progress:
        for device in devices:
            for dtype in DTYPES:
                for call in CALLS.values():
                    progress.say(f"{call.name} {dtype} on {device}")
                    lines.append(run(call, device, dtype))
                    progress.advance()
    # The sort is stable, so the dtypes stay in their order.
    return sorted(lines, key=lambda line: (line.backend, line.op))


def tables(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield a narrow table for each backend and device."""
    header = ["op", "dtype", "error, ulp", "bound", "torch's", "result", ""]
    for backend in dict.fromkeys(line.backend for line in lines):
        rows = [
            [
                *(x.op, x.dtype, x.error, x.bound, x.torch_error),
                "pass" if x.passed else "FAIL",
                x.note,
            ]
            for x in lines
            if x.backend == backend
        ]
        yield Table(f"{backend}, against fp64", header, rows, left=2)


def verdict(lines: Sequence[Line]) -> str:
    failures = sum(not line.passed for line in lines)
    return f"{len(lines) - failures} passed, {failures} failed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--device", metavar="NAME", help="one device alone: cpu, cuda, cuda:1")
    parser.add_argument(
        "--digest",
        nargs="?",
        const="",
        metavar="FILE",
        help="print hashes of all results, or compare them with those in a file",
    )


def main(args: argparse.Namespace) -> int:
    """Run and print the checks, and return the exit code."""
    chosen, left_out = served(args.device)
    for message in left_out:
        print(message, file=sys.stdout if args.digest is None else sys.stderr)
    if not chosen:
        raise UsageError("nothing is left to check")
    if args.digest is not None:
        return digest.main(chosen[-1], args.digest)
    lines = run_all(chosen)
    for shown in tables(lines):
        print_table(shown)
    if args.device is None and not torch.cuda.is_available():
        print(f"\n{no_gpu()}")
    print(f"\n{verdict(lines)}")
    return int(not all(line.passed for line in lines))
