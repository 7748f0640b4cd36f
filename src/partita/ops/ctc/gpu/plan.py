"""CTC on a GPU: how a batch is cut into programs, and the layout of the workspace.

These are pure functions of sizes. They import no Triton, so that the fakes of the registered ops
can use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ....runtime.sizes import choose, smaller

CHUNK = 32  # positions of a target in a chunk, one per lane of a warp
SAVE_EVERY = 8  # steps from one saved state to the next
TABLE_MARGIN = 24  # rows of the emission table before and after its steps
FULL_GPU = 2048  # programs beyond which a GPU is full


class CTCPlan(NamedTuple):
    """The sizes of the programs into which a batch is cut.

    Fields:
        max_target_len: the greatest target length.
        fp64: whether the states of all sequences are in fp64.
        table_width: row length of the emission table of all classes, 0 if there is none.
        num_chunks: chunks of 32 target positions; each is a program in each direction.
        class_groups: groups of 32 classes if there are few classes, otherwise 0.
        num_blocks: blocks of SAVE_EVERY steps in a half.
        carry_steps: steps in these blocks, which is the number of carries of a chunk.
    """

    max_target_len: int
    fp64: bool
    table_width: int
    num_chunks: int
    class_groups: int
    num_blocks: int
    carry_steps: int


def ceil_div(number: int, by: int) -> int:
    """Return the quotient rounded up."""
    return -(-number // by)


def table_width(C: int, max_target_len: int) -> int:
    """Return the row length of the emission table: C rounded up to 8 for few classes, else 0."""
    return choose(C <= smaller(4 * max_target_len, 256), ceil_div(C, 8) * 8, 0)


def saved_shape(
    shape: Sequence[int], max_target_len: int, save: bool, backend_table: str
) -> tuple[int, ...]:
    """Return the shape of the fp64 tensor that the loss saves for the gradient.

    Args:
        shape: `[T, N, C]` of the logits.
        max_target_len: the greatest target length.
        save: whether a gradient will be computed.
        backend_table: "reference" saves nothing; "cpu" saves α before each step; "gpu" saves the
            workspace: states before each eighth step, carries, log-sum-exps, and the emission table
            for few classes.
    """
    T, N, C = shape
    if backend_table == "cpu" and save:
        return N, T + 1, 2 * max_target_len + 4
    if backend_table != "gpu":
        return (0,)
    num_blocks, num_chunks = (T + 16) // 16, max_target_len // CHUNK + 1
    states = 2 * ((num_blocks if save else 0) + 1) * N * num_chunks * 2 * CHUNK
    carries = 2 * N * num_chunks * num_blocks * SAVE_EVERY
    table = (T + 2 * TABLE_MARGIN) * table_width(C, max_target_len)
    # 16 words leave room for the counters and for the alignment of each part.
    return (16 + states + carries + (2 + 2 * T + table) * N,)


def ctc_plan(shape: Sequence[int], fp64: bool, max_target_len: int) -> CTCPlan:
    """Return the plan for logits of shape `[T, N, C]`."""
    T, _, C = shape
    num_blocks = ceil_div(T + 1, 2 * SAVE_EVERY)
    num_chunks = max_target_len // CHUNK + 1
    class_groups = ceil_div(C, 32) if C <= 64 else 0
    return CTCPlan(
        max_target_len=max_target_len,
        fp64=fp64,
        table_width=0 if fp64 else table_width(C, max_target_len),
        num_chunks=num_chunks,
        class_groups=class_groups,
        num_blocks=num_blocks,
        carry_steps=num_blocks * SAVE_EVERY,
    )
