"""CTC-CRF in plain PyTorch: log Z of all paths minus log Z of the paths that spell the target."""

from __future__ import annotations

from functools import partial

from ..chain.reference import chain_gradient, chain_logz
from . import common

crf_loss = partial(common.crf_loss, common.in_torch(chain_logz, chain_gradient))
crf_gradient = partial(common.crf_gradient, chain_gradient)
