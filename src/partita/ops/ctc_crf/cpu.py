"""CTC-CRF on the CPU: the chains in Numba, and the lattice and the subtraction in ATen."""

from __future__ import annotations

from functools import partial

from ..chain.cpu.logz import chain_gradient, chain_logz
from .common import gradient_through_chains, in_torch, loss_through_chains

crf_loss = partial(loss_through_chains, in_torch(chain_logz, chain_gradient))
crf_gradient = partial(gradient_through_chains, chain_gradient)
