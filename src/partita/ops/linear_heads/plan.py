"""The memory plans of losses from hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...runtime import checks
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import choose, decide, larger, smaller
from .packing import packing_wanted, sizes_allow_packing

# Bytes of logits in the accumulator dtype up to which an eager call keeps them between forward and
# backward. Calls of this size wait for the host, and this memory is negligible.
SMALL_LOGITS_BYTES = 2**24
SMALL_COPIES = 4  # such tensors alive at once: logits, log-probabilities, and their gradients
# Bytes of workspace that all logits at once, or a lean plan, may use if no budget is given.
DEFAULT_BUDGET = 2**31
# Bytes of the logits in a chunk of tokens if no budget is given. With smaller chunks, adding up the
# gradient of the matrix would take a notable part of the time.
DEFAULT_CHUNK_BYTES = 2**29
# Bytes of a chunk beyond which the lean plan and a loss without gradients do not become faster.
LEAN_CHUNK_BYTES = 5 * 2**26
LOSS_CHUNK_BYTES = 15 * 2**24
# Classes in a chunk of the lean plan.
MIN_CHUNK_CLASSES, MAX_CHUNK_CLASSES = 128, 2**15
WAVE_CLASSES = 66 * 128  # makes product tiles that 132 multiprocessors share evenly
# Tokens in a chunk of the fast plan. With fewer tokens, adding up the gradient of the matrix takes
# as long as a product.
MIN_CHUNK_TOKENS = 2048
LOSS_CHUNK_TOKENS = 8192  # more tokens at a time would not make the products faster
# Tokens in a chunk on a CPU, if the gradient of the matrix is added up in place.
CPU_CHUNK_TOKENS = 512
ROW_WORDS = 24  # upper bound on the 4-byte words that a token needs in addition to its logits
ROW_ALIGNMENT = 16  # columns; matrix products and kernels need rows that start on 16 bytes
# What gradients of fp16 logits are multiplied by where they are computed with the loss. Otherwise
# they would underflow, as a loss scale is not known before the backward pass.
FP16_SCALE = 2.0**12
# The factor of each row of a divergence there. It is smaller, since a logarithm of probabilities
# stands in the gradient of the logits.
FP16_FACTOR = 2.0**8
# Tokens of each product in the batch-invariant mode. The library chooses a product's kernel, and so
# the order of its sums, by its sizes. Fewer tokens would leave multiprocessors without a tile.
BLOCK_TOKENS = 1024

DIVERGENCE_BUDGET = 2**32  # bytes of workspace of a divergence if no budget is given
DIVERGENCE_LOSS_BUDGET = 2**28  # the same without gradients, for which more is not faster
# Tokens whose logits of all classes exist at once if those of all tokens do not fit. The products
# of fewer tokens would wait for the matrices.
FORWARD_TOKENS = 512
MIN_FORWARD_TOKENS = 16

ALL_AT_ONCE = "the workspace holds all logits at once"
CHUNKS_OF_TOKENS = "the workspace holds chunks of tokens, but not all logits"
TOO_SMALL = "the workspace holds no chunk of 2,048 tokens beside the matrix's gradient in fp32"
NO_CHUNKS_OF_TOKENS = (
    "the workspace does not hold all logits, and unreduced and parallel losses, weighted sums in"
    " fp16, and fp16 inside batch_invariant() cannot take chunks of tokens"
)


class MemoryPlan(NamedTuple):
    """The way in which `linear_cross_entropy` cuts a batch into chunks.

    Fields:
        name: `fast`, `lean` or `loss`. The fast plan takes chunks of tokens: their logits, the
            gradient in the same memory, and the gradients of hidden states and matrix. The lean
            plan takes chunks of classes: it computes the logits for the loss and recomputes them
            for the gradients. The loss plan computes no gradient.
        chunk: tokens (`fast`) or classes (`lean`, `loss`) at a time.
        workspace_bytes: the most bytes of memory in use at once, in addition to inputs, results
            and the workspace of the matrix library.
        flops: floating-point operations of the matrix products, forward and backward.
        reason: why this plan was chosen.
    """

    name: str
    chunk: int
    workspace_bytes: int
    flops: int
    reason: str


def linear_cross_entropy_plan(
    tokens: int,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    memory_budget: int | None = None,
    input_grad: bool = True,
    weight_grad: bool = True,
    reduced: bool = True,
    parallel: bool = False,
    batch_invariant: bool = False,
    logits_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    low_rank: int = 0,
) -> MemoryPlan:
    """Return the chunks, workspace and operations that `linear_cross_entropy` will use.

    The plan is `fast` if the workspace allows all logits at once or has room for 2,048 tokens.
    Otherwise it is `lean`, which takes chunks of classes and recomputes the logits.

    Without a budget, a mean or sum holds all logits if they fit 2 GiB. Otherwise it takes chunks of
    tokens of equal length, whose logits take at most 0.5 GiB, or as many bytes as the matrix if
    that is more, with room for at least 2,048 tokens. The workspace depends on the arguments alone,
    so that results do too.

    With `PARTITA_PACK_ROWS=1` it is the plan of a GPU that packs rows, which needs a copy of a
    chunk's hidden states. This concerns means and sums in bf16 with `hidden` and `vocabulary` that
    are multiples of 16.

    An eager call whose logits take at most 16 MiB in fp32 follows no plan if four times these bytes
    fit the budget: PyTorch's own linear layer computes its logits.

    Args:
        tokens, hidden, vocabulary: sizes of `input` `[tokens, hidden]` and `linear_weight`
            `[vocabulary, hidden]`.
        dtype: the dtype of both.
        memory_budget: bytes of workspace; None for what suits the sizes, or 240 MiB for a loss
            without gradient.
        input_grad, weight_grad: whether hidden states and matrix need a gradient.
        reduced: whether the loss is a mean or a sum. The backward pass of unreduced losses needs
            the logits again.
        parallel: whether this is the plan of one rank of `partita.parallel`, which has these
            classes. Its losses are never reduced, and ranks exchange the gradient of the hidden
            states in fp32.
        batch_invariant: whether this is the plan of a call inside `partita.batch_invariant()`. Its
            tokens are padded to a multiple of 1,024. The classes of a product depend on no number
            of tokens: they are all classes, unless the logits of 2,048 tokens take more than half
            of the budget (2 GiB without one).
        logits_dtype: as in `linear_cross_entropy`. Logits in fp32 take twice the memory of those of
            a half type, so the numbers of bytes above are doubled.
        weight_dtype: the dtype of the matrix, if that is another one. The workspace then has a copy
            of the matrix in `dtype`.
        low_rank: the columns of the factors of low rank, 0 without them. The workspace then has
            copies of both and their gradients in fp32. `input_grad` is true for them too.

    Returns:
        `MemoryPlan(name, chunk, workspace_bytes, flops, reason)`.

    Raises:
        TypeError: `dtype` is not a floating dtype.
        ValueError: a size is below 0, or the budget is too small for a chunk of 128 classes.

    Source: Wijmans et al., Cut your losses in large-vocabulary language models, 2024, for the
    problem; the plans are our own.

    Example:
        >>> import torch, partita
        >>> plan = partita.linear_cross_entropy_plan(8192, 4096, 128256, torch.bfloat16)
        >>> plan.name, plan.chunk, plan.workspace_bytes, plan.flops
        ('fast', 8192, 2104180736, 25821343383552)
        >>> plan.reason
        'the workspace holds all logits at once'
        >>> sizes = 8192, 4096, 128256
        >>> partita.linear_cross_entropy_plan(*sizes, torch.bfloat16, memory_budget=2**29).name
        'lean'
    """
    # A compiler may not know the number of tokens. Then the chunk is an expression in it, and the
    # name is that of a plan for every number: `fast` if that is the plan of 2,048 tokens.
    sizes = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary, "low_rank": low_rank}
    check_plan(dtype, memory_budget, **sizes)
    widens, rounds = widens_logits(logits_dtype, dtype, "dtype"), weight_dtype not in (None, dtype)
    packs = reduced and not (parallel or widens or rounds) and packing_wanted()
    packs = packs and sizes_allow_packing(hidden, vocabulary, dtype)
    half_type, itemsize, size_ratio = dtype.itemsize == 2, dtype.itemsize, 1 + widens
    logit_size, copy_bytes = itemsize * size_ratio, rounds * hidden * vocabulary * itemsize
    copy_bytes += low_rank_bytes(low_rank, tokens, vocabulary, dtype)
    step, classes = 256, vocabulary
    if batch_invariant:
        step = BLOCK_TOKENS * size_ratio
        tokens = larger(-(-tokens // BLOCK_TOKENS), 1) * BLOCK_TOKENS
        default = DEFAULT_BUDGET * size_ratio
        room = default if memory_budget is None else memory_budget
        classes = invariant_classes(vocabulary, logit_size, room)
    product_flops = 2 * tokens * hidden * vocabulary
    row_bytes = max(padded_width(vocabulary) * logit_size, 1)
    # Programs that share a row exchange one byte for every 512 classes.
    token_bytes = ROW_WORDS * 4 + vocabulary // 512
    fixed_bytes = token_bytes * tokens + copy_bytes
    if widens:  # Half of the tokens have fp32 logits at a time beside their gradient, or one row.
        fixed_bytes += (1 + tokens % 2) * row_bytes
    reason = "a loss without gradients reads the logits of each chunk once"
    if not (input_grad or weight_grad):
        name = "loss"
        chunk_tokens = smaller(tokens, MIN_CHUNK_TOKENS if batch_invariant else LOSS_CHUNK_TOKENS)
        flops, fits = product_flops, False
    else:
        name, chunk_tokens = "lean", tokens
        flops = product_flops * (1 + input_grad + weight_grad)
        # The matrix's gradient needs a copy of the hidden states in which ignored rows are 0. It is
        # in the memory of their own gradient, if that is not in use.
        states_bytes = tokens * hidden * itemsize if weight_grad else 0
        fixed_bytes += states_bytes if parallel or not input_grad else 0
        # Each rank sends and receives the gradient of the hidden states in fp32.
        exchanged_bytes = 8 * tokens * hidden if parallel and input_grad else 0
        logits_bytes = row_bytes
        packed_bytes = hidden * itemsize if packs else 0
        row_bytes += packed_bytes
        all_at_once = tokens * row_bytes + fixed_bytes + exchanged_bytes
        # The matrix's gradient is added up in fp32. It is rounded into its result, which is half as
        # large, when the logits are no longer needed.
        has_sum = weight_grad and half_type and not rounds
        dweight_bytes = hidden * vocabulary * 2 if has_sum else 0
        # In fp16, so is that of the hidden states, until its upstream factor is known.
        takes_chunks = reduced and not parallel and classes == vocabulary
        # Fp16 rounds gradients in another way there, and the number of tokens must not decide.
        takes_chunks = takes_chunks and not (batch_invariant and dtype == torch.float16)
        dinput_bytes = 6 * tokens * hidden if takes_chunks and dtype == torch.float16 else 0
        budget = memory_budget
        if budget is None:
            budget = DEFAULT_BUDGET * size_ratio + tokens * packed_bytes + copy_bytes
        room = budget - dweight_bytes - fixed_bytes - dinput_bytes
        if memory_budget is None and takes_chunks:
            chunk_bytes = max(DEFAULT_CHUNK_BYTES, dweight_bytes) * size_ratio
            chunk = chunk_bytes // logits_bytes // step * step
            room = max(max(chunk, MIN_CHUNK_TOKENS) * row_bytes, dweight_bytes)
            budget = larger(budget, room + dweight_bytes + fixed_bytes)
        fits = classes == vocabulary and all_at_once <= budget
        if decide(fits, otherwise=False):
            return MemoryPlan("fast", max(tokens, 1), all_at_once, flops, ALL_AT_ONCE)
        least_room = max(MIN_CHUNK_TOKENS * row_bytes, dweight_bytes)
        spare = 0 if memory_budget is None else memory_budget - dweight_bytes - least_room
        has_room = decide(room >= least_room, otherwise=spare >= MIN_CHUNK_TOKENS * token_bytes)
        if takes_chunks and has_room:
            chunk = larger(room // row_bytes // step * step, step)
            chunks = larger(-(-tokens // chunk), 1)
            rows = -(-tokens // chunks)  # all chunks get about the same length
            chunk = choose(fits, larger(tokens, 1), -(-rows // step) * step)
            logits_bytes = larger(chunk * row_bytes, dweight_bytes)
            workspace_bytes = logits_bytes + dweight_bytes + fixed_bytes + dinput_bytes
            return MemoryPlan("fast", chunk, workspace_bytes, flops, CHUNKS_OF_TOKENS)
        reason = TOO_SMALL if takes_chunks else NO_CHUNKS_OF_TOKENS
        flops += product_flops
        if input_grad:  # the gradient of half types is added up in fp32, that of others in place
            fixed_bytes += tokens * hidden * 4 if half_type else states_bytes
        if batch_invariant:
            chunk_tokens = smaller(tokens, MIN_CHUNK_TOKENS)
            fixed_bytes += 2 * dweight_bytes
    chunk_width = padded_width(classes if batch_invariant else min(MIN_CHUNK_CLASSES, vocabulary))
    least = chunk_tokens * chunk_width * logit_size + fixed_bytes
    if memory_budget is not None and decide(memory_budget < least, otherwise=False):
        raise ValueError(
            f"memory_budget: expected at least {least:,} bytes for {tokens:,} tokens, or None,"
            f" got {memory_budget:,}"
        )
    if memory_budget is not None:
        chunk_bytes = memory_budget - fixed_bytes
    else:
        chunk_bytes = (LEAN_CHUNK_BYTES if name == "lean" else LOSS_CHUNK_BYTES) * size_ratio
    room = chunk_bytes // larger(chunk_tokens * logit_size, 1)
    chunk = choose(fits, vocabulary, _chunk_classes(room, vocabulary))
    chunk = classes if batch_invariant else chunk
    workspace_bytes = chunk_tokens * padded_width(chunk) * logit_size + fixed_bytes
    return MemoryPlan(name, chunk, workspace_bytes, flops, reason)


def check_plan(dtype: torch.dtype, memory_budget: int | None, **sizes: int) -> None:
    """Raise unless a plan of these sizes can be made."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < 0:
            raise ValueError(f"{name}: expected an int of at least 0, got {value!r}")
    check_budget(memory_budget)
    if dtype not in checks.FLOATING:
        raise TypeError(f"dtype: expected a floating torch.dtype, got {dtype!r}")


def low_rank_bytes(rank: int, tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the bytes of copies of the factors of low rank, and of their gradients' sums.

    The factor of the rows is copied once to be rounded, and once more without ignored rows.
    """
    width = padded_width(rank) * (2 * dtype.itemsize + acc_dtype(dtype).itemsize)
    return width * (tokens + vocabulary)


def invariant_classes(vocabulary: int, itemsize: int, budget: int) -> int:
    """Return the classes of a batch-invariant product, whose logits have this size in bytes.

    Their number decides the order of a row's sums, so it depends on no number of tokens and on no
    wanted gradient. The logits of 2,048 tokens take at most half of the budget.
    """
    least = min(MIN_CHUNK_CLASSES, padded_width(vocabulary))
    width = budget // (2 * MIN_CHUNK_TOKENS * itemsize)
    if width < least:
        raise ValueError(
            f"memory_budget: expected at least {2 * MIN_CHUNK_TOKENS * itemsize * least:,} bytes"
            f" inside batch_invariant(), or None, got {budget:,}"
        )
    return vocabulary if width >= padded_width(vocabulary) else _equal_chunk(vocabulary, width)


def _chunk_classes(room: int, vocabulary: int) -> int:
    """Return the classes in a chunk if the workspace has room for `room` classes."""
    largest = smaller(room, MAX_CHUNK_CLASSES) // MIN_CHUNK_CLASSES * MIN_CHUNK_CLASSES
    largest = larger(largest, MIN_CHUNK_CLASSES)
    waves = largest // WAVE_CLASSES * WAVE_CLASSES
    equal = _equal_chunk(vocabulary, largest)
    return larger(smaller(choose(largest >= WAVE_CLASSES, waves, equal), vocabulary), 1)


def is_small(tokens: int, vocabulary: int, dtype: torch.dtype, memory_budget: int | None) -> bool:
    """Return whether an eager call composes PyTorch's linear layer with the loss of its logits."""
    logits_bytes = tokens * vocabulary * acc_dtype(dtype).itemsize
    return logits_bytes <= SMALL_LOGITS_BYTES and (
        memory_budget is None or SMALL_COPIES * logits_bytes <= memory_budget
    )


def check_budget(memory_budget: int | None) -> None:
    """Raise unless the budget is a number of bytes or None."""
    if memory_budget is not None and (
        isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget < 0
    ):
        raise ValueError(
            f"memory_budget: expected a number of bytes or None, got {memory_budget!r}"
        )


def widens_logits(
    logits_dtype: torch.dtype | None, dtype: torch.dtype, name: str = "input"
) -> bool:
    """Return whether logits of this dtype are wider than the product's factors; raise if narrower.

    `name` is that of the argument which has the dtype of the factors.
    """
    if logits_dtype is None:
        return False
    if logits_dtype != torch.float32 or dtype == torch.float64:
        raise TypeError(
            f"logits_dtype: expected None, or torch.float32 where {name} has at most 32 bits,"
            f" got {logits_dtype!r} and {dtype}"
        )
    return dtype.itemsize == 2


def padded_width(classes: int) -> int:
    """Return the columns of a buffer for this number of classes."""
    return -(-classes // ROW_ALIGNMENT) * ROW_ALIGNMENT


class DivergencePlan(NamedTuple):
    """The way in which `linear_divergence` cuts a batch into chunks."""

    tokens: int  # tokens whose logits of all classes are computed together, for the loss
    # The number of last classes whose logits of all tokens stay in memory between loss and
    # gradient.
    saved: int
    # The classes whose logits are computed again together, for the gradient; 0 if the gradient is
    # computed with the loss, from the logits of the same tokens.
    chunk: int
    # The most bytes of memory in use at once, in addition to inputs, results and the workspace of
    # the matrix library.
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
    invariant: bool = False,
    widens: bool = False,
    rounds: bool = False,
    rank: int = 0,
) -> DivergencePlan:
    """Return the chunks of a batch; raise ValueError for too small a budget.

    Sizes and dtype are those of the student's head. `one_pass` says whether the gradients may be
    computed in the forward pass, `widens` whether logits are in fp32, `rounds` whether the
    student's matrix is copied, and `rank` how many columns its factors of low rank have. Chunks
    have all classes in the batch-invariant mode. Fp16 computes gradients in the forward pass in
    chunks of tokens alone, which scale them as no loss scale is known, and in that mode never, as
    the number of tokens must not decide.
    """
    itemsize, usual_size = 0, dtype.itemsize + teacher_dtype.itemsize
    for each in (dtype, teacher_dtype):
        itemsize += acc_dtype(each).itemsize if widens else each.itemsize
    row_bytes = max(padded_width(vocabulary) * itemsize, 1)
    copy_bytes = rounds * hidden * vocabulary * dtype.itemsize
    copy_bytes += low_rank_bytes(rank, tokens, vocabulary, dtype)
    fixed_bytes = ROW_WORDS * 4 * tokens + copy_bytes + 2 * widens * row_bytes
    has_gradient = input_grad or weight_grad
    if weight_grad and not input_grad:  # a copy of the hidden states in which masked rows are 0
        fixed_bytes += tokens * hidden * dtype.itemsize
    default = DIVERGENCE_BUDGET if has_gradient else DIVERGENCE_LOSS_BUDGET
    budget = memory_budget
    if budget is None:
        budget = default * itemsize // usual_size + copy_bytes
    all_bytes = tokens * row_bytes + fixed_bytes
    fits, half_type = all_bytes <= budget, dtype.itemsize == 2
    dweight_bytes = hidden * vocabulary * 4 if weight_grad and half_type and not rounds else 0
    by_tokens_bytes = dweight_bytes + fixed_bytes
    if input_grad and dtype == torch.float16:  # in fp32 until it has its upstream factor
        by_tokens_bytes += 6 * tokens * hidden
    rows = _round((budget - by_tokens_bytes) // row_bytes, 256)
    has_room = decide(rows >= MIN_CHUNK_TOKENS, otherwise=False)
    if dtype == torch.float16 and (invariant or not has_room or decide(fits, otherwise=True)):
        one_pass = False
    saved = 0 if one_pass or not has_gradient else vocabulary
    at_once = DivergencePlan(larger(tokens, 1), saved, vocabulary if saved else 0, all_bytes)
    if decide(fits, otherwise=False):
        return at_once
    if invariant:
        rows = MIN_CHUNK_TOKENS
        if one_pass or not has_gradient:
            blocks = (budget - dweight_bytes - fixed_bytes) // (row_bytes * BLOCK_TOKENS)
            rows = larger(blocks, 1) * BLOCK_TOKENS
        workspace_bytes = rows * row_bytes + dweight_bytes + fixed_bytes
        if memory_budget is not None and decide(workspace_bytes > budget, otherwise=False):
            raise ValueError(
                f"memory_budget: expected at least {workspace_bytes:,} bytes for {tokens:,} tokens"
                f" inside batch_invariant(), or None, got {memory_budget:,}"
            )
        by_blocks = DivergencePlan(rows, 0, vocabulary if saved else 0, workspace_bytes)
        return _choose(fits, at_once, by_blocks)
    by_tokens = DivergencePlan(rows, 0, 0, rows * row_bytes + by_tokens_bytes)
    takes_tokens = has_gradient and one_pass
    if takes_tokens and has_room:
        return _choose(fits, at_once, by_tokens)
    least_tokens, class_bytes = smaller(tokens, MIN_FORWARD_TOKENS), tokens * itemsize
    dinput_bytes, chunk_bytes = 0, 0
    if has_gradient:
        # The gradient of half types is added up in fp32. That of others is added up in place, so
        # that the copy of the hidden states in which masked rows are 0 is not in its memory.
        itemsize_of_sum = 4 if half_type else dtype.itemsize * weight_grad
        dinput_bytes = tokens * hidden * itemsize_of_sum if input_grad else 0
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
