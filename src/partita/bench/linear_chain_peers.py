"""Dense linear chains by others: a loop over the steps in PyTorch, torch-struct and pytorch-crf.

All functions take emissions `[T, N, C]`, transitions `[C, C]`, start and end `[C]`. torch.compile
would unroll the loop into thousands of operations, so that provider has no chains.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_STEPS = 10_000  # of a loop in Python, which takes milliseconds a step with its gradient
MAX_POTENTIALS = 2**31  # numbers in the scores of all transitions, of which several copies exist


class LinearInputs(NamedTuple):
    emissions: Tensor
    transitions: Tensor
    start: Tensor
    end: Tensor


Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def loop_logz(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Compute log Z, `[N]`, by a log-sum-exp of `[N, C, C]` scores for each step."""
    first, *others = emissions.to(transitions.dtype).unbind()
    alpha = start + first
    for emission in others:
        alpha = (alpha[:, :, None] + transitions).logsumexp(1) + emission
    return (alpha + end).logsumexp(-1)


def loop_viterbi(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Compute the states of the best path, `[T, N]`, by a maximum a step and a trace-back."""
    first, *others = emissions.to(transitions.dtype).unbind()
    alpha, choices = start + first, []
    for emission in others:
        alpha, choice = (alpha[:, :, None] + transitions).max(1)
        alpha = alpha + emission
        choices.append(choice)
    states = [(alpha + end).argmax(-1)]
    for choice in reversed(choices):
        states.append(choice.gather(1, states[-1][:, None]).squeeze(1))
    return torch.stack(states[::-1])


def beyond_loop(inputs: Any) -> str | None:
    """Return why a loop over the steps cannot take these inputs, or None."""
    is_chain = {"emissions", "source"} & set(getattr(inputs, "_fields", ()))
    if is_chain and len(inputs[0]) > MAX_STEPS:
        return f"a loop of more than {MAX_STEPS:,} steps"
    return None


def beyond_torch_struct(inputs: LinearInputs) -> str | None:
    """Return why torch-struct cannot take these inputs, or None."""
    T, N, C = inputs.emissions.shape
    if T < 2:
        return "takes at least two tokens"
    if T * N * C * C > MAX_POTENTIALS:
        return "would hold the scores of all transitions several times"
    return None


def _potentials(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Return the log-potentials of torch-struct, `[N, T - 1, C, C]` (new, old)."""
    emissions = emissions.to(transitions.dtype)
    scores = transitions.T + emissions[1:, :, :, None]
    first, last = start + emissions[0], end
    scores = torch.cat([scores[:1] + first[None, :, None, :], scores[1:]])
    scores = torch.cat([scores[:-1], scores[-1:] + last[:, None]])
    return scores.transpose(0, 1)


def torch_struct_logz() -> Function:
    chain: Any = importlib.import_module("torch_struct").LinearChainCRF
    return lambda *inputs: chain(_potentials(*inputs)).partition


def torch_struct_viterbi() -> Function:
    """Return the states of the best path from the one-hot events that torch-struct gives."""
    chain: Any = importlib.import_module("torch_struct").LinearChainCRF

    def function(emissions: Tensor, *others: Tensor) -> Tensor:
        events = chain(_potentials(emissions, *others)).argmax  # [N, T - 1, C, C] (new, old)
        entered = events.sum(3).argmax(2)
        left = events[:, :1].sum(2).argmax(2)
        return torch.cat([left, entered], 1).T

    return function


def _pytorch_crf(transitions: Tensor, start: Tensor, end: Tensor) -> Any:
    """Return pytorch-crf's module with these tensors in place of its parameters."""
    module = importlib.import_module("torchcrf").CRF(len(start)).to(transitions.device)
    tensors = {"transitions": transitions, "start_transitions": start, "end_transitions": end}
    for name, tensor in tensors.items():
        delattr(module, name)
        setattr(module, name, tensor)
    return module


def _mask(emissions: Tensor) -> Tensor:
    return torch.ones(emissions.shape[:2], dtype=torch.bool, device=emissions.device)


def pytorch_crf_logz() -> Function:
    return lambda emissions, *others: _pytorch_crf(*others)._compute_normalizer(
        emissions.to(others[0].dtype), _mask(emissions)
    )


def pytorch_crf_viterbi() -> Function:
    def function(emissions: Tensor, *others: Tensor) -> Tensor:
        paths = _pytorch_crf(*others).decode(emissions.to(others[0].dtype), _mask(emissions))
        return torch.tensor(paths, device=emissions.device).T

    return function
