"""Train a tiny policy with GRPO on tokens that were drawn with top-k and top-p.

    python examples/recorded_support.py --steps 20 --out recorded_support.png

An inference engine draws from the few classes that its cut-offs keep. It records them, and the
trainer takes its log-probabilities over them with `linear_support_stats`. The prompt is one number,
and an answer is right if it is the next one, modulo the vocabulary. The example measures:

- The ratio of probabilities in the first update of each batch, where both sides are Partita's and
  the hidden states are equal. It is exactly 1, however the trainer shuffles and cuts the batch.
- |log p(trainer) - log p(engine)| of the tokens of the first batch. The engine is plain PyTorch and
  stands for one that shares no kernel with the trainer. It takes seven tokens at a time and adds up
  two halves of each sum, which its layers round as two tensor-parallel ranks do. Where nothing is
  recorded, `truncated_stats` finds the classes again from the trainer's logits.
- The same between two calls of Partita without cut-offs, one for all tokens and one for each token:
  with the usual products and with those of `batch_invariant()`, where it is 0.

What is printed is what this machine computes. The exit code is 1 if a number is not exact that must
be, or if the policy did not learn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from digits import BLUE, INK, MUTED, RED, positive, training_bar
from matplotlib.figure import Figure
from torch import Tensor, nn

import partita

CLASSES, WIDTH, DEPTH = 256, 128, 4
GROUP = 8  # answers for each prompt; every class is a prompt
PARTS = 4  # updates for each batch of answers
WARM_UP = 10  # steps on right answers before the first draw
TOP_K, TOP_P, TEMPERATURE = 12, 0.95, 0.8
CLIP = 0.2  # how far the ratio of probabilities may move from 1
INVARIANT = "Partita twice, batch_invariant()"


Linear = Callable[[Tensor, Tensor], Tensor]


class Drawn(NamedTuple):
    """Tokens that the engine drew, with what it recorded."""

    prompts: Tensor  # [N]; those of a group follow one another
    tokens: Tensor  # [N]
    kept: Tensor  # [N, CLASSES] bool: the classes that the cut-offs kept

    def part(self, rows: Tensor) -> Drawn:
        return Drawn(*(field[rows] for field in self))

    @property
    def sets(self) -> tuple[Tensor, Tensor]:
        """What was kept as ids and offsets."""
        return as_sets(self.kept)


class Spread(NamedTuple):
    """The distribution of the absolute differences of some log-probabilities."""

    mean: float
    median: float
    percentile_99: float
    greatest: float


@dataclass(frozen=True)
class Report:
    """What the run has found.

    Fields:
        rewards: the share of right answers of each batch.
        ratio_error: the greatest |ratio - 1| in the first updates of all batches.
        mismatch: the differences of log-probabilities, by who is compared.
    """

    rewards: list[float]
    ratio_error: float
    mismatch: dict[str, Spread]


class Policy(nn.Module):
    """Some layers between an embedding of the prompt and the matrix of the vocabulary, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        sizes = ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)) * DEPTH
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    @property
    def matrix(self) -> Tensor:
        return self.head.weight.bfloat16()

    def forward(self, prompts: Tensor, linear: Linear = F.linear) -> Tensor:
        """Return hidden states, `[N, WIDTH]`.

        They are computed for all prompts at once, so those of a prompt are equal in every batch.
        """
        x = self.embed.weight.bfloat16()
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            inner = F.gelu(linear(x, first.weight.bfloat16()))
            x = x + linear(inner, second.weight.bfloat16())
        return F.rms_norm(x, (WIDTH,))[prompts]


def as_sets(kept: Tensor | Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return recorded classes as ids and offsets.

    They are a mask over the vocabulary, `[N, CLASSES]` bool, or a list for each token, as engines
    return them. A token of which nothing was recorded has all classes in its set.
    """
    if isinstance(kept, Tensor):
        ids, numbers = kept.nonzero()[:, 1], kept.sum(1)
    else:
        ids = torch.tensor([each for of_token in kept for each in of_token], dtype=torch.int64)
        numbers = torch.tensor([*map(len, kept)], dtype=torch.int64)
    return ids, F.pad(numbers.cumsum(0), (1, 0))


def engine_head(states: Tensor, matrix: Tensor, partial: torch.dtype = torch.float32) -> Tensor:
    """Compute `states @ matrix.T` with other batches and another order of sums than the trainer.

    The two halves of a sum are computed in fp32 and rounded to `partial` before they are added.
    """
    halves = zip(states.float().chunk(2, 1), matrix.float().chunk(2, 1), strict=True)
    first, second = ([rows @ half.T for rows in part.split(7)] for part, half in halves)
    return torch.cat(first).to(partial) + torch.cat(second).to(partial)


def engine_layer(states: Tensor, matrix: Tensor) -> Tensor:
    return engine_head(states, matrix, torch.bfloat16)


def engine_logprobs(logits: Tensor, drawn: Drawn) -> Tensor:
    """Return the log-probabilities of the tokens over what was kept, `[N]`."""
    scores = (logits.float() / TEMPERATURE).masked_fill(~drawn.kept, -torch.inf)
    return scores.log_softmax(1).gather(1, drawn.tokens[:, None])[:, 0]


@torch.no_grad()
def sample(policy: Policy, dtype: torch.dtype = torch.bfloat16) -> Drawn:
    """Draw a group of answers for each prompt, and record what the cut-offs keep.

    The dtype is that of the logits.
    """
    prompts = torch.arange(CLASSES, device=policy.head.weight.device).repeat_interleave(GROUP)
    logits = engine_head(policy(prompts, engine_layer), policy.matrix).to(dtype)
    best, order = (logits.float() / TEMPERATURE).topk(TOP_K)
    probabilities = best.softmax(1)
    in_nucleus = probabilities.cumsum(1) - probabilities < TOP_P
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, in_nucleus)
    picked = (probabilities * in_nucleus).multinomial(1)
    return Drawn(prompts, order.gather(1, picked)[:, 0], kept)


def support_stats(policy: Policy, drawn: Drawn) -> partita.SupportStats:
    """Return the trainer's statistics over the recorded classes."""
    states, matrix = policy(drawn.prompts), policy.matrix
    return partita.linear_support_stats(
        states, matrix, drawn.tokens, *drawn.sets, temperature=TEMPERATURE
    )


def advantages(rewards: Tensor) -> Tensor:
    """Return how much each reward differs from those of its group, `[N]`."""
    groups = rewards.view(-1, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, drawn: Drawn, old: Tensor, advantage: Tensor
) -> float:
    """Take one step of GRPO, and return the greatest |ratio - 1|."""
    stats = support_stats(policy, drawn)
    ratio = (stats.logprob - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    optimizer.zero_grad()
    (-surrogate.mean() - 1e-3 * stats.entropy.mean()).backward()
    optimizer.step()
    return float((ratio.detach() - 1).abs().max())


def warmed_up(device: torch.device) -> Policy:
    """Return a policy that has seen some right answers."""
    policy = Policy().to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    prompts = torch.arange(CLASSES, device=device)
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        answers = (prompts + 1) % CLASSES
        partita.linear_cross_entropy(policy(prompts), policy.matrix, answers).backward()
        optimizer.step()
    return policy


@torch.no_grad()
def differences(policy: Policy, drawn: Drawn) -> dict[str, Tensor]:
    """Return the absolute differences of the tokens' log-probabilities, by who is compared."""
    states, matrix, tokens = policy(drawn.prompts), policy.matrix, drawn.tokens
    of_engine = engine_head(policy(drawn.prompts, engine_layer), matrix)
    fp32, bf16 = (engine_logprobs(logits, drawn) for logits in (of_engine, of_engine.bfloat16()))
    logits = states @ matrix.T
    every = partita.token_stats(logits, tokens, temperature=TEMPERATURE)
    rounded = partita.support_stats(logits, tokens, *drawn.sets, temperature=TEMPERATURE)
    exact = support_stats(policy, drawn)
    rules = {"top_k": TOP_K, "top_p": TOP_P, "temperature": TEMPERATURE}
    again = partita.truncated_stats(logits, tokens, **rules)
    of_fp32 = sample(policy, torch.float32)
    again_in_fp32 = partita.linear_truncated_stats(
        states, matrix, of_fp32.tokens, logits_dtype=torch.float32, **rules
    )
    found = {
        "engine, all classes, bf16 heads": every.logprob - bf16,
        "engine, recorded classes, bf16 heads": rounded.logprob - bf16,
        "engine, recorded, fp32 head in the trainer": exact.logprob - bf16,
        "engine, recorded, fp32 heads on both sides": exact.logprob - fp32,
        "engine, cut-offs found again, bf16 heads": again.logprob - bf16,
        "engine, cut-offs found again, fp32 heads": (
            again_in_fp32.logprob - engine_logprobs(of_engine, of_fp32)
        ),
        "engine, recorded, fp32, equal hidden states": (
            exact.logprob - engine_logprobs(engine_head(states, matrix), drawn)
        ),
        "Partita twice, all classes, fp32 heads": alone_and_together(states, matrix, tokens),
    }
    with partita.batch_invariant():
        found[INVARIANT] = alone_and_together(states, matrix, tokens)
    return {name: difference.abs().cpu() for name, difference in found.items()}


def alone_and_together(states: Tensor, matrix: Tensor, tokens: Tensor) -> Tensor:
    """Return by how much log-probabilities of calls of one token and of all tokens differ."""

    def logprobs(states: Tensor, tokens: Tensor) -> Tensor:
        return partita.linear_token_stats(
            states, matrix, tokens, temperature=TEMPERATURE, logits_dtype=torch.float32
        ).logprob

    some = slice(None, None, GROUP)
    alone = [
        logprobs(*one) for one in zip(states[some].split(1), tokens[some].split(1), strict=True)
    ]
    return torch.cat(alone) - logprobs(states, tokens)[some]


def spread(values: Tensor) -> Spread:
    quantiles = values.double().quantile(torch.tensor([0.5, 0.99], dtype=torch.float64))
    return Spread(float(values.mean()), *quantiles.tolist(), float(values.max()))


def draw(path: Path, rewards: list[float], mismatch: dict[str, Tensor]) -> None:
    """Draw the rewards, and what share of the tokens differs by more than each number."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    left.plot(range(1, len(rewards) + 1), rewards, color=BLUE, lw=2)
    left.set_title("Right answers", size=11, weight="bold", color=INK)
    left.set(xlabel="batch", ylim=(0, 1.02))
    colours, styles = (
        (RED, RED, BLUE, BLUE, RED, BLUE, BLUE, MUTED, INK),
        ("-", "--", ":", "--", "-.", "-.", "-", "-", "-"),
    )
    for (name, values), colour, style in zip(mismatch.items(), colours, styles, strict=True):
        above = values[values > 0].sort().values
        share = torch.arange(len(above), 0, -1) / len(values)
        label = name if len(above) else f"{name}: 0"
        right.step(above, share, color=colour, ls=style, lw=1.6, label=label)
    right.set_title("Share of tokens that differ by more", size=11, weight="bold", color=INK)
    right.set(xscale="log", yscale="log", xlabel="|difference of log-probabilities|")
    right.legend(frameon=False, labelcolor=INK, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    supported = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=130, format=None if supported else "png")


def run(steps: int, seed: int, out: Path, quiet: bool = False, device: str = "cpu") -> Report:
    torch.manual_seed(seed)
    policy, mismatch = warmed_up(torch.device(device)), dict[str, Tensor]()
    rewards, errors = list[float](), list[float]()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    with training_bar(quiet, text="reward {task.fields[reward]:.2f}") as bar:
        task = bar.add_task("", total=steps, reward=0.0)
        for _ in range(steps):
            drawn = sample(policy)
            with torch.no_grad():
                old = support_stats(policy, drawn).logprob
            reward = (drawn.tokens == (drawn.prompts + 1) % CLASSES).float()
            advantage = advantages(reward)
            rewards.append(float(reward.mean()))
            mismatch = mismatch or differences(policy, drawn)
            parts = torch.randperm(len(old)).to(device).chunk(PARTS)
            first, *_ = (
                update(policy, optimizer, drawn.part(rows), old[rows], advantage[rows])
                for rows in parts
            )
            errors.append(first)
            bar.update(task, advance=1, reward=rewards[-1])
    draw(out, rewards, mismatch)
    spreads = {name: spread(values) for name, values in mismatch.items()}
    return Report(rewards, max(errors), spreads)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=20, help="batches (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("recorded_support.png"),
        help="picture to write (default recorded_support.png)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)
    report = run(options.steps, options.seed, options.out, options.quiet, options.device)
    first, last = report.rewards[0], report.rewards[-1]
    print(f"Right answers: {first:.0%} in the first batch, {last:.0%} in the last")
    print(f"Ratios of first updates: {report.ratio_error} from 1 at most")
    print(f"{'|difference of log-probabilities|':44}     mean   median     99 %      max")
    for name, values in report.mismatch.items():
        print(f"{name:44}" + "".join(f"{value:9.1e}" if value else "        0" for value in values))
    print(f"Picture: {options.out}")
    exact = report.ratio_error == 0.0 and report.mismatch[INVARIANT].greatest == 0.0
    if not exact:
        print("Numbers that must be equal differ", file=sys.stderr)
    if last < first + 0.2:
        print("The policy did not learn; try more steps", file=sys.stderr)
    return int(not exact or last < first + 0.2)


if __name__ == "__main__":
    sys.exit(main())
