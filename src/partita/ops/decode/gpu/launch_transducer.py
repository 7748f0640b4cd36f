"""The rounds of searches of transducers on a GPU: launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ...logprobs.common import topk_fake
from ...logprobs.gpu.launch import topk_of_rows
from ..transducer_common import (
    CANDIDATES,
    NODE_BITS,
    Leaf,
    Progress,
    Walk,
    Written,
    leaves_of,
    map_leaves,
)
from .transducer import transducer_greedy_kernel, transducer_rows_kernel
from .transducer_beam import (
    Scratch,
    Sizes,
    Top,
    transducer_beam_kernel,
    transducer_trace_kernel,
)

BLOCK_V = 512  # classes of the K frames that are read together
BLOCK_D = 1024  # features of the frames that are copied together
BLOCK_ROW = 1024
MAX_CHUNKS = 16
BLOCK_NODES = 4096  # comparisons of nodes at a time


def advance(
    logits: Tensor,
    encoder: Tensor,
    lengths: Tensor,
    durations: Tensor,
    num_durations: int,
    walk: Walk,
    written: Written,
    blank: int,
    max_symbols_per_step: int,
) -> None:
    """Move each sequence on past its next label, and write the label, as the reference does."""
    logits = logits.contiguous()
    (B, K, D), T = walk.frames.shape, encoder.shape[1]
    V = logits.shape[2] - num_durations
    launch(
        transducer_greedy_kernel,
        B,
        logits_ptr=logits,
        encoder_ptr=encoder,
        lengths_ptr=lengths,
        durations_ptr=durations,
        walk=walk,
        written=written,
        best_ptr=torch.empty((B, 4, K), dtype=torch.float64, device=logits.device),
        T=T,
        D=D,
        V=V,
        S=written.tokens.shape[1] - 1,
        blank=blank,
        max_symbols=max_symbols_per_step,
        stride_b=encoder.stride(0),
        stride_t=encoder.stride(1),
        stride_d=encoder.stride(2),
        NUM_DURATIONS=num_durations,
        BLOCK_DURATIONS=next_power_of_2(max(num_durations, 1)),
        K=K,
        BLOCK_V=min(next_power_of_2(V), BLOCK_V),
        BLOCK_D=min(next_power_of_2(D), BLOCK_D),
        ACC_DTYPE=tl_acc_dtype(acc_dtype(logits.dtype)),
        num_warps=8,
    )


def write_rows(mask: Tensor, leaves: Sequence[Leaf]) -> None:
    """Write the rows of the new tensors over those of the old ones where the mask `[R]` says so."""
    memory = {leaf.old.untyped_storage().data_ptr(): leaf.old for leaf in leaves}

    def apart(leaf: Leaf) -> Leaf:
        # A tensor of the old state may be another one of the new state, and is then written first.
        other = memory.get(leaf.new.untyped_storage().data_ptr(), leaf.old)
        return leaf if other is leaf.old else leaf._replace(new=leaf.new.clone())

    leaves = [apart(leaf) for leaf in leaves]
    _copy_rows(mask, None, leaves, None, [leaf.old for leaf in leaves])


def merge_rows(mask: Tensor, leaves: Sequence[Leaf], targets: Sequence[Tensor]) -> None:
    """Write the rows of the new tensors where the mask `[R]` says so, and those of the old ones."""
    _copy_rows(mask, None, leaves, [leaf.old for leaf in leaves], targets)


def take_rows(rows: Tensor, state: Any, dims: Any) -> Any:
    """Return a state whose rows are these rows of another one."""
    taken = map_leaves(lambda dim, x: torch.empty_like(x), dims, state)
    leaves = leaves_of(state, taken, dims)
    _copy_rows(None, rows, leaves, None, [leaf.old for leaf in leaves])
    return taken


def _copy_rows(
    mask: Tensor | None,
    rows: Tensor | None,
    leaves: Sequence[Leaf],
    old: Sequence[Tensor] | None,
    targets: Sequence[Tensor],
) -> None:
    inners = tuple(math.prod(leaf.old.shape[leaf.dim + 1 :]) for leaf in leaves)
    sizes = tuple(
        math.prod(leaf.old.shape[: leaf.dim]) * inner
        for leaf, inner in zip(leaves, inners, strict=True)
    )
    R = leaves[0].new.shape[leaves[0].dim]
    chunks = min(next_power_of_2(cdiv(max(sizes), BLOCK_ROW)), MAX_CHUNKS)
    launch(
        transducer_rows_kernel,
        R * chunks,
        mask_ptr=mask,
        rows_ptr=rows,
        new=tuple(leaf.new.contiguous() for leaf in leaves),
        old=None if old is None else tuple(x.contiguous() for x in old),
        target=tuple(targets),
        inners=inners,
        sizes=sizes,
        R=R,
        CHUNKS=chunks,
        BLOCK=BLOCK_ROW,
        num_warps=4,
    )


def advance_beam(
    logits: Tensor,
    encoder: Tensor,
    lengths: Tensor,
    moves: Tensor,
    num_durations: int,
    progress: Progress,
    blank: int,
    max_symbols_per_step: int,
    max_tokens: int,
    look: int,
) -> None:
    """Let each hypothesis take an arc, and keep the best ones, as the reference does."""
    logits = logits.contiguous()[:, 0]  # [B * W, V + number of durations]
    B, V, W = len(encoder), logits.shape[1] - num_durations, progress.numbers.shape[2] // 2
    classes, KT, ND = logits[:, :V], min(W + 1, V), max(num_durations, 1)
    top = topk_fake(classes, KT)
    topk_of_rows(classes, KT, 1.0, 0.0, top)
    block_c = next_power_of_2((CANDIDATES + 1) * W)
    block_e = next_power_of_2(W * (KT + 1) * ND)
    scores = torch.empty((B, block_e), dtype=torch.float64, device=logits.device)
    token_scores = torch.empty((B, block_c), dtype=torch.float64, device=logits.device)
    integers = torch.empty((4, B, block_c), dtype=torch.int64, device=logits.device)
    block_w = next_power_of_2(W)
    launch(
        transducer_beam_kernel,
        B,
        logits_ptr=logits,
        top=Top(top.indices, top.entries, top.maximum, top.sumexp),
        encoder_ptr=encoder,
        lengths_ptr=lengths,
        moves_ptr=moves,
        progress=progress,
        scratch=Scratch(scores, token_scores, *integers),
        size=Sizes(encoder.shape[2], V, W, KT, ND, logits.shape[1]),
        blank=blank,
        S=max_tokens,
        steps=progress.events.tokens.shape[1] // W,
        max_symbols=max_symbols_per_step,
        look=look,
        stride_b=encoder.stride(0),
        stride_t=encoder.stride(1),
        stride_d=encoder.stride(2),
        HAS_DURATIONS=num_durations > 0,
        BLOCK_E=block_e,
        BLOCK_C=block_c,
        CANDIDATES=CANDIDATES,
        NODE_BITS=NODE_BITS,
        BLOCK_W=block_w,
        BLOCK_N=max(BLOCK_NODES // block_w, 16),
        BLOCK_D=min(next_power_of_2(encoder.shape[2]), BLOCK_D),
        ACC_DTYPE=tl_acc_dtype(acc_dtype(logits.dtype)),
        num_warps=8 if W <= 4 else 16,
    )


def trace(
    ends: tuple[Tensor, Tensor], events: tuple[Tensor, ...], written: tuple[Tensor, ...]
) -> None:
    """Write the labels of hypotheses `[B, nbest]`, which end in these events and are so many."""
    B, nbest, columns = written[0].shape
    launch(
        transducer_trace_kernel,
        B * nbest,
        ends=ends,
        events=events,
        written=written,
        nbest=nbest,
        room=events[0].shape[1],
        S=columns - 1,
        num_warps=1,
    )
