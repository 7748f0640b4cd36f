"""Divergences from hidden states on a GPU."""

from __future__ import annotations

import functools

from ...divergence.gpu.launch import DIVERGENCE_KERNELS
from .. import chunked_divergence

linear_divergence = functools.partial(chunked_divergence.linear_divergence, DIVERGENCE_KERNELS)
linear_divergence_backward = functools.partial(
    chunked_divergence.linear_divergence_backward, DIVERGENCE_KERNELS
)
linear_divergence_one_pass = functools.partial(
    chunked_divergence.linear_divergence_one_pass, DIVERGENCE_KERNELS
)
