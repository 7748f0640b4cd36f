"""The ops of distillation losses from hidden states, on the kernels for GPUs."""

from __future__ import annotations

from ...distillation.gpu.launch import DISTILLATION_KERNELS
from ..distillation_chunks import DistillationHeads

KERNELS = DistillationHeads(DISTILLATION_KERNELS)
