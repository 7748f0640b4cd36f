"""One op of `partita warm` in a process of its own.

python -m partita.cli.warm_ops cross_entropy bf16 cuda '{"rows": [1024], "classes": [32000]}'
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..testing.samples import CALLS as SAMPLES
from ..testing.samples import Call, Draw
from .console import DTYPES, first_line
from .fresh_process import end_process

Sizes = Mapping[str, tuple[int, ...]]
Size = Mapping[str, int]

# Batches differ in these sizes. Triton compiles a kernel for a multiple of 16 apart from others,
# so each of them is run as it is and with one less.
RAGGED = ("rows", "steps", "batch")
# The first call of a size compiles, the second is recorded, and the third replays the record.
CALLS = 3
OPS: dict[str, Call] = {name: call for name, call in SAMPLES.items() if call.usual}
SIZES = tuple(dict.fromkeys(name for call in OPS.values() for name in call.usual))


class Warmed(NamedTuple):
    """The time and the kernels that one op in one dtype took."""

    seconds: float  # of all calls, without starting the process
    compiled: int  # kernels
    cached: int  # kernels that Triton's cache had before


def combinations(sizes: Sizes) -> Iterator[Size]:
    """Yield every combination of the sizes; ragged ones occur as they are and with one less."""
    values = [
        dict.fromkeys(number - less for number in sizes[name] for less in (0, 1) if number > less)
        if name in RAGGED
        else sizes[name]
        for name in sizes
    ]
    for numbers in itertools.product(*values):
        yield dict(zip(sizes, numbers, strict=True))


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


def warm_one(op: str, dtype: str, sizes: Sizes, device: torch.device) -> Warmed:
    """Run an op in a dtype at all combinations of the sizes; those not given are the usual ones."""
    draw, call = Draw(DTYPES[dtype], device=device, ragged=False), OPS[op]
    own = {name: sizes.get(name, usual) for name, usual in call.usual.items()}
    start = time.perf_counter()
    with _compilations(device) as found:
        for size in combinations(own):
            _run(call, draw, size)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return Warmed(time.perf_counter() - start, found.count(False), found.count(True))


def main(argv: Sequence[str]) -> int:
    """Warm one op in this process, and print the result as JSON."""
    op, dtype, device, sizes = argv
    chosen = torch.empty(0, device=device).device
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    numbers = {name: tuple(values) for name, values in json.loads(sizes).items()}
    try:
        result = warm_one(op, dtype, numbers, chosen)
    except Exception as error:
        print(first_line(error), file=sys.stderr)
        return 1
    print(json.dumps(result._asdict()))
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
