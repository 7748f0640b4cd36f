"""`partita warm`: compile the kernels of some ops before the first call of production."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..runtime.backend import current_backend, has_triton, interpreting, resolve
from ..testing.samples import CALLS as SAMPLES
from ..testing.samples import Call, Draw
from .console import (
    DTYPES,
    Progress,
    Table,
    UsageError,
    device_named,
    dtype_names,
    number,
    numbers,
    print_table,
)
from .fresh_process import run_fresh
from .info import EXTRAS, no_gpu

Sizes = Mapping[str, tuple[int, ...]]
Size = Mapping[str, int]

# Batches differ in these sizes. Triton compiles a kernel for a multiple of 16 apart from others,
# so each of them is run as it is and with one less.
RAGGED = ("rows", "steps", "batch")
# The first call of a size compiles, the second is recorded, and the third replays the record.
CALLS = 3
OPS: dict[str, Call] = {name: call for name, call in SAMPLES.items() if call.usual}
SIZES = tuple(dict.fromkeys(name for call in OPS.values() for name in call.usual))
USUAL_DTYPES = ("bf16", "fp32")
MAX_JOBS = 8  # each process has its own context on the GPU, of about half a GiB
MEANINGS = {
    "rows": "rows of logits, or tokens",
    "classes": "classes of a row or of a step, with CTC's blank",
    "hidden": "numbers of a hidden state",
    "steps": "steps of a sequence",
    "batch": "sequences of a batch",
    "labels": "labels of a target",
    "states": "states of a chain, tags, or k-mers",
    "edges": "edges that enter each state",
    "bases": "bases of CTC-CRF, without the blank",
    "durations": "steps of the longest segment of a semi-Markov chain",
}

DESCRIPTION = """\
Compile the kernels of some ops into Triton's cache, so that the first call of a process does not.

Each op runs forward and backward in each dtype at all combinations of the sizes given, or at usual
ones. Rows, steps and batch are run with one less too, as Triton compiles a kernel for a multiple of
16 apart from other numbers. Options of an op, such as label_smoothing, may have kernels of their
own, which are compiled at their first call."""

EPILOG = """\
examples:
  partita warm                                                every op at usual sizes
  partita warm cross_entropy --dtype bf16 --classes 128256
  partita warm ctc_loss --steps 1500 --batch 32 --classes 32
  TRITON_CACHE_DIR=/image/cache partita warm logz viterbi     into a folder to ship

exit codes:
  0  all is compiled     1  an op failed
  2  wrong arguments, or no GPU to compile for
  130  interrupted"""


class WarmResult(NamedTuple):
    """An op in a dtype, and what it took or why it failed."""

    op: str
    dtype: str
    seconds: float | None  # of all calls, without starting the process; None where it failed
    compiled: int = 0  # kernels
    cached: int = 0  # kernels that Triton's cache had before
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "ops", nargs="*", metavar="op", help=f"some of {', '.join(OPS)}; all by default"
    )
    parser.add_argument(
        "--dtype",
        type=dtype_names,
        default=USUAL_DTYPES,
        metavar="NAMES",
        help=f"{','.join(USUAL_DTYPES)} by default; also fp16, fp64",
    )
    for name in SIZES:
        parser.add_argument(f"--{name}", type=numbers, metavar="NUMBERS", help=MEANINGS[name])
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda by default; cuda:1")
    parser.add_argument(
        "--jobs",
        type=number,
        default=max(1, min(MAX_JOBS, (os.cpu_count() or 2) // 2)),
        metavar="NUMBER",
        help="processes that compile at the same time",
    )


def ops_of(args: argparse.Namespace) -> list[str]:
    """Return the ops that the user named; `viterbi` names that method of every class."""
    found = []
    for word in args.ops:
        ops = [op for op in OPS if word in (op, op.rpartition(".")[2])]
        if not ops:
            raise UsageError(f"op: expected some of {', '.join(OPS)}, got {word!r}")
        found += ops
    return list(dict.fromkeys(found)) or list(OPS)


def sizes_of(args: argparse.Namespace, ops: Sequence[str]) -> Sizes:
    """Return the sizes that the user gave, each of which one of the ops has."""
    given = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
    for name in given:
        users = [op for op in OPS if name in OPS[op].usual]
        if not set(users) & set(ops):
            raise UsageError(f"--{name}: a size of {', '.join(users)}; not of these ops")
    return given


def nothing_to_warm(device: str) -> str | None:
    """Return why no kernels are compiled on this machine, or None."""
    if interpreting():
        return "TRITON_INTERPRET is set, so kernels are interpreted and nothing is compiled."
    if not torch.cuda.is_available():
        return f"{no_gpu()} Without one nothing is compiled, so there is nothing to warm."
    if not has_triton():
        return f"triton is not installed: {EXTRAS['triton'][1]}"
    chosen = device_named(device)
    try:
        served = resolve(current_backend(), chosen, has_cpu=False)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None if served == "gpu" else f"{chosen} is served by PyTorch, which compiles nothing."


def warm_in_process(op: str, dtype: str, sizes: Sizes, device: str) -> WarmResult:
    """Warm an op in a process of its own, so that a failure leaves the others untouched."""
    own = {name: value for name, value in sizes.items() if name in OPS[op].usual}
    try:
        return run_fresh(warm_one, op, dtype, own, device)
    except RuntimeError as error:
        return WarmResult(op, dtype, None, note=str(error)[:160])


def warm_all(
    ops: Sequence[str], dtypes: Sequence[str], sizes: Sizes, device: str, jobs: int
) -> list[WarmResult]:
    """Warm all ops in all dtypes in several processes, with a progress bar."""
    pairs = [(op, dtype) for op in ops for dtype in dtypes]
    with Progress(len(pairs)) as progress, ThreadPoolExecutor(jobs) as pool:
        futures: dict[Future[WarmResult], tuple[str, str]] = {
            pool.submit(warm_in_process, op, dtype, sizes, device): (op, dtype)
            for op, dtype in pairs
        }
        try:
            progress.say(f"{jobs} processes compile")
            for future in as_completed(futures):
                progress.advance()
                progress.say(f"{' '.join(futures[future])} is done")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def combinations(sizes: Sizes) -> Iterator[Size]:
    """Yield every combination of the sizes; ragged ones occur as they are and with one less."""
    values = [
        dict.fromkeys(number - less for number in sizes[name] for less in (0, 1) if number > less)
        if name in RAGGED
        else sizes[name]
        for name in sizes
    ]
    for chosen in itertools.product(*values):
        yield dict(zip(sizes, chosen, strict=True))


@contextmanager
def _compilations(device: torch.device) -> Iterator[list[bool]]:
    """Yield a list that gets an entry for each kernel: whether Triton's cache had it."""
    found: list[bool] = []
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        yield found
        return
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
        yield found


def _run(call: Call, draw: Draw, size: Size) -> None:
    """Run forward without a gradient, and forward and backward with one, per row and reduced."""
    for option in ("", "mean")[: 1 + ("mean" in call.options)]:
        sample = call.sample(draw, option, size)
        for _ in range(CALLS):
            with torch.no_grad():
                sample.run()
        for _ in range(CALLS):
            sample.gradients(sample.run())


def warm_one(op: str, dtype: str, sizes: Sizes, device_name: str) -> WarmResult:
    """Run an op in a dtype at all combinations of the sizes; those not given are the usual ones."""
    device = torch.empty(0, device=device_name).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    draw, call = Draw(DTYPES[dtype], device=device, ragged=False), OPS[op]
    own = {name: sizes.get(name, usual) for name, usual in call.usual.items()}
    start = time.perf_counter()
    with _compilations(device) as found:
        for size in combinations(own):
            _run(call, draw, size)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return WarmResult(op, dtype, seconds, found.count(False), found.count(True))


def table(results: Sequence[WarmResult]) -> Table:
    header = ["op", "dtype", "seconds", "kernels compiled", "cached before", "result", ""]
    rows = [
        [op, dtype, "", "", "", "FAIL", note]
        if seconds is None
        else [op, dtype, f"{seconds:.1f}", str(compiled), str(cached), "ready", note]
        for op, dtype, seconds, compiled, cached, note in results
    ]
    return Table("Triton's cache", header, rows, left=2)


def cache_folder() -> str:
    from triton import knobs

    return str(knobs.cache.dir)


def main(args: argparse.Namespace) -> int:
    """Warm the ops, print a table, and return the exit code."""
    ops = ops_of(args)
    sizes = sizes_of(args, ops)
    if reason := nothing_to_warm(args.device):
        raise UsageError(reason)
    results = warm_all(ops, args.dtype, sizes, args.device, args.jobs)
    print_table(table(results))
    failures = [result for result in results if result.seconds is None]
    print(f"\n{len(results) - len(failures)} ready, {len(failures)} failed; in {cache_folder()}")
    return int(bool(failures))
