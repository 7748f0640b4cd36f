"""Statistics of rows of logits over the classes that a sampler keeps."""

from __future__ import annotations

from torch import Tensor

from ...runtime import checks
from ...runtime.backend import current_backend
from ..cross_entropy.common import check_logits
from . import autograd
from .common import TruncatedStats, checked_rules


def truncated_stats(
    logits: Tensor,
    target: Tensor | None = None,
    *,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    order: str = "vllm",
    missing: str = "keep",
    ignore_index: int = -100,
) -> TruncatedStats:
    """Statistics of each row over the classes that top-k, top-p and min-p keep.

    A sampler draws from these classes, so a policy gradient needs their log-probabilities. The
    rules find them again from the logits; each is a threshold, and all classes at a threshold are
    kept. The kept set is a constant of the derivative.

    Args:
        logits: `[..., C]`, floating dtype, any strides; may be -inf (masked classes, which no rule
            keeps).
        target: labels `[...]`, any integer dtype; without it the label is the arg-max.
        top_k: a number, or `[...]`. Keep the classes of at least the k-th greatest logit. Numbers
            below 1, and those of at least C, keep all.
        top_p: a number from 0 to 1, or `[...]`. Of what is left, normalised, keep the most probable
            classes until their sum reaches `top_p`.
        min_p: a number from 0 to 1, or `[...]`. Keep the classes of at least `min_p` times the
            greatest probability.
        temperature: a positive number, or `[...]`, by which the logits are divided first.
        softcap: replace the logits by `softcap * tanh(logits / softcap)` first.
        order: `vllm` (min-p, top-k, top-p) or `transformers` (top-k, top-p, min-p).
        missing: what a target is that the rules drop: with `keep` it is kept too, and with `inf` it
            has log-probability -inf and no gradient.
        ignore_index: rows with this label have log-probability 0; their other fields are as usual.

    Returns:
        `TruncatedStats`, fields `[...]`, fp32 (fp64 for fp64) in nats, `kept` int64 and `in_set`
        bool. A target that `keep` adds counts in all fields but `in_set`.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.
        IndexError: a label out of range. Values of tensors on a GPU are checked with
            `PARTITA_CHECK=1` only; otherwise that row's results and gradient are NaN.

    Source: Fan et al., Hierarchical neural story generation, 2018 (top-k); Holtzman et al., The
    curious case of neural text degeneration, 2020 (top-p); Nguyen et al., Min-p sampling, 2024.

    Example:
        >>> import torch, partita
        >>> logits = torch.tensor([[0.0, 1.0, 2.0, 2.0]])
        >>> stats = partita.truncated_stats(logits, torch.tensor([2]), top_k=2)
        >>> stats.logprob, stats.kept, stats.in_set
        (tensor([-0.6931]), tensor([2]), tensor([True]))
    """
    check_logits(logits, target)
    checks.python_int("ignore_index", ignore_index)
    if softcap is not None:
        checks.number("softcap", softcap, low=0.0, open_low=True)
    options = (top_k, top_p, min_p, temperature, order, missing)
    rules = checked_rules(logits, "logits", logits.shape[-1], *options)
    numbers = (float(softcap or 0.0), checks.NOTHING_IGNORED if target is None else ignore_index)
    fields = autograd.truncated_stats(logits, target, *rules, *numbers, current_backend())
    return TruncatedStats(*fields[:6])
