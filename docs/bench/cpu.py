"""Time a few ops on the CPU beside PyTorch, and write the table of this folder.

    python docs/bench/cpu.py --out docs/bench/cpu.csv

The providers of a case take turns. Times are those that a processor works on one thread, and the
least of them counts, so that other programs of the machine matter little. Before it is timed, the
gradient of Partita is compared with that of PyTorch.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numba
import torch
import torch.nn.functional as F
from torch import Tensor

import partita
from partita.cli.info import cpu

Loss = Callable[[Tensor], Tensor]
Row = tuple[str, str, str, float, int]  # op, size, provider, ms and repetitions


def ctc(generator: torch.Generator) -> tuple[str, Tensor, dict[str, Loss]]:
    """Return the case of CTC from logits, with the log-softmax."""
    logits = torch.randn(500, 16, 32, generator=generator)
    targets = torch.randint(1, 32, (16, 60), generator=generator)
    lengths = torch.full((16,), 500), torch.full((16,), 60)
    losses: dict[str, Loss] = {
        "partita": lambda x: partita.ctc_loss(x, targets, *lengths, from_logits=True),
        "torch": lambda x: F.ctc_loss(x.log_softmax(-1), targets, *lengths),
    }
    return "500 steps × 16 sequences × 32 classes", logits, losses


def chain(generator: torch.Generator) -> tuple[str, Tensor, dict[str, Loss]]:
    """Return the case of log Z of 3-mers, beside a loop over time in PyTorch."""
    scores = torch.randn(500, 8, 64, 5, generator=generator)
    source = partita.debruijn_source(4, 3)

    def loop(x: Tensor) -> Tensor:
        alpha = x.new_zeros(x.shape[1], x.shape[2])
        for step in x:
            alpha = (step + alpha[:, source]).logsumexp(-1)
        return alpha.logsumexp(-1).sum()

    losses: dict[str, Loss] = {"partita": lambda x: partita.logz(x, source).sum(), "torch": loop}
    return "500 steps × 8 chains × 64 states", scores, losses


def cross_entropy(generator: torch.Generator) -> tuple[str, Tensor, dict[str, Loss]]:
    logits = torch.randn(512, 32_000, generator=generator)
    labels = torch.randint(32_000, (512,), generator=generator)
    losses: dict[str, Loss] = {
        "partita": lambda x: partita.cross_entropy(x, labels),
        "torch": lambda x: F.cross_entropy(x, labels),
    }
    return "512 rows × 32,000 classes", logits, losses


CASES = {"ctc_loss": ctc, "logz": chain, "cross_entropy": cross_entropy}


def gradient(loss: Loss, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def milliseconds(losses: dict[str, Loss], x: Tensor, repetitions: int) -> dict[str, float]:
    """Return the least time of each provider, forward and backward."""
    best = dict.fromkeys(losses, float("inf"))
    for _ in range(repetitions):
        for name, loss in losses.items():
            start = time.process_time()
            gradient(loss, x)
            best[name] = min(best[name], 1e3 * (time.process_time() - start))
    return best


def measured(repetitions: int) -> Iterator[Row]:
    for op, case in CASES.items():
        size, x, losses = case(torch.Generator().manual_seed(0))
        ours, theirs = (gradient(loss, x) for loss in losses.values())
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        for name, least in milliseconds(losses, x, repetitions).items():
            yield op, size, name, least, repetitions


def write_table(
    description: str,
    time: str,
    measured: Callable[[int], Iterator[Row]],
    argv: Sequence[str] | None = None,
) -> None:
    """Measure with one thread, and write the table that the command line names.

    Args:
        description: what is timed.
        time: the column of the times.
        measured: yields the rows, given the number of repetitions.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="table to write")
    parser.add_argument("--repetitions", type=int, default=30, help="(default 30)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    machine = (cpu().partition(",")[0], torch.__version__)
    records = []
    for op, size, provider, ms, repetitions in measured(options.repetitions):
        records.append((op, size, provider, f"{ms:.4g}", repetitions, *machine))
        print(*records[-1], flush=True)
    with options.out.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        columns = ("op", "size", "provider", time, "repetitions", "machine", "torch")
        table.writerows([columns, *records])


if __name__ == "__main__":
    write_table("Time a few ops on the CPU beside PyTorch.", "min_ms", measured)
