"""The decoders on a GPU: block sizes and the layout of the beam, as pure functions of sizes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ....runtime.caches import register_cache
from ....runtime.sizes import cdiv, next_power_of_2

ALIGNMENT = 16  # bytes of the widest load
BLOCK_CLASSES = 1024  # classes of a piece
MAX_PIECES = 8
FEW_CANDIDATES = 64  # that are ranked without a threshold
MIN_BEAM_LANES = 16
MANY_CANDIDATES = 1024  # that take eight warps


def aligned_classes(C: int, element_size: int, strides: Sequence[int], address: int) -> int:
    """Return how many neighbouring classes start on 16 bytes in each row, or 1."""
    vec = ALIGNMENT // element_size
    aligned = address % ALIGNMENT == 0 and all(stride % vec == 0 for stride in strides[:2])
    return vec if aligned and strides[2] == 1 and C % vec == 0 else 1


def greedy_options(C: int, vec: int) -> dict[str, int]:
    """Return the blocks in which rows of C classes are read, as the kernel takes them."""
    block = min(next_power_of_2(C), BLOCK_CLASSES)
    blocks = cdiv(C, block)
    pieces = cdiv(blocks, cdiv(blocks, MAX_PIECES))
    rows = BLOCK_CLASSES // block
    return {
        "VEC": min(vec, block),
        "PIECES": pieces,
        "ROWS": rows,
        "BLOCK_V": block,
        "num_warps": 4,
    }


class BeamPlan(NamedTuple):
    """The blocks and the memory of beam search.

    Fields:
        pairs: extensions of prefixes by labels that are formed at a step.
        table_size: slots of the table of prefixes of a sequence, a power of 2.
        filters: whether a threshold leaves out candidates before they are ranked.
        block_w: lanes of the beam.
        block_p: lanes of the candidates: prefixes that stay, and pairs.
        block_i: candidates that are ranked together.
        num_warps: warps of a program.
    """

    pairs: int
    table_size: int
    filters: bool
    block_w: int
    block_p: int
    block_i: int
    num_warps: int


def extension_pairs(width: int) -> list[tuple[int, int]]:
    """Return which extensions can be among the best, as ranks of the prefix and of the label.

    For prefix i and label k, counted from 0, the extensions of the prefixes up to i by the labels
    up to k come first. These are (i + 1)(k + 1) with itself, less one for each prefix that ends in
    such a label. Where that leaves `width` others, it is not formed. Extensions that are in the
    beam already come first too, because a merge only adds to a score.
    """
    return [(i, k) for i in range(width) for k in range(width // (i + 1) + 1)]


@functools.lru_cache(maxsize=4096)
def beam_plan(T: int, width: int) -> BeamPlan:
    """Return the plan for T steps and a beam of `width` prefixes."""
    pairs = len(extension_pairs(width))
    block_p = max(next_power_of_2(width + pairs), 32)
    num_warps = 8 if block_p >= MANY_CANDIDATES else min(max(block_p // 64, 1), 4)
    filters = block_p > FEW_CANDIDATES
    block_w = max(next_power_of_2(width), 32 * num_warps)
    return BeamPlan(
        pairs=pairs,
        table_size=next_power_of_2(max(T * width * 3 // 2, 32)),
        filters=filters,
        block_w=block_w,
        block_p=block_p,
        block_i=block_w if filters else block_p,
        num_warps=num_warps,
    )


def text_beam_options(width: int, labels: int) -> dict[str, int]:
    """Return the blocks of beam search to text, whose steps have up to `labels` labels."""
    block_p = max(next_power_of_2(width * (labels + 1)), 32)
    return {
        "BLOCK_W": max(next_power_of_2(width), MIN_BEAM_LANES),
        "BLOCK_P": block_p,
        "BLOCK_K": max(next_power_of_2(labels), MIN_BEAM_LANES),
        "num_warps": min(max(block_p // 64, 1), 8),
    }


def kmer_beam_options(bases: int, width: int) -> dict[str, int]:
    """Return the blocks of beam search over k-mers, with as many warps as the search of CTC."""
    block_w = max(next_power_of_2(width), MIN_BEAM_LANES)
    block_p = next_power_of_2(2 * bases) * block_w
    num_warps = min(max(block_p // 64, 1), 4)
    if block_p >= MANY_CANDIDATES:
        num_warps = 8 if block_p < 4 * MANY_CANDIDATES else 16
    block_j = 32 if block_w == 32 else 16
    return {"BLOCK_W": block_w, "BLOCK_P": block_p, "BLOCK_J": block_j, "num_warps": num_warps}


register_cache("decode.gpu.plan.beam", beam_plan.cache_clear)
