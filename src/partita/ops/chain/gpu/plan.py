"""Choose the kernels of a chain and their compile-time arguments from sizes, strides and dtypes.

Two families of kernels serve chains. The register-resident kernels keep one state per thread and
serve small tables on NVIDIA GPUs. The general kernels pass states through global memory and serve
all other calls.

These are pure functions of sizes. They import no Triton.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.target import Target
from ....runtime.sizes import cdiv, next_power_of_2

MAX_UNROLLED_EDGES = 8  # edges into or out of a state that are loaded before the first use of one
MAX_BLOCK_STATES = 1024
MAX_BLOCK_MEANS = 64  # states whose edges the kernels of means load in blocks
MAX_SAMPLED_EDGES = 1024  # edges into a state, or final states, in a block of weights of a sample
MAX_SINGLE_SEGMENT = 64  # steps of a path in one segment per direction, which saves a launch
MIN_PARALLEL_STEPS = 2048  # of chains whose time is cut into segments, see segments.py
MAX_PARALLEL_CHAINS = 32
MAX_PARALLEL_STATES = 32
MIN_SEGMENT_STEPS = 16
MAX_SEGMENT_STEPS = 128
SEGMENT_LANES = 32  # states of one program, which is a warp
PARALLEL_PROGRAMS = 8  # for each multiprocessor


def block_options(C: int) -> dict[str, int]:
    """Return the compile-time arguments that all general kernels share: one state per thread."""
    block = min(next_power_of_2(max(C, 1)), MAX_BLOCK_STATES)
    return {"BLOCK_C": block, "num_warps": max(1, block // 32)}


def mean_options(C: int, K: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernels of means.

    The edges of few states are loaded in blocks, which are waited for once. Blocks of more states
    would pass through shared memory, which costs more than it saves.
    """
    block_k = min(next_power_of_2(max(K, 1)), MAX_UNROLLED_EDGES) if C <= MAX_BLOCK_MEANS else 1
    options = block_options(C)
    num_warps = max(options["num_warps"], options["BLOCK_C"] * block_k // 128)
    return options | {"BLOCK_K": block_k, "num_warps": num_warps}


def unroll_options(K: int, max_out_degree: int) -> dict[str, int]:
    """Return how many edges of a state are loaded together, in and out; 0 stands for a loop."""
    return {
        "UNROLL_IN": K if K <= MAX_UNROLLED_EDGES else 0,
        "UNROLL_OUT": max_out_degree if max_out_degree <= MAX_UNROLLED_EDGES else 0,
    }


def resident_options(scores: Tensor, max_out_degree: int, target: Target) -> dict[str, int] | None:
    """Return the arguments of `resident_shape` but REGULAR, or None where no such kernel serves."""
    C, K = scores.shape[2:]
    degree = max(K, max_out_degree)
    last_offset = (C - 1) * scores.stride(2) + (K - 1) * scores.stride(3)
    if not target.runs_ptx or scores.dtype == torch.float64:
        return None
    if not 0 < C <= MAX_BLOCK_STATES or not 0 < degree <= MAX_UNROLLED_EDGES:
        return None
    if last_offset >= 2**31:
        return None
    contiguous = scores.stride()[2:] == (K, 1)
    aligned = contiguous and all(
        number % 16 == 0 for number in (C * K, *scores.stride()[:2], scores.data_ptr())
    )
    block, vec = max(next_power_of_2(C), 32), 16 // scores.element_size() if aligned else 1
    return {
        "DEGREE": degree,
        "CONTIGUOUS": contiguous,
        "VEC": vec,
        "PREFETCH": 4 if block <= 512 else 1,  # as far as registers allow
        "BLOCK_C": block,
        "BLOCK_E": max(next_power_of_2(C * K), block * vec),  # at least a vector for each thread
    }


def path_segments(T: int, forward_only: bool) -> tuple[int, int]:
    """Return the steps of a segment, a power of 2, and the number of segments of each direction.

    A direction has T steps, or half of them. Its segments are traced at the same time. A long path
    has about as many segments as a segment has steps.
    """
    steps = T if forward_only else cdiv(T, 2)
    if T <= MAX_SINGLE_SEGMENT:
        size = next_power_of_2(max(steps, 16))
    else:
        size = min(max(16, 2 ** round(math.log2(T + 2) / 2 - 0.5)), 256)
    return size, cdiv(steps, size)


class SegmentSizes(NamedTuple):
    """The segments of chains that are scanned parallel in time, see `segments.py`.

    Fields:
        steps: the number of steps in a segment, a power of 2.
        segments: the number of segments of a chain.
        size: the number of segments in a group, a power of 2.
        groups: the number of groups of a chain.
    """

    steps: int
    segments: int
    size: int
    groups: int


def is_parallel(T: int, N: int, C: int) -> bool:
    """Return whether chains are few, long and of few states, so that time is cut into segments."""
    return T >= MIN_PARALLEL_STEPS and 0 < N <= MAX_PARALLEL_CHAINS and 0 < C <= MAX_PARALLEL_STATES


def segment_sizes(T: int, N: int, C: int, target: Target) -> SegmentSizes:
    """Return how chains of T steps are cut.

    Segments are as long as the kernels that have a row of states for each of them still fill the
    GPU. Groups are about as many as each has segments, because both are scanned one by one.
    """
    rows = PARALLEL_PROGRAMS * target.multiprocessors * segment_rows(C)
    whole = 1 << max((T * N // rows).bit_length() - 1, 0)  # the greatest power of 2 up to it
    steps = min(max(whole, MIN_SEGMENT_STEPS), MAX_SEGMENT_STEPS)
    segments = cdiv(T, steps)
    size = next_power_of_2(math.isqrt(segments))
    return SegmentSizes(steps, segments, size, cdiv(segments, size))


def segment_rows(C: int) -> int:
    """Return how many vectors of states a program of one warp scans at once."""
    return max(SEGMENT_LANES // small_block(C), 1)


def small_block(C: int) -> int:
    """Return the block of few states."""
    return next_power_of_2(max(C, 2))


def segment_options(C: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernels that scan several vectors of states."""
    return {"ROWS": segment_rows(C), "BLOCK_C": small_block(C), "num_warps": 1}


def operator_options(C: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernels that apply operators."""
    block = small_block(C)
    return {"BLOCK_C": block, "num_warps": 1 if block <= 16 else 4}


def sample_options(K: int, samples: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernel that draws samples."""
    block_k = min(max(16, next_power_of_2(max(K, 1))), MAX_SAMPLED_EDGES)
    block_s = max(1, min(next_power_of_2(max(samples, 1)), 1024 // block_k))
    return {
        "BLOCK_S": block_s,
        "BLOCK_K": block_k,
        "num_warps": max(1, min(4, block_s * block_k // 256)),
    }
