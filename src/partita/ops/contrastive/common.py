"""Contrastive losses one chunk of rows at a time: the loops that reference and kernels share.

The similarities of a chunk are a matrix product, which is kept in the accumulator's dtype. Between
the products a backend reads them once, for the log-sum-exps or for the gradient of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives.gpu.target import target_of
from ...primitives.rows import chunks
from ...runtime import checks
from ...runtime.autograd import needs_gradient
from ...runtime.constants import scalar
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import cdiv, decide, holds, larger, same_sizes
from ..linear_heads.common import cast_to_autocast, never
from ..linear_heads.plan import (
    CPU_CHUNK_TOKENS,
    DEFAULT_BUDGET,
    FP16_SCALE,
    check_budget,
    padded_width,
)
from ..linear_heads.products import multiply

KINDS = ("softmax", "sigmoid")

CHUNK_ROWS = 128  # Larger chunks have a multiple of these rows, which are a tile of the products.
MOST_ROWS = 2**14  # of a chunk whose gradient alone is in memory; products of more are slower


class Product(NamedTuple):
    """The factors of similarities that a kernel computes, a @ b.T, without memory for them."""

    # a, b: features of rows and columns, [R, D] and [C, D]
    a: Tensor
    b: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.a), len(self.b)


class Logits(NamedTuple):
    """A chunk of logits, scale * similarities + bias."""

    # The products of some rows with all columns, [R, C] in the accumulator's dtype; the columns of
    # a row are adjacent. Or the `Product` that gives them.
    similarities: Any
    scale: Tensor  # []
    bias: Tensor | None  # [], or None for 0
    first: int  # the column that is the pair of the first row. That of the next row is the next.


class LogSumExp(NamedTuple):
    """Log-sum-exps as maximum + log(total), or sums alone."""

    maximum: Any  # the maximum of the logits, [K], or None. It is 0 for rows of sigmoids.
    total: Tensor  # the sum of exp(logit - maximum), [K]. For rows of sigmoids it is their loss.


class ContrastiveKernels(NamedTuple):
    """The functions of one backend that read a chunk of logits."""

    # Takes `Logits`, whether they are those of sigmoids, the `LogSumExp` of their rows, memory for
    # the logit of each row's pair [R], and the `LogSumExp` of all columns or None. It writes all of
    # them, or adds the columns to what earlier chunks have written.
    scan: Callable[..., None]
    # Takes `Logits`, whether they are those of sigmoids, the `LogSumExp` of rows, that of columns
    # or None, a factor, and memory. It writes the gradient of the logits times the factor [R, C],
    # and the sums of each row, [2, R]: of the gradient times the similarity, and of the gradient.
    gradient: Callable[..., None]
    # Takes the features, and returns whether the other functions take their `Product` instead of
    # the similarities, and are faster with it.
    multiplies: Callable[..., bool] = never


class ContrastiveInputs(NamedTuple):
    """The arguments of a contrastive loss, checked."""

    # a, b: features [n, D] and [m, D] in the dtype of autocast
    a: Tensor
    b: Tensor
    # logit_scale, logit_bias: numbers in the accumulator's dtype, []; no bias is None
    logit_scale: Tensor
    logit_bias: Tensor | None
    is_sigmoid: bool  # whether each logit is that of a binary choice
    symmetric: bool  # whether there is a softmax of each column too
    budget: int  # bytes for a chunk of logits

    def saves(self, columns: int) -> bool:
        """Return whether all logits are saved for a gradient; raise unless those of a row fit."""
        least = row_bytes(columns, self.a.dtype)
        if decide(self.budget < least, otherwise=False):
            raise ValueError(
                f"memory_budget: expected at least {least:,} bytes for {columns:,} columns, or"
                f" None, got {self.budget:,}"
            )
        fits = fits_memory(self.a, columns, self.budget)
        return fits and needs_gradient(self.a, self.b, self.logit_scale, self.logit_bias)


def checked_inputs(
    a: Tensor,
    b: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float | None,
    kind: str,
    symmetric: bool,
    memory_budget: int | None,
) -> ContrastiveInputs:
    """Return the arguments of a contrastive loss, or raise if they do not fit each other."""
    for name, features in (("a", a), ("b", b)):
        checks.floating(name, features)
        checks.device(name, features, a, "a")
        if features.ndim != 2:
            raise ValueError(f"{name}: expected shape [N, D], got {list(features.shape)}")
    checks.choice("kind", kind, KINDS)
    check_budget(memory_budget)
    a, b = cast_to_autocast(a, b)  # type: ignore[assignment]
    if b.dtype != a.dtype:
        raise TypeError(f"b: expected the dtype of a, {a.dtype}, got {b.dtype}")
    if symmetric:
        checks.shape("b", b, a.shape, "a.shape")
    elif not (same_sizes(b.shape[1:], a.shape[1:]) and holds(b.shape[0] >= a.shape[0])):
        raise ValueError(
            f"b: expected at least {a.shape[0]} rows and D = {a.shape[1]}, got {list(b.shape)}"
        )
    scale = checked_number("logit_scale", logit_scale, a)
    bias = None if logit_bias is None else checked_number("logit_bias", logit_bias, a)
    budget = DEFAULT_BUDGET if memory_budget is None else memory_budget
    is_sigmoid = kind == "sigmoid"
    if bias is not None and not is_sigmoid:  # It cancels, and its gradient is 0.
        scale, bias = scale + 0 * bias, None
    return ContrastiveInputs(a, b, scale, bias, is_sigmoid, symmetric and not is_sigmoid, budget)


def checked_number(name: str, value: Tensor | float, a: Tensor) -> Tensor:
    """Return a number as a tensor in the accumulator's dtype, `[]`."""
    dtype = acc_dtype(a.dtype)
    if not isinstance(value, Tensor):
        checks.number(name, value, low=-torch.inf)
        return scalar(float(value), dtype, a.device)
    checks.floating(name, value)
    checks.device(name, value, a, "a")
    if value.shape not in ((), (1,)):
        raise ValueError(f"{name}: expected a number, of shape [] or [1], got {list(value.shape)}")
    return value.reshape(()).to(dtype)


def has_fast_products(a: Tensor) -> bool:
    """Return whether kernels multiply such features faster than they read similarities.

    They do so in half types on GPUs of the Hopper generation, one of which other devices stand for.
    The hardware that copies tiles needs rows that start on 16 bytes.
    """
    if a.dtype.itemsize != 2 or target_of(a.device).vendor != "nvidia":
        return False
    is_hopper = not a.is_cuda or torch.cuda.get_device_capability(a.device)[0] == 9
    return is_hopper and decide((a.shape[1] > 0) & (a.shape[1] % 8 == 0), otherwise=False)


def fits_memory(a: Tensor, columns: int, budget: int) -> bool:
    """Return whether all logits fit the budget.

    Kernels that multiply take less time to compute many logits again than to read them. So no
    budget makes room for more than the default one does.
    """
    most = min(budget, DEFAULT_BUDGET) if a.is_cuda and has_fast_products(a) else budget
    return decide(a.shape[0] * row_bytes(columns, a.dtype) <= most, otherwise=False)


def row_bytes(columns: int, dtype: torch.dtype, multiplies: bool = False) -> int:
    """Return the bytes of a row's similarities and their gradient, with the sums of its tiles.

    Kernels that multiply have no similarities in memory.
    """
    width = padded_width(columns)
    if multiplies:
        return width * dtype.itemsize + width // 8
    return width * (acc_dtype(dtype).itemsize + dtype.itemsize + 1)


def chunk_rows(a: Tensor, b: Tensor, budget: int, multiplies: bool = False) -> int:
    """Return the rows in a chunk: equal chunks, as few as the budget allows."""
    row = max(row_bytes(len(b), a.dtype, multiplies), 1)
    fitting = max(min(budget // row, len(a)), 1)
    if a.device.type == "cpu":  # whose functions make temporary tensors
        fitting = min(fitting, CPU_CHUNK_TOKENS)
    unit = CHUNK_ROWS
    if multiplies:
        # Then the product that gives the gradient of a chunk's rows keeps all multiprocessors busy.
        # Its tiles have 128 rows and 256 columns.
        tiles = target_of(a.device).multiprocessors // cdiv(a.shape[1], 256)
        fitting = min(fitting, MOST_ROWS)
        unit = tiles * CHUNK_ROWS if 0 < tiles * CHUNK_ROWS <= fitting else CHUNK_ROWS
    if fitting < len(a) and fitting > unit:
        fitting = fitting // unit * unit
    rows = cdiv(len(a), max(cdiv(len(a), fitting), 1))
    return min(cdiv(rows, unit) * unit, fitting)


def gradient_factor(dtype: torch.dtype) -> float:
    """Return what the gradient of logits is multiplied by, so that it does not underflow."""
    return FP16_SCALE if dtype == torch.float16 else 1.0


def as_factors(*features: Tensor) -> tuple[Tensor, ...]:
    """Return features as the products take them. A CPU multiplies half types in fp32."""
    return tuple(x.contiguous() if x.is_cuda else x.to(acc_dtype(x.dtype)) for x in features)


def empty_state(a: Tensor, b: Tensor, symmetric: bool, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the results of `contrastive_state`."""
    n, m, dtype = a.shape[0], b.shape[0], acc_dtype(a.dtype)
    sizes = (3, n), (2, m if symmetric else 0), (n if save else 0, padded_width(m))
    rows, columns, saved = (a.new_empty(size, dtype=dtype) for size in sizes)
    return rows, columns, saved


def empty_gradients(
    a: Tensor, b: Tensor, a_grad: bool, b_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the results of `contrastive_gradient`."""
    dtype = acc_dtype(a.dtype)
    of_a, of_b = a.shape if a_grad else (0, 0), b.shape if b_grad else (0, 0)
    da, db, sums = (a.new_empty(size, dtype=dtype) for size in (of_a, of_b, (2, a.shape[0])))
    return da, db, sums


def planned_chunks(
    a: Tensor, b: Tensor, budget: int, saved: Tensor, kernels: ContrastiveKernels
) -> tuple[int, bool]:
    """Return the rows of a chunk, and whether kernels multiply instead of reading similarities."""
    is_cut = not len(saved) and not fits_memory(a, len(b), budget)
    multiplies = is_cut and kernels.multiplies(a, b)
    return chunk_rows(a, b, budget, multiplies), multiplies


def similarities_of_chunks(
    a: Tensor, b: Tensor, size: int, multiplies: bool, saved: Tensor, are_known: bool = False
) -> Iterator[tuple[slice, Tensor | Product]]:
    """Yield the rows of each chunk and their similarities.

    Args:
        size, multiplies: of `planned_chunks`.
        saved: memory for the similarities of all rows. If it is empty, chunks share memory.
        are_known: whether they have been computed.
    """
    if multiplies:
        a, b = a.contiguous(), b.contiguous()
        yield from ((some, Product(a[some], b)) for some in chunks(len(a), size))
        return
    a, b = as_factors(a, b)
    memory = saved if len(saved) else saved.new_empty(size, padded_width(len(b)))
    for some in chunks(len(a), size):
        similarities = memory[some if len(saved) else slice(0, some.stop - some.start), : len(b)]
        if not are_known:
            multiply(a[some], b.T, similarities)
        yield some, similarities


def contrastive_state(
    # a, b: features of the rows [n, D] and of the columns [m, D]
    a: Tensor,
    b: Tensor,
    # logit_scale, logit_bias: numbers in the accumulator's dtype, []
    logit_scale: Tensor,
    logit_bias: Tensor | None,
    first: int,  # the column that is the pair of the first row
    # is_sigmoid, symmetric, budget: as in `ContrastiveInputs`
    is_sigmoid: bool,
    symmetric: bool,
    budget: int,
    save: bool,  # whether the similarities are saved
    *,
    kernels: ContrastiveKernels,  # the functions of the backend
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the loss of rows and columns follows from, and the similarities if saved.

    Returns:
        The `LogSumExp` of rows and the logits of their pairs, `[3, n]`; that of columns, `[2, m]`;
        the saved similarities, `[n, padded m]`.
    """
    rows, columns, saved = empty_state(a, b, symmetric, save)
    of_columns = LogSumExp(*columns) if symmetric else None
    plan = planned_chunks(a, b, budget, saved, kernels)
    for some, similarities in similarities_of_chunks(a, b, *plan, saved):
        logits = Logits(similarities, logit_scale, logit_bias, first + some.start)
        *of_rows, pairs = rows[:, some]
        adds = some.start > 0
        kernels.scan(logits, is_sigmoid, LogSumExp(*of_rows), pairs, of_columns, adds)
    return rows, columns, saved


def contrastive_gradient(
    a: Tensor,
    b: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    saved: Tensor,
    first: int,
    is_sigmoid: bool,
    symmetric: bool,
    budget: int,
    a_grad: bool,
    b_grad: bool,
    *,
    kernels: ContrastiveKernels,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of n times the loss, which know neither its upstream gradient nor n.

    Nothing underflows in a half type then, whatever the batch.

    Returns:
        The products of the logits' gradient with b `[n, D]` and with a `[m, D]`, both without the
        scale and times `gradient_factor`; the sums of each row that `ContrastiveKernels` names,
        `[2, n]`. Products that are not wanted are empty.
    """
    da, db, sums = empty_gradients(a, b, a_grad, b_grad)
    of_columns = LogSumExp(*columns) if symmetric else None
    plan, factor = planned_chunks(a, b, budget, saved, kernels), gradient_factor(a.dtype)
    each = similarities_of_chunks(a, b, *plan, saved, are_known=len(saved) > 0)
    a, b = as_factors(a, b)
    gradients = a.new_empty(plan[0], padded_width(len(b)))
    if len(a) == 0:
        db.zero_()
    for some, similarities in each:
        gradient = gradients[: some.stop - some.start, : len(b)]
        logits = Logits(similarities, logit_scale, logit_bias, first + some.start)
        of_both = (LogSumExp(*rows[:2, some]), of_columns)
        kernels.gradient(logits, is_sigmoid, *of_both, factor, gradient, sums[:, some])
        if a_grad:
            multiply(gradient, b, da[some])
        if b_grad:
            multiply(gradient.T, a[some], db, adds=some.start > 0)
    return da, db, sums


def mean_loss(rows: Tensor, columns: Tensor, is_sigmoid: bool, symmetric: bool) -> Tensor:
    """Return the mean loss of n rows, `[3, n]`, and of the columns that are their pairs, `[2, n]`.

    A log-sum-exp minus its pair's logit would cancel, so the maximum stands between them.
    """
    maximum, total, pair = rows
    if is_sigmoid:
        return total.mean()
    losses = total.log() + (maximum - pair)
    if symmetric:
        losses = (losses + columns[1].log() + (columns[0] - pair)) / 2
    return losses.mean()


def scaled_gradients(
    grad: Tensor, logit_scale: Tensor, found: tuple[Tensor, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of a, b, scale and bias from the loss's and `contrastive_gradient`'s."""
    da, db, sums = found
    of_row = grad / larger(sums.shape[1], 1)
    factor = of_row * logit_scale / gradient_factor(dtype)
    of_scale, of_bias = (row.sum(dtype=torch.float64).to(row.dtype) * of_row for row in sums)
    return (da * factor).to(dtype), (db * factor).to(dtype), of_scale, of_bias
