"""The first call of an op in this process, in seconds.

    python -m partita.bench.first_call cross_entropy partita cuda

`partita bench host --cold` runs it in fresh processes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch

from ..cli.fresh_process import end_process
from ..testing.samples import Draw
from .host_cases import step, usual_case
from .measure import wait


def seconds(op: str, provider: str, device: torch.device) -> dict[str, float]:
    """Return the seconds of the first and the second forward and backward, waited for.

    The inputs are made before, so the context of the GPU is not counted.
    """
    case, draw = usual_case(op), Draw(device=device)
    inputs = case.inputs(draw, 0)
    function = case.functions[provider]()
    times = {}
    for name in ("first", "second"):
        wait(device)
        start = time.perf_counter()
        step(function, inputs)
        wait(device)
        times[name] = time.perf_counter() - start
    return times


def main(argv: Sequence[str]) -> int:
    op, provider, device = argv
    chosen = torch.empty(0, device=device).device
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    print(json.dumps(seconds(op, provider, chosen)))
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
