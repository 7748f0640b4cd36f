"""Choose the kernels of a dense linear chain and their blocks from sizes.

These are pure functions of sizes. They import no Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.target import Target
from ....runtime.sizes import cdiv, next_power_of_2
from ..common import RANGE_ROWS, is_constant

MAX_RESIDENT_STATES = 128  # the transitions among more do not fit into a program
MAX_EXCHANGE_STATES = 512  # whose scan programs hold the transitions between them
# Programs of that scan which have to be resident together take as many multiprocessors at most.
MIN_EXCHANGE_MULTIPROCESSORS = 64
MAX_LOG_STATES = 32  # whose transitions fit into a program in the log domain
MAX_ROW_ELEMENTS = 1024  # in a block of tokens that a program takes at once
MIN_PARALLEL_TOKENS = 256
# So many sequences are scanned parallel in time, or one for every TOKENS_PER_SEQUENCE tokens: other
# scans take one step after the other, and as long for one sequence as for many.
MAX_PARALLEL_SEQUENCES = 32
TOKENS_PER_SEQUENCE = 64
MAX_PARALLEL_STATES = 16
MAX_LANE_STATES = 8  # of linear scans whose segments, and counts whose tokens, have a lane each
MIN_MEETING_TOKENS = 256  # of best paths that are found from both ends
MEETING_WARPS = 4  # at most for each multiprocessor, of all scans from the start
OPERATOR_WARPS = 2  # 2 or 4, of a program whose threads share an operator of best paths
WORD_STEPS = 16  # tokens of a path that one lane traces
MAX_LANES = 65536  # of one warp to a program, so that few lanes use all multiprocessors
COUNT_LANES = 128  # tokens that a program counts at once, if the states are few
COUNT_PROGRAMS = 2  # for each multiprocessor


def is_exact(emissions: Tensor, transitions: Tensor) -> bool:
    """Return whether exponentials have to be right in fp64."""
    return torch.float64 in (emissions.dtype, transitions.dtype)


def range_parts(transitions: Tensor, T: int, N: int, save: bool, target: Target) -> int:
    """Return into how many parts the search for the range of the transitions is divided.

    It is 0 for chains that are scanned in the log domain whatever their range is. These are those
    whose transitions change from step to step, those of many states whose sequences have
    transitions of their own, and in Triton's interpreter all that are not parallel in time, because
    the linear scans of others choose layouts.
    """
    C = transitions.shape[-1]
    has_linear_scan = target.runs_ptx or is_parallel(T, N, C, save, target)
    has_linear_scan &= transitions.ndim == 2 or C <= MAX_RESIDENT_STATES
    return cdiv(C, RANGE_ROWS) if is_constant(transitions, T) and has_linear_scan else 0


def parts_block(parts: int) -> int:
    """Return the block in which kernels read the range of the transitions."""
    return next_power_of_2(max(parts, 1))


def prepare_options(C: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernel that runs before the scans."""
    block = next_power_of_2(max(C, 1))
    tokens = max(RANGE_ROWS, min(256, MAX_ROW_ELEMENTS // block))
    threads = tokens * block // 16
    return {"ROWS": RANGE_ROWS, "TOKENS": tokens, "BLOCK_C": block, "num_warps": warps(threads)}


def warps(threads: int) -> int:
    """Return how many warps, 1 to 8, have about so many threads."""
    return max(1, min(8, next_power_of_2(threads) // 32))


def resident_options(C: int) -> dict[str, int]:
    """Return the compile-time arguments of the scans with transitions in registers."""
    block = next_power_of_2(max(C, 16))
    warps, lanes, ahead = {16: (1, 2, 8), 32: (2, 2, 4), 64: (4, 2, 4), 128: (8, 4, 4)}[block]
    return {"BLOCK_C": block, "AHEAD": ahead, "LANES": lanes, "num_warps": warps}


def exchanges(C: int, target: Target) -> bool:
    """Return whether programs exchange the states of each step, instead of a launch for each."""
    return C <= MAX_EXCHANGE_STATES and target.multiprocessors >= MIN_EXCHANGE_MULTIPROCESSORS


def exchange_options(C: int) -> dict[str, int]:
    """Return the compile-time arguments of the scan whose programs exchange states."""
    return {"STATES": 16, "WIDTH": max(16, next_power_of_2(C) // 8), "num_warps": 8}


def row_options(C: int) -> dict[str, int]:
    """Return the compile-time arguments of a kernel that takes blocks of tokens."""
    block = next_power_of_2(max(C, 1))
    rows = max(1, min(256 if C <= MAX_LANE_STATES else 32, MAX_ROW_ELEMENTS // block))
    return {"ROWS": rows, "BLOCK_C": block, "num_warps": warps(rows * block // 8)}


def stores_previous(C: int, constant: bool, target: Target) -> bool:
    """Return whether the scan of one program finds the states before each state at once.

    Otherwise the scan stores scores, and the states before follow from them. Those scans choose
    layouts, which Triton's interpreter does not have.
    """
    return not target.runs_ptx or (C <= 64 and not constant)


def resident_best(C: int, constant: bool) -> bool:
    """Return whether the best scores are scanned with the transitions in registers."""
    return constant and C <= MAX_RESIDENT_STATES


def meets(T: int, N: int, C: int, constant: bool, target: Target) -> bool:
    """Return whether best scores are scanned from both ends, so that more programs run."""
    if not target.runs_ptx or not resident_best(C, constant) or T < MIN_MEETING_TOKENS:
        return False
    most = MEETING_WARPS * target.multiprocessors
    return 0 < N * resident_options(C)["num_warps"] <= most


class SegmentSizes(NamedTuple):
    """The sizes of the segments of long sequences, and of the groups of groups above them.

    Fields:
        steps: the number of steps in a segment, a power of 2.
        size: the number of segments in a group, and of groups in a greater group, a power of 2.
        counts: the number of segments, of groups, of greater groups, and so on. One program scans
            the last of them.
    """

    steps: int
    size: int
    counts: tuple[int, ...]


def is_parallel(T: int, N: int, C: int, save: bool, target: Target) -> bool:
    """Return whether scans are parallel in time, because few sequences are long.

    Without `save` the states inside of segments are not needed. Those of more states are scanned
    by kernels that choose layouts, which Triton's interpreter does not have.
    """
    by_operators = target.runs_ptx or not save
    return uses_lanes(T, N, C, MAX_PARALLEL_STATES if by_operators else MAX_LANE_STATES)


def uses_lanes(T: int, N: int, C: int, max_states: int) -> bool:
    """Return whether few sequences of few states are long enough to be scanned in segments."""
    max_sequences = max(MAX_PARALLEL_SEQUENCES, T // TOKENS_PER_SEQUENCE)
    return T >= MIN_PARALLEL_TOKENS and 0 < N <= max_sequences and 0 < C <= max_states


def segment_sizes(T: int) -> SegmentSizes:
    """Return how a sequence of T tokens is cut, so that the two levels have similar lengths."""
    steps = size = max(8, next_power_of_2(round(T ** (1 / 3))))
    if T < size**3 // 4:
        size //= 2
    segments = max(cdiv(T - 1, steps), 1)
    return SegmentSizes(steps, size, (segments, cdiv(segments, size)))


def lane_sizes(T: int, N: int, C: int) -> SegmentSizes:
    """Return how sequences of T tokens and few states are cut for lanes."""
    max_steps, size = (64, 16) if C <= MAX_LANE_STATES else (16, 8)
    steps = max(8, min(max_steps, next_power_of_2(T * N // 8192)))
    counts = [cdiv(T, steps)]
    while counts[-1] > 2 * size:
        counts.append(cdiv(counts[-1], size))
    return SegmentSizes(steps, size, tuple(counts))


def lane_options(lanes: int) -> dict[str, int]:
    """Return the compile-time arguments of a kernel with a lane for each of something."""
    warps = 1 if lanes <= MAX_LANES else 4
    return {"LANES": 32 * warps, "num_warps": warps}


class CountGroups(NamedTuple):
    """The matrices of counts and the tokens that each one sums over, see `gradient.py`.

    Fields:
        splits: the number of programs that share a tile of a matrix.
        group_stride: the rows of `[T * N]` from a group to the next.
        stride: the rows from a token of a group to the next.
        total: the number of tokens of a group.
        per_split: the number of tokens of a split.
    """

    splits: int
    group_stride: int
    stride: int
    total: int
    per_split: int


def count_groups(
    transitions: Tensor, T: int, N: int, per_sequence: bool, target: Target
) -> tuple[int, CountGroups]:
    """Return the number of matrices of counts, and the tokens of each."""
    if transitions.ndim == 4 and not is_constant(transitions, T):
        return (T - 1) * N, CountGroups(1, 1, 1, 1, 1)
    if transitions.ndim == 3:
        return T - 1, CountGroups(1, N, 1, N, N)
    C, per_sequence = transitions.shape[-1], per_sequence or transitions.ndim == 4
    groups, total = (N, T - 1) if per_sequence else (1, (T - 1) * N)
    tiles = cdiv(C, tile_block(C)) ** 2
    programs, tokens = COUNT_PROGRAMS * target.multiprocessors, 32
    if C <= MAX_LANE_STATES:
        programs, tokens = 4 * programs, 4 * COUNT_LANES
    splits = max(1, min(programs // max(tiles * groups, 1), cdiv(total, tokens)))
    per_split = max(cdiv(total, splits), 1)
    splits = max(cdiv(total, per_split), 1)
    strides = (1, N) if per_sequence else (0, 1)
    return groups, CountGroups(splits, *strides, total, per_split)


def tile_block(C: int) -> int:
    """Return the side of a tile of the transitions."""
    return min(64, next_power_of_2(max(C, 16)))


def count_options(C: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernels that sum over a tile of the transitions."""
    block = tile_block(C)
    return {"BLOCK": block, "num_warps": max(1, block * block // 1024)}


def sum_options(splits: int, C: int) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel that adds the parts of the counts."""
    pairs = next_power_of_2(max(C * C, 1))
    # Few pairs have few programs, and more splits, so each program loads more of these at once.
    block, elements = min(32, pairs), 8192 if C <= MAX_LANE_STATES else 2048
    block_s = min(elements // block, next_power_of_2(max(splits, 1)))
    return {"BLOCK_S": block_s, "BLOCK": block, "num_warps": warps(block_s * block // 16)}
