"""Choose the kernels of semi-Markov chains and their blocks from sizes.

These are pure functions of sizes. They import no Triton.
"""

from __future__ import annotations

from ....runtime.sizes import cdiv, next_power_of_2

MAX_RING = 4096  # elements of a ring in the registers of a program
MAX_RESIDENT_STATES = 32
MAX_RANKS = 32  # of the k best paths, of which a thread has all of some slots
PROGRAMS = 1024  # about eight for each multiprocessor
ROWS = 32  # steps that a program of the posteriors takes at once


def is_resident(C: int, D: int) -> bool:
    """Return whether the open segments of a sequence stay in the registers of one program."""
    return C <= MAX_RESIDENT_STATES and state_block(C) * duration_block(D) <= MAX_RING


def state_block(C: int) -> int:
    """Return the block of all states."""
    return next_power_of_2(max(C, 2))


def duration_block(D: int) -> int:
    """Return the number of slots of a ring."""
    return next_power_of_2(max(D, 2))


def scan_options(C: int, D: int) -> dict[str, int]:
    """Return the compile-time arguments of the scans with their ring in registers."""
    block_c, slots = state_block(C), duration_block(D)
    num_warps = max(1, min(8, block_c * slots // 512))  # 16 elements of a ring in each thread
    return {"BLOCK_C": block_c, "SLOTS": slots, "num_warps": num_warps}


def nbest_options(C: int, D: int, k: int) -> dict[str, int] | None:
    """Return the compile-time arguments of the scan of the k best paths, or None if it cannot run.

    Its ring, and the ways into the states, stay in the registers of one program.
    """
    block_c, slots = state_block(C), duration_block(D)
    size = block_c * max(slots, block_c) * max(k, 2)
    if C > MAX_RESIDENT_STATES or k > MAX_RANKS or size > MAX_RING:
        return None
    # A thread has 40 elements of the ring at most, so that few warps wait for each other.
    num_warps = next_power_of_2(cdiv(size, 40 * 32))
    return {"BLOCK_C": block_c, "SLOTS": slots, "K": k, "num_warps": num_warps}


def memory_scan_options(C: int) -> dict[str, int]:
    """Return the compile-time arguments of the scan with its ring in memory.

    A block of the ring is loaded and stored without a barrier between them, so no element of it may
    be in two threads: one of another warp might load what the first one has just stored.
    """
    block_c, block_k = min(64, state_block(C)), 32
    return {
        "BLOCK_C": block_c,
        "BLOCK_K": block_k,
        "BLOCK_ALL": state_block(C),
        "num_warps": min(8, block_c * block_k // 32),
    }


def posterior_block(C: int) -> int:
    """Return how many states a program of the posteriors takes at once."""
    return min(32, state_block(C))


def splits(T: int, N: int, C: int) -> tuple[int, int]:
    """Return into how many parts a sequence is cut for sums of posteriors, and their steps."""
    programs = max(N * cdiv(C, posterior_block(C)), 1)
    parts = max(1, min(cdiv(T, ROWS), PROGRAMS // programs))
    per_part = cdiv(cdiv(T, parts), ROWS) * ROWS
    return cdiv(T, per_part), per_part
