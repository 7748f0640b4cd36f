"""The division of rows into the programs that compute divergences and gradients in one pass."""

from __future__ import annotations

from typing import NamedTuple

from ....primitives.gpu.target import MAX_SPLITS, Target
from ....runtime.sizes import cdiv, next_power_of_2

# What a program has of each of both rows. The parts of the programs of a multiprocessor then stay
# in its cache, from which the gradient reads them. With 16,384 bytes they do not.
PART_BYTES = 12288
MAX_WHOLE_BYTES = 16384  # of a row that one program has for itself
BLOCK_BYTES = 4096  # that a program of 128 threads reads of a row at once

# The kernel of mixtures that keeps parts of 16-bit rows in registers.
MIXTURE_WARPS = 4
MIXTURE_WORDS = 4  # of two logits, that a thread loads at once
MIXTURE_BLOCKS = 6  # of such words in a thread, of each row, at most
MIXTURE_REGISTERS = 80  # of a thread, with which a multiprocessor has six programs


class MixturePlan(NamedTuple):
    """The programs that keep their parts of a row of both logits in registers."""

    splits: int  # the programs of a row
    classes_per_program: int  # the classes of a program. The last program has the rest.
    blocks: int  # the blocks of these classes. All but the last are full, also in the last program.


def mixture_plan(classes: int) -> MixturePlan | None:
    """Return the plan of rows of 16-bit logits in whole vectors, or None for other rows."""
    if 2 * classes <= MAX_WHOLE_BYTES:
        return None
    vector = 2 * MIXTURE_WORDS
    block = 32 * MIXTURE_WARPS * vector
    least = cdiv(classes, MIXTURE_BLOCKS * block)
    for wanted in range(least, min(least + 4, MAX_SPLITS + 1)):
        per_program = cdiv(classes, wanted * vector) * vector
        splits, blocks = cdiv(classes, per_program), cdiv(per_program, block)
        if classes - (splits - 1) * per_program > (blocks - 1) * block:
            return MixturePlan(splits, per_program, blocks)
    return None


class OnePassPlan(NamedTuple):
    """The programs that share a row of both logits."""

    block: int  # the classes that a program reads at once
    splits: int  # the programs of a row
    # The classes of a program, a multiple of the block. The last program has the rest.
    classes_per_program: int
    num_warps: int  # the warps of a program


def one_pass_plan(classes: int, itemsize: int, target: Target) -> OnePassPlan | None:
    """Return the plan of rows of adjacent classes, or None if two passes serve them."""
    if itemsize > 4:
        return None  # a pair of statistics has to fit 64 bits
    block = min(BLOCK_BYTES // itemsize, next_power_of_2(max(classes, 2)))
    splits = 1
    # Programs of the interpreter cannot wait for one another.
    if not target.interpreted and classes * itemsize > MAX_WHOLE_BYTES:
        splits = min(cdiv(classes * itemsize, PART_BYTES), MAX_SPLITS)
    per_program = cdiv(cdiv(classes, splits), block) * block
    num_warps = max(1, block * itemsize // 1024)
    return OnePassPlan(block, cdiv(classes, per_program), per_program, num_warps)
