"""Log Z of chains in plain eager mode, where small calls wait for the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...runtime.eager import EagerCall, EagerFunction
from .autograd import logz, logz_gradient, logz_gradients, rounded_logz


class EagerLogZ(EagerFunction):
    """Log Z of each chain in the dtype of results, `[N]`; its gradient is the marginals."""

    op, gradient = rounded_logz, logz_gradient
    inputs, gradients = (0, 2, 3), (0, 1, 2)
    saved = (0, 2, 3, 1, 4, ~1, ~2)
    save_flag = 5

    @staticmethod
    def options(args: tuple[Any, ...], needed: Sequence[bool]) -> tuple[Any, ...]:
        return args[0].dtype, args[-1]

    @staticmethod
    def differentiate(ctx: Any, grads: tuple[Any, ...], saved: tuple[Any, ...]) -> Any:
        return logz_gradients(grads[0], saved, ctx.link.options[-1])


class EagerExactLogZ(EagerLogZ):
    """Log Z of each chain, `[N]` fp64; its gradient is the marginals."""

    op = logz
    saved = (0, 2, 3, 1, 4, ~0, ~1)


eager_logz = EagerCall(rounded_logz, EagerLogZ)
eager_exact_logz = EagerCall(logz, EagerExactLogZ)
