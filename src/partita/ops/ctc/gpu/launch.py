"""CTC's loss and gradient on a GPU, from allocation to the last launch.

The loss normalizes the rows (`normalize.py`), scans α and β to the middle (`forward_scan.py`) and
sums over the alignments there (`loss.py`). The gradient continues both scans through the other
halves (`posterior_scan.py`) and writes softmax minus posterior (`gradient.py`,
`label_gradient.py`).
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....primitives.rows import aligned_rows
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, launch_alongside, next_power_of_2, tl_acc_dtype
from ..common import CTCInputs
from .forward_scan import FORWARD_SCAN
from .gradient import GRADIENT_SIZES, LogitTensors, ctc_lane_gradient_kernel
from .lanes import launch_lanes
from .lattice import SIZES, TargetTensors
from .loss import LOSS_SIZES, ctc_loss_kernel
from .normalize import ctc_normalize_kernel
from .plan import (
    FULL_GPU,
    TABLE_MARGIN,
    CTCPlan,
    CTCWorkspace,
    ScanMemory,
    ctc_plan,
    scan_memory,
)
from .posterior_scan import POSTERIOR_SCAN
from .scores import ScoreTensors

VECTOR = 4  # classes that kernels read together where rows are aligned


def contiguous(x: CTCInputs) -> CTCInputs:
    """Return the batch with logits, labels and priors as kernels read them."""
    priors = None if x.label_priors is None else x.label_priors.contiguous()
    logits = aligned_rows(x.logits, VECTOR) if x.from_logits else x.logits
    return x._replace(logits=logits, labels=x.labels.contiguous(), label_priors=priors)


def target_tensors(x: CTCInputs) -> TargetTensors:
    """Return the targets and the lengths as kernels take them."""
    return TargetTensors(x.labels, x.offsets, x.input_lengths, x.target_lengths)


def prior_scale_bits(x: CTCInputs) -> int | None:
    """Return the bits of the factor of the priors in fp64. As a number it would become fp32."""
    if x.label_priors is None:
        return None
    (bits,) = struct.unpack("q", struct.pack("d", x.prior_scale))
    return int(bits)


def logit_limit(x: CTCInputs) -> float:
    """Return the greatest absolute value of a logit that has an emission.

    It keeps the exponents of paths below 2**27 and those of emissions below 2**21. With priors or
    a star, the emission of a label is a product of two factors within half of that range.
    """
    limit = min(2.0**27 / (x.logits.shape[0] + 2), 2.0**21) * 0.69
    return limit if x.label_priors is None and x.star is None else limit / 2


def row_tile(logits: Tensor, width: int) -> dict[str, int]:
    """Return how kernels read rows.

    ROWS rows are read together, in PIECES blocks of BLOCK_V classes, and groups of VEC classes are
    aligned.
    """
    block = min(next_power_of_2(width), 1024)
    stride_t, stride_n, stride_c = logits.stride()
    is_aligned = stride_c == 1 and not (logits.shape[2] | stride_t | stride_n) % VECTOR
    return {
        "VEC": VECTOR if is_aligned and logits.data_ptr() % 16 == 0 else 1,
        "PIECES": min(cdiv(width, block), 8),
        "ROWS": max(1, 1024 // block),
        "BLOCK_V": block,
    }


def launch_normalize(
    x: CTCInputs,
    maxima: Tensor | None,
    sums: Tensor | None,
    table: Tensor | None = None,
    table_width: int = 0,
    zeros: Tensor | None = None,
    num_zeros: int = 0,
    flags: Tensor | None = None,
) -> None:
    """Compute each row's log-sum-exp and the emission table, and zero words of `zeros`.

    The flags `[N]` mark sequences with a row that has no log-sum-exp.
    """
    logits, (T, N, C) = x.logits, x.logits.shape
    tile = row_tile(logits, max(C, table_width))
    has_priors = table is not None and x.label_priors is not None
    rows = (T + 2 * TABLE_MARGIN * (table_width > 0)) * N
    stride_t, stride_n, stride_c = logits.stride()
    launch(
        ctc_normalize_kernel,
        cdiv(rows, tile["ROWS"]),
        logits_ptr=logits,
        input_lengths_ptr=x.input_lengths,
        maxima_ptr=maxima,
        sums_ptr=sums,
        table_ptr=table,
        zeros_ptr=zeros,
        flags_ptr=flags,
        priors_ptr=x.label_priors if has_priors else None,
        num_zeros=num_zeros,
        T=T,
        N=N,
        C=C,
        limit=logit_limit(x),
        stride_t=stride_t,
        stride_n=stride_n,
        stride_c=stride_c,
        prior_scale=prior_scale_bits(x) if has_priors else None,
        ACC_DTYPE=tl_acc_dtype(logits.dtype),
        TABLE_WIDTH=table_width,
        STAR=table is not None and x.star is not None,
        **tile,
        num_warps=4,
    )


def numbers_of(
    x: CTCInputs, num_chunks: int, num_blocks: int, carry_steps: int
) -> dict[str, int | None]:
    """Return the sizes, strides and options of the kernels by name; see `lattice.SIZES`."""
    sizes = (*x.logits.shape, x.labels.numel(), x.max_target_len)
    chunks = (num_chunks, num_blocks, carry_steps)
    options = (x.blank, *x.logits.stride(), prior_scale_bits(x), x.star)
    return dict(zip(SIZES, (*sizes, *chunks, *options), strict=True))


class CTCCall(NamedTuple):
    """The values that the launches of one call share.

    Fields:
        x: the batch, with contiguous labels and priors.
        plan: how the batch is cut.
        workspace: the parts of the workspace.
        numbers: see `numbers_of`.
    """

    x: CTCInputs
    plan: CTCPlan
    workspace: CTCWorkspace
    numbers: dict[str, int | None]

    @classmethod
    def of(cls, x: CTCInputs, save: bool, saved: Tensor | None = None) -> CTCCall:
        """Return a call with the saved workspace, or with a new one that has room for its steps.

        With `save`, states are saved before each block of steps, because a gradient follows.
        """
        x, (T, N, C) = contiguous(x), x.logits.shape
        logits = x.logits
        shape, fp64 = (T, N, C + (x.star is not None)), logits.dtype == torch.float64
        plan = ctc_plan(shape, fp64, x.max_target_len, x.from_logits, save)
        if saved is None:
            saved = torch.empty(plan.words, dtype=torch.float64, device=logits.device)
        num_blocks = plan.num_blocks if save else 0
        numbers = numbers_of(x, plan.num_chunks, num_blocks, plan.carry_steps)
        return cls(x, plan, plan.workspace(saved), numbers)

    def scan_arguments(self, fp64: bool) -> dict[str, Any]:
        """Return the arguments that both scans share.

        A run in fp32 reads the table of emissions if there is one, which has the priors and the
        star. Other runs read the logits.
        """
        x, saved, table = self.x, self.workspace.saved, self.workspace.table
        maxima, sums = (None, None) if x.star is None else (saved.maxima, saved.sums)
        limit = logit_limit(x)
        scores = ScoreTensors(x.logits, x.label_priors, maxima, sums, limit)
        numbers, width = self.numbers, 0
        if table is not None and not fp64:
            width = self.plan.table_width
            scores = ScoreTensors(table[TABLE_MARGIN * width :], None, None, None, limit)
            stride_n = (x.logits.shape[0] + 2 * TABLE_MARGIN) * width
            strides = {"stride_t": width, "stride_n": stride_n, "stride_c": 1}
            numbers = numbers | strides | {"prior_scale": None}
        return {
            "device": x.logits.device,
            "scores": scores,
            "targets": target_tensors(x),
            "saved": saved._replace(maxima=None, sums=None),
            **numbers,
            "FP64": fp64,
            "ALL_FP64": self.plan.fp64,
            "TABLE_WIDTH": width,
        }

    def launch_forward_scan(self) -> None:
        """Scan α and β to the middle, and save states before each block if a gradient follows.

        A second run in fp64 serves the sequences that the first one flagged NEEDS_FP64.
        """
        for fp64 in (True,) if self.plan.fp64 else (False, True):
            launch_lanes(
                FORWARD_SCAN,
                2 * self.x.logits.shape[1] * (1 if fp64 else self.plan.num_chunks),
                tile_counter_ptr=None if fp64 else self.workspace.tile_counter,
                SAVE=self.numbers["num_blocks"] != 0,
                **self.scan_arguments(fp64),
            )

    def launch_posterior_scan(self, memory: ScanMemory) -> None:
        """Scan α and β through each other's half and store the posteriors.

        A run in fp64 serves the sequences that are flagged NEEDS_FP64. It comes first, stores the
        order of the labels, and clears the words of the other run. The two are kernels of their
        own.
        """
        plan = self.plan
        options: dict[str, Any] = {}
        prepares = memory.order is not None or memory.counter is not None
        for fp64 in (True,) if plan.fp64 else (True, False):
            chunks = plan.num_chunks if prepares or not fp64 else 1
            programs = 2 * self.x.logits.shape[1] * chunks
            if target_of(self.x.logits.device).runs_ptx:
                # With many programs, fewer registers let more of them run at once.
                options["maxnreg"] = 168 if programs > FULL_GPU else 255
            launch_lanes(
                POSTERIOR_SCAN,
                programs,
                memory=memory if fp64 else memory._replace(order=None),
                GROUPS=plan.class_groups if fp64 else 0,
                **self.scan_arguments(fp64),
                **options,
            )


def ctc_loss(
    x: CTCInputs, reduction: str, zero_infinity: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reduced loss, the losses, and the workspace that the gradient uses."""
    call, logits = CTCCall.of(x, save), x.logits
    x, plan, workspace = call.x, call.plan, call.workspace
    losses = torch.empty(logits.shape[1], dtype=torch.float64, device=logits.device)
    value = torch.empty(
        losses.shape if reduction == "none" else (),
        dtype=acc_dtype(logits.dtype),
        device=logits.device,
    )
    normalize = functools.partial(launch_normalize, x, *workspace.saved[4:])
    if plan.table_width:
        normalize(workspace.table, plan.table_width, workspace.zeros, plan.num_zeros)
    else:
        workspace.buffer[: plan.num_zeros].zero_()
    # Scans of logits do not wait for the log-sum-exps, unless these are the scores of a star.
    normalizes = x.from_logits and not plan.table_width
    if normalizes and x.star is None:
        launch_alongside(logits, call.launch_forward_scan, normalize)
    else:
        if normalizes:
            normalize()
        call.launch_forward_scan()
    launch(
        ctc_loss_kernel,
        len(losses),
        targets=target_tensors(x),
        saved=workspace.saved,
        losses_ptr=losses,
        value_ptr=value,
        finished_ptr=workspace.finished if value.ndim == 0 else None,
        **{name: call.numbers[name] for name in LOSS_SIZES},
        BLOCK_L=256,
        BLOCK_T=256 if logits.shape[0] <= 1024 else 2048,
        ALL_FP64=plan.fp64,
        MEAN=reduction == "mean",
        ZERO_INFINITY=zero_infinity,
        num_warps=4,
    )
    return value, losses, workspace.buffer


def ctc_gradient(
    grad_output: Tensor, x: CTCInputs, losses: Tensor, saved: Tensor, reduction: str
) -> Tensor:
    """Return the gradient of the loss with respect to the logits."""
    logits = x.logits
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if not dlogits.numel():
        return dlogits
    call = CTCCall.of(x, True, saved)
    (T, N, C), x, plan, logits = logits.shape, call.x, call.plan, call.x.logits
    memory = scan_memory(logits, plan)
    call.launch_posterior_scan(memory)
    arguments: dict[str, Any] = {
        "grad_output_ptr": grad_output,
        "logits": LogitTensors(logits, logits.stride(2), dlogits),
        "targets": target_tensors(x),
        "saved": call.workspace.saved,
        "posteriors": memory._replace(counter=None, carries=None),
        **{name: call.numbers[name] for name in GRADIENT_SIZES if name != "stride_grad"},
        "stride_grad": grad_output.stride(0) if grad_output.ndim else 0,
        "MEAN": reduction == "mean",
    }
    if plan.class_groups > 0:
        options = {"ROWS": 8, "GROUPS": plan.class_groups, "num_warps": 1}
        launch(ctc_lane_gradient_kernel, N * cdiv(T, 8), **arguments, **options)
        return dlogits
    # This kernel takes time to load, and few classes do not need it.
    from .label_gradient import ctc_label_gradient_kernel, label_index

    tile = row_tile(logits, C)
    rows = 4 if tile["BLOCK_V"] <= 512 else 1
    if tile["BLOCK_V"] > 512:
        # With a star, ten pieces and its sums have no room in the registers.
        tile |= {"BLOCK_V": 512, "PIECES": min(cdiv(C, 512), 10 if x.star is None else 8)}
    launch(
        ctc_label_gradient_kernel,
        N * cdiv(T, rows),
        **arguments,
        index=label_index(target_tensors(x), x.max_target_len, C, x.blank),
        **tile | {"ROWS": rows},
        BLOCK_L=min(max(32, next_power_of_2(x.max_target_len + 1)), 256),
        num_warps=4,
    )
    return dlogits
