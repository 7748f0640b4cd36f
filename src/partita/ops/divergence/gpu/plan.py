"""The division of rows into the programs that compute divergences and gradients in one pass."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.caches import register_cache
from ....runtime.sizes import cdiv, next_power_of_2

MAX_SPLITS = 64  # programs that may wait for one another: fewer than any GPU keeps resident
# What a program has of each of both rows. The parts of the programs of a multiprocessor then stay
# in its cache, from which the gradient of a KL reads them. With 16,384 bytes they do not.
PART_BYTES = 12288
MAX_WHOLE_BYTES = 16384  # of a row that one program has for itself
MAX_ROWS = 4  # of a program
MANY_PARTS = 8192  # that fill a GPU several times
# Blocks of a part that stays in registers, as for a mixture. A logit that is loaded alone takes a
# register, of which two in a vector take one.
MAX_BLOCKS, MAX_LONE_BLOCKS = 3, 2
BLOCK_BYTES = 4096  # that a program of 128 threads reads of a row at once


class OnePassPlan(NamedTuple):
    """The programs that share a row of both logits.

    Fields:
        block: the classes that a program reads at once.
        splits: the programs of a row.
        classes_per_program: the classes of a program, a multiple of the block. The last program
            has the rest.
        blocks: the blocks of a program.
        num_warps: the warps of a program.
    """

    block: int
    splits: int
    classes_per_program: int
    blocks: int
    num_warps: int

    def rows_per_program(self, rows: int) -> int:
        """Return how many rows a program takes its parts of, one after another.

        Rows after the first cost no wait for the counter. A GPU has enough programs all the same.
        """
        return MAX_ROWS if self.splits > 1 and rows * self.splits >= MANY_PARTS * MAX_ROWS else 1


@functools.lru_cache(maxsize=4096)
def one_pass_plan(
    classes: int, itemsize: int, vector: int, can_exchange: bool, is_mixture: bool
) -> OnePassPlan | None:
    """Return the plan of rows of adjacent classes, or None if two passes serve them.

    Args:
        classes: the number of classes.
        itemsize: the bytes of a logit.
        vector: the classes that a thread loads at once.
        can_exchange: whether programs may wait for one another.
        is_mixture: whether the divergence is that from a mixture, whose parts stay in registers.
    """
    if itemsize > 4:
        return None  # a pair of statistics has to fit 64 bits
    block = min(BLOCK_BYTES // itemsize, next_power_of_2(max(classes, 2)))
    max_blocks = MAX_BLOCKS if vector > 1 else MAX_LONE_BLOCKS
    part, whole = PART_BYTES, MAX_WHOLE_BYTES
    if is_mixture:
        part = whole = max_blocks * BLOCK_BYTES
    splits, size = 1, classes * itemsize
    if can_exchange and size > whole:
        splits = min(cdiv(size, part), MAX_SPLITS)
    blocks = cdiv(cdiv(classes, splits), block)
    if is_mixture and blocks > max_blocks:
        return None
    num_warps = max(1, block * itemsize // 1024)
    return OnePassPlan(block, cdiv(classes, blocks * block), blocks * block, blocks, num_warps)


register_cache("divergence.gpu.plan.one_pass_plans", one_pass_plan.cache_clear)
