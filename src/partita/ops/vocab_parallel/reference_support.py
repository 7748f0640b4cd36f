"""Statistics over recorded supports whose classes lie on several ranks, in plain PyTorch."""

import functools

from ..linear_heads.reference_support import SUPPORT_KERNELS
from . import support_steps

parallel_support_dots = functools.partial(support_steps.parallel_support_dots, SUPPORT_KERNELS)
parallel_support_rows = functools.partial(support_steps.parallel_support_rows, SUPPORT_KERNELS)
parallel_support_coefficients = functools.partial(
    support_steps.parallel_support_coefficients, SUPPORT_KERNELS
)
parallel_support_gradients = functools.partial(
    support_steps.parallel_support_gradients, SUPPORT_KERNELS
)
