"""Adapt the frozen head of a model to other labels with LoRA, without logits or a merged matrix.

    python examples/lora.py --steps 200

A head of 500 classes was trained on labels that its matrix explains. The labels of the new task
come from another matrix, which differs from it by a product of rank 2. `LoRA` learns that product
beside the frozen matrix. The exit code is 1 if the held-out loss does not come close to that of the
labels' own matrix.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from digits import positive
from torch import Tensor

import partita

CLASSES, WIDTH, RANK, SCALE = 500, 16, 2, 2.0
BATCH, HELD_OUT = 256, 2048


class Report(NamedTuple):
    """Held-out losses in nats: of the frozen head, with LoRA, and of the labels' own matrix."""

    frozen: float
    adapted: float
    best: float

    @property
    def learned(self) -> float:
        """The share of the difference between frozen and best that LoRA has learned."""
        return (self.frozen - self.adapted) / (self.frozen - self.best)


def run(steps: int, seed: int = 0) -> Report:
    """Train the factors, and return the held-out losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    g = torch.Generator(device).manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    frozen = 3 * numbers(CLASSES, WIDTH) / WIDTH**0.5
    other = frozen + numbers(CLASSES, RANK) @ numbers(RANK, WIDTH) / WIDTH**0.5

    def batch(tokens: int) -> tuple[Tensor, Tensor]:
        hidden = numbers(tokens, WIDTH)
        p = (hidden @ other.T).softmax(-1)
        return hidden, torch.multinomial(p, 1, generator=g)[:, 0]

    A = (numbers(RANK, WIDTH) / WIDTH**0.5).requires_grad_()
    B = torch.zeros(CLASSES, RANK, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([A, B], lr=0.05)
    for _ in range(steps):
        hidden, target = batch(BATCH)
        lora = partita.LoRA(A, B, SCALE)
        loss = partita.linear_cross_entropy(hidden, frozen, target, low_rank=lora)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    hidden, target = batch(HELD_OUT)
    with torch.no_grad():
        lora = partita.LoRA(A, B, SCALE)
        losses = (
            partita.linear_cross_entropy(hidden, frozen, target),
            partita.linear_cross_entropy(hidden, frozen, target, low_rank=lora),
            partita.linear_cross_entropy(hidden, other, target),
        )
    return Report(*map(float, losses))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example from the command line, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--seed", type=int, default=0)
    report = run(**vars(parser.parse_args(arguments)))
    print(f"Held-out loss: {report.frozen:.3f} nats of the frozen head")
    print(f"With LoRA: {report.adapted:.3f}, with the labels' own matrix: {report.best:.3f}")
    return int(report.learned < 0.8)


if __name__ == "__main__":
    sys.exit(main())
