"""Results, arguments and conventions of statistics over the classes that a sampler keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.dtypes import acc_dtype

ORDERS, MISSING = ("vllm", "transformers"), ("keep", "inf")


class TruncatedStats(NamedTuple):
    """The statistics of each row over the classes that the rules keep, shape `[...]`.

    Fields:
        logprob: log-probability of the target among the kept classes, 0 where it is ignored;
            differentiable.
        logsumexp: log Z of all classes; differentiable.
        kept_logsumexp: log Z of the kept classes; differentiable.
        entropy: entropy of the distribution over the kept classes; differentiable.
        kept: the number of kept classes, int64.
        in_set: whether the rules keep the target; True where it is ignored.
    """

    logprob: Tensor
    logsumexp: Tensor
    kept_logsumexp: Tensor
    entropy: Tensor
    kept: Tensor
    in_set: Tensor


class TruncatedRows(NamedTuple):
    """The `TruncatedStats` of rows, and what their gradient needs."""

    # logprob, logsumexp, kept_logsumexp, entropy, kept, in_set: the fields of `TruncatedStats`
    logprob: Tensor
    logsumexp: Tensor
    kept_logsumexp: Tensor
    entropy: Tensor
    kept: Tensor
    in_set: Tensor
    # The rules keep the logits of at least this number, before soft-capping. It lies between the
    # least kept and the greatest dropped logit, so that logits that are computed again, with other
    # rounding errors, are kept too.
    threshold: Tensor
    label: Tensor  # the target, or the arg-max without one, int64
    maximum: Tensor  # maximum of the soft-capped logits
    sumexp: Tensor  # sum of exp((logits - maximum) / temperature)
    kept_sumexp: Tensor  # the same of the kept classes; NaN where a label or a rule is invalid


class Rules(NamedTuple):
    """The rules of a sampler, a number for each row or None, and how they are read."""

    top_k: Tensor | None  # int64; numbers below 1 and those of at least all classes keep all
    # top_p, min_p, temperature: fp64
    top_p: Tensor | None
    min_p: Tensor | None
    temperature: Tensor | None
    min_p_first: bool  # whether the share of top-p is one of the classes that min-p keeps
    keeps_target: bool  # whether the target counts as kept

    def map(self, change: Callable[[Tensor], Tensor]) -> Rules:
        """Return the rules with each tensor changed."""
        fields: Any = (change(x) if isinstance(x, Tensor) else x for x in self)
        return Rules(*fields)


class TruncatedSums(NamedTuple):
    """What the gradient of rows needs beside their logits, `[...]`; see `TruncatedRows`."""

    label: Tensor
    in_set: Tensor
    temperature: Tensor | None  # that of the rules, or None
    threshold: Tensor
    maximum: Tensor
    sumexp: Tensor
    kept_sumexp: Tensor
    entropy: Tensor


class TruncatedGrads(NamedTuple):
    """The gradients of the differentiable `TruncatedStats` of rows, `[...]`; None for zeros."""

    grad_logprob: Tensor
    grad_logsumexp: Tensor | None
    grad_kept: Tensor | None
    grad_entropy: Tensor | None

    def counted(self, rows: TruncatedSums, keeps_target: bool, ignore_index: int) -> TruncatedGrads:
        """Return the gradients with that of the log-probability 0 where it is constant."""
        has_logprob = (rows.label != ignore_index) & (rows.in_set | keeps_target)
        return self._replace(grad_logprob=torch.where(has_logprob, self.grad_logprob, 0))

    def counts(self) -> Tensor:
        """Return which rows have a gradient."""
        return torch.stack([each != 0 for each in self if each is not None]).any(0)


class TruncatedKernels(NamedTuple):
    """The functions of one backend that work on rows of logits `[M, C]`."""

    of_rows: Callable[..., None]  # writes the `TruncatedRows`
    gradient: Callable[..., None]  # writes the gradient of the logits of some classes


def sums_of_results(rows: TruncatedRows, temperature: Tensor | None) -> TruncatedSums:
    """Return what the gradient needs of the results of rows."""
    sums = (rows.maximum, rows.sumexp, rows.kept_sumexp, rows.entropy)
    return TruncatedSums(rows.label, rows.in_set, temperature, rows.threshold, *sums)


def truncated_fake(logits: Tensor) -> TruncatedRows:
    """Return the shapes of the results for rows of logits, or of hidden states."""
    dtypes = {"kept": torch.int64, "label": torch.int64, "in_set": torch.bool}
    shape, dtype = logits.shape[:-1], acc_dtype(logits.dtype)
    fields = TruncatedRows._fields
    return TruncatedRows(*(logits.new_empty(shape, dtype=dtypes.get(n, dtype)) for n in fields))


def checked_rules(
    rows: Tensor,
    name: str,
    classes: int,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
    temperature: float | Tensor,
    order: str,
    missing: str,
) -> Rules:
    """Return the rules for the rows of the named tensor `[..., D]`, None for those without effect.

    A number becomes a tensor with one number for each row; bad ones raise.
    """

    def of_rows(rule: str, value: Any, without_effect: float, dtype: torch.dtype) -> Tensor | None:
        if isinstance(value, Tensor):
            (checks.integer if rule == "top_k" else checks.floating)(rule, value)
            checks.shape(rule, value, rows.shape[:-1], f"{name}.shape[:-1]")
            checks.device(rule, value, rows, name)
            if value.requires_grad:
                raise ValueError(f"{rule}: expected a tensor without a gradient, got one with it")
            return value.to(dtype)
        if value is None:
            return None
        if rule == "top_k":
            checks.python_int(rule, value)
            value = value if 0 < value < classes else without_effect
        elif rule == "temperature":
            checks.number(rule, value, low=0.0, open_low=True)
        else:
            checks.number(rule, value, low=0.0, high=1.0)
        if value == without_effect:
            return None
        return torch.full(rows.shape[:-1], value, dtype=dtype, device=rows.device)

    checks.choice("order", order, ORDERS)
    checks.choice("missing", missing, MISSING)
    return Rules(
        of_rows("top_k", top_k, 0, torch.int64),
        of_rows("top_p", top_p, 1.0, torch.float64),
        of_rows("min_p", min_p, 0.0, torch.float64),
        of_rows("temperature", temperature, 1.0, torch.float64),
        order == "vllm",
        missing == "keep",
    )


def check_values(classes: int, target: Tensor | None, rules: Rules, ignore_index: int) -> None:
    """Raise for the first label or number of a rule that is out of range, if they are checked."""
    if target is not None:
        checks.labels("target", target, classes, ignore_index)
    for rule in ("top_p", "min_p", "temperature"):
        value = getattr(rules, rule)
        if value is None or not checks.can_check_values(value):
            continue
        if (index := checks.first_index(~is_valid(rule, value))) is not None:
            bounds = "above 0" if rule == "temperature" else "from 0 to 1"
            given = float(value[index])
            raise ValueError(f"{rule}: expected numbers {bounds}, got {given} at {list(index)}")


def is_valid(rule: str, value: Tensor) -> Tensor:
    """Return which numbers of a rule are in its range."""
    if rule == "temperature":
        return (value > 0) & value.isfinite()
    return (value >= 0) & (value <= 1)
