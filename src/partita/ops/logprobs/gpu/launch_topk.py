"""The most probable classes of rows on a GPU: allocation and launch."""

from __future__ import annotations

from torch import Tensor

from ....primitives.gpu.row_plan import StridedRows
from ....runtime.launch import launch, next_power_of_2, tl_acc_dtype
from ..common import TopKRows, topk_fake
from .topk import topk_logprobs_kernel

WARP = 32
VECTORS = 2  # that a lane loads at once
LANE_BLOCK = 512  # classes of a lane that are read together
# Classes from which on four and eight warps share a row.
LONG_ROW, LONGEST_ROW = 4096, 32_768
ROW_BYTES = 16


def topk_of_rows(
    logits: Tensor, k: int, temperature: float, softcap: float, found: TopKRows, padded: bool
) -> None:
    """Write the k most probable classes of rows `[M, C]`, which may be padded to 16 columns."""
    classes, vector = logits.shape[1], ROW_BYTES // logits.element_size()
    is_aligned = logits.stride(0) % vector == 0 and logits.data_ptr() % ROW_BYTES == 0
    if logits.stride(1) != 1 or not is_aligned or not (padded or classes % vector == 0):
        vector = 1
    warps = 8 if classes >= LONGEST_ROW else 4 if classes >= LONG_ROW else 1
    lanes = WARP * warps
    per_lane = -(-classes // lanes)
    launch(
        topk_logprobs_kernel,
        len(logits),
        logits=StridedRows(logits, 0, *logits.stride()),
        found=found,
        classes=classes,
        K=k,
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        ACC_DTYPE=tl_acc_dtype(found.maximum.dtype),
        VEC=vector,
        LANES=lanes,
        BLOCK=lanes * vector * VECTORS,
        LANE_BLOCK=min(max(next_power_of_2(per_lane), vector), LANE_BLOCK),
        num_warps=warps,
    )


def topk_logprobs(logits: Tensor, k: int, temperature: float, softcap: float) -> TopKRows:
    """Find the k most probable classes of each row, `[..., C]`, and their log-probabilities."""
    found = topk_fake(logits, k)
    rows = logits.reshape(-1, logits.shape[-1])
    topk_of_rows(rows, k, temperature, softcap, found, False)
    return found
