"""Decisions of public functions, stored by what their checks look at.

The checks of a call and the choice of its path are some hundred steps of Python. They take the host
as long as the launches of a small call, and longer after a backward pass, for which the thread has
slept. Types, dtypes, shapes, devices and options decide them, because values on a GPU are not
checked. So an equal call passes the same checks and takes the same path.
"""

from __future__ import annotations

from typing import Any

import torch

from . import launcher
from .caches import BoundedCache, register_cache

MAX_CALLS = 1024  # calls of a function with a stored decision; a full cache is emptied


class KnownCalls:
    """The decisions of one function for calls on a GPU.

    The key has the dtype, shape and device of each tensor, whether it needs a gradient, and the
    value of each other argument. Calls with half types have no decisions, because autocast matters.
    Whoever uses a decision looks at modes, at the backend and at values that are checked.

    Args:
        name: the name of the function.
        by_size: whether sizes count. Otherwise only their equality does, and which of them are 0,
            so that calls of new shapes have decisions too; the function checks what else depends
            on a size.
    """

    def __init__(self, name: str, by_size: bool = True) -> None:
        self._by_size = by_size
        self._decisions: BoundedCache[bytes, Any] = BoundedCache(MAX_CALLS)
        self._look_up: Any = None
        register_cache(f"runtime.known_calls.{name}", self._decisions.clear)

    def find(self, *args: Any) -> Any:
        """Return the decision for such a call, or else a key for `store`, or None.

        A decision must be of another type than bytes. The first argument is a tensor.
        """
        if torch.compiler.is_compiling():
            return None
        look_up = self._look_up or self._connect(args[0])
        return None if look_up is None else look_up(*args)

    def _connect(self, first: Any) -> Any:
        """Return the C module's form of the decisions, or None without the module or a GPU."""
        if isinstance(first, torch.Tensor) and first.is_cuda:
            module = launcher.module()
            if module is not None:
                self._look_up = module.KnownCalls(self._decisions, self._by_size)
        return self._look_up

    def store(self, key: Any, decision: Any) -> None:
        """Store the decision for a call; nothing happens unless `find` returned a key."""
        if type(key) is bytes:
            self._decisions.store(key, decision)
