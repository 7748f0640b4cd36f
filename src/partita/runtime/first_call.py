"""The first call of an op: its kernels compile side by side, and those of its gradient with them.

Triton compiles a kernel where it is launched, so an op with six kernels would wait six times. Here
the launches of an op are deferred from its first uncompiled kernel on. At the end of the op, or
before anything that could depend on them, each kernel compiles in a thread of its own, those that
take longest first, and the launches follow in their order. The first call of a process does not
wait for the C module before it compiles.

The gradient of an op has kernels of its own, which are the slowest to compile. So the function of
the gradient is run once at the end of the op without launching anything, on tensors without memory
(see `register.Op.precedes`). Its kernels start to compile with those of the op, and the call does
not wait for them: the first call of the gradient does.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch import Tensor

from . import launcher, private_names
from .caches import BoundedCache, register_cache
from .compiler_options import compiler_options
from .parts import tensor_of, with_views
from .recording import ALLOCATIONS, FILLED_ALLOCATIONS, FILLS, has_no_tensors
from .translation import in_turn, translate_ahead
from .waiting import paused_collector, short_turns

MAX_THREADS = 16


class _Thread(threading.local):
    """The first call of a key that this thread runs: whether it may defer, and what it deferred."""

    may_defer = False
    deferred: DeferredLaunches | None = None


thread = _Thread()
# The kernels that some thread compiles, or that are compiled but not yet known to their functions,
# by Triton's key. A process has some dozens.
_compilations: BoundedCache[str, Any] = BoundedCache(1024)
register_cache("runtime.first_call.compilations", _compilations.clear)


class Launch(NamedTuple):
    """A deferred launch.

    Fields:
        kernel: the kernel.
        programs: the number of programs.
        args: the run-time arguments.
        options: the compile-time arguments and the launch options.
    """

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def work(self) -> tuple[float, int]:
        """Return numbers that are the greater the longer the kernel takes after its translation.

        They are the size of its code with the functions that it calls, and the sum of its integer
        constants, which are lengths of unrolled loops and sizes of blocks. Code in Gluon counts
        less, because it skips the passes that choose layouts.
        """
        constants = [value for value in self.options.values() if type(value) is int]
        is_gluon = getattr(self.kernel, "is_gluon", bool)()
        return _code_size(self.kernel, set()) * (1.0 if is_gluon else 2.5), sum(constants)


class NotPlannedError(Exception):
    """The function of a gradient needs more than launches, so its first call compiles the rest."""


def watching() -> bool:
    """Return whether a dispatch mode of this module is active in this thread."""
    return thread.deferred is not None


def may_defer() -> bool:
    """Return whether this thread runs the first call of a key, which may defer its launches."""
    return thread.may_defer


def refuse_if_planning() -> None:
    """Raise where only the launches of a gradient are looked for, and no tensor has its values."""
    if (deferred := thread.deferred) is not None and deferred.is_planning:
        raise NotPlannedError


def run(
    function: Callable[..., Any],
    *args: Any,
    then: Callable[[tuple[Any, ...], Any], None] | None = None,
) -> Any:
    """Run a function of an op that may defer its launches.

    Args:
        function: the function.
        *args: its arguments.
        then: a function of the arguments and the results that calls the gradient.
    """
    thread.may_defer = private_names.HAS_DISPATCH_MODES
    try:
        result = function(*args)
        if then is not None and (deferred := thread.deferred) is not None:
            deferred.plan(then, args, result)
        return result
    finally:
        thread.may_defer = False
        deferred, thread.deferred = thread.deferred, None
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
    deferred = thread.deferred
    if is_compiled and (deferred is None or deferred.is_idle):
        return False
    if deferred is None:
        deferred = thread.deferred = DeferredLaunches(launch)
    deferred.add(Launch(kernel, programs, args, options))
    return True


class DeferredLaunches(private_names.TorchDispatchMode):
    """The launches of an op that wait for their kernels.

    Args:
        launch: the function of kernel, programs, arguments and options that launches in the end.
    """

    def __init__(self, launch: Callable[..., None]) -> None:
        super().__init__()
        self._launch = launch
        self._launches: list[Launch] = []
        self._planned: list[Launch] = []  # launches of the gradient, which only compile
        self._used: set[int] = set()  # the storages that the deferred launches read or write
        self.is_planning = False
        self.__enter__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because PyTorch would import its compiler at the first call otherwise."""
        return False

    @property
    def is_idle(self) -> bool:
        """Return whether a launch would neither wait for another one nor be planned."""
        return not self._launches and not self.is_planning

    def add(self, launch: Launch) -> None:
        """Defer a launch."""
        if self.is_planning:
            self._planned.append(launch)
            return
        self._launches.append(launch)
        tensors = map(tensor_of, launch.args)
        storages = (arg.untyped_storage() for arg in tensors if isinstance(arg, Tensor))
        self._used.update(storage.data_ptr() for storage in storages)

    def plan(
        self, then: Callable[[tuple[Any, ...], Any], None], args: tuple[Any, ...], result: Any
    ) -> None:
        """Find the launches of the gradient; they may stay unknown, whatever the reason."""
        self.is_planning = True
        try:
            with suppress(Exception):  # the first call of the gradient raises it again
                then(args, result)
        finally:
            self.is_planning = False

    def release(self) -> None:
        """Compile all kernels, wait for those of the deferred launches, and launch in order."""
        launches, self._launches = self._launches, []
        planned, self._planned = self._planned, []
        self._used.clear()
        if not launches and not planned:
            return
        with paused_collector(), short_turns():
            with _side_by_side():
                found = _start_all(planned, launches)
            for compiled in found:
                # A compiled kernel has no result, and a failed one of Triton 3.9 no future.
                if hasattr(compiled, "result") and getattr(compiled, "future", 0) is not None:
                    compiled.result()
        may_defer, thread.may_defer = thread.may_defer, False
        try:
            for kernel, programs, args, options in launches:
                self._launch(kernel, programs, *args, **options)
        finally:
            thread.may_defer = may_defer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_planning:
            return _without_memory(func, args, kwargs)
        if self._launches and not self._is_independent(func, (*args, *kwargs.values())):
            self.release()
        return func(*args, **kwargs)

    def _is_independent(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a function neither reads nor writes what the deferred launches do."""
        if func in ALLOCATIONS or func in FILLED_ALLOCATIONS or func.is_view:
            return True
        lists = [list(arg) if isinstance(arg, (list, tuple)) else [arg] for arg in args]
        tensors = [arg for arg in itertools.chain(*lists) if isinstance(arg, Tensor)]
        return all(tensor.untyped_storage().data_ptr() not in self._used for tensor in tensors)


if hasattr(os, "register_at_fork"):  # a forked process does not have the threads that compile
    os.register_at_fork(after_in_child=_compilations.clear)


def _without_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that allocates without memory, and skip one that fills.

    Raises:
        NotPlannedError: the function computes something.
    """
    if func in ALLOCATIONS or func in FILLED_ALLOCATIONS:
        return func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
    if func in FILLS:
        return args[0]
    if func.is_view or has_no_tensors(args, None):
        return func(*args, **kwargs)
    raise NotPlannedError


def compile_aside(kernel: Any, *args: Any, **options: Any) -> Any:
    """Start to compile a kernel for the current device, and return its future.

    The result is the kernel itself if it is compiled.
    """
    with _side_by_side():
        return _start_to_compile(Launch(kernel, 1, args, options))


@contextmanager
def _side_by_side() -> Iterator[None]:
    """Let each kernel whose compilation starts in the block compile in a thread of its own.

    The block does not wait for them. A kernel that is being compiled is not compiled again.
    """
    import triton

    executor = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    mode = triton.AsyncCompileMode(executor)
    for key, compilation in list(_compilations.items()):
        if compilation.kernel is not None or _has_failed(compilation.future):
            _compilations.pop(key, None)
        else:
            mode.future_kernels[key] = compilation
    mode.__enter__()
    try:
        yield
    finally:
        private_names.leave_compile_mode(mode)
        executor.shutdown(wait=False)
        for key, compilation in mode.future_kernels.items():
            _compilations.store(key, compilation)


def _has_failed(future: Any) -> bool:
    """Return whether a compilation has failed; Triton 3.9 then drops its future."""
    return future is None or (future.done() and future.exception() is not None)


def _start_all(planned: Sequence[Launch], launches: Sequence[Launch]) -> list[Any]:
    """Start to compile all kernels, and return what each of the launches waits for.

    The translation from Python runs for one kernel after the other, so those that take longest
    come first: the rest of their compilation runs beside the translation of others. With an empty
    cache it starts before the compiler is ready.
    """
    for launch in (*planned, *launches):
        with suppress(Exception):  # the compilation raises it again
            # Triton hashes the sources, while threads prepare what else its compiler needs.
            _ = getattr(launch.kernel, "cache_key", None)
    found: list[Any] = [None] * len(launches)
    numbered = [*((-1, launch) for launch in planned), *enumerate(launches)]
    numbered.sort(key=lambda task: task[1].work, reverse=True)
    for _, (kernel, _, args, options) in numbered:
        if not launcher.is_computing_key():
            break
        with suppress(Exception):  # the compilation raises it again
            translate_ahead(kernel, with_views(args), {**options, **compiler_options()})
    for index, launch in numbered:
        if index >= 0:
            found[index] = _start_to_compile(launch)
        else:
            with suppress(Exception):  # the first call of the gradient raises it again
                _start_to_compile(launch)
    return found


def _code_size(function: Any, counted: set[int]) -> int:
    """Return the size of a device function and of those that it calls, and note them as counted."""
    code = getattr(getattr(function, "fn", None), "__code__", None)
    if code is None or id(function) in counted:
        return 0
    counted.add(id(function))
    names, values = code.co_names, function.fn.__globals__
    return len(code.co_code) + sum(_code_size(values.get(name), counted) for name in names)


def _start_to_compile(launch: Launch) -> Any:
    """Start to compile a kernel, and return its future, or the kernel if it is compiled."""
    kernel, programs, args, options = launch
    launcher.wait_for_compiler()
    if hasattr(kernel, "device_caches"):
        # The first look at the cache of a device sets the class of the kernel's source.
        _ = kernel.device_caches[private_names.current_device()]
        kernel.ASTSource = in_turn(kernel.ASTSource)
    return kernel.warmup(*with_views(args), grid=(programs,), **options, **compiler_options())
