"""Chains by others: a loop over the steps in PyTorch, and the libraries of nanopore basecallers.

All functions take scores, source, initial and final like `partita.logz`. torch.compile would unroll
the loop into thousands of operations and take minutes for each size, so that provider has no
chains.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_STATES = 1024  # a block has one thread for each state


def loop_logz(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor) -> Tensor:
    """Compute log Z, `[N]`, by one log-sum-exp of gathered states for each step."""
    scores, source = _reachable(scores, source, initial)
    alpha = initial
    for step in scores:
        alpha = (step + alpha[:, source]).logsumexp(-1)
    return (alpha + final).logsumexp(-1)


def loop_viterbi(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor) -> Tensor:
    """Compute the edges of the best path, `[T, N]`, by a maximum for each step and a trace-back."""
    scores, source = _reachable(scores, source, initial)
    alpha, choices = initial, []
    for step in scores:
        alpha, choice = (step + alpha[:, source]).max(-1)
        choices.append(choice)
    state, edges = (alpha + final).argmax(-1), []
    for choice in reversed(choices):
        slot = choice.gather(1, state[:, None]).squeeze(1)
        edges.append(state * source.shape[1] + slot)
        state = source[state, slot]
    return torch.stack(edges[::-1])


def _reachable(scores: Tensor, source: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores with -inf where there is no edge, and a table in which all sources exist."""
    missing = source < 0
    return scores.to(initial.dtype).masked_fill(missing, -torch.inf), source.masked_fill(
        missing, 0
    ).long()


def beyond_fp32_kernels(inputs: Any) -> str | None:
    """Return why the kernels of koi and seqdist cannot take these inputs, or None."""
    scores, source, *_ = inputs
    if scores.device.type != "cuda":
        return "needs a GPU"
    if scores.dtype != torch.float32:
        return "takes fp32 scores only"
    states, slots = source.shape
    if states > MAX_STATES:
        return f"takes at most {MAX_STATES:,} states"
    if (source < 0).any() or (torch.bincount(source.flatten(), minlength=states) != slots).any():
        return f"takes tables only that use each source exactly {slots} times"
    return None


def _sum_over_paths(module: str, name: str, semiring: str) -> Callable[..., Tensor]:
    library = importlib.import_module(module)
    function, S = getattr(library, name), getattr(library, semiring)
    return lambda scores, source, initial, final: function(scores, source, initial, final, S, 1)


def _best_edges(best_score: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that finds the best path by the gradient of its score.

    Users of these libraries decode in this way.
    """

    def function(scores: Tensor, *others: Tensor) -> Tensor:
        leaf = scores.detach().requires_grad_()
        with torch.enable_grad():
            best = best_score(leaf, *others)
            (indicator,) = torch.autograd.grad(best, leaf, torch.ones_like(best))
        return indicator.flatten(2).argmax(2)

    return function


def library(module: str, name: str) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    """Return the ops of a library that has the partition function of chains under a semiring."""
    return {
        "chain": lambda: _sum_over_paths(module, name, "Log"),
        "viterbi": lambda: _best_edges(_sum_over_paths(module, name, "Max")),
    }
