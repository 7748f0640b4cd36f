"""CTC on a GPU: how the scans and the rows are launched, and what the loss keeps for the gradient."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference import ctc as reference
from . import ctc_align as best
from . import ctc_posterior, ctc_scan
from . import launch as launching
from .ctc_gradient import ctc_lane_gradient_kernel, ctc_narrow_gradient_kernel, ctc_wide_gradient_kernel
from .ctc_rows import ctc_next_kernel, ctc_norm_kernel, ctc_order_kernel, ctc_total_kernel
from .ctc_walk import EVERY, LANES
from .launch import INTERPRETED, cdiv, launch, power_of_2, triton_dtype

MANY = 2048  # programs beyond which a GPU is full
MARGIN = 24  # rows of a table before and behind its steps
SCANS = {"halves": ctc_scan, "posterior": ctc_posterior, "best": best, "trace": best}


class Plan(NamedTuple):
    """How a batch is cut.

    Fields:
        most: labels of a target.
        wide: all states are.
        table: the width of a table of factors of all classes, or 0 for none.
        chunks: of 32 positions of a target, each a program in each direction.
        groups: of 32 classes, where classes are few; otherwise 0.
        summed: whether the scan sums posteriors by class: it is no slower where many programs hide one another's latency, and needs less memory.
        blocks, reach: of steps in a half, and steps that these make.
    """

    most: int
    wide: bool
    table: int
    chunks: int
    groups: int
    summed: bool
    blocks: int
    reach: int


class Kept(NamedTuple):
    """What the loss leaves for the gradient, in one buffer.

    Fields:
        zeros: what must be 0 before the scan: the ticket, flags and edges.
        ticket, flags: `[1]`, `[N]`.
        edges: what chunks hand to their neighbours.
        words: states before each block of steps, and behind the last.
        logz: `[N]`.
        maxima, sums: `[T, N]`, what normalises each step; None for log-probabilities.
        table: `[N, 24 + T + 24, width]`, or None.
    """

    zeros: Tensor
    ticket: Tensor | None
    flags: Tensor
    edges: Tensor
    words: Tensor
    logz: Tensor
    maxima: Tensor | None
    sums: Tensor | None
    table: Tensor | None


@functools.lru_cache(maxsize=4096)
def plan_of(shape: torch.Size, wide: bool, most: int) -> Plan:
    steps, count, classes = shape
    blocks = cdiv(steps + 1, 2 * EVERY)
    table = 0 if wide else reference.table_width(classes, most)
    groups, chunks = cdiv(classes, 32) if classes <= 64 else 0, most // 32 + 1
    return Plan(most, wide, table, chunks, groups, groups > 0 and 2 * count * chunks > MANY, blocks, blocks * EVERY)


@functools.lru_cache(maxsize=4096)
def _sizes(shape: torch.Size, plan: Plan, from_logits: bool, keep: bool) -> list[int]:
    """Words of the parts of the buffer, and of what is left."""
    steps, count, _ = shape
    norms = cdiv(steps * count, 1 if plan.wide else 2) if from_logits else 0
    states = 2 * (plan.blocks * keep + 1) * count * plan.chunks * 64
    sizes = [1, count, 2 * plan.chunks * count * plan.reach, states, count, norms, norms, (steps + 2 * MARGIN) * count * plan.table]
    sizes = [size + size % 2 for size in sizes]  # each on 16 bytes: pointers that are not would be another kernel
    return [*sizes, reference.kept_shape(shape, plan.most, True, keep)[0] - sum(sizes)]


def _cut(buffer: Tensor, plan: Plan, shape: torch.Size, from_logits: bool, keep: bool) -> Kept:
    sizes = _sizes(shape, plan, from_logits, keep)
    whole = buffer.view(torch.int64)
    words = whole.split_with_sizes(sizes)
    maxima = sums = None
    if from_logits:
        maxima, sums = (words[i].view(torch.float64 if plan.wide else torch.float32) for i in (5, 6))
    waits = plan.chunks > 1 and not plan.wide
    zeros = whole[: sum(sizes[: 3 if plan.chunks > 1 else 2])]
    logz = words[4].view(torch.float64)
    return Kept(zeros, words[0] if waits else None, words[1], words[2], words[3], logz, maxima, sums, words[7] if plan.table else None)


def _limit(logits: Tensor) -> float:
    """Beyond it, logits have no factor: exponents of paths stay below 2**27, and those of emissions below 2**21."""
    return min(2.0**27 / (len(logits) + 2), 2.0**21) * 0.69


def _tile(logits: Tensor, width: int) -> dict[str, int]:
    """How rows are read: so many at once, in pieces of so many classes, and how many of these lie aligned."""
    block = min(power_of_2(width), 1024)
    offsets = (logits.data_ptr() // logits.element_size(), logits.shape[2], *logits.stride()[:2])
    vector = 4 if logits.stride(2) == 1 and all(offset % 4 == 0 for offset in offsets) else 1
    return {"VEC": vector, "PIECES": min(cdiv(width, block), 8), "ROWS": max(1, 1024 // block), "BLOCK_V": block}


def _launch_lanes(name: str, programs: int, *args: Any, **options: Any) -> None:
    """Run a kernel of one warp a program, in Gluon where that is known."""
    gluon = launching.NVIDIA and not INTERPRETED
    kernel = getattr(SCANS[name], f"ctc_{name}_gluon_kernel" if gluon else f"ctc_{name}_kernel")
    launch(kernel, programs, *args, LAYOUT=LANES if gluon else None, **options, num_warps=1)


def _normalise(
    logits: Tensor, input_lengths: Tensor, maxima: Tensor | None, sums: Tensor | None, table: Tensor | None, width: int
) -> None:  # fmt: skip
    """What normalises the steps, and the table of factors."""
    steps, count, classes = logits.shape
    options = {"REAL": triton_dtype(logits.dtype), "TABLE": width, **_tile(logits, max(classes, width))}
    rows = (steps + 2 * MARGIN * (width > 0)) * count
    args = (logits, input_lengths, maxima, sums, table, *logits.shape, _limit(logits), *logits.stride())
    launch(ctc_norm_kernel, cdiv(rows, options["ROWS"]), *args, **options, num_warps=4)


class _Call(NamedTuple):
    """What all launches of a call share: its tensors, sizes and plan."""

    logits: Tensor
    targets: tuple[Tensor, ...]
    most: int
    blank: int
    plan: Plan
    kept: Kept

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether states are wide, of the runs of a scan: a second one serves sequences with logits that have no factor."""
        return (True,) if self.plan.wide else (False, True)

    def scan(self, name: str, wide: bool, ticket: Tensor | None, *args: Tensor, blocks: int, **options: Any) -> None:
        (steps, count, classes), plan, table = self.logits.shape, self.plan, self.kept.table
        source, strides = self.logits, self.logits.stride()
        if table is not None and not wide:
            source, strides = table[MARGIN * plan.table :], (plan.table, (steps + 2 * MARGIN) * plan.table, 1)
        sizes = (steps, count, classes, len(self.targets[0]), self.most, plan.chunks, blocks, plan.reach, self.blank, _limit(self.logits), *strides)
        options |= {"SPAN": 1 if wide else EVERY, "WIDE": wide, "ALL": plan.wide, "TABLE": 0 if source is self.logits else plan.table}
        programs = 2 * count * (1 if wide else plan.chunks)
        if name == "posterior" and launching.NVIDIA and not INTERPRETED:
            options["maxnreg"] = 168 if programs > MANY else 255  # more programs at once, or each with what it wants
        _launch_lanes(name, programs, source, *self.targets, *args, None if wide else ticket, *sizes, **options)


def ctc_loss(
    logits: Tensor, labels: Tensor, offsets: Tensor, input_lengths: Tensor, target_lengths: Tensor, most: int, blank: int, from_logits: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    steps, count, _ = logits.shape
    if not logits.numel():
        return reference.ctc_loss(logits, labels, offsets, input_lengths, target_lengths, most, blank, from_logits, keep)
    plan = plan_of(logits.shape, logits.dtype == torch.float64, most)
    buffer = torch.empty(reference.kept_shape(logits.shape, most, True, keep), dtype=torch.float64, device=logits.device)
    x = _cut(buffer, plan, logits.shape, from_logits, keep)
    x.zeros.zero_()
    loss = torch.empty(count, dtype=torch.float64, device=logits.device)
    if from_logits or plan.table:
        _normalise(logits, input_lengths, x.maxima, x.sums, x.table, plan.table)
    call = _Call(logits, (labels.contiguous(), offsets, input_lengths, target_lengths), most, blank, plan, x)
    blocks = plan.blocks if keep else 0
    lanes = {"BLOCK_L": 256, "BLOCK_T": 256 if steps <= 1024 else 2048}
    totals = (x.words, x.flags, x.maxima, x.sums, x.logz, loss, steps, count, len(labels), most, plan.chunks, blocks)
    for wide in call.modes:
        call.scan("halves", wide, x.ticket, x.words, x.edges, x.flags, blocks=blocks, KEEP=keep)
        launch(ctc_total_kernel, count, *call.targets, *totals, **lanes, WIDE=wide, ALL=plan.wide, num_warps=4)
    return loss, buffer


def ctc_align(
    logits: Tensor, labels: Tensor, offsets: Tensor, input_lengths: Tensor, target_lengths: Tensor, most: int, blank: int, from_logits: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, count, classes = logits.shape
    if not logits.numel():
        return reference.ctc_align(logits, labels, offsets, input_lengths, target_lengths, most, blank, from_logits)
    device, targets = logits.device, (labels.contiguous(), offsets, input_lengths, target_lengths)
    chunks, blocks = most // 32 + 1, cdiv(steps, EVERY)
    reach = blocks * EVERY
    zeros = torch.zeros(2 + count + count % 2 + (chunks * count * reach if chunks > 1 else 0), dtype=torch.int64, device=device)
    ticket, flags, edges = zeros.split([2, count + count % 2, len(zeros) - 2 - count - count % 2])
    pointers = torch.empty((count, chunks, blocks, 32), dtype=torch.int32, device=device)
    ends = torch.empty((count, 2), dtype=torch.float64, device=device)
    states = torch.empty((count, steps), dtype=torch.int32, device=device)
    found, tokens = (torch.empty((count, steps), dtype=torch.int64, device=device) for _ in range(2))
    scores = torch.empty((count, steps), dtype=torch.float64, device=device)
    maxima = sums = None
    if from_logits:
        maxima, sums = torch.empty((2, steps, count), dtype=torch.promote_types(logits.dtype, torch.float32), device=device)
        _normalise(logits, input_lengths, maxima, sums, None, 0)
    sizes = (steps, count, classes, len(labels), most, chunks, blocks, reach, blank, *logits.stride())
    _launch_lanes("best", count * chunks, logits, *targets, pointers, ends, edges, flags, ticket if chunks > 1 else None, *sizes, SPAN=EVERY)
    way = (offsets, input_lengths, target_lengths, pointers, ends, flags, states, steps, count, len(labels), most, chunks, blocks)
    _launch_lanes("trace", count, *way)
    spelt = (logits, targets[0], offsets, maxima, sums, flags, states, found, tokens, scores, steps, count, blank, *logits.stride())
    launch(best.ctc_spell_kernel, count * cdiv(steps, 256), *spelt, BLOCK_T=256, num_warps=4)
    impossible = ends.amax(1).where(target_lengths > 0, ends[:, 0]) == -torch.inf
    return found, tokens, scores, torch.where(impossible & (flags[:count] == 0), -torch.inf, scores.sum(1))


def ctc_gradient(
    grad: Tensor, logits: Tensor, labels: Tensor, offsets: Tensor, input_lengths: Tensor, target_lengths: Tensor, loss: Tensor, kept: Tensor,
    most: int, blank: int, from_logits: bool,
) -> Tensor:  # fmt: skip
    steps, count, classes = logits.shape
    plan, real, device = plan_of(logits.shape, logits.dtype == torch.float64, most), triton_dtype(logits.dtype), logits.device
    result = torch.empty(logits.shape, dtype=logits.dtype, device=device)
    if not result.numel():
        return result
    x = _cut(kept, plan, logits.shape, from_logits, True)
    wide = torch.promote_types(logits.dtype, torch.float32)
    width = cdiv(classes, 8) * 8 if plan.summed else 32
    posterior = torch.empty((count, plan.chunks, steps, width), dtype=wide, device=device)
    blanks = torch.empty((count, plan.chunks, steps), dtype=wide, device=device)
    call = _Call(logits, (labels.contiguous(), offsets, input_lengths, target_lengths), most, blank, plan, x)
    words = 2 + (len(x.edges) if plan.chunks > 1 else 0)
    by_lane = plan.groups > 0 and not plan.summed
    zeros = (torch.empty if by_lane else torch.zeros)(words, dtype=torch.int64, device=device)
    if by_lane:
        order = torch.empty((count, plan.chunks, 1 + 2 * plan.groups, 32), dtype=torch.int32, device=device)
        orders = (*call.targets[:2], target_lengths, order, zeros, count, classes, len(labels), most, plan.chunks, words)
        launch(ctc_order_kernel, count * plan.chunks, *orders, GROUPS=plan.groups, num_warps=1)
    for each in call.modes:
        ticket = None if x.ticket is None else zeros[:1]
        tensors = (x.words, x.edges, zeros[2:], x.flags, x.logz, posterior, blanks)
        call.scan("posterior", each, ticket, *tensors, blocks=plan.blocks, GROUPS=plan.groups * plan.summed, WIDTH=width)
    rows = (grad.double().contiguous(), logits, *call.targets, x.maxima, x.sums, x.flags, x.logz, posterior, blanks)
    sizes = (steps, count, classes, len(labels), most, plan.chunks, blank, *logits.stride())
    tile = _tile(logits, classes)
    if plan.summed:
        del tile["PIECES"]
        launch(ctc_narrow_gradient_kernel, count * cdiv(steps, tile["ROWS"]), *rows, result, *sizes, REAL=real, WIDTH=width, **tile, num_warps=4)
    elif by_lane:
        launch(ctc_lane_gradient_kernel, count * cdiv(steps, 8), *rows, order, result, *sizes, REAL=real, ROWS=8, GROUPS=plan.groups, num_warps=1)
    else:
        behind = torch.empty((count, most), dtype=torch.int32, device=device)
        launch(ctc_next_kernel, count * cdiv(most, 64), *call.targets[:2], target_lengths, behind, len(labels), most, BLOCK=64, num_warps=4)
        del tile["ROWS"]
        tile["BLOCK_L"] = min(max(32, power_of_2(most)), 1024)
        launch(ctc_wide_gradient_kernel, steps * count, *rows, behind, result, *sizes, REAL=real, **tile, num_warps=4)
    return result
