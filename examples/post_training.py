"""Post-train a tiny language model twice: by rewards (GRPO), and from a teacher, on policy.

    python examples/post_training.py --steps 200 --out post_training.png

The task is to continue a sequence: the prompt has two numbers, and each later number is the one
before plus their difference, modulo the size of the vocabulary. A teacher learns it from examples,
with `linear_causal_lm_loss`. Two copies of a student that was stopped early then improve on
sequences that they draw themselves:

- GRPO (Shao et al., DeepSeekMath, 2024): the reward is the share of right numbers, and each
  sequence counts by how much its reward differs from that of its group. Log-probabilities come from
  `linear_token_stats`.
- On-policy distillation (Agarwal et al., 2024): the loss is `linear_divergence` from the teacher at
  each drawn token, with beta 1, which is KL(student ‖ teacher).

No step has the logits of a batch in memory. The exit code is 1 if one of the two did not improve.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from digits import BLUE, INK, MUTED, RED, positive
from language_model import LanguageModel, Sizes
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

import partita
from partita.integrations.transformers import linear_causal_lm_loss

PROMPT = 2  # numbers of a prompt
SIZES = Sizes(megabytes=0, vocabulary=16, width=64, layers=2, length=8, batch=64)
GROUP = 16  # sequences that are drawn for each prompt
MEAN = 10  # steps of a point of the thick lines in the picture
CLIP = 0.2  # how far the ratio of probabilities may move from 1
PROMPTS = 32
TEACHER_STEPS, STUDENT_STEPS = 300, 180
GRPO, DISTILLATION = "GRPO", "distillation"


class Drawn(NamedTuple):
    """Sequences that a model drew, `[N, T]`, and the log-probabilities of the drawn numbers."""

    tokens: Tensor
    logprobs: Tensor  # [N, T - PROMPT]


@dataclass(frozen=True)
class Report:
    """The share of right numbers: of the teacher, of the student before, and after each method."""

    teacher: float
    before: float
    after: dict[str, float]


def prompts(number: int, generator: torch.Generator) -> Tensor:
    """Return random pairs of numbers, `[number, 2]`."""
    return torch.randint(SIZES.vocabulary, (number, PROMPT), generator=generator)


def continued(start: Tensor, length: int) -> Tensor:
    """Return the right sequences of some prompts, `[N, length]`."""
    difference = start[:, 1:] - start[:, :1]
    return (start[:, :1] + difference * torch.arange(length)) % SIZES.vocabulary


def rewards(tokens: Tensor) -> Tensor:
    """Return the share of right numbers of each sequence, `[N]`."""
    right = continued(tokens[:, :PROMPT], tokens.shape[1])
    return (tokens == right)[:, PROMPT:].float().mean(1)


def hidden_of_drawn(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return the hidden states from which the numbers after the prompt are drawn."""
    return model(tokens[:, :-1])[:, PROMPT - 1 :]


@torch.no_grad()
def draw(model: LanguageModel, start: Tensor, generator: torch.Generator) -> Drawn:
    """Continue each prompt with numbers that are drawn from the model."""
    tokens = start
    for _ in range(SIZES.length - PROMPT):
        probabilities = partita.softmax(model.head(model(tokens)[:, -1]))
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, drawn], 1)
    states = hidden_of_drawn(model, tokens)
    stats = partita.linear_token_stats(states, model.head.weight, tokens[:, PROMPT:])
    return Drawn(tokens, stats.logprob)


def grpo_loss(model: LanguageModel, drawn: Drawn, reward: Tensor) -> Tensor:
    """Return the clipped loss of drawn sequences; those of a prompt follow one another."""
    groups = reward.view(-1, GROUP)
    advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    states = hidden_of_drawn(model, drawn.tokens)
    stats = partita.linear_token_stats(states, model.head.weight, drawn.tokens[:, PROMPT:])
    ratio = (stats.logprob - drawn.logprobs).exp()
    weight = advantage.view(-1, 1)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * weight, clipped * weight).mean()


def distillation_loss(model: LanguageModel, teacher: LanguageModel, tokens: Tensor) -> Tensor:
    """Return KL(student ‖ teacher) of each drawn number, averaged."""
    with torch.no_grad():
        of_teacher = hidden_of_drawn(teacher, tokens)
    return partita.linear_divergence(
        hidden_of_drawn(model, tokens),
        model.head.weight,
        of_teacher,
        teacher.head.weight,
        beta=1.0,
    )


def trained(steps: int, generator: torch.Generator, advance: Callable[[], None]) -> LanguageModel:
    """Return a model that has learned from examples for some steps."""
    model = LanguageModel(SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens = continued(prompts(SIZES.batch, generator), SIZES.length)
        optimizer.zero_grad()
        linear_causal_lm_loss(model(tokens), model.head.weight, tokens).backward()
        optimizer.step()
        advance()
    return model


def improved(
    start: LanguageModel,
    loss_of: Callable[[LanguageModel, Drawn, Tensor], Tensor],
    steps: int,
    generator: torch.Generator,
    advance: Callable[[], None],
) -> tuple[LanguageModel, list[float]]:
    """Return a copy of a model that has learned from what it drew, and the reward of each step."""
    model, curve = copy.deepcopy(start), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    for _ in range(steps):
        drawn = draw(model, prompts(PROMPTS, generator).repeat_interleave(GROUP, 0), generator)
        reward = rewards(drawn.tokens)
        curve.append(float(reward.mean()))
        optimizer.zero_grad()
        loss_of(model, drawn, reward).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        advance()
    return model, curve


def score(model: LanguageModel, generator: torch.Generator) -> float:
    """Return the share of right numbers in 512 sequences that the model draws."""
    return float(rewards(draw(model, prompts(512, generator), generator).tokens).mean())


def plot(path: Path, curves: dict[str, list[float]], report: Report) -> None:
    """Draw the reward of each step."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, curve), colour in zip(curves.items(), (BLUE, RED), strict=True):
        axes.plot(range(1, len(curve) + 1), curve, color=colour, lw=0.8, alpha=0.35)
        means = torch.tensor(curve).unfold(0, min(MEAN, len(curve)), 1).mean(1).tolist()
        first = len(curve) - len(means) + 1
        axes.plot(range(first, len(curve) + 1), means, color=colour, lw=2, label=name)
    axes.axhline(report.teacher, color=MUTED, ls="--", label="the teacher")
    axes.axhline(report.before, color=MUTED, ls=":", label="the student before")
    axes.set_title("Right numbers in drawn sequences", size=11, weight="bold", color=INK)
    axes.set(xlabel=f"step (thick: the mean of {MEAN} steps)", ylim=(0, 1.02))
    axes.legend(frameon=False, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    supported = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=130, format=None if supported else "png")


def run(steps: int, seed: int, out: Path, quiet: bool = False) -> Report:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        "steps",
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=quiet) as progress:

        def counted(what: str, total: int) -> Callable[[], None]:
            task = progress.add_task(what, total=total)
            return lambda: progress.advance(task)

        teacher, student = (
            trained(number, generator, counted(who, number))
            for number, who in ((TEACHER_STEPS, "teacher"), (STUDENT_STEPS, "student"))
        )
        losses = {
            GRPO: grpo_loss,
            DISTILLATION: lambda model, drawn, _: distillation_loss(model, teacher, drawn.tokens),
        }
        models, curves = {}, {}
        for name, loss in losses.items():
            advance = counted(name, steps)
            models[name], curves[name] = improved(student, loss, steps, generator, advance)
    after = {name: score(model, generator) for name, model in models.items()}
    report = Report(score(teacher, generator), score(student, generator), after)
    plot(out, curves, report)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Post-train a tiny language model with Partita.")
    parser.add_argument(
        "--steps", type=positive, default=200, help="steps of each method (default 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("post_training.png"),
        help="picture to write (default post_training.png)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)
    report = run(options.steps, options.seed, options.out, options.quiet)
    print(f"Right numbers of the teacher: {report.teacher:.0%}")
    print(f"Right numbers of the student before: {report.before:.0%}")
    for name, value in report.after.items():
        print(f"Right numbers after {name}: {value:.0%}")
    print(f"Picture: {options.out}")
    worse = [name for name, value in report.after.items() if value <= report.before]
    for name in worse:
        print(f"{name} did not improve the student; try more steps", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
