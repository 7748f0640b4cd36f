"""Statistics of rows of logits that are never all in memory: hidden states times the vocabulary's matrix, a chunk at a time.

A chunk is either all logits of some tokens, or some classes of all tokens. The loops and the matrix products stand here, for every device; what
is done to a chunk (`accumulate_logits`, `logits_gradient`, `one_pass`) is handed in by the floor that serves, and stands here as plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...primitives.rows import chunks, finite_shift, row_chunks, softcap_slope
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.common import valid_targets
from ..cross_entropy.reference import mean_shares, one_pass
from .common import GradientCoefficients, HeadGradients, RowState, RowStatistics
from .plan import CPU_TOKENS, TOKENS, padded_width


def buffer_for(input: Tensor, rows: int, classes: int) -> Tensor:
    """Memory for that many logits."""
    return input.new_empty(rows * padded_width(classes))


def product(input: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """The logits of some tokens and classes, in the buffer."""
    rows, classes = len(input), len(weight)
    whole = buffer[: rows * padded_width(classes)].view(rows, padded_width(classes))
    if whole.device.type == "cpu":
        whole[
            :, classes:
        ].zero_()  # the next product reads them on a CPU with AMX (PyTorch 2.13), and 0 times what has been there may be NaN
    logits = whole[:, :classes]
    return (
        torch.mm(input, weight.T, out=logits)
        if bias is None
        else torch.addmm(bias, input, weight.T, out=logits)
    )


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed in the type of the total."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def first_state(logits: Tensor, spread: bool, entropy: bool) -> RowState:
    rows, wide = len(logits), acc_dtype(logits.dtype)
    low, zero = (
        torch.full((rows,), value, dtype=wide, device=logits.device) for value in (-torch.inf, 0.0)
    )
    origin, summed = (torch.zeros_like(zero), torch.zeros_like(zero)) if spread else (None, None)
    surprise, argmax = (
        (torch.zeros_like(zero), torch.zeros_like(zero, dtype=torch.int64))
        if entropy
        else (None, None)
    )
    return RowState(low, zero, low.clone(), origin, summed, surprise, argmax)


def capped(logits: Tensor, softcap: float) -> Tensor:
    wide = logits.to(acc_dtype(logits.dtype))
    return softcap * (wide / softcap).tanh() if softcap else wide


def accumulate_logits(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    state: RowState,
    temperature: float,
    softcap: float,
) -> None:
    """Carry the state, in place, over the classes from `first` on; the class weights are of these."""
    for rows in row_chunks(logits):
        _absorb(
            logits[rows],
            first,
            target[rows],
            class_weight,
            RowState(*(None if t is None else t[rows] for t in state)),  # type: ignore[arg-type]
            temperature,
            softcap,
        )


def _absorb(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    state: RowState,
    temperature: float,
    softcap: float,
) -> None:
    x = capped(logits, softcap)
    place = target.long() - first
    here = (place >= 0) & (place < x.shape[1])
    state.label.copy_(
        torch.where(here, x.gather(1, torch.where(here, place, 0)[:, None])[:, 0], state.label)
    )
    highest, at = x.max(1)
    maximum = torch.maximum(state.maximum, highest)
    shift = finite_shift(maximum)
    if first == 0 and state.origin is not None:
        state.origin.copy_(finite_shift(x[:, 0]))
    if state.origin is not None and state.smoothing_loss is not None:
        terms = state.origin[:, None] - x
        if class_weight is not None:
            terms = torch.where(class_weight == 0, 0.0, class_weight.to(x.dtype) * terms)
        state.smoothing_loss.add_(terms.sum(1))
    exponent = (x - shift[:, None]) / temperature
    e, scale = exponent.exp(), ((state.maximum - shift) / temperature).exp()
    if state.sum_x_exp is not None and state.argmax is not None:
        moved = state.sum_x_exp - state.sumexp * (shift - finite_shift(state.maximum)) / temperature
        state.sum_x_exp.copy_(scale * moved + torch.where(e == 0, 0.0, e * exponent).sum(1))
        state.argmax.copy_(torch.where(highest > state.maximum, first + at, state.argmax))
    state.sumexp.mul_(scale).add_(e.sum(1))
    state.maximum.copy_(maximum)


def row_statistics(
    state: RowState,
    target: Tensor,
    class_weight: Tensor | None,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> RowStatistics:
    """Statistics from the state after all classes."""
    _, kept, wrong = valid_targets(target, classes, ignore_index)
    spoilt = torch.where(wrong, torch.nan, 0.0).to(state.maximum.dtype)
    shift, log_total = finite_shift(state.maximum), state.sumexp.log()
    spread, entropy = shift.new_empty(0), shift.new_empty(0)
    if state.smoothing_loss is not None and state.origin is not None:
        weight = classes if class_weight is None else class_weight.to(shift.dtype).sum()
        spread = weight * (log_total + (shift - state.origin)) + state.smoothing_loss + spoilt
    if state.sum_x_exp is not None:
        entropy = log_total - state.sum_x_exp / state.sumexp + spoilt
    nll = torch.where(kept, log_total + (shift - state.label) / temperature, 0.0) + spoilt
    argmax = target.new_empty(0, dtype=torch.int64) if state.argmax is None else state.argmax
    return RowStatistics(
        nll,
        shift / temperature + log_total + spoilt,
        spread,
        entropy,
        argmax,
        state.maximum,
        state.sumexp,
    )


def accumulate_hidden(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    temperature: float,
    softcap: float,
    spread: bool,
    entropy: bool,
    chunk: int,
    keep: bool,
    accumulate_logits: Callable[..., None] = accumulate_logits,
    first_state: Callable[..., RowState] = first_state,
) -> tuple[RowState, Tensor]:
    """The state of input weight^T + bias, from so many classes of some tokens at a time; and, where there is one chunk and it is to be kept, the logits."""
    (tokens, _), classes, target = input.shape, len(weight), target.contiguous()
    together = tokens if keep else min(tokens, TOKENS)
    buffer, state = (
        buffer_for(input, together, min(chunk, classes)),
        first_state(input, spread, entropy),
    )
    for rows in chunks(tokens, together):
        known = RowState(*(None if t is None else t[rows] for t in state))  # type: ignore[arg-type]
        for part in chunks(classes, chunk):
            logits = product(
                input[rows], weight[part], None if bias is None else bias[part], buffer
            )
            accumulate_logits(
                logits,
                part.start,
                target[rows],
                None if class_weight is None else class_weight[part],
                known,
                temperature,
                softcap,
            )
    return state, buffer if keep else buffer.new_empty(0)


def linear_rows(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    temperature: float,
    softcap: float,
    ignore_index: int,
    spread: bool,
    entropy: bool,
    chunk: int,
    keep: bool,
    accumulate_hidden: Callable[..., tuple[RowState, Tensor]] = accumulate_hidden,
    row_statistics: Callable[..., RowStatistics] = row_statistics,
) -> tuple[Tensor, ...]:
    """`Fields` of input weight^T + bias, and the logits, where they are to be kept."""
    state, kept = accumulate_hidden(
        input,
        weight,
        bias,
        target,
        class_weight,
        temperature,
        softcap,
        spread,
        entropy,
        chunk,
        keep,
    )
    return *row_statistics(
        state, target.contiguous(), class_weight, len(weight), temperature, ignore_index
    ), kept


def gradient_coefficients(
    nll: Tensor | None,
    logsumexp: Tensor | None,
    spread: Tensor | None,
    entropy: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    fields: RowStatistics,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> GradientCoefficients:
    """From the gradients of the fields."""
    _, kept, wrong = valid_targets(target, classes, ignore_index)
    pull = torch.where(wrong, torch.nan, 0.0).to(fields.maximum.dtype)
    at_label, log_pull, by_class = torch.zeros_like(pull), None, None
    if nll is not None:
        at_label = -torch.where(kept, nll, 0.0)
        pull = pull - at_label
    if logsumexp is not None:
        pull = pull + logsumexp
    if spread is not None and fields.smoothing_loss.numel():
        pull = pull + spread * (
            classes if class_weight is None else class_weight.to(pull.dtype).sum()
        )
        by_class = -spread / temperature
    if entropy is not None and fields.entropy.numel():
        pull, log_pull = pull - entropy * fields.entropy, -entropy / temperature
    return GradientCoefficients(pull / temperature, at_label / temperature, log_pull, by_class)


def logits_gradient(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    c: GradientCoefficients,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    result: Tensor,
) -> None:
    """The gradient of the logits of the classes from `first` on, which may take their place."""
    for rows in row_chunks(logits):
        of_rows = GradientCoefficients(*(None if t is None else t[rows] for t in c))  # type: ignore[arg-type]
        _descend(
            logits[rows],
            first,
            target[rows],
            class_weight,
            of_rows,
            maximum[rows],
            sumexp[rows],
            temperature,
            softcap,
            result[rows],
        )


def _descend(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    c: GradientCoefficients,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    result: Tensor,
) -> None:
    x = capped(logits, softcap)
    exponent = (x - finite_shift(maximum)[:, None]) / temperature
    p = exponent.exp() / sumexp[:, None]
    grad = c.dlogits_coef[:, None] * p
    active = (c.dlogits_coef != 0) | (c.label_coef != 0)
    if c.log_coef is not None:
        grad = grad + c.log_coef[:, None] * torch.where(
            p == 0, 0.0, p * (exponent - sumexp.log()[:, None])
        )
        active = active | (c.log_coef != 0)
    if c.smoothing_coef is not None:
        grad = grad + c.smoothing_coef[:, None] * (
            1.0 if class_weight is None else class_weight.to(x.dtype)
        )
        active = active | (c.smoothing_coef != 0)
    at_target = torch.arange(first, first + x.shape[1], device=x.device) == target.long()[:, None]
    grad = grad + torch.where(at_target, c.label_coef[:, None], 0.0)
    if softcap:
        grad = grad * softcap_slope(logits, softcap)
    result.copy_(torch.where(active[:, None], grad, 0.0))


def linear_rows_backward(
    pull: Tensor,
    at_label: Tensor,
    log_pull: Tensor | None,
    by_class: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    kept: Tensor,
    temperature: float,
    softcap: float,
    chunk: int,
    to_input: bool,
    to_weight: bool,
    to_bias: bool,
    logits_gradient: Callable[..., None] = logits_gradient,
) -> tuple[Tensor, ...]:
    """`Gradients` from the coefficients of the rows: the logits are computed again, a chunk of classes at a time, or are `kept`, and overwritten."""
    classes, wide = len(weight), acc_dtype(input.dtype)
    result = empty_gradients(input, weight, bias, to_input, to_weight, to_bias)
    buffer = kept if len(kept) else buffer_for(input, len(input), min(chunk, classes))
    alone, target = chunk >= classes > 0, target.contiguous()
    total = (
        result.input
        if alone or input.dtype == wide or not to_input
        else torch.empty_like(input, dtype=wide)
    )
    if to_input and not alone:
        total.zero_()
    for part in chunks(classes, chunk):
        logits = (
            buffer.view(len(input), -1)[:, :classes]
            if len(kept)
            else product(input, weight[part], None if bias is None else bias[part], buffer)
        )
        c, of_class = (
            GradientCoefficients(pull, at_label, log_pull, by_class),
            None if class_weight is None else class_weight[part],
        )
        logits_gradient(
            logits, part.start, target, of_class, c, maximum, sumexp, temperature, softcap, logits
        )
        if to_input and alone:
            torch.mm(logits, weight, out=total)
        elif to_input:
            add_product(total, logits, weight[part])
        if to_weight:
            torch.mm(logits.T, input, out=result.weight[part])
        if to_bias:
            result.bias[part] = logits.sum(0, dtype=wide)
    if total is not result.input:
        result.input.copy_(total)
    return tuple(result)


def empty_gradients(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    to_input: bool,
    to_weight: bool,
    to_bias: bool,
) -> HeadGradients:
    wanted = ((input, to_input), (weight, to_weight), (input if bias is None else bias, to_bias))
    return HeadGradients(
        *(
            torch.empty(t.shape if wants else (0,), dtype=t.dtype, device=t.device)
            for t, wants in wanted
        )
    )


def linear_one_pass(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    chunk: int,
    to_input: bool,
    to_weight: bool,
    to_bias: bool,
    one_pass: Callable[..., Tensor] = one_pass,
    mean_shares: Callable[..., Tensor | None] = mean_shares,
) -> tuple[Tensor, ...]:
    """Sum or mean of the loss, and its `Gradients`: three products, so many tokens at a time."""
    (tokens, _), classes, wide = input.shape, len(weight), acc_dtype(input.dtype)
    result = empty_gradients(input, weight, bias, to_input, to_weight, to_bias)
    if not input.is_cuda and input.dtype == wide:
        chunk = min(chunk, CPU_TOKENS)
    buffer = buffer_for(input, min(chunk, tokens), classes)
    alone = chunk >= tokens
    totals = [result.weight, torch.zeros_like(result.bias, dtype=wide)]
    if to_weight and not alone:
        totals[0] = (
            result.weight.zero_()
            if input.dtype == wide
            else torch.zeros_like(result.weight, dtype=wide)
        )
    divisors = mean_shares(target, class_weight, ignore_index, classes, mean, wide)
    loss = torch.zeros((), dtype=wide, device=input.device)
    for part in chunks(tokens, chunk):
        logits = product(input[part], weight, bias, buffer)
        loss += one_pass(
            logits,
            target[part],
            class_weight,
            ignore_index,
            smoothing,
            softcap,
            z_loss,
            mean,
            divisors,
        )
        if to_input:
            torch.mm(logits, weight, out=result.input[part])
        if to_weight and alone:
            torch.mm(logits.T, input, out=result.weight)
        elif to_weight:
            add_product(totals[0], logits.T, input[part])
        if to_bias:
            totals[1] += logits.sum(0, dtype=wide)
    if tokens == 0:
        loss = loss / (0.0 if mean else 1.0)
        totals[0].zero_()
    for gradient, total in zip(result[1:], totals, strict=True):
        if gradient is not total:
            gradient.copy_(total)
    return loss, *result
