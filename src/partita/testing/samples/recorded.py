"""The registered ops that a call runs, with their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.private_names import TorchDispatchMode
from ...runtime.register import Op
from .call import map_tensors


class OpCall(NamedTuple):
    """One call of a registered op.

    Fields:
        op: the overload, such as `torch.ops.partita.softmax.default`.
        args: its arguments, as copies that the call has not changed.
    """

    op: Any
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.op.name()).removeprefix("partita::")


class _Recorder(TorchDispatchMode):
    def __init__(self, found: list[OpCall]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "partita":
            self.found.append(OpCall(op, tuple(map_tensors(_copy, arg) for arg in args)))
        return op(*args, **(kwargs or {}))


def _copy(x: Tensor) -> Tensor:
    """Return a copy that lies in memory as the original does."""
    x = x.detach()
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return copy.copy_(x) if all(x.stride()) else x.clone().as_strided(x.shape, x.stride())


@contextmanager
def recorded_ops(*, eager: bool = False) -> Iterator[list[OpCall]]:
    """Yield a list that gets the registered ops that run inside, forward and backward.

    They run through PyTorch's dispatcher as in compiled code, or past it as in plain `eager` code.

    Example:
        >>> import torch, partita
        >>> from partita.testing.samples import recorded_ops
        >>> with recorded_ops() as found:
        ...     _ = partita.softmax(torch.zeros(2, 3))
        >>> [call.name for call in found]
        ['softmax']
    """
    found: list[OpCall] = []
    if not eager:
        with _Recorder(found):
            yield found
        return
    serve = Op.eager

    def note(op: Op, *args: Any) -> Any:
        found.append(OpCall(op.dispatched, tuple(map_tensors(_copy, arg) for arg in args)))
        return serve(op, *args)

    Op.eager = note  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Op.eager = serve  # type: ignore[method-assign]
