"""Row statistics, gradient coefficients and options that the linear heads share.

The reference and the kernels of one device use them, and so does the vocabulary-parallel loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import chunks, part_of
from ...runtime import checks
from ...runtime.autograd import (
    autocast_dtype,
    is_double_backward,
    plain_eager,
    requires_grad,
)
from ...runtime.dtypes import acc_dtype
from ...runtime.invariance import is_batch_invariant
from ..cross_entropy.common import LossOptions, logsumexp_term
from .plan import (
    BLOCK_TOKENS,
    LOSS_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    MemoryPlan,
    linear_cross_entropy_plan,
    padded_width,
    widens_logits,
)
from .products import (
    aligned_columns,
    aligned_rows,
    in_blocks,
    multiply,
    multiply_blocks,
    without_padding,
)


class Wanted(NamedTuple):
    """Which gradients of the tensors of a head are wanted."""

    input_grad: bool
    weight_grad: bool
    bias_grad: bool
    low_rank_input_grad: bool = False
    low_rank_weight_grad: bool = False


TENSORS = len(Wanted._fields)  # the first fields of a head


class Head(NamedTuple):
    """The hidden states and the matrix from which logits are computed, and how."""

    input: Tensor  # hidden states, [M, H]
    weight: Tensor  # matrix of the vocabulary, [C, H], in their dtype, or in fp32
    bias: Tensor | None  # its bias, [C] in the dtype of the matrix, or None
    # low_rank_input, low_rank_weight: [M, r] and [C, r], whose product is added to the logits, in
    # any floating dtypes; or None
    low_rank_input: Tensor | None = None
    low_rank_weight: Tensor | None = None
    # Whether products have blocks of 1,024 tokens, so that bits depend on no batch.
    invariant: bool = False
    widens: bool = False  # whether logits of half types are fp32, as the product adds them up

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self[:5]

    @property
    def products(self) -> tuple[bool, bool]:
        """The fields that say how products are computed."""
        return self.invariant, self.widens

    @property
    def rank(self) -> int:
        """The columns of the factors of low rank, 0 without them."""
        return 0 if self.low_rank_weight is None else self.low_rank_weight.shape[-1]

    def beside(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Head:
        """Return another head whose products are computed like those of this one."""
        return Head(input, weight, bias, None, None, *self.products)

    def of_call(self, logits_dtype: torch.dtype | None) -> Head:
        """Return the head whose logits are computed as a call asks for."""
        widens = widens_logits(logits_dtype, self.input.dtype)
        return Head(*self.tensors, is_batch_invariant(), widens)

    @property
    def rounds(self) -> bool:
        """Return whether products need a copy of the matrix in the dtype of the hidden states."""
        return self.weight.dtype != self.input.dtype

    @property
    def rounded(self) -> Head:
        """The head whose tensors all have the dtype of the hidden states."""
        dtype = self.input.dtype
        rounded = (None if each is None else each.to(dtype) for each in self.tensors)
        return Head._make((*rounded, *self.products))

    @property
    def is_usual(self) -> bool:
        """Return whether PyTorch's linear layer computes the same logits."""
        has_low_rank = self.low_rank_input is not None
        return not (self.invariant or self.widens or self.rounds or has_low_rank)

    @property
    def flat(self) -> Head:
        """The head with hidden states `[M, H]`, of hidden states `[..., H]`."""
        return self.with_rows(lambda rows: rows[None].flatten(0, -2))

    @property
    def aligned(self) -> Head:
        """The head with rows on 16 bytes, in whole blocks, in the batch-invariant mode."""
        return self.with_aligned_rows.with_rows(self.in_blocks)

    @property
    def with_aligned_rows(self) -> Head:
        """The head with rows on 16 bytes in the batch-invariant mode."""
        if not self.invariant:
            return self
        head = self.with_rows(aligned_rows)
        return Head(head.input, aligned_columns(self.weight), *head[2:])

    def with_rows(self, function: Callable[[Tensor], Tensor]) -> Head:
        """Return the head with a function of all that has the rows of the hidden states."""
        states = self.low_rank_input
        states = None if states is None else function(states)
        low_rank = (states, self.low_rank_weight)
        return Head(function(self.input), self.weight, self.bias, *low_rank, *self.products)

    @property
    def wanted(self) -> Wanted:
        if not torch.is_grad_enabled():
            return Wanted(False, False, False)
        return Wanted(*(requires_grad(each) for each in self.tensors))

    def plan(
        self, memory_budget: int | None, reduced: bool, of_rank: tuple[int, int] | None = None
    ) -> MemoryPlan:
        """Return the plan of this head, or that of a rank with these tokens and classes."""
        input_grad, weight_grad, bias_grad, *of_low_rank = self.wanted
        tokens, classes = of_rank or (self.input.shape[0], len(self.weight))
        return linear_cross_entropy_plan(
            tokens,
            self.input.shape[1],
            classes,
            self.input.dtype,
            memory_budget=memory_budget,
            input_grad=input_grad or any(of_low_rank),
            weight_grad=weight_grad or bias_grad,
            reduced=reduced,
            parallel=of_rank is not None,
            batch_invariant=self.invariant,
            logits_dtype=torch.float32 if self.widens else None,
            weight_dtype=self.weight.dtype,
            low_rank=self.rank,
        )

    def part(self, tokens: slice, classes: slice) -> Head:
        """Return the head of some tokens and some classes."""
        head = self.with_rows(lambda rows: rows[tokens])
        of_classes = (self.weight, self.bias, self.low_rank_weight)
        weight, bias, factor = (None if each is None else each[classes] for each in of_classes)
        return Head(head.input, weight, bias, head.low_rank_input, factor, *self.products)  # type: ignore[arg-type]

    def rows(self, tokens: int) -> int:
        """Return the rows that the logits of tokens have in a buffer, which fill whole blocks."""
        return tokens + -tokens % BLOCK_TOKENS if self.invariant else tokens

    def buffer_rows(self, tokens: int) -> int:
        """Return the rows of a buffer: an even number, for gradients of half the size."""
        rows = self.rows(tokens)
        return rows + rows % 2 if self.widens else rows

    def buffer(self, tokens: int, classes: int, for_gradient: bool = False) -> Tensor:
        """Return memory for the logits of some tokens and classes, flat, whose rows are padded.

        The gradient takes their place, or lies before logits that are wider; see `parts_to_read`.
        """
        rows, dtype = self.buffer_rows(tokens), self.input.dtype
        if self.widens:
            dtype = acc_dtype(dtype)
            if for_gradient and not self.is_read_in_place(tokens):
                rows = rows // 2 + self.tokens_beside_gradient(tokens)
        return self.input.new_empty(rows * padded_width(classes), dtype=dtype)

    def rows_in(self, buffer: Tensor, tokens: int, classes: int) -> Tensor:
        """Return the view of a buffer that has the rows of tokens, and their padding."""
        rows, width = self.rows(tokens), padded_width(classes)
        return buffer[: rows * width].view(rows, width)

    def is_read_in_place(self, tokens: int) -> bool:
        """Return whether the gradient of wide logits takes their place, as that of saved ones does.

        The logits of one block are one product, of which no half exists beside the gradient.
        """
        return self.widens and self.invariant and tokens <= BLOCK_TOKENS

    def tokens_beside_gradient(self, tokens: int) -> int:
        """Return the tokens whose wide logits exist at a time, beside the gradient of all."""
        half = (tokens + 1) // 2
        return max(half // BLOCK_TOKENS, 1) * BLOCK_TOKENS if self.invariant else half

    def parts_to_read(self, tokens: int, in_place: bool) -> list[slice]:
        """Return the tokens whose logits are read, and their gradients written, one after another.

        The gradient of wide logits has half their size. In place it starts where they do, and
        overwrites logits that were read before, so that each part has as many tokens as all before
        it. Otherwise about half of the logits exist at a time, behind the gradient.
        """
        if not self.widens:
            return [slice(0, tokens)]
        if not in_place:
            return list(chunks(tokens, self.tokens_beside_gradient(tokens)))
        # PyTorch adds up a row that is alone in another order on a CPU.
        first = int(self.input.device.type == "cpu")
        stops = [*(2**i for i in range(first, (tokens - 1).bit_length())), tokens]
        return [slice(*ends) for ends in zip([0, *stops], stops, strict=False)]

    def logits(self, buffer: Tensor) -> Tensor:
        """Compute the logits in the buffer."""
        tokens, C = len(self.input), len(self.weight)
        padded = self.rows_in(buffer, tokens, C)
        if padded.device.type == "cpu":
            # On a CPU with AMX the next product reads the padding (PyTorch 2.13). Uninitialized
            # memory may be NaN there, and 0 times NaN is NaN.
            padded[:, C:].zero_()
        logits, invariant, bias = padded[:, :C], self.invariant, self.bias
        states, factor = self.low_rank_input, self.low_rank_weight
        adds = False
        if states is not None and factor is not None:
            # The wide product reads what it adds to, since its arithmetic takes longer than that.
            multiply_blocks(states, factor.T, logits, invariant, bias)
            bias, adds = None, True
        multiply_blocks(self.input, self.weight.T, logits, invariant, bias, adds)
        return logits[:tokens]

    def in_blocks(self, rows: Tensor, value: float = 0.0) -> Tensor:
        """Return what belongs to the tokens, `[M, ...]`, as `in_blocks` does."""
        return in_blocks(rows, self.invariant, value)

    def of_tokens(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Return results in the shape of the tokens, as `without_padding` does."""
        return without_padding(rows, shape, self.invariant)


def cast_to_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Cast the tensors as `torch.nn.functional.linear` casts its arguments under autocast."""
    dtype = autocast_dtype(next(tensor for tensor in tensors if tensor is not None).device)
    if dtype is None:
        return tensors
    return tuple(
        tensor.to(dtype)
        if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
        else tensor
        for tensor in tensors
    )


def checked_head(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prefix: str = "",
    shape: str = "[C, H]",
    more_dimensions: bool = False,
    may_round: bool = False,
) -> Head:
    """Return the head in the dtype of autocast; raise unless its tensors fit each other.

    Errors put the prefix before the names of the tensors and call the matrix's shape `shape`; it
    may have more dimensions, or be in fp32 beside a half type, where the caller says so.
    """
    names = (f"{prefix}input", f"{prefix or 'linear_'}weight", f"{prefix or 'linear_'}bias")
    for name, tensor in zip(names, (input, weight, bias), strict=True):
        if tensor is not None or name != names[2]:
            checks.floating(name, tensor)
            checks.device(name, tensor, input, names[0])  # type: ignore[arg-type]
    head = Head(*cast_to_autocast(input, weight, bias))  # type: ignore[arg-type]
    like, dtype = names[0], head.input.dtype
    if may_round and head.weight.dtype == torch.float32 and dtype.itemsize == 2:
        like, dtype = names[1], torch.float32
    for name, tensor in zip(names[1:], head[1:3], strict=True):
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"{name}: expected the dtype of {like}, {dtype}, got {tensor.dtype}")
    if weight.ndim < 2 or (weight.ndim > 2 and not more_dimensions):
        raise ValueError(f"{names[1]}: expected shape {shape}, got {list(weight.shape)}")
    if input.ndim == 0 or input.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{names[0]}: expected shape [..., H] with H = {weight.shape[-1]},"
            f" got {list(input.shape)}"
        )
    if bias is not None:
        checks.shape(names[2], bias, weight.shape[:-1], f"{names[1]} without H")
    return head


def counted_rows(rows: Tensor, grad: Tensor) -> Tensor:
    """Return hidden states, `[M, H]`, with zeros where the gradient of the logits is 0.

    Where that gradient is differentiated too, rows stay unless their products may overflow.
    """
    counts = (grad != 0).any(1, keepdim=True)
    if is_double_backward():
        squares = rows.to(acc_dtype(rows.dtype)).square()
        counts = counts | squares.isfinite().all(1, keepdim=True)
    return torch.where(counts, rows, 0)


def counted_states(input: Tensor, counts: Tensor, memory: Tensor) -> Tensor:
    """Return the hidden states, `[M, H]`, with zeros in rows that do not count, `[M]`.

    The gradient of the logits is 0 in these rows, and NaN times 0 would be NaN in the gradient of
    the matrix. `memory` takes the result where it has that size, which saves an allocation.
    """
    if input.device.type == "cpu" and bool(counts.all()):
        return input
    out = memory if memory.shape == input.shape and memory.dtype == input.dtype else None
    return torch.where(counts[:, None], input, input.new_zeros(()), out=out)


def chunk_and_save(plan: MemoryPlan, classes: int) -> tuple[int, bool]:
    """Return the classes in a chunk and whether the logits are saved for the backward pass.

    This holds for losses whose gradient is computed in the backward pass.
    """
    fast = plan.name == "fast"
    return classes if fast else plan.chunk, fast and plain_eager()


def loss_terms(
    statistics: Sequence[Tensor],
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    options: LossOptions,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of each row and its z-loss, which is None without one.

    The first of the statistics are nll, log Z and the smoothing loss, as in `RowStatistics`.
    """
    nll, logsumexp, smoothing_loss, *_ = statistics
    smoothing, valid, loss = options.label_smoothing, target != options.ignore_index, nll
    if weight is not None:
        in_range = valid & (target >= 0) & (target < classes)
        loss = loss * weight.to(nll.dtype)[torch.where(in_range, target, 0).long()]
    if smoothing > 0:
        smoothing_loss = torch.where(valid, smoothing_loss, 0.0)
        loss = (1 - smoothing) * loss + smoothing / classes * smoothing_loss
    return loss, logsumexp_term(options, torch.where(valid, logsumexp, 0.0))


class RowOptions(NamedTuple):
    """The options of the statistics of rows."""

    temperature: float  # the logits are divided by it after the soft-cap
    softcap: float  # bound of the logits, 0 for none
    ignore_index: int  # the label of rows that do not count
    needs_smoothing: bool  # whether the smoothing loss is computed
    needs_entropy: bool  # whether entropy and argmax are computed

    def used(self, grads: Sequence[Tensor | None]) -> StatisticsGrads:
        """Return the gradients of the first four `RowStatistics`, None for those not computed."""
        nll, logsumexp, smoothing, entropy = grads[:4]
        smoothing = smoothing if self.needs_smoothing else None
        return StatisticsGrads(nll, logsumexp, smoothing, entropy if self.needs_entropy else None)


class StatisticsGrads(NamedTuple):
    """The gradients of the first four `RowStatistics`, `[M]` each; None for zeros."""

    grad_nll: Tensor | None
    grad_logsumexp: Tensor | None
    grad_smoothing: Tensor | None
    grad_entropy: Tensor | None


class RowState(NamedTuple):
    """The state of rows after some of their classes; x are the logits after soft-capping."""

    maximum: Tensor  # the maximum of x, [M]
    sumexp: Tensor  # the sum of e = exp((x - maximum) / temperature), [M]
    label: Tensor  # x at the target, -inf until that class was read, [M]
    # x of the first class, 0 if that is -inf, [M]; None without a smoothing loss.
    origin: Tensor | None
    smoothing_loss: Tensor | None  # the sum of class weight * (origin - x), [M]; None without one
    sum_x_exp: Tensor | None  # the sum of e log e, [M]; None without an entropy
    argmax: Tensor | None  # the lowest class with the maximum, [M] int64; None without an entropy

    def clear(self) -> None:
        """Write the state before any class."""
        for field, value in zip(self, (-torch.inf, 0.0, -torch.inf, 0.0, 0.0, 0.0, 0), strict=True):
            if field is not None:
                field.fill_(value)


def new_state(like: Tensor, needs_smoothing: bool, needs_entropy: bool) -> RowState:
    """Return memory for the state of the rows, which the first chunk writes without reading."""
    rows, dtype = len(like), acc_dtype(like.dtype)
    maximum, sumexp, label, origin, smoothing_loss, sum_x_exp = (
        like.new_empty(rows, dtype=dtype) for _ in range(6)
    )
    return RowState(
        maximum=maximum,
        sumexp=sumexp,
        label=label,
        origin=origin if needs_smoothing else None,
        smoothing_loss=smoothing_loss if needs_smoothing else None,
        sum_x_exp=sum_x_exp if needs_entropy else None,
        argmax=like.new_empty(rows, dtype=torch.int64) if needs_entropy else None,
    )


def accumulate_hidden(
    accumulate_logits: Callable[..., None],
    head: Head,
    target: Tensor,
    class_weight: Tensor | None,
    state: RowState,
    temperature: float,
    softcap: float,
    chunk: int,
    save_logits: bool,
) -> Tensor:
    """Update the state in place with the logits of a head, and return what `read_logits` does."""
    target, tokens = target.contiguous(), MIN_CHUNK_TOKENS if head.invariant else LOSS_CHUNK_TOKENS

    def read(rows: slice, part: slice, logits: Tensor) -> None:
        options = (part_of(class_weight, part), part_of(state, rows), temperature, softcap)
        accumulate_logits(logits, part.start, target[rows], *options)

    tokens = len(head.input) if save_logits else tokens
    return read_logits(head, tokens, chunk, save_logits, read)


def read_logits(
    head: Head,
    tokens: int,
    chunk: int,
    save_logits: bool,
    read: Callable[[slice, slice, Tensor], None],
) -> Tensor:
    """Compute the logits of a head for `read`, and return them if they are saved.

    The logits of `tokens` tokens and `chunk` classes exist at once, or all if they are saved, for
    which one chunk has to hold all classes. The result is empty otherwise. `read` takes which
    tokens and classes these are, and their logits.
    """
    M, C, head = len(head.input), len(head.weight), head.rounded
    buffer = head.buffer(M if save_logits else min(tokens, M), min(chunk, C))
    for rows in chunks(M, tokens):
        memory = buffer[rows.start * padded_width(C) :] if save_logits else buffer
        for part in chunks(C, chunk):
            read(rows, part, head.part(rows, part).logits(memory))
    return buffer if save_logits else buffer.new_empty(0)


class RowStatistics(NamedTuple):
    """Statistics of the rows of logits / temperature, in nats; NaN where a target is invalid."""

    nll: Tensor  # minus the log-probability of the target, 0 if the row is ignored, [M]
    logsumexp: Tensor  # log Z, [M]
    smoothing_loss: Tensor  # the sum of class weight * (log Z - x), [M]; empty if not wanted
    entropy: Tensor  # the entropy, [M]; empty if not wanted
    argmax: Tensor  # the lowest class with the maximum, [M] int64; empty if not wanted
    maximum: Tensor  # the maximum in `RowState`, which the backward pass reads, [M]
    sumexp: Tensor  # the sum in `RowState`, which the backward pass reads, [M]


def empty_statistics(
    like: Tensor, rows: int, needs_smoothing: bool, needs_entropy: bool
) -> RowStatistics:
    """Return memory for the statistics of the rows; those that are not wanted are empty."""
    dtype, entropy_rows = acc_dtype(like.dtype), rows if needs_entropy else 0
    return RowStatistics(
        nll=like.new_empty(rows, dtype=dtype),
        logsumexp=like.new_empty(rows, dtype=dtype),
        smoothing_loss=like.new_empty(rows if needs_smoothing else 0, dtype=dtype),
        entropy=like.new_empty(entropy_rows, dtype=dtype),
        argmax=like.new_empty(entropy_rows, dtype=torch.int64),
        maximum=like.new_empty(rows, dtype=dtype),
        sumexp=like.new_empty(rows, dtype=dtype),
    )


class GradientCoefficients(NamedTuple):
    """The coefficients of the terms in the gradient of each row of logits.

    With p the softmax of a row, its gradient is dlogits_coef * p + log_coef * p log p
    + smoothing_coef * class weights, plus label_coef at the target. A row whose coefficients are
    all 0 has the gradient 0, whatever its logits are.
    """

    dlogits_coef: Tensor  # the factor of p, [M]
    label_coef: Tensor  # the term at the target, [M]
    log_coef: Tensor | None  # the factor of p log p, [M]; None without an entropy
    # The factor of the class weights, [M]; None without a smoothing loss.
    smoothing_coef: Tensor | None

    def counts(self) -> Tensor:
        """Return which rows have a gradient, `[M]`."""
        return torch.stack([each != 0 for each in self if each is not None]).any(0)


def empty_coefficients(rows: int, grads: StatisticsGrads) -> GradientCoefficients:
    """Return memory for the coefficients of rows; those that no gradient needs are empty."""
    like = next(grad for grad in grads if grad is not None)
    return GradientCoefficients(
        dlogits_coef=like.new_empty(rows),
        label_coef=like.new_empty(rows),
        log_coef=like.new_empty(0 if grads.grad_entropy is None else rows),
        smoothing_coef=like.new_empty(0 if grads.grad_smoothing is None else rows),
    )


class HeadGradients(NamedTuple):
    """The gradients of the fields of a `Head`; those that are not wanted are empty."""

    input: Tensor
    weight: Tensor
    bias: Tensor
    low_rank_input: Tensor
    low_rank_weight: Tensor


def never(*_: Tensor) -> bool:
    return False


class LowRankGradients:
    """The sums of the gradients of the factors of low rank, over chunks of logits, in fp32.

    `head` has the factors in the dtype of the logits' gradient. `of_both` may serve where both are
    wanted; see `HeadKernels.low_rank_gradients`.
    """

    def __init__(self, head: Head, wanted: Wanted, of_both: Callable[..., bool] = never) -> None:
        self.head, self.of_both, accumulator = head, of_both, acc_dtype(head.input.dtype)
        self.dinput, self.dweight = (
            each.new_zeros(each.shape, dtype=accumulator) if wants and each is not None else None
            for each, wants in zip(head.tensors[3:], wanted[3:], strict=True)
        )

    def start(self, rows: slice, counts: Callable[[slice], Tensor]) -> None:
        """Take the rows of a chunk of tokens, with zeros where a row has no gradient."""
        if self.dweight is not None and self.head.low_rank_input is not None:
            states = self.head.low_rank_input[rows]
            self.states = torch.where(counts(rows)[:, None], states, 0)

    def add(self, padded: Tensor, rows: slice, part: slice) -> None:
        """Add what the gradient of the logits of a chunk gives, which may be overwritten.

        It may have more rows than the chunk; see `Head.rows_in`.
        """
        factor, padded = self.head.low_rank_weight, padded[:, : part.stop - part.start]
        if factor is None:
            return
        dinput = None if self.dinput is None else self.dinput[rows]
        if dinput is not None and self.dweight is not None:
            tensors = (self.states, factor[part], dinput, self.dweight[part])
            if self.of_both(padded[: len(self.states)], *tensors):
                return
        if dinput is not None:
            multiply_blocks(padded, factor[part], dinput, self.head.invariant, adds=True)
        if self.dweight is not None:
            multiply(padded[: len(self.states)].T, self.states, self.dweight[part], adds=True)

    def write(self, result: HeadGradients) -> None:
        """Round the sums to the result."""
        for total, gradient in zip((self.dinput, self.dweight), result[3:], strict=True):
            if total is not None:
                gradient.copy_(total)
