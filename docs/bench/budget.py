"""Time `linear_cross_entropy` under several workspaces on a GPU, and write a table of this folder.

    python docs/bench/budget.py --out docs/bench/linear_budget.csv

Each line has one budget, and `default` stands for none; the first size has all budgets. The time is
the median of the loss with its gradients in bf16, and the memory is the peak beside inputs and
gradients. The unit is the time of the three bare matrix products. The last line of each size is
PyTorch's composition under `torch.compile`.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import partita

GIB = 2**30
SIZES = ((16384, 2048, 262144), (32768, 4096, 128256), (8192, 8192, 256000))
BUDGETS = (None, GIB // 2, GIB, 2 * GIB, 3 * GIB, 4 * GIB, 6 * GIB, 10 * GIB)
COLUMNS = (
    *("tokens", "hidden", "classes", "provider", "budget_gib", "plan", "chunk", "median_ms"),
    *("products_ms", "workspace_gib", "machine", "torch"),
)


def measured(call: Callable[[], Any], repetitions: int) -> tuple[float, float]:
    """Return the median time in milliseconds, and the peak of the memory in GiB."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / GIB


def products(x: Tensor, matrix: Tensor, repetitions: int) -> float:
    """Return the time of the logits and of the two products of their gradient."""
    logits = torch.empty(len(x), len(matrix), dtype=x.dtype, device=x.device)

    def call() -> None:
        torch.mm(x, matrix.T, out=logits)
        torch.mm(logits, matrix)
        torch.mm(logits.T, x)

    return measured(call, repetitions)[0]


def lines(size: tuple[int, int, int], repetitions: int) -> Iterator[dict[str, Any]]:
    """Measure one size; each line is yielded as soon as it is known."""
    tokens, hidden, classes = size
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "device": "cuda",
        "generator": generator,
    }
    x = torch.randn(tokens, hidden, **options).requires_grad_()
    matrix = torch.randn(classes, hidden, **options).mul_(hidden**-0.5).requires_grad_()
    target = torch.randint(classes, (tokens,), device="cuda", generator=generator)
    common = {
        **{"tokens": tokens, "hidden": hidden, "classes": classes},
        "products_ms": f"{products(x.detach(), matrix.detach(), repetitions):.2f}",
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    gradients = (x.numel() + matrix.numel()) * x.element_size() / GIB

    def line(loss: Callable[[], Tensor], **rest: Any) -> dict[str, Any]:
        def step() -> None:
            torch.autograd.grad(loss(), (x, matrix))

        milliseconds, peak = measured(step, repetitions)
        times = {"median_ms": f"{milliseconds:.2f}", "workspace_gib": f"{peak - gradients:.2f}"}
        return common | times | rest

    for budget in BUDGETS if size == SIZES[0] else BUDGETS[:1]:
        try:
            plan = partita.linear_cross_entropy_plan(*size, torch.bfloat16, memory_budget=budget)
        except ValueError:  # The budget is below the least that these sizes need.
            continue
        yield line(
            lambda budget=budget: partita.linear_cross_entropy(
                x, matrix, target, memory_budget=budget
            ),
            provider="partita",
            budget_gib="default" if budget is None else f"{budget / GIB:g}",
            plan=plan.name,
            chunk=plan.chunk,
        )
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, t: F.cross_entropy(F.linear(x, w), t))
    yield line(lambda: compiled(x, matrix, target), provider="compile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the table to write")
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for size in SIZES:
            for line in lines(size, args.repetitions):
                writer.writerow(line)
                file.flush()
                print(*(f"{key} {line[key]}" for key in COLUMNS if key in line), flush=True)


if __name__ == "__main__":
    main()
