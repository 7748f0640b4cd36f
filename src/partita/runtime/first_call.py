"""The first call of an op: its kernels compile side by side.

Triton compiles a kernel where it is launched, so an op with six kernels would wait six times. Here
the launches of an op are deferred from its first uncompiled kernel on. Each kernel compiles in a
thread of its own, and the launches follow in their order at the end of the op, or before anything
that could depend on them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .recording import ALLOCATIONS, FILLED_ALLOCATIONS, FILLS, has_no_tensors

MAX_THREADS = 8

_active = threading.local()


def watching() -> bool:
    """Return whether a dispatch mode of this module is active in this thread."""
    return getattr(_active, "deferred", None) is not None


def may_defer() -> bool:
    """Return whether this thread runs the first call of a key, which may defer its launches."""
    return getattr(_active, "may_defer", False)


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function of an op that may defer its launches."""
    _active.may_defer = True
    try:
        return function(*args)
    finally:
        _active.may_defer = False
        deferred, _active.deferred = getattr(_active, "deferred", None), None
        if deferred is not None:
            deferred.__exit__(None, None, None)
            deferred.release()


def defer(
    launch: Callable[..., None],
    kernel: Any,
    programs: int,
    args: tuple[Any, ...],
    options: dict[str, Any],
    is_compiled: bool,
) -> bool:
    """Defer a launch if an earlier one is deferred, or from an uncompiled kernel on.

    Args:
        launch: the function of kernel, programs, arguments and options that launches in the end.
        kernel, programs, args, options: the launch.
        is_compiled: whether the kernel is compiled.

    Returns:
        Whether the launch is deferred.
    """
    if not may_defer():
        return False
    deferred = getattr(_active, "deferred", None)
    if deferred is None:
        if is_compiled:
            return False
        deferred = _active.deferred = DeferredLaunches(launch)
    deferred.add(kernel, programs, args, options)
    return True


class DeferredLaunches(TorchDispatchMode):
    """The launches of an op that wait for their kernels.

    Args:
        launch: the function of kernel, programs, arguments and options that launches in the end.
    """

    def __init__(self, launch: Callable[..., None]) -> None:
        import triton

        super().__init__()
        self._launch = launch
        self._launches: list[tuple[Any, int, tuple[Any, ...], dict[str, Any]]] = []
        self._used: set[int] = set()  # the storages that they read or write
        self._executor = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
        self._compilation = triton.AsyncCompileMode(self._executor)
        self._compilation.__enter__()
        self.__enter__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because PyTorch would import its compiler at the first call otherwise."""
        return False

    def add(
        self, kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Start to compile a kernel, unless it is compiled, and defer its launch."""
        kernel.warmup(*args, grid=(programs,), **options)
        self._launches.append((kernel, programs, args, options))
        self._used.update(arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor))

    def release(self) -> None:
        """Wait for the kernels and launch in order. The op defers no further launches."""
        from triton.runtime import _async_compile

        _active.may_defer = False
        launches, self._launches = self._launches, []
        if launches:
            try:
                self._compilation.__exit__(None, None, None)
            finally:
                _async_compile.active_mode.set(None)  # Triton leaves it set after an error
                self._executor.shutdown()
            for kernel, programs, args, options in launches:
                self._launch(kernel, programs, *args, **options)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._launches and not self._is_independent(func, args):
            self.release()
        return func(*args, **(kwargs or {}))

    def _is_independent(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a function neither reads nor writes what the deferred launches do."""
        if func in FILLS:
            return args[0].untyped_storage()._cdata not in self._used
        known = func in ALLOCATIONS or func in FILLED_ALLOCATIONS
        return known or func.is_view or has_no_tensors(args, None)
