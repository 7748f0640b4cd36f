"""A round of greedy search of a transducer on a GPU: launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ..transducer_common import Leaf, Walk, Written
from .transducer import transducer_greedy_kernel, transducer_rows_kernel

BLOCK_V = 256  # classes of the K frames that are read together
BLOCK_D = 128
BLOCK_ROW = 1024
MAX_CHUNKS = 16


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
    new, old, inners, sizes = [], [], [], []
    for leaf in leaves:
        # A tensor of the old state may be another one of the new state, and is then written first.
        other = memory.get(leaf.new.untyped_storage().data_ptr(), leaf.old)
        values = leaf.new if other is leaf.old else leaf.new.clone()
        inners.append(math.prod(leaf.old.shape[leaf.dim + 1 :]))
        sizes.append(math.prod(leaf.old.shape[: leaf.dim]) * inners[-1])
        new.append(values.contiguous())
        old.append(leaf.old)
    chunks = min(next_power_of_2(cdiv(max(sizes), BLOCK_ROW)), MAX_CHUNKS)
    launch(
        transducer_rows_kernel,
        len(mask) * chunks,
        mask_ptr=mask,
        new=tuple(new),
        old=tuple(old),
        inners=tuple(inners),
        sizes=tuple(sizes),
        R=len(mask),
        CHUNKS=chunks,
        BLOCK=BLOCK_ROW,
        num_warps=4,
    )
