"""Sample calls of functions of rows of hidden states, whose logits are a product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from ...ops.linear_heads.api import linear_cross_entropy, linear_token_stats
from ...ops.linear_heads.divergence import (
    linear_distillation_loss,
    linear_divergence,
    linear_topk_divergence,
)
from ...ops.linear_heads.logprobs import linear_logprobs, linear_topk_logprobs
from ...ops.linear_heads.plan import low_rank_bytes
from ...ops.linear_heads.support import linear_support_stats
from ...ops.linear_heads.truncated import linear_truncated_stats
from . import in_torch
from .call import Bound, Call, Draw, Inputs, Sizes, together
from .rows import (
    DISTILLATION,
    IGNORED,
    LOG_PROBABILITY,
    PROBABILITY_GRADIENT,
    RULES,
    SOFT,
    TERMS,
    all_options,
    best_classes,
    best_few,
    labels,
    many_ids,
    masked_rows,
    probabilities,
    some_classes,
    support,
    teacher_classes,
    without_terms,
)

HIDDEN = {"rows": 6, "classes": 300, "hidden": 5}
USUAL_HIDDEN = {"rows": (1024,), "classes": (32000, 128256), "hidden": (1024,)}
CHECKED_HIDDEN = ({"rows": 19, "classes": 781, "hidden": 781},)


def _hidden(draw: Draw, sizes: Sizes) -> Inputs:
    return {
        "input": draw.scores(sizes["rows"], sizes["hidden"], plain=True),
        "linear_weight": draw.matrix(sizes["classes"], sizes["hidden"]),
    }


def _bias(draw: Draw, sizes: Sizes) -> Inputs:
    return {"linear_bias": draw.scores(sizes["classes"], plain=True)}


_linear_cross_entropy = together(_hidden, labels, {"reduction": "none"})


def _of_states(ignored: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """Return the elements of rows `[...]` of hidden states, and of the factor beside them."""
    names = [name for name in ("input", "low_rank_input") if name in inputs]
    return {name: ignored.unsqueeze(-1).expand_as(inputs[name]) for name in names}


def _ignored_tokens(inputs: Inputs) -> dict[str, Tensor]:
    target = inputs["target"]
    return {} if target.is_floating_point() else _of_states(target == IGNORED, inputs)


def _lean(draw: Draw, sizes: Sizes, heads: int = 1) -> Inputs:
    """Return a budget in bytes that holds the logits of half of the classes."""
    row = sizes["classes"] // 2 * draw.dtype.itemsize + 64 + 4 * sizes["hidden"]
    return {"memory_budget": heads * sizes["rows"] * row}


# A budget for the logits and gradients of a student and of a teacher.
_lean_heads = partial(_lean, heads=4)


def _wide(draw: Draw, sizes: Sizes) -> Inputs:
    """Return the dtype of logits that are wider than their factors may be."""
    return {} if draw.dtype == torch.float64 else {"logits_dtype": torch.float32}


def _wide_lean(draw: Draw, sizes: Sizes) -> Inputs:
    return {**_wide(draw, sizes), **_lean(draw, sizes, heads=3)}


def with_low_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes the factors of low rank as inputs of their own."""

    @wraps(function)
    def call(
        *,
        low_rank_input: Tensor | None = None,
        low_rank_weight: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        if low_rank_input is not None:
            inputs["low_rank"] = (low_rank_input, low_rank_weight)
        return function(**inputs)

    return call


def _low_rank(draw: Draw, sizes: Sizes) -> Inputs:
    return {
        "low_rank_input": draw.scores(sizes["rows"], 3, plain=True),
        "low_rank_weight": draw.matrix(sizes["classes"], 3),
    }


def _low_rank_lean(draw: Draw, sizes: Sizes, heads: int = 1) -> Inputs:
    budget = _lean(draw, sizes, heads)["memory_budget"]
    budget += low_rank_bytes(3, sizes["rows"], sizes["classes"], draw.dtype)
    return {**_low_rank(draw, sizes), "memory_budget": budget}


FAST = {"memory_budget": 2**20}
LOW_RANK: dict[str, Any] = {
    "low rank": _low_rank,
    "low rank, lean": _low_rank_lean,
    "low rank, fp32 logits": together(_wide, _low_rank),
}
BUDGETS: dict[str, Any] = {"lean": _lean, "fast": FAST}
LINEAR_CROSS_ENTROPY: dict[str, Any] = {
    **BUDGETS,
    "mean": {"reduction": "mean"},
    "mean, chunks of tokens": lambda draw, sizes: {
        **_linear_cross_entropy(draw, {**sizes, "rows": 4500}),
        "reduction": "mean",
        "memory_budget": 1_000_000 * draw.dtype.itemsize,
    },
    "sum, lean": together({"reduction": "sum"}, _lean),
    "bias, all options": together(_bias, all_options),
    "bias, all options, lean": together(_bias, all_options, _lean),
    "bias, all options, mean, fast": together(_bias, all_options, {"reduction": "mean"}, FAST),
    "probabilities": probabilities,
    "fp32 logits": _wide,
    "fp32 logits, bias, all options, lean": together(_bias, all_options, _wide_lean),
    "fp32 logits, mean": together(_wide, {"reduction": "mean"}, FAST),
    "fp32 logits, probabilities": together(probabilities, _wide),
    **LOW_RANK,
    "low rank, probabilities": together(probabilities, _low_rank),
    "low rank, bias, all options, mean": together(
        _bias, all_options, _low_rank, {"reduction": "mean"}
    ),
    "several leading dimensions": lambda draw, sizes: {
        "input": draw.scores(2, sizes["rows"], sizes["hidden"], plain=True),
        "target": draw.labels(0, sizes["classes"], 2, sizes["rows"]),
    },
}


LINEAR: dict[str, Any] = {
    **BUDGETS,
    "all options": together(_bias, {"temperature": 0.7, "softcap": 5.0}, _lean),
    "fp32 logits": _wide,
    "fp32 logits, lean": _wide_lean,
    **LOW_RANK,
}


SUPPORTS: dict[str, Any] = {
    **BUDGETS,
    **LOW_RANK,
    "many ids": many_ids,
    "bias, all options, lean": together(
        _bias, {"temperature": 0.7, "softcap": 5.0}, many_ids, _lean
    ),
    "several leading dimensions": lambda draw, sizes: {
        "input": draw.scores(1, sizes["rows"], sizes["hidden"], plain=True),
        "target": labels(draw, sizes)["target"][None],
    },
}


def _rules(draw: Draw, sizes: Sizes) -> Inputs:
    """Return rules. Those of half types keep all, since of rounded logits others would be kept."""
    if draw.dtype.itemsize == 2:
        return {"top_k": None, "top_p": None, "min_p": 1e-6}
    return {"top_p": 0.7}


def _linear_logprobs(draw: Draw, sizes: Sizes) -> Inputs:
    """Ignore all ids of every third row, and one of the others."""
    ids = torch.where(draw.counts(sizes["rows"]).unsqueeze(-1), some_classes(draw, sizes), IGNORED)
    ids[:, 3] = IGNORED
    return {**_hidden(draw, sizes), "ids": ids, "ignore_index": IGNORED}


def _ignored_rows(inputs: Inputs) -> dict[str, Tensor]:
    return _of_states((inputs["ids"] == IGNORED).all(-1), inputs)


def _heads(draw: Draw, sizes: Sizes) -> Inputs:
    rows, classes, hidden = sizes["rows"], sizes["classes"], sizes["hidden"] + 1
    teacher_weight = draw.beside(classes, hidden, grad=False) / hidden**0.5
    return {
        **_hidden(draw, sizes),
        "teacher_input": draw.beside(rows, hidden, grad=False),
        "teacher_weight": teacher_weight,
        "mask": draw.counts(rows),
        "reduction": "none",
    }


SOFT_LINEAR: dict[str, Any] = {
    **SOFT,
    "lean": _lean_heads,
    "beta 0.3, mean, fast": {"beta": 0.3, "reduction": "mean", **FAST},
    "bias, beta 1, lean": together(_bias, {"beta": 1.0}, _lean_heads),
    "fp32 logits": _wide,
    "fp32 logits, beta 0.3, mean, fast": together(_wide, {"beta": 0.3, "reduction": "mean"}, FAST),
    **LOW_RANK,
    "low rank, lean": partial(_low_rank_lean, heads=4),
    "low rank, beta 0.3, mean": together(_low_rank, {"beta": 0.3, "reduction": "mean"}),
}


LINEAR_DISTILLATION: dict[str, Any] = {
    **DISTILLATION,
    "lean": _lean_heads,
    "hard and kl, lean": together({"weights": {"hard": 0.5, "kl": 0.5}}, _lean_heads),
    "mean, fast": {"reduction": "mean", **FAST},
    "bias, mean, lean": together(_bias, {"reduction": "mean"}, _lean_heads),
    "teacher's classes, fast": together(teacher_classes, FAST),
    "fp32 logits, mean, fast": together(_wide, {"reduction": "mean"}, FAST),
    "low rank, lean": partial(_low_rank_lean, heads=4),
    "low rank, mean": together(_low_rank, {"reduction": "mean"}),
}


def _linear_distillation(draw: Draw, sizes: Sizes) -> Inputs:
    return {**_heads(draw, sizes), **labels(draw, sizes), "weights": TERMS}


def _linear_topk_divergence(draw: Draw, sizes: Sizes) -> Inputs:
    teacher = best_classes(draw.beside(sizes["rows"], sizes["classes"], grad=False))
    rest = {"teacher": teacher, "mask": draw.counts(sizes["rows"]), "reduction": "none"}
    return {**_hidden(draw, sizes), **rest}


_from_hidden = partial(
    Call,
    small=HIDDEN,
    usual=USUAL_HIDDEN,
    empty=("rows",),
    values=(),
    checked=CHECKED_HIDDEN,
    forward=Bound(16.0),
    backward=Bound(16.0),
    rounds=True,  # logits, to the dtype of the hidden states, as PyTorch rounds them
)
_divergences = partial(
    _from_hidden, options=SOFT_LINEAR, scale=LOG_PROBABILITY, grad_scale=PROBABILITY_GRADIENT
)
CALLS = (
    _from_hidden(
        "linear_cross_entropy",
        with_low_rank(linear_cross_entropy),
        _linear_cross_entropy,
        options=LINEAR_CROSS_ENTROPY,
        batch={"input": 0, "low_rank_input": 0, "target": 0},
        uncounted=_ignored_tokens,
        in_torch=in_torch.from_hidden(in_torch.cross_entropy),
    ),
    _from_hidden(
        "linear_token_stats",
        with_low_rank(linear_token_stats),
        together(_hidden, labels),
        options={**LINEAR, "no target": {"target": None}},
        batch={"input": 0, "low_rank_input": 0, "target": 0},
        in_torch=in_torch.from_hidden(in_torch.token_stats),
    ),
    _from_hidden(
        "linear_support_stats",
        with_low_rank(linear_support_stats),
        together(_hidden, support),
        options=SUPPORTS,
        batch={"input": 0, "low_rank_input": 0, "target": 0},
        uncounted=_ignored_tokens,
        in_torch=in_torch.from_hidden(in_torch.support_stats),
    ),
    _from_hidden(
        "linear_truncated_stats",
        with_low_rank(linear_truncated_stats),
        together(_hidden, labels, _rules),
        options={**LINEAR, "all rules, lean": together(_bias, RULES, _rules, _lean)},
        batch={"input": 0, "low_rank_input": 0, "target": 0},
        in_torch=in_torch.from_hidden(in_torch.truncated_stats),
    ),
    _from_hidden(
        "linear_logprobs",
        with_low_rank(linear_logprobs),
        _linear_logprobs,
        options=LINEAR,
        batch={"input": 0, "low_rank_input": 0, "ids": 0},
        uncounted=_ignored_rows,
        in_torch=in_torch.from_hidden(in_torch.logprobs),
    ),
    _from_hidden(
        "linear_topk_logprobs",
        with_low_rank(linear_topk_logprobs),
        together(_hidden, best_few),
        options=LINEAR,
        batch={"input": 0, "low_rank_input": 0},
        in_torch=in_torch.from_hidden(in_torch.topk_logprobs),
    ),
    _divergences(
        "linear_divergence",
        with_low_rank(linear_divergence),
        _heads,
        batch={"input": 0, "low_rank_input": 0, "teacher_input": 0, "mask": 0},
        uncounted=lambda inputs: masked_rows(inputs, "input", "low_rank_input", "teacher_input"),
        in_torch=in_torch.linear_divergence,
    ),
    _divergences(
        "linear_distillation_loss",
        with_low_rank(linear_distillation_loss),
        _linear_distillation,
        options=LINEAR_DISTILLATION,
        batch={"input": 0, "low_rank_input": 0, "teacher_input": 0, "target": 0, "mask": 0},
        uncounted=lambda inputs: without_terms(inputs, "input", "low_rank_input"),
        in_torch=in_torch.linear_distillation,
    ),
    _divergences(
        "linear_topk_divergence",
        with_low_rank(linear_topk_divergence),
        _linear_topk_divergence,
        batch={"input": 0, "low_rank_input": 0, "teacher": 0, "mask": 0},
        uncounted=lambda inputs: masked_rows(inputs, "input", "low_rank_input"),
        in_torch=in_torch.from_hidden(in_torch.topk_divergence),
    ),
)
