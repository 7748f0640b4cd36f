"""CTC on a GPU: how the scans and the rows are launched, and what the loss keeps for the gradient."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime import launch as launching
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import (
    INTERPRETED,
    SideStream,
    call_id,
    cdiv,
    launch,
    next_power_of_2,
    tl_acc_dtype,
)
from .. import reference
from . import align as best
from . import forward_scan as ctc_scan
from . import posterior as ctc_posterior
from .gradient import (
    ctc_label_gradient_kernel,
    ctc_lane_gradient_kernel,
    ctc_narrow_gradient_kernel,
)
from .normalize import ctc_next_kernel, ctc_norm_kernel, ctc_order_kernel, ctc_total_kernel
from .steps import EVERY, LANES

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
        zeros: what must be 0 before the scan: the ticket, how many losses are there, flags and edges.
        ticket, arrived, flags: `[1]`, `[1]`, `[N]`.
        edges: what chunks hand to their neighbours.
        words: states before each block of steps, and behind the last.
        logz: `[N]`.
        maxima, sums: `[T, N]`, what normalises each step; None for log-probabilities.
        table: `[N, 24 + T + 24, width]`, or None.
        posterior, blanks: `[N, chunks, T, 32]`, `[N, chunks, T]`, where they are found beside what normalises the steps; otherwise None.
    """

    zeros: Tensor
    ticket: Tensor | None
    arrived: Tensor
    flags: Tensor
    edges: Tensor
    words: Tensor
    logz: Tensor
    maxima: Tensor | None
    sums: Tensor | None
    table: Tensor | None
    posterior: Tensor | None
    blanks: Tensor | None


class LabelIndex(NamedTuple):
    """Where the labels of a class stand in a target.

    Fields:
        slots: `[N, C]`, the first place of each class, or -1.
        again: `[N]`, how often one class stands there again at most, or -1 where none stands there.
        behind: `[N, L]`, the next place of the same class, or -1.
    """

    slots: Tensor
    again: Tensor
    behind: Tensor


def label_index(
    labels: Tensor, offsets: Tensor, target_lengths: Tensor, most: int, classes: int, blank: int
) -> LabelIndex:
    count = len(target_lengths)
    sizes = [
        cdiv(size, 4) * 4 for size in (count * classes, count, count * most)
    ]  # each on 16 bytes
    words = torch.empty(sum(sizes), dtype=torch.int32, device=labels.device)
    words[: sizes[0] + sizes[1]].fill_(-1)
    places = LabelIndex(*words.split_with_sizes(sizes))
    args = (labels, offsets, target_lengths, *places, labels.numel(), most, classes, blank)
    launch(ctc_next_kernel, count * cdiv(most, 64), *args, BLOCK=64, num_warps=4)
    return places


@functools.lru_cache(maxsize=4096)
def plan_of(shape: torch.Size, wide: bool, most: int) -> Plan:
    steps, count, classes = shape
    blocks = cdiv(steps + 1, 2 * EVERY)
    table = 0 if wide else reference.table_width(classes, most)
    groups, chunks = cdiv(classes, 32) if classes <= 64 else 0, most // 32 + 1
    return Plan(
        most,
        wide,
        table,
        chunks,
        groups,
        groups > 0 and 2 * count * chunks > MANY,
        blocks,
        blocks * EVERY,
    )


@functools.lru_cache(maxsize=4096)
def _sizes(shape: torch.Size, plan: Plan, from_logits: bool, keep: bool) -> list[int]:
    """Words of the parts of the buffer, and of what is left."""
    steps, count, _ = shape
    norms = cdiv(steps * count, 1 if plan.wide else 2) if from_logits else 0
    states = 2 * (plan.blocks * keep + 1) * count * plan.chunks * 64
    shares = (
        count * plan.chunks * steps
        if reference.posterior_words(shape, plan.most, from_logits, keep) and not plan.wide
        else 0
    )
    sizes = [
        1,
        1,
        count,
        2 * plan.chunks * count * plan.reach,
        states,
        count,
        norms,
        norms,
        (steps + 2 * MARGIN) * count * plan.table,
    ]
    sizes = [
        size + size % 2 for size in (*sizes, 16 * shares, cdiv(shares, 2))
    ]  # each on 16 bytes: pointers that are not would be another kernel
    return [
        *sizes,
        reference.kept_shape(shape, plan.most, from_logits, keep, "gpu")[0] - sum(sizes),
    ]


def _cut(buffer: Tensor, plan: Plan, shape: torch.Size, from_logits: bool, keep: bool) -> Kept:
    sizes = _sizes(shape, plan, from_logits, keep)
    whole = buffer.view(torch.int64)
    ticket, arrived, flags, edges, words, logz, maxima, sums, table, posterior, blanks, _ = (
        whole.split_with_sizes(sizes)
    )
    waits, real = plan.chunks > 1 and not plan.wide, torch.float64 if plan.wide else torch.float32
    norms, shares = (
        [part.view(real) if size else None for part in parts]
        for size, parts in ((sizes[6], (maxima, sums)), (sizes[9], (posterior, blanks)))
    )
    zeros = whole[: sum(sizes[: 4 if plan.chunks > 1 else 3])]
    waiting, logz = ticket if waits else None, logz.view(torch.float64)
    return Kept(
        zeros,
        waiting,
        arrived,
        flags,
        edges,
        words,
        logz,
        norms[0],
        norms[1],
        table if plan.table else None,
        shares[0],
        shares[1],
    )


def _limit(logits: Tensor) -> float:
    """Beyond it, logits have no factor: exponents of paths stay below 2**27, and those of emissions below 2**21."""
    return min(2.0**27 / (logits.shape[0] + 2), 2.0**21) * 0.69


def _tile(logits: Tensor, width: int) -> dict[str, int]:
    """How rows are read: so many at once, in pieces of so many classes, and how many of these lie aligned."""
    block = min(next_power_of_2(width), 1024)
    offsets = (logits.data_ptr() // logits.element_size(), logits.shape[2], *logits.stride()[:2])
    vector = 4 if logits.stride(2) == 1 and all(offset % 4 == 0 for offset in offsets) else 1
    return {
        "VEC": vector,
        "PIECES": min(cdiv(width, block), 8),
        "ROWS": max(1, 1024 // block),
        "BLOCK_V": block,
    }


def _launch_lanes(name: str, programs: int, *args: Any, call: Any = None, **options: Any) -> None:
    """Run a kernel of one warp a program, in Gluon where that is known."""
    gluon = launching.NVIDIA and not INTERPRETED
    kernel = getattr(SCANS[name], f"ctc_{name}_gluon_kernel" if gluon else f"ctc_{name}_kernel")
    launch(
        kernel, programs, *args, call=call, LAYOUT=LANES if gluon else None, **options, num_warps=1
    )


def _normalise(
    logits: Tensor,
    input_lengths: Tensor,
    maxima: Tensor | None,
    sums: Tensor | None,
    table: Tensor | None,
    width: int,
    zeros: Tensor | None,
    call: Any = None,
) -> None:
    """What normalises the steps, and the table of factors; `zeros` are filled."""
    steps, count, classes = logits.shape
    options = {
        "REAL": tl_acc_dtype(logits.dtype),
        "TABLE": width,
        **_tile(logits, max(classes, width)),
    }
    rows = (steps + 2 * MARGIN * (width > 0)) * count
    words = 0 if zeros is None else zeros.shape[0]
    args = (
        logits,
        input_lengths,
        maxima,
        sums,
        table,
        zeros,
        words,
        *logits.shape,
        _limit(logits),
        *logits.stride(),
    )
    launch(ctc_norm_kernel, cdiv(rows, options["ROWS"]), *args, call=call, **options, num_warps=4)


class _Call(NamedTuple):
    """What all launches of a call share: its tensors, sizes and plan; and the number that stands for all of these."""

    number: int
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

    def scan(
        self,
        name: str,
        wide: bool,
        ticket: Tensor | None,
        *args: Tensor,
        blocks: int,
        **options: Any,
    ) -> None:
        (steps, count, classes), plan, table = self.logits.shape, self.plan, self.kept.table
        source, strides = self.logits, self.logits.stride()
        if table is not None and not wide:
            source, strides = (
                table[MARGIN * plan.table :],
                (plan.table, (steps + 2 * MARGIN) * plan.table, 1),
            )
        sizes = (
            steps,
            count,
            classes,
            self.targets[0].shape[0],
            self.most,
            plan.chunks,
            blocks,
            plan.reach,
            self.blank,
            _limit(self.logits),
            *strides,
        )
        options |= {
            "SPAN": 1 if wide else EVERY,
            "WIDE": wide,
            "ALL": plan.wide,
            "TABLE": 0 if source is self.logits else plan.table,
        }
        programs = 2 * count * (1 if wide else plan.chunks)
        if name == "posterior" and launching.NVIDIA and not INTERPRETED:
            options["maxnreg"] = (
                168 if programs > MANY else 255
            )  # more programs at once, or each with what it wants
        _launch_lanes(
            name,
            programs,
            source,
            *self.targets,
            *args,
            None if wide else ticket,
            *sizes,
            call=(self.number, blocks),
            **options,
        )

    def halves(self, wide: bool, blocks: int) -> None:
        x = self.kept
        self.scan(
            "halves", wide, x.ticket, x.words, x.edges, x.flags, blocks=blocks, KEEP=blocks > 0
        )

    def total(
        self,
        losses: Tensor,
        blocks: int,
        value: Tensor | None = None,
        mean: bool = False,
        zero: bool = False,
    ) -> None:
        """log Z, the losses, and what they are reduced to: without a place for that, all is still without what normalises the steps."""
        (steps, count, _), x = self.logits.shape, self.kept
        norms = (None, None) if value is None else (x.maxima, x.sums)
        arrived = x.arrived if value is not None and value.ndim == 0 else None
        args = (
            x.words,
            x.flags,
            *norms,
            x.logz,
            losses,
            value,
            arrived,
            steps,
            count,
            self.targets[0].shape[0],
            self.most,
            self.plan.chunks,
            blocks,
        )
        lanes = {"BLOCK_L": 256, "BLOCK_T": 256 if steps <= 1024 else 2048}
        call = (self.number, blocks, value is None, arrived is None)
        launch(
            ctc_total_kernel,
            count,
            *self.targets,
            *args,
            call=call,
            **lanes,
            ALL=self.plan.wide,
            MEAN=mean,
            ZERO=zero,
            num_warps=4,
        )

    def zeros(self, filled: bool = True) -> Tensor:
        """A ticket and edges for the scan of posteriors; or their memory, for a kernel that fills it."""
        words = 2 + (self.kept.edges.shape[0] if self.plan.chunks > 1 else 0)
        return (torch.zeros if filled else torch.empty)(
            words, dtype=torch.int64, device=self.logits.device
        )

    def posteriors(self, posterior: Tensor, blanks: Tensor, zeros: Tensor, width: int = 32) -> None:
        x, groups = self.kept, self.plan.groups * self.plan.summed
        ticket, tensors = (
            None if x.ticket is None else zeros[:1],
            (x.words, x.edges, zeros[2:], x.flags, x.logz, posterior, blanks),
        )
        for wide in self.modes:
            self.scan(
                "posterior",
                wide,
                ticket,
                *tensors,
                blocks=self.plan.blocks,
                GROUPS=groups,
                WIDTH=width,
            )


def ctc_loss(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    most: int,
    blank: int,
    from_logits: bool,
    reduction: str,
    zero_infinity: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if not logits.numel():
        targets = (labels, offsets, input_lengths, target_lengths)
        return reference.ctc_loss(
            logits, *targets, most, blank, from_logits, reduction, zero_infinity, keep
        )
    plan = plan_of(logits.shape, logits.dtype == torch.float64, most)
    buffer = torch.empty(
        reference.kept_shape(logits.shape, most, from_logits, keep, "gpu"),
        dtype=torch.float64,
        device=logits.device,
    )
    x = _cut(buffer, plan, logits.shape, from_logits, keep)
    losses = torch.empty(logits.shape[1], dtype=torch.float64, device=logits.device)
    value = torch.empty(
        losses.shape if reduction == "none" else (),
        dtype=acc_dtype(logits.dtype),
        device=logits.device,
    )
    targets = (labels.contiguous(), offsets, input_lengths, target_lengths)
    number = call_id(
        logits,
        *logits.shape,
        *logits.stride(),
        *targets,
        labels.shape[0],
        most,
        blank,
        from_logits,
        keep,
        True,
    )
    call = _Call(number, logits, targets, most, blank, plan, x)
    if plan.table:
        _normalise(logits, input_lengths, x.maxima, x.sums, x.table, plan.table, x.zeros, number)
    else:
        x.zeros.zero_()
    zeros = call.zeros() if x.posterior is not None else None
    blocks, apart = plan.blocks if keep else 0, from_logits and not plan.table
    beside = SideStream(logits, apart)  # the scans do not wait for what normalises the steps
    try:
        with beside:
            for wide in call.modes:
                call.halves(wide, blocks)
            if zeros is not None and x.posterior is not None and x.blanks is not None:
                call.total(losses, blocks)
                call.posteriors(x.posterior, x.blanks, zeros)
        if apart:
            _normalise(logits, input_lengths, x.maxima, x.sums, None, 0, None, number)
    finally:
        beside.join()  # after an error too: the memory is the current stream's
    call.total(losses, blocks, value, reduction == "mean", zero_infinity)
    return value, losses, buffer


def ctc_align(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    most: int,
    blank: int,
    from_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, count, classes = logits.shape
    if not logits.numel():
        return reference.ctc_align(
            logits, labels, offsets, input_lengths, target_lengths, most, blank, from_logits
        )
    device, targets = logits.device, (labels.contiguous(), offsets, input_lengths, target_lengths)
    chunks, blocks = most // 32 + 1, cdiv(steps, EVERY)
    reach = blocks * EVERY
    zeros = torch.zeros(
        2 + count + count % 2 + (chunks * count * reach if chunks > 1 else 0),
        dtype=torch.int64,
        device=device,
    )
    ticket, flags, edges = zeros.split([2, count + count % 2, len(zeros) - 2 - count - count % 2])
    pointers = torch.empty((count, chunks, blocks, 32), dtype=torch.int32, device=device)
    ends = torch.empty((count, 2), dtype=torch.float64, device=device)
    states = torch.empty((count, steps), dtype=torch.int32, device=device)
    found, tokens = (
        torch.empty((count, steps), dtype=torch.int64, device=device) for _ in range(2)
    )
    scores = torch.empty((count, steps), dtype=torch.float64, device=device)
    maxima = sums = None
    if from_logits:
        maxima, sums = torch.empty(
            (2, steps, count), dtype=torch.promote_types(logits.dtype, torch.float32), device=device
        )
        _normalise(logits, input_lengths, maxima, sums, None, 0, None)
    sizes = (
        steps,
        count,
        classes,
        len(labels),
        most,
        chunks,
        blocks,
        reach,
        blank,
        *logits.stride(),
    )
    _launch_lanes(
        "best",
        count * chunks,
        logits,
        *targets,
        pointers,
        ends,
        edges,
        flags,
        ticket if chunks > 1 else None,
        *sizes,
        SPAN=EVERY,
    )
    way = (
        offsets,
        input_lengths,
        target_lengths,
        pointers,
        ends,
        flags,
        states,
        steps,
        count,
        len(labels),
        most,
        chunks,
        blocks,
    )
    _launch_lanes("trace", count, *way)
    spelt = (
        logits,
        targets[0],
        offsets,
        maxima,
        sums,
        flags,
        states,
        found,
        tokens,
        scores,
        steps,
        count,
        blank,
        *logits.stride(),
    )
    launch(best.ctc_spell_kernel, count * cdiv(steps, 256), *spelt, BLOCK_T=256, num_warps=4)
    impossible = ends.amax(1).where(target_lengths > 0, ends[:, 0]) == -torch.inf
    return (
        found,
        tokens,
        scores,
        torch.where(impossible & (flags[:count] == 0), -torch.inf, scores.sum(1)),
    )


def ctc_gradient(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    kept: Tensor,
    most: int,
    blank: int,
    from_logits: bool,
    reduction: str,
) -> Tensor:
    steps, count, classes = logits.shape
    plan, real, device = (
        plan_of(logits.shape, logits.dtype == torch.float64, most),
        tl_acc_dtype(logits.dtype),
        logits.device,
    )
    result = torch.empty(logits.shape, dtype=logits.dtype, device=device)
    if not result.numel():
        return result
    x = _cut(kept, plan, logits.shape, from_logits, True)
    targets = (labels.contiguous(), offsets, input_lengths, target_lengths)
    number = call_id(
        logits,
        *logits.shape,
        *logits.stride(),
        *targets,
        labels.shape[0],
        most,
        blank,
        from_logits,
        grad,
        *grad.stride(),
    )
    call = _Call(number, logits, targets, most, blank, plan, x)
    by_lane, wide = (
        plan.groups > 0 and not plan.summed,
        torch.promote_types(logits.dtype, torch.float32),
    )
    width = cdiv(classes, 8) * 8 if plan.summed else 32
    posterior, blanks = x.posterior, x.blanks
    if posterior is None or blanks is None:
        posterior, blanks = (
            torch.empty(count * plan.chunks * steps * size, dtype=wide, device=device)
            for size in (width, 1)
        )
        zeros = call.zeros(filled=not by_lane)
        if by_lane:
            order = torch.empty(
                (count, plan.chunks, 1 + 2 * plan.groups, 32), dtype=torch.int32, device=device
            )
            orders = (
                *call.targets[:2],
                target_lengths,
                order,
                zeros,
                count,
                classes,
                labels.shape[0],
                most,
                plan.chunks,
                zeros.shape[0],
            )
            launch(
                ctc_order_kernel,
                count * plan.chunks,
                *orders,
                call=number,
                GROUPS=plan.groups,
                num_warps=1,
            )
        call.posteriors(posterior, blanks, zeros, width)
    rows = (grad, logits, *call.targets, x.maxima, x.sums, x.flags, x.logz, posterior, blanks)
    sizes = (
        steps,
        count,
        classes,
        labels.shape[0],
        most,
        plan.chunks,
        blank,
        *logits.stride(),
        grad.stride(0) if grad.ndim else 0,
    )
    tile = _tile(logits, classes) | {"REAL": real, "MEAN": reduction == "mean"}
    if plan.groups == 0:
        places = label_index(call.targets[0], offsets, target_lengths, most, classes, blank)
        narrow = tile["BLOCK_V"] <= 512
        tile |= {
            "ROWS": 4 if narrow else 1,
            "BLOCK_L": min(max(32, next_power_of_2(most + 1)), 256),
        }
        if not narrow:
            tile |= {"BLOCK_V": 512, "PIECES": min(cdiv(classes, 512), 10)}
        launch(
            ctc_label_gradient_kernel,
            count * cdiv(steps, tile["ROWS"]),
            *rows,
            *places,
            result,
            *sizes,
            call=number,
            **tile,
            num_warps=4,
        )
    elif by_lane:
        tile = {"REAL": real, "MEAN": tile["MEAN"], "ROWS": 8, "GROUPS": plan.groups}
        launch(
            ctc_lane_gradient_kernel,
            count * cdiv(steps, 8),
            *rows,
            order,
            result,
            *sizes,
            call=number,
            **tile,
            num_warps=1,
        )
    else:
        del tile["PIECES"]
        launch(
            ctc_narrow_gradient_kernel,
            count * cdiv(steps, tile["ROWS"]),
            *rows,
            result,
            *sizes,
            call=number,
            WIDTH=width,
            **tile,
            num_warps=4,
        )
    return result
