"""The memory plan of divergences from hidden states, whose logits come from two heads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...runtime.sizes import choose, decide, larger, smaller
from .plan import MIN_CHUNK_CLASSES, MIN_CHUNK_TOKENS, ROW_WORDS, padded_width

DEFAULT_BUDGET = 2**32  # bytes of workspace if no budget is given
LOSS_BUDGET = 2**28  # the same without gradients, for which a larger workspace is not faster
# Tokens whose logits of all classes exist at once if those of all tokens do not fit. The products
# of fewer tokens would wait for the matrices.
FORWARD_TOKENS = 512
MIN_FORWARD_TOKENS = 16


class DivergencePlan(NamedTuple):
    """The way in which `linear_divergence` cuts a batch into chunks.

    Fields:
        tokens: tokens whose logits of all classes are computed together, for the loss.
        saved: the number of last classes whose logits of all tokens stay in memory between loss and
            gradient.
        chunk: the classes whose logits are computed again together, for the gradient; 0 if the
            gradient is computed with the loss, from the logits of the same tokens.
        workspace_bytes: the most bytes of memory in use at once, in addition to inputs, results
            and the workspace of the matrix library.
    """

    tokens: int
    saved: int
    chunk: int
    workspace_bytes: int


def divergence_plan(
    tokens: int,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    memory_budget: int | None,
    input_grad: bool,
    weight_grad: bool,
    one_pass: bool,
) -> DivergencePlan:
    """Return the chunks of a batch.

    Args:
        tokens, hidden, vocabulary: the sizes of the student's head.
        dtype, teacher_dtype: the dtypes of the two heads.
        memory_budget: bytes of workspace, or None.
        input_grad, weight_grad: whether hidden states and matrix need a gradient.
        one_pass: whether the gradients may be computed in the forward pass.

    Raises:
        ValueError: the budget is too small.
    """
    itemsize = dtype.itemsize + teacher_dtype.itemsize
    row_bytes = max(padded_width(vocabulary) * itemsize, 1)
    fixed_bytes = ROW_WORDS * 4 * tokens
    has_gradient = input_grad or weight_grad
    if weight_grad and not input_grad:  # a copy of the hidden states in which masked rows are 0
        fixed_bytes += tokens * hidden * dtype.itemsize
    default = DEFAULT_BUDGET if has_gradient else LOSS_BUDGET
    budget = default if memory_budget is None else memory_budget
    all_bytes = tokens * row_bytes + fixed_bytes
    saved = 0 if one_pass or not has_gradient else vocabulary
    at_once = DivergencePlan(larger(tokens, 1), saved, vocabulary if saved else 0, all_bytes)
    fits = all_bytes <= budget
    if decide(fits, otherwise=False):
        return at_once
    half_type = dtype.itemsize == 2
    dweight_bytes = hidden * vocabulary * 4 if weight_grad and half_type else 0
    rows = _round((budget - dweight_bytes - fixed_bytes) // row_bytes, 256)
    by_tokens = DivergencePlan(rows, 0, 0, rows * row_bytes + dweight_bytes + fixed_bytes)
    takes_tokens = has_gradient and one_pass
    if takes_tokens and decide(rows >= MIN_CHUNK_TOKENS, otherwise=False):
        return _choose(fits, at_once, by_tokens)
    least_tokens, class_bytes = smaller(tokens, MIN_FORWARD_TOKENS), tokens * itemsize
    dinput_bytes, chunk_bytes = 0, 0
    if has_gradient:
        dinput_bytes = tokens * hidden * 4 if input_grad and half_type else 0
        chunk_bytes = min(MIN_CHUNK_CLASSES, padded_width(vocabulary)) * class_bytes
    least = fixed_bytes + larger(least_tokens * row_bytes, chunk_bytes + dinput_bytes)
    if memory_budget is not None and decide(memory_budget < least, otherwise=False):
        raise ValueError(
            f"memory_budget: expected at least {least:,} bytes for {tokens:,} tokens, or None,"
            f" got {memory_budget:,}"
        )
    room = larger(budget, least) - fixed_bytes
    fitting_rows = smaller(room // row_bytes, tokens)
    fitting_classes = (room - dinput_bytes) // larger(class_bytes, 1)
    saved = 0
    if not takes_tokens:
        rows = _round(smaller(fitting_rows, 4 * FORWARD_TOKENS), 128)
    else:
        quarter = smaller(room // 4 // row_bytes, tokens)
        rows = larger(smaller(quarter, FORWARD_TOKENS), least_tokens)
        # In the forward pass the logits of the saved classes exist for all tokens, and those of the
        # others for `rows`. In the backward pass the gradient of the hidden states is added up.
        other_rows = larger(tokens - rows, 1)
        saved = smaller((room - rows * row_bytes) // (other_rows * itemsize), fitting_classes)
        saved = larger(smaller(saved, vocabulary - 1), 0)
        saved = saved // MIN_CHUNK_CLASSES * MIN_CHUNK_CLASSES
    forward = rows * padded_width(vocabulary - saved) * itemsize + saved * class_bytes
    if not has_gradient:
        return _choose(fits, at_once, DivergencePlan(rows, 0, 0, forward + fixed_bytes))
    chunk = _equal_chunk(vocabulary - saved, choose(saved > 0, saved, fitting_classes))
    backward = padded_width(choose(saved > 0, saved, chunk)) * class_bytes + dinput_bytes
    workspace_bytes = larger(forward, backward) + fixed_bytes
    plan = DivergencePlan(rows, saved, chunk, workspace_bytes)
    if takes_tokens:  # with rows whose number a compiler does not know
        plan = _choose(by_tokens.tokens >= MIN_CHUNK_TOKENS, by_tokens, plan)
    return _choose(fits, at_once, plan)


def _choose(condition: bool, plan: DivergencePlan, otherwise: DivergencePlan) -> DivergencePlan:
    """Return one of two plans; compiled code decides when it runs."""
    pairs = zip(plan, otherwise, strict=True)
    return DivergencePlan(*(choose(condition, number, other) for number, other in pairs))


def _round(number: int, multiple: int) -> int:
    """Return the number rounded down to a multiple, if it is that large."""
    return larger(choose(number >= multiple, number // multiple * multiple, number), 1)


def _equal_chunk(classes: int, largest: int) -> int:
    """Return the classes of chunks of the same size, up to the rounding of their width."""
    largest = larger(largest // MIN_CHUNK_CLASSES, 1) * MIN_CHUNK_CLASSES
    chunks = larger(-(-classes // largest), 1)
    width = -(-classes // (chunks * MIN_CHUNK_CLASSES)) * MIN_CHUNK_CLASSES
    return larger(smaller(width, classes), 1)
