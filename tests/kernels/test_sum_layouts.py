"""The order of a row's sum in compiled kernels does not depend on where the row starts.

Triton adds up the values of a tile in an order that follows from its layout, and chooses layouts by
the alignment of addresses. So kernels of all starts must have the same layouts wherever they add.
"""

import math
import re
from collections.abc import Callable

import pytest
import torch
from helpers.compilation import TARGETS, compiled
from helpers.launches import Launch, recording
from torch import Tensor

import partita

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# Elements before the first row, and between two rows.
STARTS = ((0, 0), (1, 0), (2, 0), (0, 3))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, before: int, between: int) -> Tensor:
    memory = torch.zeros(math.prod(shape[:-1]) * (shape[-1] + between) + before, dtype=dtype)
    return memory[before:].view(*shape[:-1], -1)[..., : shape[-1]].requires_grad_()


def layouts_of_sums(launch: Launch) -> list[str]:
    """Return the types of all tensors that a kernel adds up, with their layouts, and the axes."""
    ir = compiled(launch, TARGETS["sm_90"].target).asm["ttgir"]
    names = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.M))
    sums = re.findall(
        r'"tt\.reduce"\(\S+\) <\{(axis = \d+).*?arith\.(\w+).*?\}\) : \((.*?)\) ->', ir, re.S
    )
    return [
        f"{axis} {re.sub(r'#[a-z]+[0-9]*(?=[,>])', lambda found: names[found[0]], kind)}"
        for axis, operation, kind in sums
        if operation == "addf"
    ]


def rnnt(logits: Tensor) -> None:
    (B, T, U1, _), targets = logits.shape, torch.ones(len(logits), logits.shape[2] - 1).int()
    lengths = torch.full((B,), T), torch.full((B,), U1 - 1)
    partita.rnnt_loss(logits, targets, *lengths, blank=0, reduction="sum")


def ctc(logits: Tensor) -> None:
    T, N, _ = logits.shape
    lengths = torch.full((N,), T), torch.full((N,), 4)
    targets = torch.ones(N, 4).int()
    partita.ctc_loss(logits, targets, *lengths, reduction="sum", from_logits=True).backward()


def greedy(logits: Tensor) -> None:
    partita.ctc_greedy_search(logits.detach(), from_logits=True)


CASES: list[tuple[str, Callable[[Tensor], None], tuple[int, ...]]] = [
    ("rnnt_nodes_kernel", rnnt, (1, 3, 3)),
    ("rnnt_overlap_kernel", rnnt, (1, 200, 100)),
    ("ctc_normalize_kernel", ctc, (10, 3)),
    ("ctc_label_gradient_kernel", ctc, (10, 3)),
    ("ctc_best_class_kernel", greedy, (10, 3)),
]
WIDE = ("rnnt_overlap_kernel", "ctc_label_gradient_kernel")
NO_FP64 = ("rnnt_overlap_kernel", torch.float64)


@pytest.mark.parametrize("classes", [32, 1024, 1025])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "call", "shape"), CASES, ids=[case[0] for case in CASES])
def test_sums_have_one_layout_wherever_rows_start(
    kernel: str,
    call: Callable[[Tensor], None],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    classes: int,
) -> None:
    found = []
    for start in STARTS:
        launches: list[Launch] = []
        with recording(launches, "13.0"):
            call(zeros((*shape, classes), dtype, *start))
        of_kernel = [launch for launch in launches if launch.kernel.__name__ == kernel]
        found.append([layouts_of_sums(launch) for launch in of_kernel])
    # Other kernels serve narrow rows, and fp64.
    is_served = kernel not in WIDE or (classes > 32 and (kernel, dtype) != NO_FP64)
    assert bool(found[0]) is is_served and all(found[0])
    assert found == [found[0]] * len(found)
