"""Train a draft head that guesses what a teacher says next, over a part of the vocabulary.

    python examples/draft_head.py --steps 60

The teacher is a frozen head over 256 classes. The draft has the 64 classes that the teacher says
most often, narrower hidden states, and the loss `kl` + `tv` of `linear_distillation_loss`, with a
weight for each row: the teacher's probability of the draft's classes. Speculative decoding accepts
a token of the draft with the probability 1 - tv, over the classes of the draft, and the example
prints its mean before and after. The exit code is 1 if the draft did not learn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import partita

CLASSES, DRAFT_CLASSES, WIDTH, DRAFT_WIDTH, TOKENS = 256, 64, 32, 24, 64


class Problem:
    """A teacher, and a draft that sees a projection of the teacher's hidden states."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.teacher = torch.randn(CLASSES, WIDTH) / WIDTH**0.5
        self.popularity = torch.linspace(3, -3, CLASSES)[torch.randperm(CLASSES)]
        self.classes = self.popularity.topk(DRAFT_CLASSES).indices
        self.narrow = nn.Linear(WIDTH, DRAFT_WIDTH)
        self.draft = nn.Linear(DRAFT_WIDTH, DRAFT_CLASSES)

    def loss(self, hidden: Tensor) -> partita.Distillation:
        """Return the losses of the draft for hidden states of the teacher, `[tokens, WIDTH]`."""
        return partita.linear_distillation_loss(
            self.narrow(hidden),
            self.draft.weight,
            hidden,
            self.teacher,
            weights={"kl": 1.0, "tv": 1.0},
            linear_bias=self.draft.bias,
            teacher_bias=self.popularity,
            teacher_classes=self.classes,
            reduction="none",
        )

    def acceptance(self) -> float:
        """Return the mean acceptance rate on fresh hidden states."""
        generator = torch.Generator().manual_seed(1)
        hidden = 2 * torch.randn(TOKENS, WIDTH, generator=generator)
        with torch.no_grad():
            tv = self.loss(hidden).tv
        assert tv is not None
        return 1 - float(tv.mean())

    def train(self, steps: int) -> None:
        parameters = [*self.narrow.parameters(), *self.draft.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=1e-2)
        for _ in range(steps):
            hidden = 2 * torch.randn(TOKENS, WIDTH)
            found = self.loss(hidden)
            assert found.teacher_mass is not None
            optimizer.zero_grad()
            (found.teacher_mass * found.loss).mean().backward()
            optimizer.step()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="of training (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default 0)")
    options = parser.parse_args(arguments)
    problem = Problem(options.seed)
    before = problem.acceptance()
    problem.train(options.steps)
    after = problem.acceptance()
    print(f"acceptance {before:.3f} before, {after:.3f} after {options.steps} steps")
    return 0 if after > before + 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
