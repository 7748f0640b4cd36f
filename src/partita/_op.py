"""Registration of the ops with PyTorch: the one file that touches torch.library."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from . import _backend
from ._autograd import plain_eager

PLAIN = (torch.Tensor, torch.nn.Parameter)

_library = torch.library.Library("partita", "DEF")


@functools.cache
def _implementation(column: str, name: str, backend: str, device: torch.device, numba: bool) -> Callable[..., Any]:
    floor = _backend.resolve(backend, device, numba=numba)
    return getattr(importlib.import_module(f".{floor}.{column}", __package__), name)


class Op:
    """A registered op. Plain eager code goes past PyTorch's dispatcher, which costs host time."""

    def __init__(self, eager: Callable[..., Any], dispatched: Callable[..., Any]) -> None:
        self.eager, self.dispatched = eager, dispatched

    def __call__(self, first: torch.Tensor, *rest: Any) -> Any:
        if plain_eager() and type(first) in PLAIN:
            return self.eager(first, *rest)
        return self.dispatched(first, *rest)


def define(
    column: str,
    schema: str,
    fake: Callable[..., Any],
    *,
    check: Callable[..., None] | None = None,
    vmap: Callable[..., Any] | None = None,
    numba: bool = False,
    by_floor: bool = False,
) -> Op:
    """Register `partita::<schema>` and return it.

    The schema's first argument is a tensor and its last is `str backend`. At each call, the function of the op's name in the module
    `column` of the chosen floor (`reference`, `kernels` or `cpu`) gets every argument but the last. `check` sees the same arguments
    first: it runs with the op, never while a graph is traced. `fake` gives shapes and dtypes, of the floor that is named to it last where they
    differ `by_floor`; `vmap` is the batching rule; `numba` says whether that floor has the column.
    """
    name = schema.partition("(")[0]
    qualified = f"partita::{name}"

    def run(first: torch.Tensor, *rest: Any) -> Any:
        *args, backend = rest
        if check is not None:
            check(first, *args)
        return _implementation(column, name, backend, first.device, numba)(first, *args)

    def shapes(first: torch.Tensor, *rest: Any) -> Any:
        *args, backend = rest
        floor = (_backend.resolve(backend, first.device, numba=numba),) if by_floor else ()
        return fake(first, *args, *floor)

    def refuse_derivatives(*args: Any) -> Any:
        """Derivatives are the autograd functions' affair; what goes past them, as Dynamo does under a function transform, must not be a silent zero."""
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if transformed and torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            raise RuntimeError(f"{qualified}: no derivative here; compile the function inside of torch.func.grad, not the transform itself")
        with torch._C._AutoDispatchBelowAutograd():
            return dispatched(*args)

    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, refuse_derivatives, "Autograd")
    torch.library.register_fake(qualified, shapes, lib=_library)
    if vmap is not None:
        torch.library.register_vmap(qualified, vmap, lib=_library)
    dispatched = getattr(torch.ops.partita, name).default
    return Op(run, dispatched)
