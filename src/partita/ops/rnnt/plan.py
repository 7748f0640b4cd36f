"""The memory plan of transducer losses from encoder and predictor."""

from __future__ import annotations

import torch

from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import choose, decide, larger, smaller
from ..linear_heads.plan import MemoryPlan, check_plan, padded_width

DEFAULT_BUDGET = 2**30  # bytes of workspace if no budget is given
# Bytes of logits in a chunk beyond which the products do not become faster.
CHUNK_BYTES = 2**28
# Bytes of a node beside its logits: two log-probabilities, alpha and beta in fp64, padded to whole
# chunks on a GPU, the log-sum-exp in fp64, and two posteriors in fp32.
NODE_BYTES = 64
# The same for each duration of a TDT: its two posteriors, two log-probabilities in fp64, its logit.
DURATION_BYTES = 28
PARTIAL_STEPS = 4  # steps that share a partial sum of the predictor's gradient

ONE_PRODUCT = "a loss without gradients reads the logits of each chunk once"
ALL_AT_ONCE = "the workspace holds all logits, so each is computed once"
TOO_SMALL = "the workspace does not hold all logits, so they are computed for each of two passes"
UNREDUCED = "the factor of each loss is known in the backward pass only, which computes logits anew"


class RNNTPlan(MemoryPlan):
    """The way in which `linear_rnnt_loss` cuts the joint into chunks.

    Fields:
        name: `fast`, `lean` or `loss`. The fast plan keeps all logits between the scan and the
            gradient: three matrix products. The lean plan computes them for each: four products.
            The loss plan computes no gradient: one product.
        chunk: the steps, of all sequences, whose joint is in memory at a time. Each has U + 1 rows.
        workspace_bytes: the most bytes of memory in use at once, in addition to inputs, results
            and the workspace of the matrix library.
        flops: floating-point operations of the matrix products, forward and backward.
        reason: why this plan was chosen.
    """

    __slots__ = ()


def linear_rnnt_plan(
    batch: int,
    steps: int,
    labels: int,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    durations: int = 0,
    low_rank: int = 0,
    memory_budget: int | None = None,
    gradient: bool = True,
    reduced: bool = True,
) -> RNNTPlan:
    """Return the chunks, workspace and operations that `linear_rnnt_loss` will use.

    Without a budget, the workspace is at most 1 GiB, or what a chunk of one step needs. The plan
    depends on the arguments alone, so that results do too.

    Args:
        batch, steps, labels: sizes B, T and U of `encoder` `[B, T, D]` and `predictor`
            `[B, U + 1, D]`.
        hidden, vocabulary: sizes D and V of `linear_weight` `[V, D]`.
        dtype: the dtype of all of these.
        durations: the number of durations, for `linear_tdt_loss`.
        low_rank: the rank of LoRA, 0 without it.
        memory_budget: bytes of workspace; None for the rule above.
        gradient: whether any input needs a gradient.
        reduced: whether the losses are reduced, and their dtype is not fp16. Otherwise the
            gradients are computed in the backward pass.

    Returns:
        `RNNTPlan(name, chunk, workspace_bytes, flops, reason)`.

    Raises:
        TypeError: `dtype` is not a floating dtype.
        ValueError: a size is below 0, or the budget is too small for a chunk of one step.

    Source: the plans are our own; Kuang et al., Pruned RNN-T for fast, memory-efficient ASR
        training, 2022, for the problem.

    Example:
        >>> import torch, partita
        >>> plan = partita.linear_rnnt_plan(32, 200, 100, 640, 1025, torch.bfloat16)
        >>> plan.name, plan.chunk, plan.reason == partita.linear_rnnt_plan(
        ...     8, 400, 100, 640, 1025, torch.bfloat16
        ... ).reason
        ('lean', 1277, False)
    """
    sizes = {"batch": batch, "steps": steps, "labels": labels, "hidden": hidden}
    sizes |= {"vocabulary": vocabulary, "durations": durations, "low_rank": low_rank}
    check_plan(dtype, memory_budget, **sizes)
    rows = batch * steps * (labels + 1)
    columns = vocabulary + durations
    product = 2 * rows * (hidden * columns + low_rank * (hidden + columns))
    inputs = (batch, steps, labels, hidden, vocabulary, dtype)
    options = (durations, memory_budget, gradient, reduced)
    chunk, keeps_logits, workspace_bytes = joint_chunks(*inputs, *options, rank=low_rank)
    if keeps_logits:
        name, products, reason = "fast", 3, ALL_AT_ONCE
    elif not gradient:
        name, products, reason = "loss", 1, ONE_PRODUCT
    else:
        name, (reason, products) = "lean", (TOO_SMALL, 4) if reduced else (UNREDUCED, 5)
    return RNNTPlan(name, chunk, workspace_bytes, products * product, reason)


def joint_chunks(
    batch: int,
    steps: int,
    labels: int,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype,
    durations: int,
    memory_budget: int | None,
    gradient: bool,
    reduced: bool,
    invariant: bool = False,
    rank: int = 0,
) -> tuple[int, int, int]:
    """Return the chunk, whether all logits stay in memory, 1 or 0, and the bytes of the workspace.

    The arguments are those of `linear_rnnt_plan`, and a compiler may not know the sizes. In the
    batch-invariant mode chunks have whole partial sums, and no logits stay in memory, since those
    of a chunk would start anywhere.
    """
    itemsize, positions, rows = dtype.itemsize, labels + 1, batch * steps * (labels + 1)
    columns = padded_width(vocabulary) + (padded_width(durations) if durations else 0)
    step_logits = positions * columns * itemsize
    step_hidden = positions * (hidden + padded_width(rank)) * itemsize * (2 if gradient else 1)
    if gradient:
        step_hidden += positions * hidden * acc_dtype(dtype).itemsize // PARTIAL_STEPS
    fixed = rows * (NODE_BYTES + durations * DURATION_BYTES)
    if gradient and dtype.itemsize == 2:
        # Sums over chunks are in fp32.
        sums = (vocabulary + durations) * (hidden + 1) + batch * (steps + positions) * hidden
        fixed += sums * acc_dtype(dtype).itemsize
    factor_bytes = itemsize + (acc_dtype(dtype).itemsize if gradient else 0)
    fixed += padded_width(rank) * (hidden + columns) * factor_bytes
    total_steps = larger(batch * steps, 1)
    limit = larger(CHUNK_BYTES // larger(step_logits, 1), 1)
    budget = DEFAULT_BUDGET if memory_budget is None else memory_budget
    all_logits = total_steps * step_logits
    keeps_logits = 0
    if gradient and reduced and not invariant:
        keeps_logits = choose(fixed + all_logits + step_hidden <= budget, 1, 0)
    step = PARTIAL_STEPS if invariant else 1
    least = fixed + step * (step_logits + step_hidden)
    if memory_budget is not None and decide(memory_budget < least, otherwise=False):
        raise ValueError(
            f"memory_budget: expected at least {least:,} bytes for {rows:,} nodes, or None,"
            f" got {memory_budget:,}"
        )
    fixed += keeps_logits * all_logits
    step_bytes = step_hidden + (1 - keeps_logits) * step_logits
    room = (budget - fixed) // larger(step_bytes, 1)
    chunk = larger(smaller(smaller(larger(room, 1), limit), total_steps) // step * step, step)
    return chunk, keeps_logits, fixed + chunk * step_bytes
