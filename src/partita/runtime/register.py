"""Registration of ops with PyTorch. This is the only file that touches `torch.library`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .autograd import plain_eager
from .backend import Backends, resolve
from .caches import register_cache

PLAIN = (torch.Tensor, torch.nn.Parameter)

_library = torch.library.Library("partita", "DEF")


class Op:
    """A registered op. A plain eager call bypasses PyTorch's dispatcher, which costs host time.

    Args:
        eager: the function that serves plain eager calls.
        dispatched: the op as PyTorch's dispatcher knows it.
    """

    def __init__(self, eager: Callable[..., Any], dispatched: Callable[..., Any]) -> None:
        self.eager, self.dispatched = eager, dispatched

    def __call__(self, first: torch.Tensor, *rest: Any) -> Any:
        if plain_eager() and type(first) in PLAIN:
            return self.eager(first, *rest)
        return self.dispatched(first, *rest)


def define(
    schema: str,
    fake: Callable[..., Any],
    *,
    backends: Backends,
    check: Callable[..., None] | None = None,
    vmap: Callable[..., Any] | None = None,
    fake_by_backend: bool = False,
    reference_if_empty: bool = False,
) -> Op:
    """Register `partita::<schema>` and return it.

    The schema's first argument is a tensor and its last is `str backend`. Each call goes to the
    function that `backends` lists for the op's name; it gets every argument but the last.

    Args:
        schema: the schema in the syntax of `torch.library`.
        fake: computes the shapes and dtypes of the results. With `fake_by_backend` it gets the name
            of the table that serves the call (`reference`, `gpu` or `cpu`) as its last argument.
        backends: the functions that serve the op.
        check: runs before the op on the same arguments, and never while a graph is traced.
        vmap: the batching rule.
        fake_by_backend: whether the shapes of the results depend on the backend.
        reference_if_empty: whether the reference serves calls whose first tensor has no elements.
    """
    name = schema.partition("(")[0]
    qualified = f"partita::{name}"

    @functools.lru_cache(maxsize=256)
    def implementation(backend: str, device: torch.device) -> Callable[..., Any]:
        return backends.functions(resolve(backend, device, has_cpu=backends.cpu is not None))[name]

    register_cache(f"runtime.register.{name}", implementation.cache_clear)

    def run(first: torch.Tensor, *rest: Any) -> Any:
        *args, backend = rest
        if check is not None:
            check(first, *args)
        if reference_if_empty and not first.numel():
            resolve(backend, first.device, has_cpu=backends.cpu is not None)
            return backends.functions("reference")[name](first, *args)
        return implementation(backend, first.device)(first, *args)

    def shapes(first: torch.Tensor, *rest: Any) -> Any:
        *args, backend = rest
        if fake_by_backend:
            served_by = resolve(backend, first.device, has_cpu=backends.cpu is not None)
            if reference_if_empty and 0 in first.shape:
                served_by = "reference"
            return fake(first, *args, served_by)
        return fake(first, *args)

    def refuse_derivatives(*args: Any) -> Any:
        """Raise where a transform would bypass the autograd functions and lose the derivative."""
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
        )
        if transformed and needs_grad:
            raise RuntimeError(
                f"{qualified}: no derivative here; compile the function inside of"
                " torch.func.grad, not the transform itself"
            )
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
