"""One call of CTC: what its launches share, and the launches of its scans."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime import launch as runtime_launch
from ....runtime.launch import cdiv, next_power_of_2, tl_acc_dtype
from ....runtime.parts import Part
from . import plan as planning
from .forward_scan import FORWARD_SCAN
from .lanes import launch_lanes
from .lattice import SIZES, SavedScan, TargetTensors
from .loss import LOSS_SIZES, LossResults, ctc_loss_kernel
from .normalize import ctc_normalize_kernel
from .plan import TABLE_MARGIN, CTCPlan
from .posterior_scan import POSTERIOR_SCAN
from .scores import ScoreTensors
from .workspace import CTCWorkspace, ScanMemory, workspace_layout


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
    stride_t, stride_n, stride_c = logits.stride()
    runtime_launch.launch(
        ctc_normalize_kernel,
        cdiv(rows, tile["ROWS"]),
        logits_ptr=logits,
        input_lengths_ptr=input_lengths,
        maxima_ptr=maxima,
        sums_ptr=sums,
        table_ptr=table,
        zeros_ptr=zeros,
        flags_ptr=flags,
        priors_ptr=scores.priors if has_priors else None,
        num_zeros=num_zeros,
        T=T,
        N=N,
        C=C,
        limit=logit_limit(T, scores),
        stride_t=stride_t,
        stride_n=stride_n,
        stride_c=stride_c,
        prior_scale=scores.scale if has_priors else None,
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
        numbers: the sizes, strides and options of the kernels by name; see `lattice.SIZES`.
    """

    logits: Tensor
    targets: TargetTensors
    blank: int
    scores: ScoreArguments
    plan: CTCPlan
    workspace: CTCWorkspace
    numbers: dict[str, int | None]

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
        sizes = (T, N, C, targets.labels.numel(), max_target_len, plan.num_chunks, num_blocks)
        options = (plan.carry_steps, blank, *logits.stride(), scores.scale, scores.star)
        numbers = dict(zip(SIZES, (*sizes, *options), strict=True))
        return cls(logits, targets, blank, scores, plan, workspace, numbers)

    def numbers_of(self, names: Sequence[str]) -> dict[str, int | None]:
        """Return the numbers that a kernel takes."""
        return {name: self.numbers[name] for name in names if name in self.numbers}

    @property
    def results(self) -> LossResults:
        """The results of the loss in the workspace."""
        workspace = self.workspace
        return LossResults(workspace.flags, workspace.logz, workspace.maxima, workspace.sums)

    @property
    def saved(self) -> SavedScan:
        """The tensors of the workspace that the posterior scan reads."""
        workspace = self.workspace
        return SavedScan(workspace.states, workspace.carries, workspace.flags, workspace.logz)

    def score_tensors(self, table: Part | None) -> ScoreTensors:
        """Return what the posterior scan computes emissions from."""
        maxima = sums = None
        if self.scores.star is not None:
            maxima, sums = self.workspace.maxima, self.workspace.sums
        limit = logit_limit(self.logits.shape[0], self.scores)
        return ScoreTensors(self.logits, table, self.scores.priors, maxima, sums, limit)

    def launch_forward_scan(self) -> None:
        """Scan α and β to the middle, and save states before each block if a gradient follows.

        A second run in fp64 serves the sequences that the first one flagged NEEDS_FP64.
        """
        (T, N, _), plan, workspace = self.logits.shape, self.plan, self.workspace
        for fp64 in (True,) if plan.fp64 else (False, True):
            scores, numbers, table_width = self.score_tensors(None), self.numbers, 0
            if workspace.table is not None and not fp64:
                # The table has the priors and the star.
                table_width = plan.table_width
                buffer, start, dtype = workspace.table
                rows = buffer, start + 8 * TABLE_MARGIN * table_width, dtype
                scores = ScoreTensors(rows, None, None, None, None, scores.limit)
                numbers = numbers | {
                    "stride_t": table_width,
                    "stride_n": (T + 2 * TABLE_MARGIN) * table_width,
                    "stride_c": 1,
                    "prior_scale": None,
                }
            launch_lanes(
                FORWARD_SCAN,
                2 * N * (1 if fp64 else plan.num_chunks),
                self.logits.device,
                scores=scores,
                targets=self.targets,
                saved=self.saved._replace(logz=None),
                tile_counter_ptr=None if fp64 else workspace.tile_counter,
                **numbers,
                SAVE=self.numbers["num_blocks"] != 0,
                FP64=fp64,
                ALL_FP64=plan.fp64,
                TABLE_WIDTH=table_width,
            )

    def launch_loss(
        self,
        losses: Tensor,
        value: Tensor,
        mean: bool,
        zero_infinity: bool,
    ) -> None:
        """Compute log Z and the losses, and reduce them to `value`."""
        (T, N, _), workspace = self.logits.shape, self.workspace
        runtime_launch.launch(
            ctc_loss_kernel,
            N,
            targets=self.targets,
            states_ptr=workspace.states,
            results=self.results,
            losses_ptr=losses,
            value_ptr=value,
            finished_ptr=workspace.finished if value.ndim == 0 else None,
            **self.numbers_of(LOSS_SIZES),
            BLOCK_L=256,
            BLOCK_T=256 if T <= 1024 else 2048,
            ALL_FP64=self.plan.fp64,
            MEAN=mean,
            ZERO_INFINITY=zero_infinity,
            num_warps=4,
        )

    def launch_posterior_scan(self, memory: ScanMemory) -> None:
        """Scan α and β through each other's half and store the posteriors.

        A run in fp64 serves the sequences that are flagged NEEDS_FP64. It comes first, stores the
        order of the labels, and clears the words of the other run. The two are kernels of their
        own.
        """
        plan = self.plan
        prepares = memory.posteriors.order is not None or memory.counter is not None
        for fp64 in (True,) if plan.fp64 else (True, False):
            chunks = plan.num_chunks if prepares or not fp64 else 1
            self._launch_posterior_scan(memory, fp64, chunks)

    def _launch_posterior_scan(self, memory: ScanMemory, fp64: bool, chunks: int) -> None:
        """Launch a run of the posterior scan; see `launch_posterior_scan`."""
        plan, workspace, programs = self.plan, self.workspace, 2 * self.logits.shape[1] * chunks
        options: dict[str, Any] = {}
        device = self.logits.device
        if target_of(device).runs_ptx:
            # With many programs, fewer registers let more of them run at once.
            options["maxnreg"] = 168 if programs > planning.FULL_GPU else 255
        if not fp64:
            memory = memory._replace(posteriors=memory.posteriors._replace(order=None))
        launch_lanes(
            POSTERIOR_SCAN,
            programs,
            device,
            scores=self.score_tensors(None if fp64 else workspace.table),
            targets=self.targets,
            saved=self.saved,
            memory=memory,
            **self.numbers,
            FP64=fp64,
            ALL_FP64=plan.fp64,
            TABLE_WIDTH=0 if fp64 else plan.table_width,
            GROUPS=plan.class_groups if fp64 else 0,
            **options,
        )
