"""One call of CTC: what its launches share, and the launches of its scans."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime import launch as runtime_launch
from ....runtime.launch import cdiv, next_power_of_2, tl_acc_dtype
from ....runtime.parts import Part
from . import plan as planning
from .forward_scan import FORWARD_SCAN
from .lanes import launch_lanes, uses_gluon
from .loss import ctc_loss_kernel
from .normalize import ctc_normalize_kernel
from .plan import SAVE_EVERY, TABLE_MARGIN, CTCPlan
from .posterior_scan import POSTERIOR_SCAN
from .workspace import CTCWorkspace, ScanMemory, workspace_layout


class TargetTensors(NamedTuple):
    """The targets of a batch, in the order in which kernels take them.

    Fields:
        labels: the targets one after another, M labels, contiguous.
        offsets: `[N]`, where each target starts.
        input_lengths: `[N]`.
        target_lengths: `[N]`.
    """

    labels: Tensor
    offsets: Tensor
    input_lengths: Tensor
    target_lengths: Tensor


class ScoreArguments(NamedTuple):
    """The options of the scores as kernels take them; None without priors and without a star.

    Fields:
        priors: `[C]`, contiguous.
        scale: the bits of the factor of the priors in fp64. As a number it would become fp32.
        star: the label that is the star.
    """

    priors: Tensor | None
    scale: int | None
    star: int | None


def score_arguments(priors: Tensor | None, scale: float, star: int | None) -> ScoreArguments:
    """Return the options of the scores as kernels take them; see `ScoreOptions`."""
    if priors is None:
        return ScoreArguments(None, None, star)
    (bits,) = struct.unpack("q", struct.pack("d", scale))
    return ScoreArguments(priors.contiguous(), bits, star)


def logit_limit(T: int, scores: ScoreArguments) -> float:
    """Return the greatest absolute value of a logit that has an emission.

    It keeps the exponents of paths below 2**27 and those of emissions below 2**21. With priors or
    a star, the emission of a label is a product of two factors within half of that range.
    """
    limit = min(2.0**27 / (T + 2), 2.0**21) * 0.69
    return limit if scores.priors is None and scores.star is None else limit / 2


def row_tile(logits: Tensor, width: int) -> dict[str, int]:
    """Return how kernels read rows.

    ROWS rows are read together, in PIECES blocks of BLOCK_V classes, and groups of VEC classes are
    aligned.
    """
    block = min(next_power_of_2(width), 1024)
    stride_t, stride_n, stride_c = logits.stride()
    is_aligned = stride_c == 1 and not (logits.shape[2] | stride_t | stride_n) & 3
    return {
        "VEC": 4 if is_aligned and logits.data_ptr() & 15 == 0 else 1,
        "PIECES": min(cdiv(width, block), 8),
        "ROWS": max(1, 1024 // block),
        "BLOCK_V": block,
    }


def launch_normalize(
    logits: Tensor,
    input_lengths: Tensor,
    maxima: Tensor | Part | None,
    sums: Tensor | Part | None,
    scores: ScoreArguments,
    table: Part | None = None,
    table_width: int = 0,
    zeros: Part | None = None,
    num_zeros: int = 0,
    flags: Tensor | None = None,
) -> None:
    """Compute each row's log-sum-exp and the emission table, and zero words of `zeros`.

    The flags `[N]` mark sequences with a row that has no log-sum-exp.
    """
    T, N, C = logits.shape
    tile = row_tile(logits, max(C, table_width))
    has_priors = table is not None and scores.priors is not None
    rows = (T + 2 * TABLE_MARGIN * (table_width > 0)) * N
    runtime_launch.launch(
        ctc_normalize_kernel,
        cdiv(rows, tile["ROWS"]),
        logits,
        input_lengths,
        maxima,
        sums,
        table,
        zeros,
        flags,
        scores.priors if has_priors else None,
        num_zeros,
        T,
        N,
        C,
        logit_limit(T, scores),
        *logits.stride(),
        scores.scale if has_priors else None,
        ACC_DTYPE=tl_acc_dtype(logits.dtype),
        TABLE_WIDTH=table_width,
        STAR=table is not None and scores.star is not None,
        **tile,
        num_warps=4,
    )


class CTCCall(NamedTuple):
    """The values that the launches of one call share.

    Fields:
        logits: `[T, N, C]`.
        targets: the targets and the lengths.
        blank: the class of the blank.
        scores: the priors and the star.
        plan: how the batch is cut.
        workspace: the parts of the workspace.
        sizes: what a scan takes before the strides of its emissions.
        strides: those of the logits.
    """

    logits: Tensor
    targets: TargetTensors
    blank: int
    scores: ScoreArguments
    plan: CTCPlan
    workspace: CTCWorkspace
    sizes: tuple[Any, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        logits: Tensor,
        targets: TargetTensors,
        max_target_len: int,
        blank: int,
        from_logits: bool,
        scores: ScoreArguments,
        save: bool,
        saved: Tensor | None = None,
    ) -> CTCCall:
        """Return a call with the saved workspace, or with a new one that has room for its steps.

        With `save`, states are saved before each block of steps, because a gradient follows.
        """
        T, N, C = logits.shape
        shape, fp64 = (T, N, C + (scores.star is not None)), logits.dtype == torch.float64
        layout = workspace_layout(shape, fp64, max_target_len, from_logits, save)
        if saved is None:
            saved = torch.empty(layout.words, dtype=torch.float64, device=logits.device)
        plan, workspace = layout.plan, layout.of(saved)
        num_blocks = plan.num_blocks if save else 0
        chunks = (max_target_len, plan.num_chunks, num_blocks, plan.carry_steps)
        sizes = (T, N, C, targets.labels.numel(), *chunks, blank, logit_limit(T, scores))
        return cls(logits, targets, blank, scores, plan, workspace, sizes, logits.stride())

    def score_tensors(self, in_table: bool = False) -> tuple[Tensor | Part | None, ...]:
        """Return the priors, and the normalizers that the star needs; a table contains them."""
        priors, _, star = self.scores
        workspace = self.workspace
        if star is None or in_table:
            return None if in_table else priors, None, None
        return priors, workspace.maxima, workspace.sums

    def launch_forward_scan(self) -> None:
        """Scan α and β to the middle, and save states before each block if a gradient follows.

        A second run in fp64 serves the sequences that the first one flagged NEEDS_FP64.
        """
        (T, N, *_), plan, workspace = self.sizes, self.plan, self.workspace
        for fp64 in (True,) if plan.fp64 else (False, True):
            source: Tensor | Part = self.logits
            strides, table_width = self.strides, 0
            if workspace.table is not None and not fp64:
                table_width = plan.table_width
                buffer, start, dtype = workspace.table
                source = buffer, start + 8 * TABLE_MARGIN * table_width, dtype
                strides = (table_width, (T + 2 * TABLE_MARGIN) * table_width, 1)
            launch_lanes(
                FORWARD_SCAN,
                2 * N * (1 if fp64 else plan.num_chunks),
                source,
                *self.targets,
                workspace.states,
                workspace.carries,
                workspace.flags,
                None if fp64 else workspace.tile_counter,
                *self.score_tensors(in_table=table_width > 0),
                *self.sizes,
                *strides,
                None if table_width else self.scores.scale,
                self.scores.star,
                SAVE=self.sizes[6] > 0,
                BLOCK_T=1 if fp64 else SAVE_EVERY,
                FP64=fp64,
                ALL_FP64=plan.fp64,
                TABLE_WIDTH=table_width,
            )

    def launch_loss(
        self,
        losses: Tensor,
        value: Tensor | None = None,
        mean: bool = False,
        zero_infinity: bool = False,
    ) -> None:
        """Compute log Z and the losses, and reduce them to `value`.

        Without `value`, only log Z is final, and the losses still lack the log-sum-exps.
        """
        (T, N, _, *sizes), workspace = self.sizes, self.workspace
        normalizers = (None, None) if value is None else (workspace.maxima, workspace.sums)
        finished = workspace.finished if value is not None and value.ndim == 0 else None
        runtime_launch.launch(
            ctc_loss_kernel,
            N,
            *self.targets,
            workspace.states,
            workspace.flags,
            *normalizers,
            workspace.logz,
            losses,
            value,
            finished,
            T,
            N,
            *sizes[:4],
            BLOCK_L=256,
            BLOCK_T=256 if T <= 1024 else 2048,
            ALL_FP64=self.plan.fp64,
            MEAN=mean,
            ZERO_INFINITY=zero_infinity,
            num_warps=4,
        )

    def launch_posterior_scan(self, memory: ScanMemory, width: int) -> None:
        """Scan α and β through each other's half and store the posteriors in rows of `width`.

        A run in fp64 serves the sequences that are flagged NEEDS_FP64. It comes first, stores the
        order of the labels, and clears the words of the other run. The two are kernels of their
        own.
        """
        plan = self.plan
        prepares = memory.order is not None or memory.counter is not None
        for fp64 in (True,) if plan.fp64 else (True, False):
            chunks = plan.num_chunks if prepares or not fp64 else 1
            self._launch_posterior_scan(memory, width, fp64, chunks)

    def _launch_posterior_scan(
        self, memory: ScanMemory, width: int, fp64: bool, chunks: int
    ) -> None:
        """Launch a run of the posterior scan; see `launch_posterior_scan`."""
        plan, workspace, programs = self.plan, self.workspace, 2 * self.sizes[1] * chunks
        options: dict[str, Any] = {}
        if uses_gluon():
            # With many programs, fewer registers let more of them run at once.
            options["maxnreg"] = 168 if programs > planning.FULL_GPU else 255
        launch_lanes(
            POSTERIOR_SCAN,
            programs,
            self.logits,
            None if fp64 else workspace.table,
            *self.targets,
            workspace.states,
            workspace.carries,
            memory.carries,
            workspace.flags,
            workspace.logz,
            memory.posteriors,
            memory.blank_posteriors,
            memory.order if fp64 else None,
            memory.counter,
            *self.score_tensors(),
            *self.sizes,
            *self.strides,
            self.scores.scale,
            self.scores.star,
            BLOCK_T=1 if fp64 else SAVE_EVERY,
            FP64=fp64,
            ALL_FP64=plan.fp64,
            TABLE_WIDTH=0 if fp64 else plan.table_width,
            GROUPS=plan.class_groups * plan.sum_by_class,
            ORDER_GROUPS=plan.class_groups if fp64 and memory.order is not None else 0,
            WIDTH=width,
            **options,
        )
