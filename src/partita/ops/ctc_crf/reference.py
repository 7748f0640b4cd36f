"""CTC-CRF in plain PyTorch: log Z of all paths minus log Z of the paths that spell the target."""

from __future__ import annotations

from functools import partial

from ..chain.reference import chain_gradient, chain_logz
from . import common

FUNCTIONS = common.CRFFunctions(chain_logz, chain_gradient)
crf_loss = partial(common.crf_loss, FUNCTIONS)
crf_gradient = partial(common.crf_gradient, FUNCTIONS)
