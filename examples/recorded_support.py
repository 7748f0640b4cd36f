"""Train a tiny policy on tokens that were drawn with top-k, with and without the recorded sets.

    python examples/recorded_support.py --steps 60

A sampler with top-k draws from the k most probable classes. The policy gradient of its tokens
belongs to the distribution over these classes, so the ratio of probabilities in PPO and GRPO has to
be taken over them too. The sampler records the sets; `linear_support_stats` takes them.

The prompt is one number, and an answer is right if it is the next one, modulo the vocabulary. Both
sides compute log-probabilities from the same hidden states: the sampler for the whole batch, the
trainer for shuffled parts of it. Before the first update of each batch the ratio must be 1. It is
exactly 1 with the recorded sets, whatever the parts are, since the bits of a row do not depend on
its batch. Without them it is far from 1. The exit code is 1 if it is not so, or if the policy did
not learn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import partita

CLASSES, WIDTH, BATCH, PARTS = 24, 32, 256, 4
TOP_K, TEMPERATURE = 6, 0.8
CLIP = 0.2  # how far the ratio of probabilities may move from 1
BUDGET = 2**20  # bytes; with a budget so small the logits of recorded classes are computed alone


class Drawn(NamedTuple):
    """Tokens that the sampler drew, with what it recorded.

    Fields:
        states: hidden states, `[N, H]`.
        tokens: what was drawn, `[N]`.
        ids, offsets: the sets, as `linear_support_stats` takes them.
        logprobs: log-probabilities over the sets, `[N]`.
        reward: 1 for a right token, else 0, `[N]`.
    """

    states: Tensor
    tokens: Tensor
    ids: Tensor
    offsets: Tensor
    logprobs: Tensor
    reward: Tensor


@dataclass(frozen=True)
class Report:
    """What the run has found.

    Fields:
        before, after: the mean reward of the first and of the last batch.
        with_sets: the greatest |ratio - 1| of the first updates over the recorded sets.
        without_sets: the mean |ratio - 1| of the same over all classes.
    """

    before: float
    after: float
    with_sets: float
    without_sets: float


class Policy(nn.Module):
    """An embedding of the prompt, and the matrix of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def hidden(self, prompts: Tensor) -> Tensor:
        """Return hidden states, `[N, H]`."""
        states: Tensor = self.embed(prompts)
        return states

    def stats(self, states: Tensor, drawn: Sequence[Tensor]) -> partita.SupportStats:
        """Return the statistics over recorded sets; `drawn` are tokens, ids and offsets."""
        return partita.linear_support_stats(
            states, self.head.weight, *drawn, temperature=TEMPERATURE, memory_budget=BUDGET
        )


def draw(policy: Policy, prompts: Tensor) -> Drawn:
    """Draw one token for each prompt from its k best classes, and record them."""
    with torch.no_grad():
        states = policy.hidden(prompts)
        logits = policy.head(states) / TEMPERATURE
        best = logits.topk(TOP_K)
        picked = best.values.softmax(-1).multinomial(1)
        tokens = best.indices.gather(1, picked)[:, 0]
        ids, offsets = best.indices.flatten(), TOP_K * torch.arange(len(prompts) + 1)
        stats = policy.stats(states, (tokens, ids, offsets))
    assert stats.in_set.all()
    reward = (tokens == (prompts + 1) % CLASSES).float()
    return Drawn(states, tokens, ids, offsets, stats.logprob, reward)


def part_of(drawn: Drawn, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, ids and offsets of some rows, whose sets have k classes each."""
    ids = drawn.ids.view(-1, TOP_K)[rows].flatten()
    return drawn.tokens[rows], ids, TOP_K * torch.arange(len(rows) + 1)


def train(steps: int, seed: int = 0) -> Report:
    """Train the policy for some batches, each in several parts."""
    torch.manual_seed(seed)
    policy, rewards, errors, plain_errors = Policy(), list[float](), list[float](), list[float]()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    for _ in range(steps):
        prompts = torch.randint(CLASSES, (BATCH,))
        drawn = draw(policy, prompts)
        rewards.append(float(drawn.reward.mean()))
        advantage = drawn.reward - drawn.reward.mean()
        order = torch.randperm(BATCH)
        for i, rows in enumerate(order.chunk(PARTS)):
            stats = policy.stats(policy.hidden(prompts[rows]), part_of(drawn, rows))
            ratio = (stats.logprob - drawn.logprobs[rows]).exp()
            if i == 0:
                errors.append(float((ratio - 1).abs().max()))
                whole = policy.head(drawn.states[rows])
                plain = partita.token_stats(whole, drawn.tokens[rows], temperature=TEMPERATURE)
                difference = (plain.logprob - drawn.logprobs[rows]).exp() - 1
                plain_errors.append(float(difference.abs().mean()))
            weight = advantage[rows]
            surrogate = torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight)
            loss = -surrogate.mean() - 1e-3 * stats.entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    mean = sum(plain_errors) / len(plain_errors)
    return Report(rewards[0], rewards[-1], max(errors), mean)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    report = train(parser.parse_args(arguments).steps)
    print(f"reward {report.before:.2f} before, {report.after:.2f} after")
    print(f"|ratio - 1| of first updates: {report.with_sets} over the recorded sets,")
    print(f"    {report.without_sets:.2f} on average over all classes")
    return int(report.with_sets != 0.0 or report.after < report.before + 0.3)


if __name__ == "__main__":
    sys.exit(main())
