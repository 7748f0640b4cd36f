"""What a rank does with its share of the classes, on the kernels of `linear_cross_entropy`."""

from __future__ import annotations

import functools

from ..reference import parallel as reference
from .linear_cross_entropy import absorb, descend, first_state, linear_state

__all__ = ["linear_descend_", "linear_state", "logits_gradient", "logits_state"]

logits_state = functools.partial(reference.logits_state, absorb=absorb, first_state=first_state)
logits_gradient = functools.partial(reference.logits_gradient, descend=descend)
linear_descend_ = functools.partial(reference.linear_descend_, descend=descend)
