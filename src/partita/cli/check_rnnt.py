"""The transducers that `partita check` runs, with their counterparts in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.rnnt.api import rnnt_loss
from ..ops.rnnt.linear import linear_rnnt_loss, linear_tdt_loss
from ..ops.rnnt.tdt import tdt_loss
from .check_torch import upcast

STEPS, LABELS = 6, (5, 2)
DURATIONS = (0, 1, 2)

Function = Callable[..., Any]


def _sequences(x: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Return a target of two labels for one sequence."""
    return torch.tensor([LABELS], device=x.device), [STEPS], [len(LABELS)]


def _nodes(x: Tensor) -> Tensor:
    """Return rows as the nodes of one sequence, `[1, T, U + 1, V]`."""
    positions = len(LABELS) + 1
    return x[: STEPS * positions].unflatten(0, (1, STEPS, positions))


def _joint(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return encoder, predictor, and the matrices of tokens and durations."""
    columns, first = x[:, -40:], STEPS + len(LABELS) + 1
    encoder, predictor = columns[:STEPS][None], columns[STEPS:first][None]
    return encoder, predictor, columns[first:-3], columns[-3:]


def _heads(x: Tensor) -> list[Tensor]:
    """Return the logits of tokens and of durations from the joint."""
    encoder, predictor, *weights = _joint(x)
    hidden = (encoder[:, :, None] + predictor[:, None]).relu()
    return [hidden @ weight.T for weight in weights]


def _in_torch(tokens: Tensor, durations: Tensor | None = None) -> Tensor:
    """Compute the loss of one sequence node by node; without durations it is that of RNN-T."""
    log_tokens = upcast(tokens)[0].log_softmax(-1)
    log_durations = None if durations is None else upcast(durations)[0].log_softmax(-1)
    alpha: dict[tuple[int, int], list[Tensor]] = {(0, 0): [log_tokens.new_zeros(())]}
    ends = []
    for t in range(STEPS):
        for u in range(len(LABELS) + 1):
            if (t, u) not in alpha:
                continue
            total = torch.stack(alpha[t, u]).logsumexp(0)
            blank, label = log_tokens[t, u, 0], log_tokens[t, u, (*LABELS, 0)[u]]
            arcs = [(1, 0, blank), (0, 1, label)]
            if log_durations is not None:
                arcs = [
                    (d, kind, token + log_durations[t, u, k])
                    for kind, token in ((0, blank), (1, label))
                    for k, d in enumerate(DURATIONS)
                    if d + kind > 0
                ]
            for steps, labels, score in arcs:
                target = (t + steps, u + labels)
                if target == (STEPS, len(LABELS)) and not labels:
                    ends.append(total + score)
                elif target[0] < STEPS and target[1] <= len(LABELS):
                    alpha.setdefault(target, []).append(total + score)
    return -torch.stack(ends).logsumexp(0)


def _tdt(tokens: Tensor, durations: Tensor) -> Tensor:
    sequences = _sequences(tokens)
    return tdt_loss(tokens, durations, *sequences, 0, DURATIONS, reduction="sum")


def _linear_tdt(x: Tensor) -> Tensor:
    return linear_tdt_loss(*_joint(x), *_sequences(x), 0, DURATIONS, reduction="sum")


# Each op with its counterpart, and its dtypes.
RNNT: tuple[tuple[Any, ...], ...] = (
    (
        "rnnt_loss",
        lambda x: rnnt_loss(_nodes(x), *_sequences(x), 0),
        lambda x: _in_torch(_nodes(x)),
        "bf16",
        "fp32",
    ),
    (
        "tdt_loss",
        lambda x: _tdt(_nodes(x), _nodes(x)[..., -3:]),
        lambda x: _in_torch(_nodes(x), _nodes(x)[..., -3:]),
        "bf16",
        "fp32",
    ),
)
LINEAR_RNNT: tuple[tuple[str, Function, Function, tuple[str, ...]], ...] = (
    (
        "linear_rnnt_loss",
        lambda x, _: linear_rnnt_loss(*_joint(x)[:3], *_sequences(x), blank=0),
        lambda x, _: _in_torch(_heads(x)[0]),
        ("fp32",),
    ),
    (
        "linear_tdt_loss",
        lambda x, _: _linear_tdt(x),
        lambda x, _: _in_torch(*_heads(x)),
        ("fp32",),
    ),
)
