"""`partita warm`: compile the kernels of some ops before the first call of production."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from ..runtime.backend import current_backend, has_triton, interpreting, numba_problem, resolve
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
Compile the kernels of some ops ahead, so that the first call of a process does not: on a GPU into
Triton's cache, and on a CPU, where chains, CTC and transducers have kernels, into Numba's.

Each op runs forward and backward in each dtype at all combinations of the sizes given, or at usual
ones. Rows, steps and batch are run with one less too, as Triton compiles a kernel for a multiple of
16 apart from other numbers. Numba compiles for dtypes alone, so on a CPU the usual sizes are small.
Options of an op, such as label_smoothing, may have kernels of their own, which are compiled at
their first call."""

EPILOG = """\
examples:
  partita warm                                                every op at usual sizes
  partita warm cross_entropy --dtype bf16 --classes 128256
  partita warm ctc_loss --steps 1500 --batch 32 --classes 32
  TRITON_CACHE_DIR=/image/cache partita warm logz viterbi     into a folder to ship
  partita warm linear_chain --device cpu --dtype fp32         for a job on the CPU
  NUMBA_CACHE_DIR=/image/cache partita warm --device cpu      into a folder to ship

exit codes:
  0  all is compiled     1  an op failed
  2  wrong arguments, or nothing to compile
  130  interrupted"""


class WarmResult(NamedTuple):
    """An op in a dtype, and what it took or why it failed."""

    op: str
    dtype: str
    seconds: float | None  # of all calls, without starting the process; None where it failed
    compiled: int = 0  # kernels
    cached: int = 0  # kernels that the cache had before
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
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        metavar="NAME",
        help="cuda by default, or cpu without a GPU; cuda:1",
    )
    parser.add_argument(
        "--jobs",
        type=number,
        metavar="NUMBER",
        help="processes that compile at the same time; on a CPU, where ops share kernels, 1",
    )


def ops_of(args: argparse.Namespace) -> list[str]:
    """Return the ops that the user named; `viterbi` names that method of every class."""
    found, compiled = [], [op for op in OPS if OPS[op].numba or not is_cpu(args.device)]
    for word in args.ops:
        ops = [op for op in OPS if word in (op, op.rpartition(".")[2])]
        if not ops:
            raise UsageError(f"op: expected some of {', '.join(OPS)}, got {word!r}")
        if not set(ops) & set(compiled):
            raise UsageError(f"op: PyTorch serves {word} on a CPU, and compiles nothing")
        found += ops
    return [op for op in dict.fromkeys(found) if op in compiled] or compiled


def sizes_of(args: argparse.Namespace, ops: Sequence[str]) -> Sizes:
    """Return the sizes that the user gave, each of which one of the ops has."""
    given = {name: value for name in SIZES if (value := getattr(args, name)) is not None}
    for name in given:
        users = [op for op in OPS if name in OPS[op].usual]
        if not set(users) & set(ops):
            raise UsageError(f"--{name}: a size of {', '.join(users)}; not of these ops")
    return given


def is_cpu(device: str) -> bool:
    return device.partition(":")[0] == "cpu"


def nothing_to_warm(device: str) -> str | None:
    """Return why no kernels are compiled on this machine, or None."""
    if is_cpu(device):
        if (problem := numba_problem()) is not None:
            return f"Nothing is compiled for a CPU: {problem}"
    elif interpreting():
        return "TRITON_INTERPRET is set, so kernels are interpreted and nothing is compiled."
    elif not torch.cuda.is_available():
        return f"{no_gpu()} Without one nothing is compiled for it; --device cpu warms the CPU."
    elif not has_triton():
        return f"triton is not installed: {EXTRAS['triton'][1]}"
    chosen = device_named(device)
    try:
        served = resolve(current_backend(), chosen, has_cpu=chosen.type == "cpu")
    except (RuntimeError, ValueError) as error:
        return str(error)
    if served == "gpu" and chosen.type == "cpu":
        return "Triton's interpreter serves the CPU, and compiles nothing."
    if served == "reference":
        return f"{chosen} is served by PyTorch, which compiles nothing."
    return None if cache_folder(device) else "Numba has no folder to write to: set NUMBA_CACHE_DIR."


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
            progress.say(f"{jobs} process{'es' * (jobs > 1)} compile{'s' * (jobs == 1)}")
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


def _numba_loads() -> dict[bool, int]:
    """Return how many kernels of Numba this process has compiled, and how many its cache had."""
    if numba_problem() is not None:
        return {False: 0, True: 0}
    from ..primitives.cpu.jit import KERNELS

    stats = [kernel.stats for kernel in KERNELS]
    return {
        False: sum(sum(each.cache_misses.values()) for each in stats),
        True: sum(sum(each.cache_hits.values()) for each in stats),
    }


@contextmanager
def _compilations(device: torch.device) -> Iterator[list[bool]]:
    """Yield a list that gets an entry for each kernel: whether the cache had it."""
    found: list[bool] = []
    if device.type != "cuda":
        before = _numba_loads()
        yield found
        for cached, number in _numba_loads().items():
            found += [cached] * (number - before[cached])
        return
    if not has_triton():
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
    """Run an op in a dtype at all combinations of the sizes.

    Those not given are the usual ones, and on a CPU, whose kernels serve all sizes, small ones.
    """
    device = torch.empty(0, device=device_name).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    draw, call = Draw(DTYPES[dtype], device=device, ragged=False), OPS[op]
    others = call.usual if device.type == "cuda" else {n: (size,) for n, size in call.small.items()}
    own = {name: sizes.get(name, others[name]) for name in call.usual}
    start = time.perf_counter()
    with _compilations(device) as found:
        for size in combinations(own):
            _run(call, draw, size)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return WarmResult(op, dtype, seconds, found.count(False), found.count(True))


def table(results: Sequence[WarmResult], compiler: str) -> Table:
    header = ["op", "dtype", "seconds", "kernels compiled", "cached before", "result", ""]
    rows = [
        [op, dtype, "", "", "", "FAIL", note]
        if seconds is None
        else [op, dtype, f"{seconds:.1f}", str(compiled), str(cached), "ready", note]
        for op, dtype, seconds, compiled, cached, note in results
    ]
    return Table(f"{compiler}'s cache", header, rows, left=2)


def cache_folder(device: str) -> str:
    """Return the folder of Triton's or Numba's cache; an empty text where Numba finds none."""
    if not is_cpu(device):
        from triton import knobs

        return str(knobs.cache.dir)
    from ..primitives.cpu import jit

    folder = Path(jit.jit(is_cpu).stats.cache_path or "")  # Numba has a folder for each of sources
    if folder.name == "__pycache__":
        return f"the folders __pycache__ of {jit.PACKAGE}"
    return str(folder.parent) if folder.name else ""


def main(args: argparse.Namespace) -> int:
    """Warm the ops, print a table, and return the exit code."""
    ops = ops_of(args)
    sizes = sizes_of(args, ops)
    if reason := nothing_to_warm(args.device):
        raise UsageError(reason)
    usual_jobs = 1 if is_cpu(args.device) else max(1, min(MAX_JOBS, (os.cpu_count() or 2) // 2))
    results = warm_all(ops, args.dtype, sizes, args.device, args.jobs or usual_jobs)
    print_table(table(results, "Numba" if is_cpu(args.device) else "Triton"))
    failures, folder = [x for x in results if x.seconds is None], cache_folder(args.device)
    print(f"\n{len(results) - len(failures)} ready, {len(failures)} failed; in {folder}")
    return int(bool(failures))
