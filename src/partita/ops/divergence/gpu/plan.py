"""The division of rows into the programs that compute divergences and gradients in one pass."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ....runtime.caches import register_cache
from ....runtime.sizes import cdiv, next_power_of_2

MAX_SPLITS = 64  # programs that may wait for one another: fewer than any GPU keeps resident
PART_BYTES = 16384  # what a program of 128 threads holds of each of both rows
MAX_WHOLE_BYTES = 32768  # one program holds rows up to this size and waits for no other


class OnePassPlan(NamedTuple):
    """The programs that share a row of both logits.

    Fields:
        block: the classes that a program holds in registers.
        splits: the programs of a row.
        num_warps: the warps of a program.
        max_registers: the registers that a thread may use, or None for no limit.
    """

    block: int
    splits: int
    num_warps: int
    max_registers: int | None


@functools.lru_cache(maxsize=4096)
def one_pass_plan(classes: int, itemsize: int, can_exchange: bool) -> OnePassPlan | None:
    """Return the plan of rows that start on 16 bytes, or None if two passes serve them.

    Args:
        classes: the number of classes.
        itemsize: the bytes of a logit.
        can_exchange: whether programs may wait for one another.
    """
    if itemsize > 4:
        return None  # a pair of statistics has to fit 64 bits
    block = next_power_of_2(classes)
    max_registers = 96 if itemsize == 2 else 128
    if block * itemsize < PART_BYTES:
        return OnePassPlan(block, 1, max(1, block * itemsize // 2048), None)
    if block * itemsize <= MAX_WHOLE_BYTES:
        return OnePassPlan(block, 1, block * itemsize // 4096, max_registers)
    block = PART_BYTES // itemsize
    splits = cdiv(classes, block)
    if not can_exchange or splits > MAX_SPLITS:
        return None
    return OnePassPlan(block, splits, 4, max_registers)


register_cache("divergence.gpu.plan.one_pass_plans", one_pass_plan.cache_clear)
