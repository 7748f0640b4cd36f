"""Integers of the host for the GPU, sent as the parameters of launches.

A copy from ordinary memory may wait for the work that the GPU has, and pinned memory takes time to
allocate. A launch does neither.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

WORDS = 16  # the integers of a launch
LIMIT = 2**24  # fp32 has every integer up to here


@triton.jit
def store_words_kernel(
    words,  # [start + 16] int64
    start,
    w0,
    w1,
    w2,
    w3,
    w4,
    w5,
    w6,
    w7,
    w8,
    w9,
    w10,
    w11,
    w12,
    w13,
    w14,
    w15,
):
    """Store 16 integers from a position on.

    They come as fp32, because Triton compiles a kernel anew for some values of its integers.
    """
    words += start
    tl.store(words + 0, w0)
    tl.store(words + 1, w1)
    tl.store(words + 2, w2)
    tl.store(words + 3, w3)
    tl.store(words + 4, w4)
    tl.store(words + 5, w5)
    tl.store(words + 6, w6)
    tl.store(words + 7, w7)
    tl.store(words + 8, w8)
    tl.store(words + 9, w9)
    tl.store(words + 10, w10)
    tl.store(words + 11, w11)
    tl.store(words + 12, w12)
    tl.store(words + 13, w13)
    tl.store(words + 14, w14)
    tl.store(words + 15, w15)


def words_on_device(values: Sequence[int], device: torch.device) -> tuple[Tensor, Any]:
    """Return integers of at most `LIMIT` as an int64 tensor on a GPU, and what sent them.

    The tensor has zeros up to a multiple of 16 elements. The host does not wait. The second result
    is the C module's form of the kernel, or None.
    """
    numbers = [*map(float, values), *[0.0] * (-len(values) % WORDS)]
    words, sender = torch.empty(len(numbers), dtype=torch.int64, device=device), None
    for start in range(0, len(numbers), WORDS):
        chunk = numbers[start : start + WORDS]
        sender = launch(store_words_kernel, 1, words, start, *chunk, num_warps=1)
    return words, sender
