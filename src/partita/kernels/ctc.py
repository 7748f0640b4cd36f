"""CTC on a GPU: how the scans and the rows are launched, and what the loss keeps for the gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.ctc import kept_shape
from .ctc_rows import ctc_gradient_kernel, ctc_norm_kernel, ctc_total_kernel
from . import ctc_scan, launch as launching
from .ctc_scan import EVERY
from .launch import INTERPRETED, launch

MANY = 2048  # programs that fill a GPU


class Kept(NamedTuple):
    """What the loss leaves for the gradient, in one buffer, and how it was cut.

    Fields:
        words: states before each block of steps, and behind the last.
        edges: what chunks hand to their neighbours.
        flags, ticket, logz: `[N]`, `[1]`, `[N]`.
        maxima, sums: `[T, N]`, what normalises each step; None for log-probabilities.
        blocks, chunks, parts: of steps, of positions, and positions a lane.
    """

    words: Tensor
    edges: Tensor
    flags: Tensor
    ticket: Tensor | None
    logz: Tensor
    maxima: Tensor | None
    sums: Tensor | None
    blocks: int
    chunks: int
    parts: int


def _real(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _cut(buffer: Tensor, logits: Tensor, most: int, from_logits: bool, keep: bool) -> Kept:
    steps, count, _ = logits.shape
    wide = logits.dtype == torch.float64
    parts = 1 if 2 * count * (most // 32 + 1) <= MANY else 2
    chunks, half = most // (32 * parts) + 1, (steps + 1) // 2
    blocks = triton.cdiv(half, EVERY) if keep else 0
    norms = steps * count if from_logits else 0
    sizes = [1, count, 2 * chunks * count * half, 2 * (blocks + 1) * count * chunks * 64 * parts, count, norms, norms if wide else 0]
    ticket, flags, edges, words, logz, first, second, _ = buffer.split([*sizes, len(buffer) - sum(sizes)])
    ends = 1 + count + (edges.numel() if chunks > 1 else 0)
    maxima = sums = None
    if from_logits and wide:
        maxima, sums = first, second
    elif from_logits:
        maxima, sums = first.view(torch.float32).split([norms, norms])
    integers = [t.view(torch.int64) for t in (words, edges, flags, ticket, buffer[:ends])]
    words, edges, flags, ticket, zeros = integers
    kept = Kept(words, edges, flags, ticket if chunks > 1 and not wide else None, logz, maxima, sums, blocks, chunks, parts)
    return kept, zeros


def _numbers(logits: Tensor, labels: Tensor, most: int) -> tuple[int, ...]:
    return *logits.shape, len(labels), most


def _scan(name: str, programs: int, *args: Any, **options: Any) -> None:
    gluon = launching.NVIDIA and not INTERPRETED
    kernel = getattr(ctc_scan, f"ctc_{name}_gluon_kernel" if gluon else f"ctc_{name}_kernel")
    launch(kernel, programs, *args, LAYOUT=ctc_scan.LANES if gluon else None, **options, num_warps=1)


def _limit(logits: Tensor) -> float:
    """Beyond it, logits have no factor: exponents of paths stay below 2**27, and those of emissions below 2**21."""
    return min(2.0**27 / (len(logits) + 2), 2.0**21) * 0.69


def ctc_loss(
    logits: Tensor, labels: Tensor, offsets: Tensor, input_lengths: Tensor, target_lengths: Tensor, most: int, blank: int, from_logits: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    steps, count, classes = logits.shape
    labels = labels.contiguous()
    buffer = torch.empty(kept_shape(steps, count, most, True, keep), dtype=torch.float64, device=logits.device)
    kept, zeros = _cut(buffer, logits, most, from_logits, keep)
    zeros.zero_()
    loss = torch.empty(count, dtype=torch.float64, device=logits.device)
    targets = (labels, offsets, input_lengths, target_lengths)
    if from_logits and logits.numel():
        block = min(triton.next_power_of_2(classes), 4096)
        rows = max(1, 1024 // block)
        norms = (logits, input_lengths, kept.maxima, kept.sums, *logits.shape, *logits.stride())
        launch(ctc_norm_kernel, triton.cdiv(steps * count, rows), *norms, REAL=_real(logits.dtype), ROWS=rows, BLOCK_V=block, num_warps=max(1, min(4, block // 256)))
    sizes = (steps, count, classes, len(labels), most, kept.chunks, kept.blocks, blank, _limit(logits), *logits.stride())
    totals = (*targets, kept.words, kept.flags, kept.maxima, kept.sums, kept.logz, loss, steps, count, len(labels), most, kept.chunks, kept.blocks)
    for wide, every in _modes(logits):
        options = {"PARTS": kept.parts, "WIDE": wide, "ALL": every}
        span = 1 if wide else EVERY
        ticket, programs = (None, 2 * count) if wide else (kept.ticket, 2 * count * kept.chunks)
        scans = (logits, *targets, kept.words, kept.edges, kept.flags, ticket, *sizes)
        _scan("halves", programs, *scans, KEEP=keep, SPAN=span, **options)
        launch(ctc_total_kernel, count, *totals, BLOCK=128, **options, num_warps=4)
    return loss, buffer


def _modes(logits: Tensor) -> list[tuple[bool, bool]]:
    """Whether states are wide, and whether every sequence's are: those with scores that have no factor follow alone."""
    return [(True, True)] if logits.dtype == torch.float64 else [(False, True), (True, False)]


def ctc_gradient(
    grad: Tensor, logits: Tensor, labels: Tensor, offsets: Tensor, input_lengths: Tensor, target_lengths: Tensor, loss: Tensor, kept: Tensor,
    most: int, blank: int, from_logits: bool,
) -> Tensor:  # fmt: skip
    steps, count, classes = logits.shape
    labels = labels.contiguous()
    x, _ = _cut(kept, logits, most, from_logits, True)
    real, device = torch.float64 if logits.dtype == torch.float64 else torch.float32, logits.device
    result = torch.empty(logits.shape, dtype=logits.dtype, device=device)
    if not result.numel():
        return result
    width = 32 * x.parts * x.chunks
    posterior = torch.empty((steps, count, width), dtype=real, device=device)
    blanks = torch.empty((steps, count, x.chunks), dtype=real, device=device)
    edges = torch.zeros(1 + (x.edges.numel() if x.chunks > 1 else 0), dtype=torch.int64, device=device)
    targets = (labels, offsets, input_lengths, target_lengths)
    sizes = (steps, count, classes, len(labels), most, x.chunks, x.blocks, blank, _limit(logits), *logits.stride())
    for wide, every in _modes(logits):
        ticket, programs = (None, 2 * count) if wide else (None if x.ticket is None else edges[:1], 2 * count * x.chunks)
        scans = (logits, *targets, x.words, x.edges, edges[1:], x.flags, x.logz, posterior, blanks, ticket, *sizes)
        _scan("posterior", programs, *scans, PARTS=x.parts, SPAN=1 if wide else EVERY, WIDE=wide, ALL=every)
    narrow = classes <= 64 or (classes <= 256 and classes <= 2 * most)
    block = max(16, triton.next_power_of_2(classes)) if narrow else 256
    precision = None if real == torch.float64 else "tf32x3" if launching.NVIDIA and not INTERPRETED else "ieee"
    rows = (logits, *targets, x.maxima, x.sums, x.flags, x.logz, posterior, blanks, result)
    numbers = (steps, count, classes, len(labels), most, x.chunks, width, blank, *logits.stride())
    options = {"NARROW": narrow, "PRECISION": precision, "REAL": _real(logits.dtype), "ROWS": 16, "BLOCK_V": block, "BLOCK_L": 32 if real == torch.float32 else 16}
    launch(ctc_gradient_kernel, count * triton.cdiv(steps, 16), grad.double().contiguous(), *rows, *numbers, **options, num_warps=4)
    return result
