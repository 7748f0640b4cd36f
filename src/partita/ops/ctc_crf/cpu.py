"""CTC-CRF on the CPU: the chains in Numba, and the lattice and the subtraction in ATen."""

from __future__ import annotations

from functools import partial

from ..chain.cpu.logz import chain_gradient, chain_logz
from . import common

FUNCTIONS = common.CRFFunctions(chain_logz, chain_gradient)
crf_loss = partial(common.crf_loss, FUNCTIONS)
crf_gradient = partial(common.crf_gradient, FUNCTIONS)
