"""Fit hidden Markov models to a series, by the gradient of log Z or by expectation maximization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from digits import training_bar
from torch import Tensor

import partita

NARROWEST = 0.1  # °C; no regime can shrink to a single month
EMPTY = 1e-9  # is added to counts, so that a regime without months has a distribution


class Model(NamedTuple):
    """N hidden Markov models of C regimes."""

    means: Tensor  # [N, C], °C
    deviations: Tensor  # [N, C], °C
    transitions: Tensor  # [N, C, C], log-probabilities, from and to
    stationary: Tensor  # [N, C], log-probabilities


class Fit(NamedTuple):
    """The best model, and the progress of all starts."""

    model: Model  # the best start, with the regimes from cold to warm
    curves: Tensor  # [steps, starts], log-likelihoods


def stationary(transitions: Tensor) -> Tensor:
    """Return π `[N, C]` with πP = π and Σπ = 1 for P `[N, C, C]`: it solves π (I − P + 1) = 1."""
    identity = torch.eye(transitions.shape[-1], dtype=transitions.dtype)
    return torch.linalg.solve(
        (identity - transitions + 1).mT, transitions.new_ones(transitions.shape[:2])
    )


def chain_of(model: Model, values: Tensor) -> partita.LinearChain:
    """Return the chains of all models over the same series."""
    regimes = torch.distributions.Normal(model.means, model.deviations)
    emissions = regimes.log_prob(values[:, None, None])  # [T, N, C]
    transitions = model.transitions.expand(len(values) - 1, *model.transitions.shape)
    return partita.linear_chain(emissions, transitions, start=model.stationary)


def draw_starts(
    values: Tensor, regimes: int, starts: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means at the values of random months, log-widths, and logits of the transitions."""
    means = values[torch.randint(len(values), (starts, regimes), generator=generator)]
    moves = 2 * torch.eye(regimes, dtype=torch.float64) + torch.randn(
        starts, regimes, regimes, dtype=torch.float64, generator=generator
    )
    return means, torch.full_like(means, values.std().log().item()), moves


def model_of(means: Tensor, widths: Tensor, moves: Tensor) -> Model:
    transitions = moves.log_softmax(-1)
    return Model(means, NARROWEST + widths.exp(), transitions, stationary(transitions.exp()).log())


def gradient_steps(
    values: Tensor, start: tuple[Tensor, Tensor, Tensor], steps: int
) -> Iterator[tuple[Model, Tensor]]:
    """Yield the models before and after each step of Adam, with their log-likelihoods."""
    parameters = [tensor.requires_grad_() for tensor in start]
    optimizer = torch.optim.Adam(parameters)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    for _ in range(steps):
        model = model_of(*parameters)
        logz = chain_of(model, values).logz()
        yield model, logz.detach()
        optimizer.zero_grad()
        (-logz.sum() / len(values)).backward()
        optimizer.step()
        schedule.step()
    model = model_of(*(tensor.detach() for tensor in parameters))
    yield model, chain_of(model, values).logz()


def em_steps(
    values: Tensor, start: tuple[Tensor, Tensor, Tensor], steps: int
) -> Iterator[tuple[Model, Tensor]]:
    """Yield the models before and after each step of expectation maximization.

    A step takes the means, the widths and the transitions from the expected counts. It leaves out
    the first month, whose distribution follows from the transitions.

    Source: Rabiner, A tutorial on hidden Markov models, 1989.
    """
    model = model_of(*start)
    for step in range(steps + 1):
        chain = chain_of(model, values)
        yield model, chain.logz()
        if step == steps:
            return
        weights = chain.state_marginals() + EMPTY  # [T, N, C]
        counts = chain.expected_counts().transitions + EMPTY  # [N, C, C], from and to
        weights = weights / weights.sum(0)
        means = (weights * values[:, None, None]).sum(0)
        variances = (weights * (values[:, None, None] - means) ** 2).sum(0)
        transitions = counts / counts.sum(-1, keepdim=True)
        model = Model(
            means,
            variances.sqrt().clamp(min=NARROWEST),
            transitions.log(),
            stationary(transitions).log(),
        )


METHODS = {"gradient": gradient_steps, "em": em_steps}


def fit(
    values: Tensor,
    regimes: int,
    starts: int,
    steps: int,
    generator: torch.Generator,
    quiet: bool,
    method: str = "gradient",
) -> Fit:
    """Fit a model from each start."""
    curves = []
    text = "best log-likelihood {task.fields[best]:.2f}"
    start = draw_starts(values, regimes, starts, generator)
    with training_bar(quiet, title="Fitting", unit="steps", text=text) as progress:
        task = progress.add_task("", total=steps + 1, best=float("nan"))
        for model, logz in METHODS[method](values, start, steps):
            found = model
            curves.append(logz)
            progress.update(task, advance=1, best=logz.max().item())
    best = int(curves[-1].argmax())
    order = found.means[best].argsort()
    model_of_best = Model(
        *(
            t[best : best + 1, order]
            for t in found._replace(transitions=found.transitions[:, :, order])
        )
    )
    return Fit(model_of_best, torch.stack(curves))
