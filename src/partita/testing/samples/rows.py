"""Sample calls of functions of rows of logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops.cross_entropy.api import cross_entropy, token_stats
from ...ops.divergence.api import distillation_loss, divergence, topk_divergence
from ...ops.logprobs.api import logprobs, topk_logprobs
from ...ops.logprobs.common import TopK
from ...ops.softmax.api import log_softmax, logsumexp, softmax
from ...ops.support.api import support_stats
from ...ops.truncated.api import truncated_stats
from ...runtime.dtypes import acc_dtype
from . import in_torch
from .call import Bound, Call, Draw, Inputs, Sizes, Values, together

SMALL = {"rows": 6, "classes": 7}
USUAL = {"rows": (1024,), "classes": (1000, 32000, 128256)}
CHECKED = ({"rows": 19, "classes": 781}, {"rows": 3, "classes": 50_257})
IGNORED = -100

# What users mix: logits in a half type beside class weights, teachers and probabilities in fp32.
BESIDE = ((torch.bfloat16, torch.float32), (torch.float16, torch.float32))
# A divergence is a difference of log-probabilities down to -8, each rounded. So a probability has a
# relative error of that size, and a gradient that of the greatest probability.
LOG_PROBABILITY = torch.tensor(8.0)
PROBABILITY_GRADIENT = LOG_PROBABILITY / 32
SUM_OF_DIFFERENCES = Bound(16.0)


def _logits(draw: Draw, sizes: Sizes) -> Inputs:
    return {"input": draw.scores(sizes["rows"], sizes["classes"])}


def _probability_error(inputs: Inputs) -> Tensor:
    """Return the greatest magnitude whose ulp is an error of a probability p, which is p - p log p.

    The logarithm of p is rounded, and the gradient has p as a factor.
    """
    logits: Tensor = inputs["input"].detach()
    p = logits.to(acc_dtype(logits.dtype)).softmax(inputs["dim"])
    return (p - p.xlogy(p)).nan_to_num(0.0).max()


def row_labels(draw: Draw, sizes: Sizes, ignored: int = IGNORED) -> Tensor:
    """Return labels, of which every third is ignored. Logits in the first column are never -inf."""
    labels = draw.labels(0, sizes["classes"], sizes["rows"])
    labels = torch.where(draw.counts(sizes["rows"]), labels, ignored)
    return labels if draw.values in ("plain", "offset") else labels.clamp(max=0)


def _ignored(inputs: Inputs, name: str = "input") -> dict[str, Tensor]:
    logits, target = inputs[name], inputs["target"]
    ignored = target == inputs.get("ignore_index", IGNORED)
    if logits.ndim > 1 and not target.is_floating_point():
        return {name: ignored.unsqueeze(1).expand_as(logits)}
    return {}


def labels(draw: Draw, sizes: Sizes) -> Inputs:
    return {"target": row_labels(draw, sizes)}


def all_options(draw: Draw, sizes: Sizes) -> Inputs:
    weight = draw.positive(sizes["classes"])
    return {"weight": weight, "label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2}


def probabilities(draw: Draw, sizes: Sizes) -> Inputs:
    target = draw.beside(sizes["rows"], sizes["classes"], grad=False).softmax(1)
    return {"target": target.requires_grad_(draw.grad)}


def _pixels(draw: Draw, sizes: Sizes) -> Inputs:
    logits = draw.scores(sizes["rows"], sizes["classes"], 2, 3)
    labels = draw.labels(0, sizes["classes"], sizes["rows"], 2, 3)
    return {"input": logits, "target": torch.where(draw.counts(*labels.shape), labels, IGNORED)}


def _one_row(draw: Draw, sizes: Sizes) -> Inputs:
    return {"input": draw.scores(sizes["classes"]), "target": torch.tensor(1, device=draw.device)}


def _learned_weight(draw: Draw, sizes: Sizes) -> Inputs:
    return {"weight": draw.positive(sizes["classes"]).requires_grad_(draw.grad)}


CROSS_ENTROPY: dict[str, Any] = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum"},
    "ignored class": lambda draw, sizes: {
        "target": row_labels(draw, sizes, 2),
        "ignore_index": 2,
        "reduction": "mean",
    },
    "softcap": {"softcap": 5.0},
    "all options": all_options,
    "all options, mean": together(all_options, {"reduction": "mean"}),
    "probabilities": probabilities,
    "probabilities, all options": together(probabilities, all_options, _learned_weight),
    "pixels": _pixels,
    "one row": _one_row,
}


def _cross_entropy_inplace(input: Tensor, **others: Any) -> Tensor:
    """Overwrite a copy, because a leaf can't be overwritten."""
    return cross_entropy(input * 1, inplace=True, **others)


def _named_logits(draw: Draw, sizes: Sizes) -> Inputs:
    return {"logits": draw.scores(sizes["rows"], sizes["classes"])}


STATISTICS: dict[str, Any] = {"temperature and softcap": {"temperature": 0.7, "softcap": 5.0}}
RULES = {"top_k": 5, "top_p": 0.8, "min_p": 0.01}


def rules_of_rows(draw: Draw, sizes: Sizes) -> Inputs:
    """Return rules that differ from row to row."""
    rows = torch.arange(sizes["rows"], device=draw.device)
    return {
        "top_k": rows,
        "top_p": 0.9 / (1 + 0.1 * rows.double()),
        "min_p": 0.02 * (rows % 3).double(),
        "temperature": 0.5 + (rows % 4).double(),
    }


TRUNCATED: dict[str, Any] = {
    "all rules": {**RULES, "temperature": 0.7, "softcap": 5.0},
    "all rules, transformers": {**RULES, "order": "transformers"},
    "rules of each row": rules_of_rows,
    "top-k, no target": {"top_k": 3, "target": None},
}


def some_classes(draw: Draw, sizes: Sizes) -> Tensor:
    """Return four classes of each row, of which some are the same."""
    ids = draw.labels(0, sizes["classes"], sizes["rows"], 2)
    return torch.cat([ids, ids[:, :1], ids // 2], 1)


def support(draw: Draw, sizes: Sizes, more: int = 0) -> Inputs:
    """Return labels and recorded ids, one for most rows.

    The first row has four of them, the third one none. `more` adds ids to others, in which classes
    repeat. Of every second id the class is the label of its row.
    """
    rows, classes = sizes["rows"], sizes["classes"]
    numbers = torch.ones(rows, dtype=torch.int64)
    numbers[:1], numbers[2:3] = 4, 0
    numbers[3:] += more
    numbers[4::3] = 0 if more else 1
    target = row_labels(draw, sizes)
    offsets = torch.cat([numbers.new_zeros(1), numbers.cumsum(0)])
    ids = draw.labels(0, classes, int(offsets[-1]))
    of_row = target.cpu().clamp(min=0).repeat_interleave(numbers)
    ids[::2] = of_row[::2].to(ids.device)
    return {"target": target, "ids": ids, "offsets": offsets.to(draw.device)}


def many_ids(draw: Draw, sizes: Sizes) -> Inputs:
    return support(draw, sizes, more=11)


def without_support(inputs: Inputs) -> dict[str, Tensor]:
    """Return the logits of ignored rows, and those outside of the sets of others."""
    target, logits = inputs["target"], inputs["logits"]
    rest = (inputs["ids"], inputs["offsets"], logits.shape[-1])
    is_member = in_torch.members(target, *rest)
    return {"logits": ~is_member | (target == IGNORED).unsqueeze(-1)}


SUPPORTS: dict[str, Any] = {
    **STATISTICS,
    "many ids": many_ids,
    "several leading dimensions": lambda draw, sizes: {
        "logits": draw.scores(1, sizes["rows"], sizes["classes"]),
        "target": row_labels(draw, sizes)[None],
    },
}


def best_few(draw: Draw, sizes: Sizes) -> Inputs:
    return {"k": min(3, sizes["classes"])}


SOFT: dict[str, Any] = {
    "beta 0.3": {"beta": 0.3},
    "beta 1": {"beta": 1.0},
    "beta 0.5, all options": {"beta": 0.5, "temperature": 0.7, "softcap": 5.0},
    "beta 0, softcap": {"softcap": 5.0},
    "mean": {"reduction": "mean"},
    "beta 0.3, sum": {"beta": 0.3, "reduction": "sum"},
    "no mask": {"mask": None, "reduction": "mean"},
}


def masked_rows(inputs: Inputs, *names: str) -> dict[str, Tensor]:
    """Return the rows of these inputs that a mask leaves out."""
    mask = inputs["mask"]
    if mask is None:
        return {}
    return {name: ~mask.unsqueeze(-1).expand_as(inputs[name]) for name in names if name in inputs}


def _divergence(draw: Draw, sizes: Sizes) -> Inputs:
    shape = (sizes["rows"], sizes["classes"])
    return {
        "logits": draw.scores(*shape),
        "teacher_logits": draw.beside(*shape, grad=False),
        "mask": draw.counts(sizes["rows"]),
        "reduction": "none",
    }


TERMS = {"hard": 0.3, "kl": 0.2, "reverse_kl": 0.7, "jsd": 0.4, "tv": 0.6}


def weights_of_rows(draw: Draw, sizes: Sizes) -> Inputs:
    weight = draw.positive(sizes["rows"])
    return {"weights": {"hard": weight, "kl": 1 - weight.clamp(max=1)}, "mask": None}


DISTILLATION: dict[str, Any] = {
    "hard and kl, mean": {"weights": {"hard": 0.5, "kl": 0.5}, "reduction": "mean"},
    "all options": {
        "beta": 0.3,
        "temperature": 1.7,
        "scale_by_temperature_squared": True,
        "softcap": 5.0,
    },
    "sum": {"reduction": "sum"},
    "rows' weights, mean": together(weights_of_rows, {"reduction": "mean"}),
    "no target": {"target": None, "weights": {"reverse_kl": 1.0, "tv": 1.0}},
}


def teacher_classes(draw: Draw, sizes: Sizes) -> Inputs:
    """Return a student's part of the teacher's classes: a permutation of all of them."""
    order = torch.randperm(sizes["classes"], generator=draw.generator(sizes["classes"], 11))
    return {"teacher_classes": order.to(draw.device), "reduction": "mean"}


def without_terms(inputs: Inputs, *names: str) -> dict[str, Tensor]:
    """Return the rows of these inputs that have no term."""
    target, mask = inputs["target"], inputs["mask"]
    if target is None:
        return masked_rows(inputs, *names)
    unused = target == IGNORED
    unused = unused if mask is None else unused & ~mask
    return {name: unused.unsqueeze(-1).expand_as(inputs[name]) for name in names if name in inputs}


def _distillation(draw: Draw, sizes: Sizes) -> Inputs:
    return {**_divergence(draw, sizes), **labels(draw, sizes), "weights": TERMS}


def best_classes(logits: Tensor) -> TopK:
    """Return the three best classes of each row, and the log-sum-exp of all."""
    x = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    best = x.log_softmax(-1).topk(min(3, x.shape[-1]))
    return TopK(best.values, best.indices, x.logsumexp(-1))


def _topk_divergence(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _divergence(draw, sizes)
    logits, teacher = inputs.pop("logits"), best_classes(inputs.pop("teacher_logits"))
    return {"logits": logits, "teacher": teacher, **inputs}


FINITE: tuple[Values, ...] = ("offset", "wide", "equal")
_of_rows = partial(Call, small=SMALL, usual=USUAL, empty=("rows",), rows=(0,), checked=CHECKED)
_softmax = partial(
    _of_rows,
    inputs=together(_logits, {"dim": -1}),
    options={
        "dim 0": {"dim": 0},
        "in a wider dtype": lambda draw, sizes: {"dtype": acc_dtype(draw.dtype)},
    },
    values=("offset", "wide", "huge", "equal", "masked", "inf_rows"),
    batch={"input": 0},
)
_cross_entropies = partial(
    _of_rows,
    inputs=together(_logits, labels, {"ignore_index": IGNORED, "reduction": "none"}),
    values=("offset", "wide", "equal", "masked", "inf_rows"),
    mixtures=BESIDE,
    batch={"input": 0, "target": 0},
    uncounted=_ignored,
    in_torch=in_torch.cross_entropy,
    grad_scale=-1,
)
_divergences = partial(
    _of_rows,
    options=SOFT,
    values=FINITE,
    forward=SUM_OF_DIFFERENCES,
    scale=LOG_PROBABILITY,
    grad_scale=PROBABILITY_GRADIENT,
    checked=CHECKED[:1],
)
CALLS = (
    _softmax(
        "softmax",
        softmax,
        in_torch=torch.softmax,
        scale="element",
        grad_scale=_probability_error,
    ),
    _softmax("log_softmax", log_softmax, in_torch=torch.log_softmax, scale=-1),
    _softmax(
        "logsumexp",
        logsumexp,
        options={"dim 0": {"dim": 0}, "both": {"dim": (0, 1), "keepdim": True}},
        empty=("rows", "classes"),
        values=("offset", "wide", "equal", "masked", "inf_rows"),
        in_torch=torch.logsumexp,
        grad_scale="element",
    ),
    _cross_entropies("cross_entropy", cross_entropy, options=CROSS_ENTROPY),
    _cross_entropies(
        "cross_entropy, in place",
        _cross_entropy_inplace,
        options={name: CROSS_ENTROPY[name] for name in ("mean", "all options, mean")},
        second_derivatives=False,
    ),
    _of_rows(
        "token_stats",
        token_stats,
        together(_named_logits, labels),
        options={**STATISTICS, "no target": {"target": None}},
        values=("offset", "wide", "equal", "masked"),
        batch={"logits": 0, "target": 0},
        rows=(0, 0, 0, 0),
        in_torch=in_torch.token_stats,
    ),
    Call(
        "token_stats, logprob",
        lambda **inputs: token_stats(**inputs).logprob,
        together(_named_logits, labels),
        SMALL,
        options=STATISTICS,
        batch={"logits": 0, "target": 0},
        rows=(0,),
        uncounted=lambda inputs: _ignored(inputs, "logits"),
    ),
    _of_rows(
        "truncated_stats",
        truncated_stats,
        together(_named_logits, labels, {"top_p": 0.7}),
        options=TRUNCATED,
        values=("offset", "wide", "equal", "masked"),
        batch={"logits": 0, "target": 0},
        rows=(0, 0, 0, 0, 0, 0),
        in_torch=in_torch.truncated_stats,
    ),
    _of_rows(
        "logprobs",
        logprobs,
        lambda draw, sizes: {**_named_logits(draw, sizes), "ids": some_classes(draw, sizes)},
        options=STATISTICS,
        values=FINITE,
        batch={"logits": 0, "ids": 0},
        in_torch=in_torch.logprobs,
    ),
    _of_rows(
        "support_stats",
        support_stats,
        together(_named_logits, support),
        options=SUPPORTS,
        values=("offset", "wide", "equal", "masked"),
        batch={"logits": 0, "target": 0},
        rows=(0, 0, 0),
        uncounted=without_support,
        in_torch=in_torch.support_stats,
    ),
    _of_rows(
        "topk_logprobs",
        topk_logprobs,
        together(_named_logits, best_few),
        options=STATISTICS,
        values=FINITE,
        batch={"logits": 0},
        rows=(0, 0, 0),
        in_torch=in_torch.topk_logprobs,
    ),
    _divergences(
        "divergence",
        divergence,
        _divergence,
        mixtures=(*BESIDE, (torch.float64, torch.float32)),
        batch={"logits": 0, "teacher_logits": 0, "mask": 0},
        uncounted=lambda inputs: masked_rows(inputs, "logits", "teacher_logits"),
        in_torch=in_torch.divergence,
    ),
    _divergences(
        "distillation_loss",
        distillation_loss,
        _distillation,
        options={**DISTILLATION, "teacher's classes": teacher_classes},
        mixtures=(*BESIDE, (torch.float64, torch.float32)),
        batch={"logits": 0, "teacher_logits": 0, "target": 0, "mask": 0},
        rows=(),  # as many results as there are terms
        uncounted=lambda inputs: without_terms(inputs, "logits"),
        in_torch=in_torch.distillation,
    ),
    _divergences(
        "topk_divergence",
        topk_divergence,
        _topk_divergence,
        mixtures=BESIDE,
        batch={"logits": 0, "teacher": 0, "mask": 0},
        uncounted=lambda inputs: masked_rows(inputs, "logits"),
        in_torch=in_torch.topk_divergence,
    ),
)
